"""Five maps that a memory has to learn online (ATLAS section 6.4, figure 6).

A sequence of pairs (i_1, o_1), (i_2, o_2), … of vectors is shown once, and a memory takes one step
of an optimiser per pair on ‖M(i_t) − o_t‖²/‖o_t‖². The outputs are:

| mapping | o_t | required memory |
|---|---|---|
| ``low_rank`` | Wᵀ i_t, W = X Y of rank k | nothing but the map |
| ``mlp`` | N(i_t) | nothing but the map |
| ``attention`` | N(a_t), a = causal attention over i | earlier inputs |
| ``attention_inputs`` | N(a_t), with a_t given in place of i_t | nothing but the map |
| ``sliding`` | as ``attention``, over the last 512 tokens | recent inputs |

Read with two slips of the text mended: the loss compares M(i), and values are W_Vᵀ i.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from recollect.fields import Validated, int_check, integer, option, validate

__all__ = ["MappingBatch", "MappingConfig", "MappingName", "draw_mapping"]

MappingName = Literal["low_rank", "mlp", "attention", "attention_inputs", "sliding"]


@dataclass(frozen=True, kw_only=True)
class MappingConfig(Validated):
    """Which map, and its sizes; d = 256 and the window of 512 are the paper's.

    Left open by the paper: the rank, the length, and the scale of all weights. Here every weight is
    normal with variance 1/(its inputs), so that outputs are about as long as inputs, and biases
    are 0.

    Args:
        name: one of the five.
        size: d.
        length: T.
        rank: k of ``low_rank``, at most d.
        window: tokens that ``sliding`` attends to, the current one among them.

    Raises:
        ValueError: a number out of range, naming it.

    Examples:
        >>> config = rc.tasks.MappingConfig(name="low_rank", size=8, length=16, rank=2)
        >>> batch = rc.tasks.draw_mapping(config, 2, torch.Generator().manual_seed(0))
        >>> torch.linalg.matrix_rank(batch.outputs, rtol=1e-4)  # [B, T, d] of rank k
        tensor([2, 2])
    """

    name: MappingName = option(MISSING, *get_args(MappingName))
    size: int = integer(256, at_least=1)
    length: int = integer(2048, at_least=1)
    rank: int = integer(32, at_least=1)
    window: int = integer(512, at_least=1)

    def validate(self) -> None:
        if self.rank > self.size:
            raise ValueError(
                f"MappingConfig: rank must be at most size = {self.size}, got {self.rank}"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class MappingBatch:
    """One map per row.

    Attributes:
        inputs, outputs: ``[B, T, d]``.

    Examples:
        >>> config = rc.tasks.MappingConfig(name="low_rank", size=8, length=16, rank=2)
        >>> batch = rc.tasks.draw_mapping(config, 2, torch.Generator().manual_seed(0))
        >>> batch.inputs.shape, batch.outputs.shape
        (torch.Size([2, 16, 8]), torch.Size([2, 16, 8]))
    """

    inputs: Tensor
    outputs: Tensor

    def loss(self, predictions: Tensor) -> Tensor:
        """‖M(i_t) − o_t‖²/‖o_t‖² per token ``[B, T]``."""
        error = (predictions - self.outputs).square().sum(-1)
        return error / self.outputs.square().sum(-1)


def draw_mapping(
    config: MappingConfig,
    batch: int,
    generator: torch.Generator,
    *,
    dtype: torch.dtype = torch.float32,
) -> MappingBatch:
    """Draw a map and a sequence for each row; O(B T² d) with attention, O(B T d²) without.

    Args:
        config: which map.
        batch: batch size B.
        generator: the only source of randomness; the result lives on its device.
        dtype: dtype of the arithmetic and of the result.

    Raises:
        ValueError: a negative batch.

    Examples:
        >>> draw = torch.Generator().manual_seed(0)
        >>> config = rc.tasks.MappingConfig(name="low_rank", size=8, length=16, rank=2)
        >>> batch = rc.tasks.draw_mapping(config, 2, draw)
        >>> batch.inputs.shape, batch.outputs.shape
        (torch.Size([2, 16, 8]), torch.Size([2, 16, 8]))
    """
    validate("draw_mapping: batch", int_check(), batch)
    d, device = config.size, generator.device

    def normal(*shape: int, fan: int = 1) -> Tensor:
        weights = torch.randn(batch, *shape, generator=generator, device=device, dtype=dtype)
        return weights / fan**0.5

    x = normal(config.length, d)
    if config.name == "low_rank":
        X, Y = normal(d, config.rank, fan=d), normal(config.rank, d, fan=config.rank)
        return MappingBatch(inputs=x, outputs=x @ X @ Y)  # rows: (XY)ᵀ i, seen from the right
    first, second = normal(d, d, fan=d), normal(d, d, fan=d)

    def network(inputs: Tensor) -> Tensor:
        return torch.nn.functional.gelu(inputs @ first) @ second

    if config.name == "mlp":
        return MappingBatch(inputs=x, outputs=network(x))
    q, k, v = (x @ normal(d, d, fan=d) for _ in range(3))
    t = torch.arange(config.length, device=device)
    hidden = t[None, :] > t[:, None]
    if config.name == "sliding":
        hidden = hidden | (t[None, :] <= t[:, None] - config.window)
    scores = (q @ k.mT / d**0.5).masked_fill(hidden, float("-inf"))
    attended = scores.softmax(-1) @ v
    inputs = attended if config.name == "attention_inputs" else x
    return MappingBatch(inputs=inputs, outputs=network(attended))
