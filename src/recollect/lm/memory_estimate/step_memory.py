"""Memory of a training step, measured on fake tensors, which have shapes and no values.

A block runs forward and backward on torch's fake tensors, with the operations and autocast types of
a real step and without its allocations. `LiveMemory` measures what is saved for the backward pass,
and the peak of each pass. One block of each kind runs three times on few tokens. Sequences are
independent and engines save memory linear in T, so B sequences of T tokens take c + B (a + b T).

With fake tensors, engines cannot branch on values and take the general path, as on a GPU. On a CPU
they inspect decays and errors, and often take a path with less memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from recollect.lm.memory_estimate.fake_ranks import simulate_context_parallel
from recollect.lm.memory_estimate.live_memory import LiveMemory
from recollect.lm.model.config import MLP, RecollectConfig
from recollect.lm.model.loss import next_token_loss
from recollect.lm.model.model import RecollectForCausalLM

__all__ = ["PROBE_TOKENS", "BlockMemory", "LinearFit", "MemoryModel", "fit_memory_model"]

PROBE_TOKENS = 512
"""Length of the measured sequences, unless the run's are shorter; one has twice as many tokens."""


class BlockMemory(NamedTuple):
    """Bytes of a part of the model beyond its weights and its input.

    Attributes:
        saved: after the forward pass, including the output.
        forward: peak of the forward pass.
        backward: peak of the backward pass beyond ``saved``, including gradients of weights.
    """

    saved: float
    forward: float
    backward: float


class LinearFit(NamedTuple):
    """c + B (a + b T), through the measurements at (B, T) = (1, T₀), (1, 2 T₀) and (2, T₀)."""

    tokens: int  # T₀
    first: BlockMemory
    longer: BlockMemory
    wider: BlockMemory

    def predict(self, rows: int, tokens: int) -> BlockMemory:
        """Return the bytes for ``rows`` sequences of ``tokens`` tokens."""

        def at(first: float, longer: float, wider: float) -> float:
            per_row = wider - first  # a + b T₀
            per_token = (longer - first) / self.tokens
            fixed = max(0.0, first - per_row)
            return fixed + rows * (per_row + per_token * (tokens - self.tokens))

        return BlockMemory(*map(at, self.first, self.longer, self.wider))


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """Bytes of a model's training step on one device, as a function of the batch.

    Attributes:
        width: channels of the residual stream.
        weights: bytes of all weights.
        block_weights: bytes of the weights of each block.
        blocks: memory of each block, in order.
        head: memory of the last norm, the output layer and the loss.
    """

    width: int
    weights: int
    block_weights: tuple[int, ...]
    blocks: tuple[LinearFit, ...]
    head: LinearFit

    @property
    def root_weights(self) -> int:
        """Bytes of the weights outside the blocks: embedding, head, last norm."""
        return self.weights - sum(self.block_weights)

    def peak(self, rows: int, tokens: int, *, checkpointing: bool = False) -> tuple[int, int]:
        """Return the peak beyond weights and optimizer state, and the gradients included in it.

        Args:
            rows: number of sequences.
            tokens: length of each.
            checkpointing: whether only the inputs of blocks are saved, and blocks are recomputed.
        """
        residual = 4 * rows * tokens * self.width  # input of a block
        blocks = [fit.predict(rows, tokens) for fit in self.blocks]
        head = self.head.predict(rows, tokens)
        saved = [residual if checkpointing else block.saved for block in blocks]
        before_head, gradients = residual + sum(saved), self.root_weights
        candidates = [
            (before_head + head.forward, 0),
            (before_head + head.saved + head.backward, 0),
        ]
        for index, block in reversed([*enumerate(blocks)]):
            peak = block.backward
            if checkpointing:  # the forward pass is repeated first
                peak = max(block.forward, block.saved + block.backward)
            earlier = residual + sum(saved[: index + 1])
            candidates.append((earlier + gradients + peak, gradients))
            gradients += self.block_weights[index]
        total, included = max(*candidates, (gradients, gradients))
        return round(total), included


def fit_memory_model(
    config: RecollectConfig,
    *,
    tokens: int,
    bf16: bool = False,
    loss_chunk: int = 1024,
    context: int = 1,
) -> MemoryModel:
    """Measure the memory of a model's training step. Nothing is allocated.

    Args:
        config: configuration of the model.
        tokens: length of the sequences; at most `PROBE_TOKENS` are run.
        bf16: whether matrix products are in bfloat16.
        loss_chunk: as ``[run] loss_chunk``.
        context: number of context-parallel ranks, with ``tokens`` tokens each.

    Raises:
        ValueError: a recipe with a member that reads values.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes(
        ...     "gated_delta_net", vocab_size=32, hidden_size=16, num_hidden_layers=2,
        ...     num_attention_heads=2,
        ... )
        >>> from recollect.lm.memory_estimate.step_memory import fit_memory_model
        >>> memory = fit_memory_model(config, tokens=64)
        >>> memory.weights == 4 * rc.lm.parameter_count(config), len(memory.blocks)
        (True, 2)
    """
    kinds = list(zip(config.layer_names, config.has_mlp, strict=True))
    measured: dict[tuple[str, bool], tuple[int, LinearFit]] = {}
    probe, width = min(PROBE_TOKENS, tokens), config.hidden_size
    with FakeTensorMode():
        for name, has_mlp in dict.fromkeys(kinds):
            block = _single_block_model(config, name, has_mlp).model.blocks[0]
            if context > 1:
                simulate_context_parallel(block, context)

            def forward(x: Tensor, block: nn.Module = block) -> Tensor:
                return block(x, output_final_state=False)[0]

            try:
                fit = _fit(forward, block, width, probe, bf16)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise ValueError(
                    f"the memory of recipe {name!r} cannot be estimated: a member of it reads "
                    f"values ({error.func}), and the tensors of an estimate have only shapes"
                ) from error
            measured[name, has_mlp] = _weight_bytes(block), fit
        model = _single_block_model(config, *kinds[0])
        norm, head = model.model.norm, model.lm_head

        def loss(x: Tensor) -> Tensor:
            labels = torch.zeros(x.shape[:2], dtype=torch.long)
            return next_token_loss(norm(x), head, labels, chunk_size=loss_chunk)

        # The memory of the loss is linear only beyond the first chunk.
        loss_probe = tokens if loss_chunk == 0 else max(probe, min(tokens, loss_chunk))
        head_fit = _fit(loss, nn.ModuleList([norm, head]), width, loss_probe, bf16)
        root = _weight_bytes(model) - _weight_bytes(model.model.blocks[0])
    weights, fits = zip(*(measured[kind] for kind in kinds), strict=True)
    return MemoryModel(
        width=width, weights=root + sum(weights), block_weights=weights, blocks=fits, head=head_fit
    )


def _single_block_model(config: RecollectConfig, name: str, has_mlp: bool) -> RecollectForCausalLM:
    config = copy.deepcopy(config)
    config.num_hidden_layers = 1
    config.layers = [name] if has_mlp else [name, name, MLP]
    return RecollectForCausalLM(config).train()


def _fit(
    f: Callable[[Tensor], Tensor], module: nn.Module, width: int, tokens: int, bf16: bool
) -> LinearFit:
    sizes = ((1, tokens), (1, 2 * tokens), (2, tokens))
    return LinearFit(tokens, *(_measure(f, module, (B, T, width), bf16) for B, T in sizes))


def _measure(
    f: Callable[[Tensor], Tensor], module: nn.Module, shape: tuple[int, int, int], bf16: bool
) -> BlockMemory:
    """Run one forward and one backward pass on fake tensors."""
    module.zero_grad()
    x = torch.zeros(shape, requires_grad=True)
    with LiveMemory([*module.parameters(), x]) as memory:
        start = memory.current
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            y = f(x)
        saved, forward = memory.current - start, memory.peak - start
        grad_output = torch.ones_like(y)
        memory.reset_peak()
        y.backward(grad_output)
        backward = memory.peak - start - saved
    module.zero_grad()
    return BlockMemory(saved=saved, forward=forward, backward=backward)


def _weight_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())
