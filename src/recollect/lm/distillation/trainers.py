"""Trainers of the steps that follow a teacher: matched layers and matched logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from recollect.lm.model.loss import IGNORE_INDEX
from recollect.lm.replacement.swap import SwappedAttention
from recollect.lm.training.trainer import RecollectTrainer

__all__ = ["LayerMatchingTrainer", "LogitMatchingTrainer"]


class _TeacherTrainer(RecollectTrainer):
    """Trains a model to a loss that compares it with its teacher; evaluates the usual loss."""

    def __init__(self, *args: Any, teacher: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = teacher.to(self.args.device).eval()

    def teacher_loss(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss of a batch."""
        raise NotImplementedError

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss = self.teacher_loss(model, inputs)
        if num_items_in_batch is not None:  # of all batches of the step
            loss = loss * self.fraction_of_step(inputs, num_items_in_batch)
        return (loss, {}) if return_outputs else loss


class LayerMatchingTrainer(_TeacherTrainer):
    """Trains each new layer to the attention output of the teacher, from the teacher's input.

    With inputs x and outputs o of the attention, the loss is the sum over layers of
    Σ ‖f(x) − o‖² / Σ ‖o‖². Only the new layers are trained.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model = cast(nn.Module, self.model)
        new = {
            id(weight)
            for module in model.modules()
            if isinstance(module, SwappedAttention)
            for weight in module.parameters()
            if weight.requires_grad
        }
        for weight in model.parameters():
            weight.requires_grad_(id(weight) in new)

    def teacher_loss(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        layers = {
            name: module
            for name, module in self._unwrap(model).named_modules()
            if isinstance(module, SwappedAttention)
        }
        with _record(self.teacher, [*layers]) as calls, torch.no_grad():
            self.teacher(**_model_inputs(inputs), use_cache=False)
        mask = inputs.get("attention_mask")
        losses = []
        for name, layer in layers.items():
            x, target = calls[name]
            y = layer(x, mask)[0]
            if mask is not None:
                y, target = y[mask.bool()], target[mask.bool()]
            losses.append((y - target).square().sum() / target.square().sum().clamp_min(1e-12))
        return torch.stack(losses).sum()


class LogitMatchingTrainer(_TeacherTrainer):
    """Trains a model to the distributions of the teacher: the mean of KL(teacher ‖ model)."""

    def teacher_loss(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        kwargs = _model_inputs(inputs)
        with torch.no_grad():
            target = self.teacher(**kwargs, use_cache=False).logits
        logits = model(**kwargs, use_cache=False).logits
        valid = inputs["labels"][:, 1:] != IGNORE_INDEX
        p, q = (x[:, :-1][valid].float().log_softmax(-1) for x in (target, logits))
        return functional.kl_div(q, p, log_target=True, reduction="sum") / max(len(q), 1)


def _model_inputs(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}


@contextmanager
def _record(model: nn.Module, names: list[str]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Record the input and the output of modules in one call of their model."""
    calls: dict[str, tuple[Tensor, Tensor]] = {}

    def record(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        calls[name] = x, output[0] if isinstance(output, tuple) else output

    with ExitStack() as hooks:
        for name in names:
            module, hook = model.get_submodule(name), partial(record, name)
            hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True))
        yield calls
