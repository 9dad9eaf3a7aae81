"""Errors of a loss or gradient that is not finite, with the module in which it arose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recollect.explanation.diagnosis import ADVICE_SMALLER_STEPS
from recollect.layer.gates import GateProjection
from recollect.lm.training.atomic_checkpoints import last_checkpoint

if TYPE_CHECKING:
    from recollect.lm.training.trainer import RecollectTrainer

__all__ = ["INNER_STEPS_HINT", "NUMERICAL_ERRORS", "Diverged", "DivergenceGuard", "find_origin"]

NUMERICAL_ERRORS = (
    ValueError,
    ArithmeticError,
    torch.linalg.LinAlgError,  # pyright: ignore[reportPrivateImportUsage]
)
"""Errors that layers and solvers raise for inputs that are not finite."""


INNER_STEPS_HINT = f"these are steps of the memory itself: {ADVICE_SMALLER_STEPS}"


LARGE_LR = 0.1
"""Learning rates above it are likely a typing error."""


class Diverged(ValueError):
    """A loss or gradient is not finite. The weights are those before the step.

    Args:
        step: Number of the step, from 1.
        lr: Learning rate of the step; ``None`` if the model was only evaluated.
        origin: Source of the first number that is not finite; ``None`` if unknown.
        advice: End of the message: the last checkpoint and a remedy.
        checkpoint: Last checkpoint; ``None`` without one.

    Attributes:
        step, lr, origin, checkpoint: The arguments.

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
        rate = "" if lr is None else f"learning rate {lr:.3g}"
        if lr is not None and lr > LARGE_LR:
            rate += ", by about which AdamW moves every weight at a step: 0.0001 to 0.01 are usual"
        super().__init__(
            f"training diverged at step {step:,}{f' ({rate})' if rate else ''}: "
            f"{origin or 'a loss or a gradient is not finite'}; {advice}"
        )
        self.step, self.lr, self.origin, self.checkpoint = step, lr, origin, checkpoint


class DivergenceGuard:
    """Explains losses, gradients and errors of the current step that are not finite."""

    def __init__(self, trainer: RecollectTrainer) -> None:
        self.trainer = trainer
        self._batches: list[tuple[Any, Any]] = []
        self._step, self._lr = 0, 0.0

    def start_step(self, step: int, lr: float) -> None:
        """Forget the batches of the step before."""
        self._batches.clear()
        self._step, self._lr = step, lr

    @contextmanager
    def track_batch(
        self,
        batch: Any,
        num_items: Any = None,  # number of targets of the step
        *,
        is_eval: bool = False,
    ) -> Iterator[None]:
        """Context manager of a forward pass that replaces errors of numbers that are not finite."""
        if is_eval:
            self._batches.clear()
        self._batches.append((batch, num_items))
        try:
            yield
        except Diverged:
            raise
        except NUMERICAL_ERRORS as error:
            if (origin := self._find_origin()) is None:
                raise
            raise self._error(origin) from error

    def error(self, quantity: str) -> Diverged:
        """Return the error of a quantity, such as the loss, that is not finite."""
        return self._error(self._find_origin(), quantity)

    def _find_origin(self) -> str | None:
        """Run the batches of the step again to find the module."""
        trainer = self.trainer
        if trainer.args.world_size > 1:  # the cause may be in another process
            return None

        def run() -> Iterator[Tensor]:
            for batch, num_items in self._batches:
                with trainer.compute_loss_context_manager():
                    yield from trainer.batch_losses(trainer._prepare_inputs(batch), num_items)

        assert trainer.model is not None
        return find_origin(trainer.model, run)

    def _error(self, origin: str | None, quantity: str = "") -> Diverged:
        """Return the error with the last checkpoint and a remedy."""
        args = self.trainer.args
        self.trainer.async_save.drain()
        checkpoint = last_checkpoint(Path(str(args.output_dir)))
        change = "lower lr or clip" if args.max_grad_norm else "set clip = 1 or a lower lr"
        advice = f"{change} in [optimizer], or raise warmup, and restart"
        if self._step == 1 and origin is not None:
            advice = f"no weight was trained yet, so {INNER_STEPS_HINT}"
        if checkpoint is None:
            advice = f"no checkpoint was written yet: {advice}"
        else:
            advice = (
                f"the last checkpoint is {checkpoint}: {advice} under another [run] out, with that "
                "folder as [model] start if its loss was still falling"
            )
        return Diverged(
            step=self._step,
            lr=self._lr,
            origin=origin or f"{quantity} is not finite",
            advice=advice,
            checkpoint=checkpoint,
        )


def find_origin(model: nn.Module, run: Callable[[], Iterable[Tensor]]) -> str | None:
    """Return the first module whose output is not finite when ``run`` is called, as a clause."""
    names: list[str] = []

    def record(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        # A log decay of −inf is valid: the memory is cleared.
        allow_neg_inf = isinstance(module, GateProjection)
        if not names and _has_nonfinite(output, allow_neg_inf=allow_neg_inf):
            names.append(name)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                hooks.enter_context(module.register_forward_hook(partial(record, name)))
        with torch.compiler.set_stance("force_eager"), suppress(*NUMERICAL_ERRORS):
            for _ in run():
                if names:
                    break
    return f"the output of {_describe_module(model, names[0])} is not finite" if names else None


def _has_nonfinite(output: Any, *, allow_neg_inf: bool) -> bool:
    """Whether a tensor among a module's outputs is not finite."""
    outputs = output if isinstance(output, Sequence) else (output,)
    for x in outputs:
        if isinstance(x, Tensor) and x.is_floating_point():
            x = x.detach()
            with suppress(RuntimeError):  # tensors of torch.func transforms have no readable values
                if not bool((x < torch.inf if allow_neg_inf else x.isfinite()).all()):
                    return True
    return False


def _describe_module(model: nn.Module, name: str) -> str:
    """Return a description of a module, with the name for `nn.Module.get_submodule`."""
    parts = name.split(".")
    if "blocks" in parts and parts[-1] != "blocks":
        block = parts.index("blocks")
        index, inside = int(parts[block + 1]), parts[block + 2 :]
        layer_names = getattr(getattr(model, "config", None), "layer_names", None)
        layer = f"layer {index}"
        if layer_names and inside[:1] in ([], ["layer"]):  # not in the MLP or a norm
            layer += f" ({layer_names[index]})"
        return f"{layer}, in {name}," if inside else layer
    words = {"embed_tokens": "the embedding", "norm": "the last norm", "lm_head": "the head"}
    return f"{words[parts[-1]]} ({name})" if parts[-1] in words else name
