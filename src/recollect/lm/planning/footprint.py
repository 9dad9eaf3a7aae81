"""What a training step keeps and takes, counted on tensors that have shapes and no numbers.

A block is built and run forward and back among torch's fake tensors: they go through the very
operations of a step, in the types of autocast, and allocate nothing. `LiveMemory` counts what lives
after the forward pass (what the backward pass needs) and the most that lives in each pass. One
block of each kind is run three times on a few tokens: with B rows of T tokens a count is
c + B (a + b T), because rows are independent and engines keep what is linear in T.

Without numbers engines take the way that holds for all of them, as on a GPU. On a CPU they look at
decays and errors, and often find a cheaper one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from recollect.lm.model.config import MLP, RecollectConfig
from recollect.lm.model.loss import next_token_loss
from recollect.lm.model.model import RecollectForCausalLM
from recollect.lm.planning.along import lay_along
from recollect.lm.planning.live_memory import LiveMemory

__all__ = ["SHORT", "Counts", "Footprint", "Passes", "count", "footprint"]

SHORT = 512
"""Tokens of a row that is run, where a row has as many; the longer one has twice as many."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Bytes of a part of the model beyond its weights and its input.

    Attributes:
        kept: after the forward pass, the output included.
        forward: the most during it.
        backward: the most during the backward pass beyond ``kept``, gradients of weights included.
    """

    kept: float
    forward: float
    backward: float

    def _with(self, other: Passes, f: Callable[[float, float], float]) -> Passes:
        return Passes(
            kept=f(self.kept, other.kept),
            forward=f(self.forward, other.forward),
            backward=f(self.backward, other.backward),
        )


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of a training step on one device.

    Attributes:
        weights: all of them. block_weights: of every block.
        blocks: of every block, in order. head: the last norm, the output layer and the loss.
        stream: the input of one block.
    """

    weights: int
    block_weights: tuple[int, ...]
    blocks: tuple[Passes, ...]
    head: Passes
    stream: int

    @property
    def root_weights(self) -> int:
        """Those of no block: embedding, head, last norm."""
        return self.weights - sum(self.block_weights)

    def most(self, *, checkpointing: bool = False) -> tuple[int, int]:
        """The most that lives at once beside weights and optimizer, and the gradients within it.

        Args:
            checkpointing: whether only the inputs of blocks are kept, and each is run again.
        """
        kept = [float(self.stream) if checkpointing else block.kept for block in self.blocks]
        below = self.stream + sum(kept)
        moments = [
            (below + self.head.forward, 0.0),
            (below + self.head.kept + self.head.backward, 0.0),
        ]
        gradients = float(self.root_weights)
        for index in reversed(range(len(self.blocks))):
            block = self.blocks[index]
            under = self.stream + sum(kept[: index + 1]) + gradients
            most = block.backward
            if checkpointing:  # it is run again first
                most = max(block.forward, block.kept + block.backward)
            moments.append((under + most, gradients))
            gradients += self.block_weights[index]
        moments.append((gradients, gradients))
        whole, within = max(moments)
        return round(whole), round(within)


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """c + B (a + b T), through (1, T₀), (1, 2 T₀) and (2, T₀)."""

    short: int
    one: Passes
    longer: Passes
    wider: Passes

    def at(self, rows: int, tokens: int) -> Passes:
        per_token = self.longer._with(self.one, lambda x, y: (x - y) / self.short)
        per_row = self.wider._with(self.one, lambda x, y: x - y)  # a + b T₀
        fixed = self.one._with(per_row, lambda x, y: max(0.0, x - y))
        row = per_row._with(per_token, lambda a, b: a + b * (tokens - self.short))
        return fixed._with(row, lambda c, x: c + rows * x)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What was counted of a model on a few tokens.

    Attributes:
        width: of the stream. weights, block_weights: as in `Footprint`.
    """

    width: int
    weights: int
    block_weights: tuple[int, ...]
    _blocks: tuple[_Fit, ...]
    _head: _Fit

    def at(self, rows: int, tokens: int) -> Footprint:
        """The bytes of a step.

        Args:
            rows: of a batch that is read at once. tokens: of each.
        """
        return Footprint(
            weights=self.weights,
            block_weights=self.block_weights,
            blocks=tuple(fit.at(rows, tokens) for fit in self._blocks),
            head=self._head.at(rows, tokens),
            stream=4 * rows * tokens * self.width,
        )


def count(
    config: RecollectConfig,
    *,
    tokens: int,
    bf16: bool = False,
    loss_chunk: int = 1024,
    context: int = 1,
) -> Counts:
    """Count the bytes of a model's step; nothing is allocated.

    Args:
        config: of the model. tokens: of a row; rows of `SHORT` tokens stand for longer ones.
        bf16: whether products are in bfloat16. loss_chunk: as ``[run] loss_chunk``.
        context: ranks that hold as many tokens each of a row.

    Raises:
        ValueError: a recipe with a member that looks at numbers.
    """
    kinds = list(zip(config.pattern, config.followed, strict=True))
    made: dict[tuple[str, bool], tuple[int, _Fit]] = {}
    short, width = min(SHORT, tokens), config.hidden_size
    with FakeTensorMode():
        for name, followed in dict.fromkeys(kinds):
            try:
                block = _alone(config, name, followed=followed).model.blocks[0]
                if context > 1:
                    lay_along(block, context)

                def through(x: Tensor, block: nn.Module = block) -> Tensor:
                    return block(x, output_final_state=False)[0]

                made[name, followed] = _bytes(block), _fit(through, block, width, short, bf16)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise ValueError(
                    f"recipe {name!r} cannot be counted on paper: a member of it looks at numbers "
                    f"({error.func}), and the tensors of a plan have only shapes"
                ) from error
        model = _alone(config, *kinds[0])
        norm, head = model.model.norm, model.lm_head

        def loss(x: Tensor) -> Tensor:
            asked = torch.zeros(x.shape[:2], dtype=torch.long)
            return next_token_loss(norm(x), head, asked, chunk_size=loss_chunk)

        # From as many tokens on as a chunk has, what is held is linear.
        enough = tokens if loss_chunk == 0 else max(short, min(tokens, loss_chunk))
        last = _fit(loss, nn.ModuleList([norm, head]), width, enough, bf16)
        root = _bytes(model) - _bytes(model.model.blocks[0])
    return Counts(
        width=width,
        weights=root + sum(made[kind][0] for kind in kinds),
        block_weights=tuple(made[kind][0] for kind in kinds),
        _blocks=tuple(made[kind][1] for kind in kinds),
        _head=last,
    )


def footprint(
    config: RecollectConfig, *, rows: int, tokens: int, bf16: bool = False, loss_chunk: int = 1024
) -> Footprint:
    """The bytes of a step of a model; nothing is allocated.

    Args:
        config: of the model. rows, tokens: of a batch that is run at once.
        bf16: whether products are in bfloat16. loss_chunk: as ``[run] loss_chunk``.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes(
        ...     "gated_delta_net", vocab_size=32, hidden_size=16, num_hidden_layers=2,
        ...     num_attention_heads=2,
        ... )
        >>> from recollect.lm.planning.footprint import footprint
        >>> found = footprint(config, rows=1, tokens=64)
        >>> found.weights == 4 * rc.lm.parameter_count(config), len(found.blocks)
        (True, 2)
    """
    return count(config, tokens=tokens, bf16=bf16, loss_chunk=loss_chunk).at(rows, tokens)


def _alone(config: RecollectConfig, name: str, followed: bool) -> RecollectForCausalLM:
    """A model of one block."""
    one = copy.deepcopy(config)
    one.num_hidden_layers = 1
    one.layers = [name] if followed else [name, name, MLP]
    return RecollectForCausalLM(one).train()


def _fit(
    f: Callable[[Tensor], Tensor], module: nn.Module, width: int, short: int, bf16: bool
) -> _Fit:
    sizes = ((1, short), (1, 2 * short), (2, short))
    one, longer, wider = (_run(f, module, width, B, T, bf16) for B, T in sizes)
    return _Fit(short=short, one=one, longer=longer, wider=wider)


def _run(
    f: Callable[[Tensor], Tensor], module: nn.Module, width: int, rows: int, tokens: int, bf16: bool
) -> Passes:
    """One forward and one backward pass among fake tensors."""
    module.zero_grad()
    x = torch.zeros(rows, tokens, width, requires_grad=True)
    with LiveMemory([*module.parameters(), x]) as memory:
        before = memory.now
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            y = f(x)
        kept, forward = memory.now - before, memory.peak - before
        gradient = torch.ones_like(y)
        memory.reset_peak()
        y.backward(gradient)
        backward = memory.peak - before - kept
    module.zero_grad()
    return Passes(kept=kept, forward=forward, backward=backward)


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())
