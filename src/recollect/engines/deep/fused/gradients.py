"""The fused walk in training: what `chain.forward` and `chain.backward` compute, by two kernels.

One walk leaves a trace of a group of inner batches: A and S at every border, h, δ, σ′ and σ″ ⊙ u at
the keys, in bfloat16. Reads and their gradients are products of all batches at once, in PyTorch
(`chain.reads`). What is sequential, the gradients of A and S from border to border, is the other
kernel. The equations are those of `chain.backward`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from recollect.engines.deep.chain.backward import InputGradients
from recollect.engines.deep.chain.trace import ChainSpec, Commits, ForwardTrace, Keys, ReadGradients
from recollect.engines.deep.fused.fitting import Build
from recollect.engines.deep.fused.walk import Launch, Task, aligned, kept_batches

__all__ = ["BackTask", "FusedWalker"]

Tensors = list[Tensor]

_INPUTS = ("k", "e", "h", "d", "slope", "bend", "W")
_NUMBERS = ("to_d", "to_h", "to_e", "pi", "w", "sizes", "T")
_OUTPUTS = ("k_own", "e_own", "z_own", "weight", "k_scale", "gram")


class BackTask(ctypes.Structure):
    """``BackTask`` of ``cuda/back.cuh``: addresses and sizes."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _INPUTS),
        ("left", ctypes.c_void_p * 2),
        ("right", ctypes.c_void_p * 2),
        *((name, ctypes.c_void_p) for name in _NUMBERS),
        ("end", ctypes.c_void_p * 4),
        ("start", ctypes.c_void_p * 4),
        *((name, ctypes.c_void_p) for name in _OUTPUTS),
        ("N", ctypes.c_int),
        ("P", ctypes.c_int),
    ]


@dataclass(frozen=True, kw_only=True)
class _Trace:
    """What a walk has left, as it lies in memory; rows are those of the build.

    Attributes:
        k, e: ``[N, P, R, D]``. h, d, slope, bend: ``[N, P, R, hidden]``. W: ``[N, P, J, 2, hidden,
            D]``. sizes: |δ_1|², |h|², |e|², |k|² ``[N, P, R, 4]``. rho: ``[N, P, R]``.
        kept: whether a batch's end is kept, ``[N, P]``.
    """

    k: Tensor
    e: Tensor
    h: Tensor
    d: Tensor
    slope: Tensor
    bend: Tensor
    W: Tensor
    sizes: Tensor
    rho: Tensor
    kept: Tensor


def _natural(w: Tensor, tall: bool) -> Tensor:
    """``[out, in]``, of a map that is kept with its narrower side in rows; or back."""
    return w.mT if tall else w


def _addresses(tensors: Sequence[Tensor], count: int) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * count)(*(x.data_ptr() for x in tensors))


class FusedWalker:
    """Forward and backward of the recurrence over borders, for a build.

    Args:
        build: of the kernels.
        launch: runs them.
    """

    def __init__(self, build: Build, launch: Launch) -> None:
        self.build, self.launch = build, launch

    def forward(
        self, spec: ChainSpec, keys: Keys, start: Sequence[Tensor], commits: Commits
    ) -> ForwardTrace:
        """`chain.forward.forward`, from a trace in bfloat16.

        Args:
            spec: of the chain. keys: of all batches. start: A and S per map. commits: per batch.
        """
        build, k = self.build, keys.k
        N, P, n, D = k.shape
        J, M, R = start[0].shape[1], build.HS * build.CS, build.R
        more = R - n
        full = kept_batches(commits, P, k.device)
        zeros = k.new_zeros(N, P, R)

        def last(x: Tensor | float) -> Tensor:
            made = zeros.clone()
            made[..., -1] = x
            return made

        a, C = last(1.0 if keys.T is None else keys.T[..., 0, 0]), zeros.new_zeros(N, P, R, R)
        C[:, :, -1, :n] = keys.c[..., 0]
        m, s, D_row = a, a, a
        if J == 2:
            assert keys.T is not None
            m, s = last(keys.T[..., 0, 1]), aligned(keys.T[..., 1, 1])
            D_row = aligned(pad(keys.c[..., 1], (0, more)))
        half = [aligned(pad(x.to(torch.bfloat16), (0, 0, 0, more))) for x in (k, keys.v)]
        length = half[0].float().square().sum(-1)
        given = [
            _natural(w[:, j], up) for j in range(J) for w, up in zip(start, spec.tall, strict=True)
        ]
        given = [aligned(w) for w in given]
        ends = [torch.empty_like(w) for w in given]

        def new(*shape: int) -> Tensor:
            return half[0].new_empty(N, P, *shape)

        W, e, sums = new(J, 2, M, D), new(R, D), zeros.new_empty(N, P, R, 4)
        h, d, slope, bend = (new(R, M) for _ in range(4))
        task = Task(
            *(x.data_ptr() for x in (half[0], *half, a, m, C, s, D_row, length, full)),
            _addresses(given, 4),
            _addresses(ends, 4),
            *(x.data_ptr() for x in (sums, W, h, d, slope, bend, e, sums)),
            N=N,
            P=P,
        )
        self.launch("trace", build, task, k.device)
        rho = sums[..., 3] if build.normalised else torch.ones_like(zeros)
        sizes = torch.cat([sums[..., :3], length.unsqueeze(-1)], dim=-1)
        kept = torch.arange(N, device=k.device)[:, None] < full
        trace = _Trace(
            k=half[0], e=e, h=h, d=d, slope=slope, bend=bend, W=W, sizes=sizes, rho=rho, kept=kept
        )
        wide = W.float()
        # The trace holds [hidden, D]: A_1 as it is, A_2 the other way round.
        maps = [
            (x if (i == 0) != up else x.mT).contiguous()
            for i, (x, up) in enumerate(zip(wide.unbind(3), spec.tall, strict=True))
        ]
        after = [
            torch.stack([_natural(ends[2 * j + i], up) for j in range(J)], dim=1)
            for i, up in enumerate(spec.tall)
        ]
        return ForwardTrace(
            M=maps,
            ends=after,
            delta=[d[:, :, :n].float(), e[:, :, :n].float()],
            h=[k, h[:, :, :n].float()],
            saved=None,
            rho=rho[:, :, :n] if build.normalised else None,
            walked=trace,
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
        """`chain.backward.backward`.

        Args:
            spec: of the chain. keys: of all batches. trace: of `forward`. needs: what is asked for.
            back: what reads say. ends: gradients after the last batch, ``[P, J, entries]``.
        """
        build, own = self.build, trace.walked
        assert isinstance(own, _Trace)
        N, P, n, D = keys.k.shape
        J, M, R = trace.M[0].shape[2], build.HS * build.CS, build.R
        more = R - n

        def rows(x: Tensor) -> Tensor:
            return aligned(pad(x, (0, 0, 0, more)).float())

        c = pad(keys.c.mT, (0, more))  # [N, P, J, R]
        w = aligned(c * own.rho.unsqueeze(2) * own.kept[..., None, None])
        pi = (back.h[0] * keys.k).sum(-1) + (back.delta[1] * trace.delta[1]).sum(-1)
        pi = aligned(pad(pi, (0, more)))
        T = pi.new_zeros(N, P, 4)
        T[..., 0] = 1.0 if keys.T is None else keys.T[..., 0, 0]
        if J == 2:
            assert keys.T is not None
            T[..., 1], T[..., 2] = keys.T[..., 0, 1], keys.T[..., 1, 1]
        T[..., 3] = own.kept
        half = torch.bfloat16
        left = [
            aligned(pad(x.unflatten(-1, (J, D)).transpose(2, 3).to(half), (0, 0, 0, more)))
            for x in back.left
        ]
        right = [aligned(pad(x.to(half), (0, 0, 0, more))) for x in back.right]
        given = [rows(x) for x in (back.delta[0], back.h[1], back.delta[1])]
        shapes = [x.shape[-2:] for x in trace.M]
        stacked = [x.view(P, J, *shape) for x, shape in zip(ends, shapes, strict=True)]
        end = [
            aligned(_natural(x[:, j], up))
            for j in range(J)
            for x, up in zip(stacked, spec.tall, strict=True)
        ]
        start = [torch.empty_like(x) for x in end]
        numbers = (*given, pi, w, own.sizes, T)
        k_own, e_own, z_own = (pi.new_empty(N, P, R, x) for x in (D, D, M))
        weight, k_scale = pi.new_empty(N, P, J, R), pi.new_empty(N, P, R)
        gram = pi.new_empty(N, P, build.CS, 3)
        task = BackTask(
            *(getattr(own, name).data_ptr() for name in _INPUTS),
            _addresses(left, 2),
            _addresses(right, 2),
            *(x.data_ptr() for x in numbers),
            _addresses(end, 4),
            _addresses(start, 4),
            *(x.data_ptr() for x in (k_own, e_own, z_own, weight, k_scale, gram)),
            N=N,
            P=P,
        )
        self.launch("back", build, task, pi.device)
        first = [
            torch.stack([_natural(start[2 * j + i], up) for j in range(J)], dim=1)
            for i, up in enumerate(spec.tall)
        ]
        k = None
        if needs["k"]:
            A = trace.M[0][:, :, 0]  # [N, P, D, hidden]
            k = back.h[0] + k_own[:, :, :n] + z_own[:, :, :n] @ A.mT
            k = k + k_scale[:, :, :n, None] * keys.k
        affine = spec.ending.affine
        assert affine is not None  # misfit
        e = e_own[:, :, :n]
        total = gram.sum(2)
        to_T = None
        if needs["T"]:
            to_T = total.new_zeros(N, P, J, J)
            to_T[..., 0, 0] = total[..., 0]
            if J == 2:
                to_T[..., 0, 1], to_T[..., 1, 1] = total[..., 1], total[..., 2]
        to_c = None
        if needs["c"]:
            to_c = (weight * own.rho.unsqueeze(2) * own.kept[..., None, None])[..., :n].mT
        return InputGradients(
            T=to_T,
            k=k,
            v=-affine[1] * e if needs["v"] else None,
            raw=affine[0] * e if needs["raw"] and spec.ending.residual else None,
            c=to_c,
            named={},
            start=first,
        )
