"""Rows in segments: a row of T tokens is read as N pieces, and the state goes on from each.

A loss over all of a row is L = Σ_i L_i(θ, s_{i−1}) with s_i = f(θ, s_{i−1}, tokens of piece i), so
memory is that of a piece and of its states, however long the row:

- the gradient *cut* at the borders, Σ_i ∂L_i/∂θ with s_{i−1} taken as given, is truncated
  backpropagation through time: each piece runs back at once and is forgotten;
- the gradient *kept*, dL/dθ, is that of the whole row. The pieces are read once for their states,
  and again from the last to the first: piece i runs back what its loss and
  g_i = dL/ds_i ask of it, ∂L_i/∂θ + g_i · ∂s_i/∂θ, which leaves g_{i−1}.

The last token of a piece predicts the first of the next. Where a document begins, its memory starts
anew, at a border of pieces and within one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from recollect.blocks.layers import initial_memory_of
from recollect.lm.model.cache import RecollectCache, cache_of
from recollect.lm.model.loss import IGNORE_INDEX, next_token_targets
from recollect.lm.model.model import RecollectForCausalLM
from recollect.lm.training.atomic_checkpoints import AtomicTrainer

__all__ = ["Piece", "SegmentedTrainer", "check_segments", "pieces", "predicted"]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Columns of a batch that are read at once.

    Attributes:
        inputs: arguments of a forward pass, but for the states before.
        rows: of the states after the piece before, for every document of this one.
        anew: whether each of these documents begins here.
    """

    inputs: Mapping[str, Any]
    rows: tuple[int, ...]
    anew: tuple[bool, ...]

    def after(self, model: RecollectForCausalLM, states: RecollectCache | None) -> dict[str, Any]:
        """Arguments of the forward pass.

        Args:
            model: whose initial memories documents begin with.
            states: after the piece before; ``None`` at the first.
        """
        if states is not None:
            if self.rows != tuple(range(states.rows)):
                chosen = torch.tensor(self.rows)
                states = states.map(lambda state: state.select(chosen))
            if any(self.anew):
                states = _anew(model, states, torch.tensor(self.anew))
        return {**self.inputs, "cache": states, "use_cache": True}


def _anew(model: RecollectForCausalLM, states: RecollectCache, begins: Tensor) -> RecollectCache:
    """Rows that begin as a layer's first token meets them."""
    layers = [cast(nn.Module, block.layer) for block in model.model.blocks]
    both = zip(states.states, layers, strict=True)
    return RecollectCache(
        (state.reset(begins, initial_memory_of(layer)) for state, layer in both), states.seen
    )


def pieces(batch: Mapping[str, Tensor], segments: int) -> Iterator[Piece]:
    """The pieces of a batch, from the first.

    Args:
        batch: ``input_ids`` and ``labels`` ``[B, T]``, and ``cu_seqlens`` of all rows one after the
            other, where documents begin within a row.
        segments: N; the last may be shorter.
    """
    ids, labels = batch["input_ids"], batch["labels"]
    B, T = ids.shape
    borders = batch.get("cu_seqlens")
    starts: list[list[int]] = [[] for _ in range(B)]
    for start in [] if borders is None else borders[:-1].tolist():
        starts[start // T].append(start % T)
    length = -(-T // segments)
    last = list(range(B))  # the row of the states before that each row goes on from
    for begin in range(0, T, length):
        end = min(begin + length, T)
        inner = [[s for s in row if begin < s < end] for row in starts]
        rows: list[int] = []
        anew: list[bool] = []
        cuts: list[int] = []
        for r, row in enumerate(inner):
            rows += [last[r]] * (1 + len(row))
            anew += [begin in starts[r], *(True for _ in row)]
            cuts += [r * (end - begin) + s - begin for s in (begin, *row)]
        last = [sum(1 + len(row) for row in inner[: r + 1]) - 1 for r in range(B)]
        inputs = {
            "input_ids": ids[:, begin:end],
            "shift_labels": _targets(labels, begin, end, starts),
        }
        if any(inner):
            inputs = {name: x.reshape(1, -1) for name, x in inputs.items()}
            inputs["cu_seqlens"] = torch.tensor([*cuts, B * (end - begin)], device=ids.device)
        yield Piece(inputs=inputs, rows=tuple(rows), anew=tuple(anew))


def _targets(labels: Tensor, begin: int, end: int, starts: list[list[int]]) -> Tensor:
    """Return the targets of a segment, as `next_token_targets` returns them for whole rows."""
    targets = labels[:, begin + 1 : end + 1].clone()
    if end == labels.shape[1]:
        targets = nn.functional.pad(targets, (0, 1), value=IGNORE_INDEX)
    for r, row in enumerate(starts):
        targets[r, [s - 1 - begin for s in row if begin < s <= end]] = IGNORE_INDEX
    return targets


def predicted(batch: Mapping[str, Tensor]) -> Tensor:
    """How many tokens a batch predicts."""
    targets = next_token_targets(batch["labels"], None, batch.get("cu_seqlens"))
    return (targets != IGNORE_INDEX).sum()


def check_segments(model: nn.Module, segments: int) -> None:
    """That rows can be read in pieces.

    Args:
        model: that reads them. segments: N.

    Raises:
        ValueError: a state that grows with the text.
    """
    if segments == 1 or not isinstance(model, RecollectForCausalLM) or not model.cache_grows:
        return
    config = model.config
    mixed = zip(config.pattern, config.mixed, strict=True)
    name = next(name for name, (mixer, _) in mixed if mixer.grows)
    raise ValueError(
        f"[data] segments = {segments} hands a memory's state on, and that of {name} grows with "
        "the text: take a memory or a window of a fixed size in its place, or leave segments out"
    )


class SegmentedTrainer(AtomicTrainer):
    """A Trainer that may read the rows of a batch in segments.

    Attributes:
        segments: N; 1 reads them whole.
        kept: whether the gradient crosses the borders of segments.
    """

    segments = 1
    kept = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loss: Tensor | None = None  # of the last piece
        self._after: RecollectCache | None = None
        self._pull: list[Tensor] = []  # g_i of the piece that is read, tensor by tensor
        self._scale: Tensor | None = None

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """As the Trainer's, with a backward pass for every piece.

        Replicas average their gradients (DDP) after the last one; shards are summed after each,
        as nobody holds the whole of them.

        Args:
            model: as the Trainer wrapped it.
            inputs: a batch.
            num_items_in_batch: tokens that the step predicts.
        """
        if self.segments == 1:
            return super().training_step(model, inputs, num_items_in_batch)
        batch = cast(dict[str, Tensor], self._prepare_inputs(inputs))
        items = predicted(batch) if num_items_in_batch is None else num_items_in_batch
        own, parts = self._own(model), list(pieces(batch, self.segments))
        if self.kept:
            return self._whole_gradient(model, parts, items)
        losses: list[Tensor] = []
        states = None
        for part in parts:
            goes_on = self.accelerator.no_sync(model) if part is not parts[-1] else nullcontext()
            with goes_on:
                super().training_step(model, part.after(own, states), items)
            losses.append(self._taken_loss())
            states = self._taken_states()
        return torch.stack(losses).sum()

    def _whole_gradient(self, model: nn.Module, parts: list[Piece], items: Any) -> Tensor:
        own = self._own(model)
        model.train()
        before: list[RecollectCache | None] = [None]
        for part in parts[:-1]:
            with torch.no_grad(), self.compute_loss_context_manager():
                given = part.after(own, before[-1])
                del given["shift_labels"]
                before.append(cache_of(model(**given, logits_to_keep=1)))
        losses: list[Tensor] = []
        asked: list[Tensor] = []
        try:
            for part in reversed(parts):
                states, leaves = _leaves(before.pop())
                self._pull = asked
                self._scale = torch.zeros((), device=self.args.device, requires_grad=True)
                super().training_step(model, part.after(own, states), items)
                losses.append(self._taken_loss())
                self._taken_states()
                # What is run back is the loss times what the Trainer scales it with.
                scale = cast(Tensor, self._scale.grad)
                asked = [
                    torch.zeros_like(x) if x.grad is None else x.grad / scale.to(x.dtype)
                    for x in leaves
                ]
        finally:
            self._pull, self._scale = [], None
        return torch.stack(losses).sum()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """As the Trainer's, of a batch or of a piece of one.

        Args:
            model: as the Trainer wrapped it.
            inputs: a batch, or a piece.
            return_outputs: whether the model's outputs come back too.
            num_items_in_batch: tokens that the step predicts.
        """
        whole = super().compute_loss
        if "cache" not in inputs:
            return whole(model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = cast(Any, whole(model, inputs, True, num_items_in_batch))
        self._loss, self._after = loss.detach().clone(), cache_of(outputs)
        if self._scale is not None:
            loss = loss + self._scale
            after = _floating(cast(RecollectCache, self._after))
            for state, asked in zip(after, self._pull, strict=bool(self._pull)):
                if state.requires_grad:
                    loss = loss + (state * asked).sum().to(loss.dtype)
        return (loss, outputs) if return_outputs else loss

    def losses(self, batch: dict[str, Tensor], items: Any = None) -> Iterator[Tensor]:
        """Of a batch on its device, what adds up to its loss; each may be run back by itself.

        Args:
            batch: as a data loader gives it.
            items: tokens that its step predicts.
        """
        model = cast(nn.Module, self.model)
        if self.segments == 1:
            yield self.compute_loss(model, batch, num_items_in_batch=items)
            return
        items = predicted(batch) if items is None else items
        states = None
        for part in pieces(batch, self.segments):
            given = part.after(self._own(model), states)
            loss = self.compute_loss(model, given, num_items_in_batch=items)
            states = self._taken_states()
            yield loss

    def measured_loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Mean loss over the tokens that a batch predicts, without logits of them all.

        Args:
            batch: on its device.
        """
        model = self._own(cast(nn.Module, self.model))
        if self.segments == 1:
            return cast(Tensor, model(**batch, use_cache=False, output_logits=False).loss)
        items, total = predicted(batch), torch.zeros((), device=batch["input_ids"].device)
        states = None
        for part in pieces(batch, self.segments):
            given = part.after(model, states)
            out = model(**given, num_items_in_batch=items, output_logits=False)
            states, total = cache_of(out), total + out.loss
        return total

    def _own(self, model: nn.Module) -> RecollectForCausalLM:
        return cast(RecollectForCausalLM, self.accelerator.unwrap_model(model))

    def _taken_loss(self) -> Tensor:
        loss, self._loss = self._loss, None
        assert loss is not None
        return loss

    def _taken_states(self) -> RecollectCache:
        """The states after the last piece, cut off from how they came."""
        after, self._after = self._after, None
        assert after is not None
        return after.detach()


def _floating(states: RecollectCache) -> list[Tensor]:
    """All tensors of states that may have gradients, in one order."""
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        if x.is_floating_point():
            found.append(x)
        return x

    states.map(lambda state: state.map(note))
    return found


def _leaves(states: RecollectCache | None) -> tuple[RecollectCache | None, list[Tensor]]:
    """States from which gradients are asked, and their tensors."""
    if states is None:
        return None, []
    wanted = states.map(
        lambda state: state.map(
            lambda x: x.detach().requires_grad_() if x.is_floating_point() else x
        )
    )
    return wanted, _floating(wanted)
