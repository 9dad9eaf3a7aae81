"""Switching autoregression: forecast a sequence whose dynamics change once (TTR section 5, eq. 55).

    k_{t+1} = a_t k_t + σ ε_t,   a_t = 0.9 for t < T/4, else 0.999,   ε_t ~ N(0, Σ)

The association of time t is k_t → v_t = k_{t+1}/‖k_{t+1}‖ and the query is q_t = k_{t+1}. A layer's
output y_t = m_t(k_{t+1}) forecasts v_{t+1} from the associations up to t. There are no learned
parameters. The naive forecaster repeats v_t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from recollect.fields import Validated, int_check, integer, number, option, validate

__all__ = ["SwitchingBatch", "SwitchingConfig", "switching"]


@dataclass(frozen=True, kw_only=True)
class SwitchingConfig(Validated):
    """The process; defaults are the paper's, if the paper has them.

    The paper leaves open Σ beyond "unit diagonals and non-zero off-diagonals", and k_1.

    Args:
        size: K, the size of keys and values.
        length: T, the number of associations.
        early_scale, late_scale: factor a before and after the switch, 0 to 1.
        noise: σ.
        covariance: Σ. ``"equal"`` has ``correlation`` everywhere off the diagonal; ``"drawn"`` is
            AAᵀ scaled to a unit diagonal, for a random K × K matrix A of standard normal numbers
            per sequence.
        correlation: correlation of two coordinates of ``"equal"``; 0 to 1.
        start: k_1 is ``"stationary"`` (the standard deviation of the early process, σ/√(1 − a²)) or
            one ``"step"`` of noise from 0.

    Raises:
        ValueError: a number is out of range; names the number.

    Examples:
        >>> config = rc.tasks.SwitchingConfig(size=4, length=8)
        >>> rc.tasks.switching(config, 2, torch.Generator().manual_seed(0)).k.shape
        torch.Size([2, 8, 4])
    """

    size: int = integer(64, at_least=1)
    length: int = integer(256, at_least=4)
    early_scale: float = number(0.9, at_least=0, at_most=1)
    late_scale: float = number(0.999, at_least=0, at_most=1)
    noise: float = number(0.02, at_least=1e-12, at_most=1e12)
    covariance: Literal["equal", "drawn"] = option("equal", "drawn")
    correlation: float = number(0.5, at_least=0, at_most=1)
    start: Literal["stationary", "step"] = option("stationary", "step")

    def validate(self) -> None:
        if self.start == "stationary" and self.early_scale == 1:
            raise ValueError(
                "SwitchingConfig: early_scale = 1 has no stationary spread; use start='step'"
            )

    @property
    def switch_time(self) -> int:
        """Number of factors a_t before the switch, with t < T/4."""
        return -(-self.length // 4) - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class SwitchingBatch:
    """Sequences to memorise and forecast.

    Attributes:
        k, v: ``[B, T, K]``, the associations; values have length 1.
        q: ``[B, T, K]``, the next key.
        target: ``[B, T, K]``, the next value, which y_t forecasts.

    Examples:
        >>> config = rc.tasks.SwitchingConfig(size=4, length=8)
        >>> batch = rc.tasks.switching(config, 2, torch.Generator().manual_seed(0))
        >>> torch.allclose(batch.v.norm(dim=-1), torch.ones(2, 8))
        True
        >>> torch.equal(batch.q[:, :-1], batch.k[:, 1:])  # the next key
        True
    """

    k: Tensor
    v: Tensor
    q: Tensor
    target: Tensor

    @property
    def repeat_last(self) -> Tensor:
        """Forecast that repeats the last value, ``[B, T, K]``."""
        return self.v

    def loss(self, y: Tensor) -> Tensor:
        """Return ‖v_{t+1} − y_t‖² per token ``[B, T]``, the quantity of TTR figure 2."""
        return (self.target - y).square().sum(-1)


def switching(
    config: SwitchingConfig,
    batch: int,
    generator: torch.Generator,
    *,
    dtype: torch.dtype = torch.float32,
) -> SwitchingBatch:
    """Draw sequences, O(B T K²).

    Args:
        config: the process.
        batch: batch size B.
        generator: the only source of randomness; the result is on its device.
        dtype: dtype of the result; the process runs in float64.

    Raises:
        ValueError: ``batch`` is negative.

    Examples:
        >>> draw = torch.Generator().manual_seed(0)
        >>> config = rc.tasks.SwitchingConfig(size=4, length=16)
        >>> sample = rc.tasks.switching(config, 2, draw)
        >>> sample.k.shape, torch.equal(sample.q[:, :-1], sample.k[:, 1:])
        (torch.Size([2, 16, 4]), True)
    """
    validate("switching: batch", int_check(), batch)
    K, device, wide = config.size, generator.device, torch.float64

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=wide)

    if config.covariance == "equal":
        eye = torch.eye(K, device=device, dtype=wide)
        sigma = config.correlation + (1 - config.correlation) * eye
        # At a correlation of 1, Σ has rank one, and only a root by eigenvectors exists.
        root = _root(sigma).expand(batch, K, K)
    else:
        root = torch.nn.functional.normalize(normal(batch, K, K), dim=-1)  # unit rows: unit Σ_ii
    noise = config.noise * normal(batch, config.length + 2, K) @ root.mT
    k = noise[:, 0]
    if config.start == "stationary":
        k = k / (1 - config.early_scale**2) ** 0.5
    keys = [k]
    for t in range(1, config.length + 2):
        k = (config.early_scale if t <= config.switch_time else config.late_scale) * k + noise[:, t]
        keys.append(k)
    path = torch.stack(keys, dim=1).to(dtype)  # [B, T + 2, K]
    units = path / path.norm(dim=-1, keepdim=True)
    return SwitchingBatch(k=path[:, :-2], v=units[:, 1:-1], q=path[:, 1:-1], target=units[:, 2:])


def _root(sigma: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(sigma)
    return vectors * values.clamp_min(0).sqrt()
