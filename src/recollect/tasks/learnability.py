"""Five maps for a memory to learn online (ATLAS section 6.4, figure 6).

A memory reads a sequence of pairs (i_1, o_1), (i_2, o_2), … of vectors once. It takes one step of
an optimiser per pair on ‖M(i_t) − o_t‖²/‖o_t‖². The outputs are:

| mapping | o_t | required memory |
|---|---|---|
| ``low_rank`` | Wᵀ i_t, W = X Y of rank k | the map |
| ``mlp`` | N(i_t) | the map |
| ``attention`` | N(a_t), a = causal attention over i | the map and earlier inputs |
| ``attention_inputs`` | N(a_t), with inputs a_t instead of i_t | the map |
| ``sliding`` | as ``attention``, over the last 512 tokens | the map and recent inputs |

Two errors of the paper's text are corrected: the loss compares M(i), and values are W_Vᵀ i.
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
    """A map and its sizes; d = 256 and the window of 512 are the paper's.

    The paper leaves open the rank, the length, and the scale of all weights. Here every weight is
    normal with variance 1/(number of inputs), so that outputs are about as long as inputs, and
    biases are 0.

    Args:
        name: name of the map.
        size: d.
        length: T.
        rank: k of ``low_rank``, at most d.
        window: number of tokens, with the current one, of the attention of ``sliding``.

    Raises:
        ValueError: a number is out of range; names the number.

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
    """One map per batch element.

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
        """Return ‖M(i_t) − o_t‖²/‖o_t‖² per token ``[B, T]``."""
        error = (predictions - self.outputs).square().sum(-1)
        return error / self.outputs.square().sum(-1)


def draw_mapping(
    config: MappingConfig,
    batch: int,
    generator: torch.Generator,
    *,
    dtype: torch.dtype = torch.float32,
) -> MappingBatch:
    """Draw maps, each with a sequence; O(B T² d) with attention, O(B T d²) without.

    Args:
        config: map and sizes.
        batch: batch size B.
        generator: the only source of randomness; the result is on its device.
        dtype: dtype of the arithmetic and of the result.

    Raises:
        ValueError: ``batch`` is negative.

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
        return MappingBatch(inputs=x, outputs=x @ X @ Y)  # (XY)ᵀ i for row vectors i
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
