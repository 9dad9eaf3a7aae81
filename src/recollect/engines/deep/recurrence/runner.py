"""Forward and backward of the recurrence over inner batches, by two kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from recollect.choices.algorithm.normalized_steps import EPS
from recollect.choices.matmul_precision import is_full_precision
from recollect.choices.memory.norms import NORM_EPS
from recollect.engines.deep.chain.backward import ReadGradients
from recollect.engines.deep.chain.chain import ChainInputs, ChainSpec, Commits, ForwardTrace

__all__ = ["TUNING", "Launch", "RecurrenceRunner", "dot_precision"]

Launch = Callable[[str, int, Sequence[Tensor | int], Mapping[str, object]], None]
"""Run ``"forward"`` or ``"backward"``: number of programs, arguments, constants."""

TUNING: dict[str, dict[str, dict[str, int]]] = {
    "forward": {
        "ieee": {"BW": 64, "num_warps": 8, "num_stages": 2},
        "tf32": {"BW": 64, "num_warps": 8, "num_stages": 2},
    },
    "backward": {
        "ieee": {"BW": 16, "num_warps": 8, "num_stages": 1},
        "tf32": {"BW": 64, "num_warps": 8, "num_stages": 1},
    },
}
"""Compiler options by kernel and precision, with the hidden units of a tile at 64 channels and 16
associations as BW. Larger tiles spill more registers on Hopper."""


def dot_precision() -> str:
    """Return the type of the factors of float32 products, ``"ieee"`` or ``"tf32"``."""
    return "ieee" if is_full_precision("cuda") else "tf32"


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _pad(x: Tensor, width: int, dim: int = -1) -> Tensor:
    """Return x, contiguous, with zeros up to a width of one dimension."""
    missing = width - x.shape[dim]
    return pad(x, [0, 0] * (-1 - dim) + [0, missing]) if missing else x.contiguous()


def _tile(limit: int, W: int, D: int, R: int) -> int:
    """Return the hidden units of a tile: the largest power of two that divides W and fits."""
    return min(W & -W, max(16, limit * 64 * 16 // (max(D, 64) * R)))


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """Tensors of a forward pass for its backward pass, with the shapes of `kernels`."""

    M: tuple[Tensor, Tensor]  # A and S at every boundary and after the last batch, per map
    z: Tensor  # outputs of the first map
    u: Tensor  # gradients before the activation's derivative
    last: Tensor  # outputs of the last map
    sizes: Tensor  # |δ_1|² and |h_1|² with step scales
    T: Tensor  # boundary transitions
    active: Tensor | None  # whether a batch commits [N, P]; None if all batches commit


class RecurrenceRunner:
    """The recurrence over inner batches by two kernels (`ChainSpec.runner`)."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch

    def forward(
        self, spec: ChainSpec, inputs: ChainInputs, start: Sequence[Tensor], commits: Commits
    ) -> ForwardTrace:
        """Return the result of `chain.forward.forward` for ``start [P, J, D, W]`` per map."""
        channels = inputs.k.shape[-1]
        D = _next_power_of_2(channels)
        k = _pad(inputs.k, D)
        N, P, R, _ = k.shape
        _, J, _, W = start[0].shape
        uses_step_scales = spec.uses_step_scales
        active = None
        T = k.new_ones(N, P, 1, 1) if inputs.T is None else inputs.T.contiguous()
        c = inputs.c.contiguous()
        if not all(commit is True for commit in commits):
            committed = _num_committed(commits, P, k.device)
            active = torch.arange(N, device=k.device)[:, None] < committed
            T = torch.where(
                active[..., None, None], T, torch.eye(J, dtype=T.dtype, device=T.device)
            )
            c = torch.where(active[..., None, None], c, 0.0)
        M = (k.new_empty(N + 1, P, J, D, W), k.new_empty(N + 1, P, J, D, W))
        for stack, first in zip(M, start, strict=True):
            stack[0].copy_(_pad(first, D, -2))
        h, delta = (k.new_empty(N, P, R, W) for _ in range(2))
        e = torch.empty_like(k)
        z = k.new_empty(N if spec.save_for_backward else 1, P, R, W)
        u, last = (torch.empty_like(x) if spec.save_for_backward else x for x in (h, e))
        rho = k.new_empty(N, P, R) if uses_step_scales else c
        weights, sizes = torch.empty_like(c), k.new_empty(N, P, R, 2) if uses_step_scales else c
        tokens, num_heads = _inputs(spec, inputs, k)
        outputs = (*M, z, u, h, delta, e, last, weights, rho, sizes)
        constants = _constants(spec, "forward", k, (W, J, channels))
        constants |= {"KEEP": spec.save_for_backward}
        self.launch("forward", P, (*tokens, T, c, *outputs, N, P, num_heads), constants)
        saved = _Saved(M=M, z=z, u=u, last=last, sizes=sizes, T=T, active=active)
        return ForwardTrace(
            M=[x[:N, ..., :channels, :] for x in M],
            final_maps=[x[N, ..., :channels, :].clone() for x in M],
            h=[k[..., :channels], h],
            delta=[delta, e[..., :channels]],
            z=[],
            u=[],
            rho=rho if uses_step_scales else None,
            alignment=None,
            weights=weights,
            runner_state=saved if spec.save_for_backward else None,
        )

    def backward(
        self,
        spec: ChainSpec,
        inputs: ChainInputs,
        trace: ForwardTrace,
        commits: Commits,
        needs: Mapping[str, bool],
        read_gradients: ReadGradients,
        final_grads: Sequence[Tensor],  # [P, J, D, W] per map
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return the result of `chain.backward.backward`; overwrite the gradients passed in."""
        saved = trace.runner_state
        assert isinstance(saved, _Saved)
        keys, h = trace.h
        delta, e = trace.delta
        N, P, _, channels = keys.shape
        _, _, J, D, W = saved.M[0].shape
        k, e = _pad(keys, D), _pad(e, D)
        to_k, to_e = (_pad(x, D) for x in (read_gradients.h[0], read_gradients.delta[1]))
        to_h, to_d = read_gradients.h[1].contiguous(), read_gradients.delta[0].contiguous()
        reads = [
            x
            for left_factor, right_factor in zip(
                read_gradients.left_factors, read_gradients.right_factors, strict=True
            )
            for x in (_pad(left_factor.unflatten(-1, (J, channels)), D), right_factor.contiguous())
        ]
        G = [_pad(x.reshape(P, J, channels, W), D, -2) for x in final_grads]
        to_T, to_c = torch.zeros_like(saved.T), torch.empty_like(trace.weights)
        to_g, to_M = torch.empty_like(k), torch.empty_like(k)
        norm = spec.output_head.layer_norm
        to_nearest = torch.empty_like(k) if norm and spec.uses_step_scales else to_g
        to_weight, scratch = torch.empty_like(k) if norm else to_g, torch.empty_like(k[0])
        tokens, num_heads = _inputs(spec, inputs, k)
        tensors = (*saved.M, saved.z, saved.u, h, delta, e, saved.last, trace.weights, saved.sizes)
        outputs = (to_T, to_c, to_g, to_M, to_nearest, to_weight, scratch)
        arguments = (*tokens, saved.T, *tensors, to_k, to_h, to_d, to_e, *reads, *G, *outputs)
        constants = _constants(spec, "backward", k, (W, J, channels))
        info = torch.finfo(k.dtype)
        constants |= {"Q": reads[0].shape[2], "FLOOR": info.tiny / info.eps}
        self.launch("backward", P, (*arguments, N, P, num_heads), constants)
        if needs["k"]:
            to_k = torch.baddbmm(
                to_k.flatten(0, 1), to_d.flatten(0, 1), saved.M[0][:N, :, 0].flatten(0, 1).mT
            ).view_as(k)
        to_k, to_g, to_M, to_nearest, to_weight = (
            x[..., :channels] for x in (to_k, to_g, to_M, to_nearest, to_weight)
        )
        if saved.active is not None:
            to_T, to_c = (x * saved.active[..., None, None] for x in (to_T, to_c))
        if trace.rho is not None:
            to_c = to_c * trace.rho.unsqueeze(-1)
        affine = spec.output_head.bias.affine
        assert affine is not None
        grads = {"T": to_T, "k": to_k, "c": to_c, "head v": -affine[1] * to_g}
        if spec.output_head.residual:
            grads["head raw"] = to_M
        if norm and spec.uses_step_scales:
            grads["head nearest_value"] = to_nearest
        if norm:
            for name, x in (("norm_weight", to_weight), ("norm_bias", to_M)):
                if needs[f"param {name}"]:
                    total = x.sum((0, 2)).view(-1, num_heads, channels).sum(0)
                    grads[f"param {name}"] = total.to(inputs.params[name].dtype)
        return grads, [x[..., :channels, :] for x in G]


def _num_committed(commits: Commits, P: int, device: torch.device) -> Tensor:
    """Return the number of committed batches, ``[P]``. They precede all others."""
    count = torch.full((P,), sum(x is True for x in commits), dtype=torch.int32, device=device)
    for mask in commits:
        if not isinstance(mask, bool):
            count += mask.view(P)
    return count


def _inputs(spec: ChainSpec, inputs: ChainInputs, k: Tensor) -> tuple[tuple[Tensor, ...], int]:
    """Return k, raw, v, the nearest value, the norm's weight and bias, and the number of heads."""
    D = k.shape[-1]
    v = _pad(inputs.head["v"], D)
    raw = _pad(inputs.head["raw"], D) if spec.output_head.residual else k
    nearest = _pad(inputs.head["nearest_value"], D) if "nearest_value" in inputs.head else v
    if not spec.output_head.layer_norm:
        return (k, raw, v, nearest, k, k), 1
    weight, bias = (
        _pad(inputs.params[name].to(k.dtype), D) for name in ("norm_weight", "norm_bias")
    )
    return (k, raw, v, nearest, weight, bias), len(weight)


def _constants(
    spec: ChainSpec, kernel: str, k: Tensor, sizes: tuple[int, int, int]
) -> dict[str, object]:
    """Return the constants of a kernel, with ``sizes`` W, J and the channels without padding."""
    (W, J, channels), (R, D), precision = sizes, k.shape[2:], dot_precision()
    affine = spec.output_head.bias.affine
    assert affine is not None
    return {
        "D": D,
        "CHANNELS": channels,
        "W": W,
        "R": R,
        "J": J,
        "BW": _tile(TUNING[kernel][precision]["BW"], W, D, R),
        "NORM": spec.output_head.layer_norm,
        "RESIDUAL": spec.output_head.residual,
        "STEP_SCALES": spec.uses_step_scales,
        "ACTIVATION": spec.activation.name,
        "SLOPE": float(affine[0]),
        "OFFSET": float(affine[1]),
        "EPS": EPS,
        "NORM_EPS": NORM_EPS,
        "TINY": torch.finfo(k.dtype).tiny,
        "PRECISION": precision,
    }
