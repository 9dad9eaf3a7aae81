"""Divergence: a loss or a gradient that is not finite, and where in the model it arose.

Looking costs one number per step. Only when that is not finite, the step's batches are run again,
with the weights that they met, to find the module that gave the first such number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from recollect.explanation.diagnosis import SMALLER_STEPS
from recollect.layer.gates import GateProjection
from recollect.lm.training.atomic_checkpoints import AtomicTrainer, last_checkpoint
from recollect.report.ranks import of_all

__all__ = ["OWN_STEPS", "REFUSALS", "Diverged", "Guard", "find_origin"]

REFUSALS = (
    ValueError,
    ArithmeticError,
    torch.linalg.LinAlgError,  # pyright: ignore[reportPrivateImportUsage]
)
"""What layers and solvers raise of numbers that are not finite."""


OWN_STEPS = f"these are steps of the memory itself: {SMALLER_STEPS}"


LARGE = 0.1
"""Learning rates above it are likely a slip."""


class Diverged(ValueError):
    """Training met a loss or a gradient that is not finite; the weights are those before the step.

    Args:
        step: from 1.
        lr: learning rate of that step; ``None`` where the model was only measured.
        origin: where in the model the first such number arose, in words; ``None`` where nobody
            looked.
        advice: what stands and what to do, to end the message.
        checkpoint: that stands, ``None`` without one.

    Attributes:
        step, lr, origin, checkpoint: as given.

    Examples:
        >>> error = rc.lm.Diverged(step=3, lr=0.1, origin="the loss", advice="Lower lr.")
        >>> error.step, error.origin
        (3, 'the loss')
    """

    def __init__(
        self,
        *,
        step: int,
        lr: float | None,
        origin: str | None,
        advice: str,
        checkpoint: Path | None = None,
    ) -> None:
        cause = origin or "a loss or a gradient is not finite"
        rate = "" if lr is None else f" (learning rate {lr:.3g}{_usual(lr)})"
        super().__init__(f"training diverged at step {step:,}{rate}: {cause}; {advice}")
        self.step, self.lr, self.origin, self.checkpoint = step, lr, origin, checkpoint


def _usual(lr: float) -> str:
    """Of a rate that no model takes, which are usual."""
    if lr <= LARGE:
        return ""
    return ", by about which AdamW moves every weight at a step: 0.0001 to 0.01 are usual"


class Guard(TrainerCallback):
    """Ends a run of a Trainer before it takes a step whose loss or gradient is not finite.

    Attributes:
        loss: of the step under way, so far.
        losses: of a batch, whose sum is its loss; how it is run again.
    """

    loss: Tensor
    losses: Callable[[Any, Any], Iterable[Tensor]]

    def __init__(self, trainer: AtomicTrainer) -> None:
        self.trainer = trainer
        self.losses = self._whole
        self._batches: list[tuple[Any, Any]] = []  # of the step under way
        self._step, self._lr = 0, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._batches.clear()
        self._step = state.global_step + 1
        self._lr = self.trainer.optimizer.param_groups[0]["lr"]  # type: ignore[union-attr]

    @contextmanager
    def reading(self, batch: Any, count: Any = None, *, measured: bool = False) -> Iterator[None]:
        """Inside, the model reads a batch of the step under way.

        Args:
            batch: what it reads.
            count: tokens that the step predicts, as the Trainer counts them.
            measured: whether it is none of a step, and only measured on.

        Raises:
            Diverged: in place of what a layer refuses, where that is not finite.
        """
        if measured:
            self._batches.clear()
        self._batches.append((batch, count))
        try:
            yield
        except Diverged:
            raise
        except REFUSALS as error:
            if (origin := self._origin()) is None:
                raise
            raise self._diverged(origin) from error

    def check_loss(self, loss: Tensor) -> None:
        """That a loss which is read anyway is finite.

        Raises:
            Diverged: it is not.
        """
        if not bool(loss.isfinite()):
            raise self._diverged(self._origin())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = self.trainer.model
        assert model is not None
        finite = self.loss.isfinite()
        gradients = [_own(weight.grad) for weight in model.parameters() if weight.grad is not None]
        gradients = [gradient for gradient in gradients if gradient.numel()]
        if gradients:
            largest = nn.utils.get_total_norm(gradients, norm_type=torch.inf)
            finite = finite & largest.isfinite()
        if args.world_size > 1:  # all processes end before the same step
            broken = self.trainer.accelerator.reduce((~finite).float())
            finite = cast(Tensor, broken) == 0
        if not bool(finite):
            raise of_all(self._diverged(self._origin()))

    def _origin(self) -> str | None:
        # Of several processes another may hold the cause, or a part of the weights.
        if self.trainer.args.world_size > 1:
            return None
        return find_origin(cast(nn.Module, self.trainer.model), self._losses)

    def _losses(self) -> Iterator[Tensor]:
        """The losses of the batches, computed again."""
        trainer = self.trainer
        for batch, count in self._batches:
            with trainer.compute_loss_context_manager():
                yield from self.losses(trainer._prepare_inputs(batch), count)

    def _whole(self, batch: Any, count: Any) -> Iterator[Tensor]:
        trainer = self.trainer
        model = cast(nn.Module, trainer.model)
        yield cast(Tensor, trainer.compute_loss(model, batch, num_items_in_batch=count))

    def _diverged(self, origin: str | None) -> Diverged:
        args = self.trainer.args
        checkpoint = None
        self.trainer.settle_saving()
        with suppress(ValueError):  # one that lost a file
            checkpoint = last_checkpoint(Path(str(args.output_dir)))
        change = "lower lr or clip" if args.max_grad_norm else "set clip = 1 or a lower lr"
        advice = f"{change} in [optimizer], or raise warmup, and begin anew"
        if self._step == 1 and origin is not None and origin.startswith("the output of"):
            advice = f"no weight was trained yet, so {OWN_STEPS}"
        if checkpoint is None:
            advice = f"no checkpoint was written yet: {advice}"
        else:
            # What it holds may be on the way there already.
            advice = (
                f"{checkpoint} stands: {advice} under another [run] out, with that folder as "
                "[model] start if its loss was falling still"
            )
        return Diverged(
            step=self._step, lr=self._lr, origin=origin, checkpoint=checkpoint, advice=advice
        )


def _own(gradient: Tensor) -> Tensor:
    """What this process holds of a gradient."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def find_origin(model: nn.Module, losses: Callable[[], Iterable[Tensor]]) -> str | None:
    """Where the first number that is not finite arises, in words.

    That is the first module in the order of the forward pass that gives one. Where all outputs are
    finite, gradients are looked at: the module nearest to the loss whose gradient is not.

    Args:
        model: what `losses` runs. Its gradients are replaced.
        losses: runs the step's batches again, and gives the loss of each.

    Returns:
        ``None`` if every number is finite, or what was refused has another reason.
    """
    model.zero_grad(set_to_none=True)
    total = 0.0
    with _watched(model) as found, torch.compiler.set_stance("force_eager"):
        try:
            for loss in losses():
                total += float(loss.detach())
                if loss.requires_grad and not found:
                    loss.backward()  # they add up, as in the step
        except REFUSALS:
            total = 0.0  # the refusal is told, where it is none of what is looked for here
    if found:
        return f"the output of {_place(model, found[0])} is not finite"
    if not torch.tensor(total).isfinite():
        return "the loss is not finite, though the output of every layer is"
    gradients = _owners((name, weight.grad) for name, weight in model.named_parameters())
    model.zero_grad(set_to_none=True)
    if gradients:
        return f"the gradient of {_place(model, gradients[-1])} is not finite"
    weights = _owners(model.named_parameters())
    return f"a weight of {_place(model, weights[0])} is not finite" if weights else None


def _owners(tensors: Iterable[tuple[str, Tensor | None]]) -> list[str]:
    """The modules that own what is not finite, by the names of their tensors."""
    return [
        name.rpartition(".")[0]
        for name, x in tensors
        if x is not None and not bool(x.detach().isfinite().all())
    ]


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[str]]:
    """Inside, a list gets the name of the first module whose output is not finite."""
    found: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            # A log decay of −inf forgets everything, and is a value like others.
            forgets = isinstance(module, GateProjection)
            if not found and any(_broken(x, forgets=forgets) for x in _tensors(output)):
                found.append(name)

        return hook

    handles = [
        module.register_forward_hook(look(name)) for name, module in model.named_modules() if name
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _tensors(output: Any) -> list[Tensor]:
    several = output if isinstance(output, Sequence) else (output,)
    return [x for x in several if isinstance(x, Tensor) and x.is_floating_point()]


def _broken(x: Tensor, *, forgets: bool) -> bool:
    x = x.detach()
    try:
        return not bool((x < torch.inf if forgets else x.isfinite()).all())
    except RuntimeError:  # inside a transform of torch.func, which tells no values
        return False


def _place(model: nn.Module, name: str) -> str:
    """A module in words, with the name that `nn.Module.get_submodule` takes."""
    parts = name.split(".")
    if "blocks" in parts and parts[-1] != "blocks":
        index = int(parts[parts.index("blocks") + 1])
        pattern = getattr(getattr(model, "config", None), "pattern", None)
        # The recipe is no matter of the MLP and the norms beside its layer.
        own = parts[parts.index("blocks") + 2 :][:1] in ([], ["layer"])
        layer = f"layer {index}" + (f" ({pattern[index]})" if pattern and own else "")
        return layer if parts[-1] == str(index) else f"{layer}, in {name},"
    words = {"embed_tokens": "the embedding", "norm": "the last norm", "lm_head": "the head"}
    return f"{words[parts[-1]]} ({name})" if parts[-1] in words else name
