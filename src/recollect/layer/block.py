"""Backbone blocks around a sequence layer: norms, residual connections and the MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from recollect.layer.feed_forward import FeedForward
from recollect.layer.recorded_call import RecordedCall

__all__ = ["Block", "FeedForward", "SwiGLU", "ZeroCenteredRMSNorm", "mlp_width"]


def mlp_width(d_model: int) -> int:
    """Return Llama's width of a SwiGLU MLP, 8/3 · d_model, as a multiple of 8."""
    return max(8, round(d_model / 3) * 8)


class SwiGLU(nn.Module):
    """W_down(SiLU(W_gate x) ⊙ W_up x)."""

    def __init__(self, d_model: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.gate_up = nn.Linear(d_model, 2 * width, bias=False)
        self.down = nn.Linear(width, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs ``[..., d_model]`` for inputs ``[..., d_model]``."""
        gate, linear = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * linear)


class ZeroCenteredRMSNorm(nn.RMSNorm):
    """x / √(mean(x²) + ε) ⊙ (1 + w), with w initially 0, in at least float32."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set w to 0."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last axis."""
        work = torch.promote_types(x.dtype, torch.float32)
        factors = 1 + self.weight.to(work)
        return functional.rms_norm(x.to(work), self.normalized_shape, factors, self.eps).to(x.dtype)


class Block(nn.Module):
    """A pre-norm block: x + layer(RMS(x)), then x + MLP(RMS(x)) (Llama's)."""

    def __init__(
        self,
        layer: nn.Module,  # the sequence layer, of a recipe or of a composition
        width: int | None,  # hidden channels of the MLP; None for a block without an MLP
        *,
        eps: float = 1e-6,  # ε of both norms
        zero_centered: bool = False,  # whether the norms multiply by 1 + w instead of w
    ) -> None:
        super().__init__()
        d_model: int = layer.d_model  # type: ignore[assignment]
        norm = ZeroCenteredRMSNorm if zero_centered else nn.RMSNorm
        self.memory_norm = norm(d_model, eps=eps)
        self.layer = layer
        self.mlp_norm = None if width is None else norm(d_model, eps=eps)
        self.mlp = None if width is None else SwiGLU(d_model, width)

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        output_final_state: bool = True,
        calls: list[RecordedCall] | None = None,
    ) -> tuple[Tensor, Any]:
        """Return outputs and the state, with the arguments of `MemoryLayer.forward`."""
        recorded = {} if calls is None else {"calls": calls}
        y, state = self.layer(
            _norm_in_weight_dtype(self.memory_norm, x),
            state,
            attention_mask,
            cu_seqlens,
            output_final_state=output_final_state,
            **recorded,
        )
        x = x + y
        if self.mlp is None or self.mlp_norm is None:
            return x, state
        return x + self.mlp(_norm_in_weight_dtype(self.mlp_norm, x)), state


def _norm_in_weight_dtype(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """Apply the norm in the dtype of its weight, which may differ from x under autocast."""
    weight = norm.weight
    if weight.dtype == x.dtype:
        return norm(x)
    dtype = torch.promote_types(weight.dtype, x.dtype)
    return norm(x.to(dtype)) if weight.dtype == dtype else norm(x)
