"""Forward and backward of the recurrence over inner batches: tensors around two kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.choices.algorithm.normalized_steps import EPS
from recollect.choices.matmul_precision import is_full_precision
from recollect.choices.memory.norms import NORM_EPS
from recollect.engines.deep.chain.backward import InputGradients
from recollect.engines.deep.chain.trace import ChainSpec, Commits, ForwardTrace, Keys, ReadGradients

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
    """Factors of float32 products: ``"ieee"`` or ``"tf32"``."""
    return "ieee" if is_full_precision("cuda") else "tf32"


def _tile(limit: int, W: int, D: int, R: int) -> int:
    """Hidden units of a tile: the largest power of two that divides W and fits."""
    return min(W & -W, max(16, limit * 64 * 16 // (max(D, 64) * R)))


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """Tensors of a forward pass for its backward pass; shapes as in `kernels`.

    Attributes:
        M: A and S at every border, and after the last batch, per map.
        active: whether a batch moves the memory, ``[N, P]``; ``None`` if all do.
    """

    M: tuple[Tensor, Tensor]
    z: Tensor
    u: Tensor
    last: Tensor
    sizes: Tensor
    T: Tensor
    active: Tensor | None


class RecurrenceRunner:
    """The recurrence over inner batches by two kernels (`ChainSpec.walker`).

    Args:
        launch: runs a kernel.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch

    def forward(
        self, spec: ChainSpec, keys: Keys, start: Sequence[Tensor], commits: Commits
    ) -> ForwardTrace:
        """Compute what `chain.forward.forward` computes.

        Args:
            spec: of the chain. keys: of all batches. start: A and S per map ``[P, J, D, W]``.
            commits: per batch.
        """
        k = keys.k.contiguous()
        N, P, R, D = k.shape
        _, J, _, W = start[0].shape
        normalized = spec.normalised
        moves = None
        T = k.new_ones(N, P, 1, 1) if keys.T is None else keys.T.contiguous()
        c = keys.c.contiguous()
        if not all(commit is True for commit in commits):
            committed = _num_committed(commits, P, k.device)
            moves = torch.arange(N, device=k.device)[:, None] < committed
            T = torch.where(moves[..., None, None], T, torch.eye(J, dtype=T.dtype, device=T.device))
            c = torch.where(moves[..., None, None], c, 0.0)
        M = (k.new_empty(N + 1, P, J, D, W), k.new_empty(N + 1, P, J, D, W))
        for stack, first in zip(M, start, strict=True):
            stack[0].copy_(first)
        h, delta = (k.new_empty(N, P, R, W) for _ in range(2))
        e = torch.empty_like(k)
        z = k.new_empty(N if spec.keep else 1, P, R, W)
        u, last = (torch.empty_like(x) if spec.keep else x for x in (h, e))
        rho = k.new_empty(N, P, R) if normalized else c
        weights, sizes = torch.empty_like(c), k.new_empty(N, P, R, 2) if normalized else c
        tokens, heads = _inputs(spec, keys, k)
        outputs = (*M, z, u, h, delta, e, last, weights, rho, sizes)
        constants = _constants(spec, "forward", k, (W, J)) | {"KEEP": spec.keep}
        self.launch("forward", P, (*tokens, T, c, *outputs, N, P, heads), constants)
        saved = _Saved(M=M, z=z, u=u, last=last, sizes=sizes, T=T, active=moves)
        return ForwardTrace(
            M=[x[:N] for x in M],
            ends=[x[N].clone() for x in M],
            delta=[delta, e],
            h=[k, h],
            saved=None,
            rho=rho if normalized else None,
            weights=weights,
            walked=saved if spec.keep else None,
        )

    def backward(
        self,
        spec: ChainSpec,
        keys: Keys,
        trace: ForwardTrace,
        needs: Mapping[str, bool],
        back: ReadGradients,
        ends: Sequence[Tensor],
    ) -> InputGradients:
        """Compute what `chain.backward.backward` computes; ``back`` and ``ends`` are overwritten.

        Args:
            spec: of the chain. keys: of all batches. trace: of `forward`.
            needs: by name, whether a gradient is needed.
            back: gradients through reads. ends: after the last batch, ``[P, J, D W]`` per map.
        """
        saved = trace.walked
        assert isinstance(saved, _Saved) and trace.weights is not None
        k, h = trace.h
        delta, e = trace.delta
        N, P, _, D = k.shape
        _, _, J, _, W = saved.M[0].shape
        to_k, to_h, to_d, to_e = (x.contiguous() for x in (*back.h, *back.delta))
        reads = [x.contiguous() for pair in zip(back.left, back.right, strict=True) for x in pair]
        G = [x.contiguous().view(P, J, D, W) for x in ends]
        to_T, to_c = torch.zeros_like(saved.T), torch.empty_like(trace.weights)
        to_g, to_M = torch.empty_like(k), torch.empty_like(k)
        norm = spec.ending.layer_norm
        to_nearest = torch.empty_like(k) if norm and spec.normalised else to_g
        to_weight, spare = torch.empty_like(k) if norm else to_g, torch.empty_like(k[0])
        tokens, heads = _inputs(spec, keys, k)
        tensors = (*saved.M, saved.z, saved.u, h, delta, e, saved.last, trace.weights, saved.sizes)
        outputs = (to_T, to_c, to_g, to_M, to_nearest, to_weight, spare)
        arguments = (
            *tokens,
            saved.T,
            *tensors,
            to_k,
            to_h,
            to_d,
            to_e,
            *reads,
            *G,
            *outputs,
            N,
            P,
            heads,
        )
        constants = _constants(spec, "backward", k, (W, J))
        info = torch.finfo(k.dtype)
        constants |= {"Q": reads[0].shape[2], "FLOOR": info.tiny / info.eps}
        self.launch("backward", P, arguments, constants)
        if needs["k"]:
            to_k = torch.baddbmm(
                to_k.flatten(0, 1), to_d.flatten(0, 1), saved.M[0][:N, :, 0].flatten(0, 1).mT
            ).view_as(k)
        if saved.active is not None:
            to_T, to_c = (x * saved.active[..., None, None] for x in (to_T, to_c))
        if trace.rho is not None:
            to_c = to_c * trace.rho.unsqueeze(-1)
        affine = spec.ending.bias.affine
        assert affine is not None
        named: dict[str, Tensor] = {}
        if norm and spec.normalised:
            named["said"] = to_nearest
        if norm:
            for name, x in (("norm_weight", to_weight), ("norm_bias", to_M)):
                if needs[f"param {name}"]:
                    total = x.sum((0, 2)).view(-1, heads, D).sum(0)
                    named[f"param {name}"] = total.to(keys.params[name].dtype)
        return InputGradients(
            T=to_T,
            k=to_k if needs["k"] else None,
            v=-affine[1] * to_g if needs["v"] else None,
            raw=to_M if needs["raw"] and spec.ending.residual else None,
            c=to_c,
            named=named,
            start=G,
        )


def _num_committed(commits: Commits, P: int, device: torch.device) -> Tensor:
    """Number of batches that each memory commits, ``[P]``: always the first ones."""
    count = torch.full((P,), sum(x is True for x in commits), dtype=torch.int32, device=device)
    for mask in commits:
        if not isinstance(mask, bool):
            count += mask.view(P)
    return count


def _inputs(spec: ChainSpec, keys: Keys, k: Tensor) -> tuple[tuple[Tensor, ...], int]:
    """k, raw, v, the nearest value, weight and bias of the norm; and the number of heads."""
    v = keys.v.contiguous()
    raw = keys.raw.contiguous() if spec.ending.residual else k
    nearest = v if keys.said is None else keys.said.contiguous()
    if not spec.ending.layer_norm:
        return (k, raw, v, nearest, k, k), 1
    weight, bias = (
        keys.params[name].to(k.dtype).contiguous() for name in ("norm_weight", "norm_bias")
    )
    return (k, raw, v, nearest, weight, bias), len(weight)


def _constants(
    spec: ChainSpec, kernel: str, k: Tensor, sizes: tuple[int, int]
) -> dict[str, object]:
    """Constants that both kernels are compiled with.

    Args:
        spec: of the chain. kernel: its name. k: keys ``[N, P, R, D]``. sizes: W and J.
    """
    (W, J), (R, D), precision = sizes, k.shape[2:], dot_precision()
    affine = spec.ending.bias.affine
    assert affine is not None
    return {
        "D": D,
        "W": W,
        "R": R,
        "J": J,
        "BW": _tile(TUNING[kernel][precision]["BW"], W, D, R),
        "NORM": spec.ending.layer_norm,
        "RESIDUAL": spec.ending.residual,
        "SHARE": spec.normalised,
        "CURVE": spec.curve.name,
        "SLOPE": float(affine[0]),
        "OFFSET": float(affine[1]),
        "EPS": EPS,
        "NORM_EPS": NORM_EPS,
        "TINY": torch.finfo(k.dtype).tiny,
        "PRECISION": precision,
    }
