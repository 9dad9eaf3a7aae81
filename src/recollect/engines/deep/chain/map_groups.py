"""Groups of maps of equal sizes, which one product serves.

The wide factors and M have shape ``[N, P, maps, ...]``, so that heads and maps form one batch axis
of a product. The narrow factors have shape ``[maps, N, P, ...]``, because products write them: on a
CPU, strided writes are slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from recollect.choices.matmul_precision import matmul_precision
from recollect.engines.deep.chain.trace import (
    ChainInputs,
    ChainSpec,
    ForwardTrace,
    MapStack,
    ReadGradients,
)

__all__ = [
    "ForwardStacks",
    "GradientStacks",
    "add_matmul",
    "apply_transition",
    "group_by_size",
    "is_cpu",
    "repeat_per_map",
    "split_groups",
    "stack_maps",
    "unbind_batches",
]

Tensors = list[Tensor]


def group_by_size(sizes: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Return the indices of maps grouped by their (narrow, wide) sizes."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i, size in enumerate(sizes):
        groups.setdefault(size, []).append(i)
    return tuple(map(tuple, groups.values()))


def is_cpu(x: Tensor) -> bool:
    """Return whether x is on the CPU, where strided writes are slow and launches are cheap."""
    return x.device.type == "cpu"


def add_matmul(out: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> None:
    """Compute out += alpha a b, in one operation if that is not slower.

    Args:
        out: ``[P, m, n]``, with any stride between its matrices.
        a: ``[P, m, r]``.
        b: ``[P, r, n]``.
        alpha: Factor of the product.
    """
    if not is_cpu(out) or out.is_contiguous():
        out.baddbmm_(a, b, alpha=alpha)
    else:
        out.add_(torch.bmm(a, b), alpha=alpha)


def apply_transition(out: Tensor, T: Tensor, M: Tensor, *, transpose: bool = False) -> None:
    """Compute out_j = Σ_i T[j, i] M_i, or Σ_i T[i, j] M_i if ``transpose``, at full precision.

    Products with decays and momentum are not rounded to fewer bits. With a base, the writes are the
    difference of two stacks, and rounding both at every boundary would cancel most digits.

    Args:
        out: ``[P, J, entries]``.
        T: ``[P, J, J]``, zero below its diagonal.
        M: ``[P, J, entries]``.
        transpose: Whether T is transposed.
    """
    T = T.mT if transpose else T
    if is_cpu(M):
        torch.bmm(T, M, out=out)
    else:
        with matmul_precision("float32", M.device.type):
            torch.bmm(T, M, out=out)


def unbind_batches(x: Tensor, N: int) -> Sequence[Tensor]:
    """Return N batches of x; a single batch is repeated and overwritten."""
    return x.unbind(0) if x.shape[0] == N else (x[0],) * N


def repeat_per_map(x: Tensor, L: int) -> Tensor:
    """Repeat ``[N, P, ...]`` for every map of a group, ``[N, P L, ...]``."""
    if L == 1:
        return x
    return x.unsqueeze(2).expand(*x.shape[:2], L, *x.shape[2:]).flatten(1, 2)


def split_groups(spec: ChainSpec, map_groups: Sequence[Tensor]) -> Tensors:
    """Return the stacks of all groups ``[P, L, ...]`` map by map."""
    groups = {
        i: x
        for group, stack in zip(spec.map_groups, map_groups, strict=True)
        for i, x in zip(group, stack.unbind(1), strict=True)
    }
    return [groups[i] for i in range(len(spec.transposed))]


class ForwardStacks:
    """Stacks of a group in the forward pass, batch by batch.

    Attributes:
        narrow_: Narrow factors of a batch, ``[P, L, R, 1, narrow]``.
        wide_: Wide factors of a batch, ``[P L, R, wide]``.
        Q_: c times the narrow factors, ``[P, L, R, J, narrow]``.
        has_precomputed_Q: Whether Q is complete before the first batch.
    """

    def __init__(
        self,
        spec: ChainSpec,
        inputs: ChainInputs,
        index: int,
        start: Tensor,
        sizes: tuple[int, bool],
        allocate: Callable[..., Tensor],
    ) -> None:
        (buffer_index, has_precomputed_Q), members = sizes, spec.map_groups[index]
        self.members = [(i, spec.transposed[i]) for i in members]
        k, c = inputs.k, inputs.c
        N, P, R, _ = k.shape
        _, L, J, small, large = start.shape
        count = N if spec.save_for_backward else 1
        self.end = allocate(f"end {buffer_index}", index, *start.shape)
        if N == 1:
            self.M = start.unsqueeze(0)
        else:
            self.M = allocate("M", index, N, *start.shape)
            self.M[0].copy_(start)
        head, transposed = members[0] == 0, spec.transposed[members[0]]
        if head and transposed and L == 1:
            self.narrow = k.unsqueeze(0)
        else:
            self.narrow = allocate("narrow", index, L, N, P, R, small)
            if head and transposed:
                self.narrow[0].copy_(k)
        if head and not transposed and L == 1:
            self.wide = k.unsqueeze(2)
        else:
            self.wide = allocate("wide", index, N, P, L, R, large)
            if head and not transposed:
                self.wide[:, :, 0].copy_(k)
        self.has_precomputed_Q = has_precomputed_Q and head and transposed and L == 1
        if self.has_precomputed_Q:  # one product for all batches
            self.Q = (k.unsqueeze(-2) * c.unsqueeze(-1)).unsqueeze(2)
        else:
            self.Q = allocate("Q", index, count, P, L, R, J, small)
        self.narrow_ = self.narrow.permute(1, 2, 0, 3, 4).unsqueeze(4).unbind(0)
        self.wide_ = self.wide.flatten(1, 2).unbind(0)
        self.Q_ = unbind_batches(self.Q, N)
        self.weighted = unbind_batches(self.Q.flatten(1, 2).flatten(3).mT, N)
        self.products = [
            *self.M.flatten(1, 2).flatten(2, 3).unbind(0),
            self.end.flatten(0, 1).flatten(1, 2),
        ]
        self.flat = [*self.M.flatten(1, 2).flatten(3).unbind(0), self.end.flatten(0, 1).flatten(2)]
        self.T: Sequence[Tensor] | None = None
        if inputs.T is not None:
            self.T = repeat_per_map(inputs.T, L).unbind(0)
        self.J, self.L = J, L

    def factors(self, L: int) -> list[tuple[Tensor, Sequence[int]]]:
        """Return stacks ``[N, factors, P, R, ·]`` and their indices for `StepScales.begin_span`."""
        narrow = [i if is_transposed else L + i for i, is_transposed in self.members]
        wide = [L + i if is_transposed else i for i, is_transposed in self.members]
        first = int(narrow[0] == 0)
        groups: list[tuple[Tensor, Sequence[int]]] = []
        if wide != [0]:
            groups.append((self.wide.transpose(1, 2), wide))
        if narrow[first:]:
            groups.append((self.narrow.transpose(0, 1)[:, first:], narrow[first:]))
        return groups

    def map_views(self, member: int, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return h, δ and A of a map, ``[N, P, ·, ·]``."""
        narrow, wide, A = self.narrow[member], self.wide[:, :, member], self.M[:, :, member, 0]
        return (narrow, wide, A) if transposed else (wide, narrow, A.mT)

    def cross_boundary(self, n: int, weight: Tensor | None, commit: bool | Tensor) -> None:
        """Compute M at the boundary after batch n.

        Args:
            n: Index of the batch.
            weight: Coefficients ``[P, 1, R, J, 1]``, or ``None`` if Q is complete.
            commit: Whether the batch commits, or a mask of the elements that do.
        """
        source, target = self.products[n], self.products[n + 1]
        if commit is False:
            target.copy_(source)
            return
        if weight is not None and not self.has_precomputed_Q:
            torch.mul(self.narrow_[n], weight, out=self.Q_[n])
        weighted, right = self.weighted[n], self.wide_[n]
        if self.T is None:
            torch.baddbmm(source, weighted, right, out=target)
        else:
            if self.J == 1:
                torch.mul(self.flat[n], self.T[n], out=self.flat[n + 1])
            else:
                apply_transition(self.flat[n + 1], self.T[n], self.flat[n])
            target.baddbmm_(weighted, right)
        if commit is not True:
            target.copy_(torch.where(commit.repeat_interleave(self.L, 0), target, source))


def stack_maps(xs: Sequence[Tensor]) -> Tensor:
    """Stack maps' ``[N, P, ...]`` to ``[N, P, L, ...]``; a single map is a view."""
    return xs[0].unsqueeze(2) if len(xs) == 1 else torch.stack(list(xs), dim=2)


class GradientStacks:
    """Gradients of a group of maps of equal sizes, batch by batch.

    Attributes:
        grad: Gradient of M at the boundary after the current batch, ``[P L, J, entries]``.
        grad_wide: Gradients of the wider of h and δ, initially those of the reads,
            ``[N, P, L, R, wide]``.
        grad_narrow: Gradients of the narrower of h and δ, per map ``[N, P, R, narrow]``.
        grad_Q: Gradients of Q, ``[N, P, L, R, J, narrow]``.
        key_narrow: Narrow factors of Ā, ``[N, P, L, rows, narrow]``.
        key_wide: Wide factors of Ā, ``[N, P, L, rows, wide]``.

    The factors of Ā are (k, z̄) for the first map. Other maps have (ū, δ), followed by (h, z̄).
    """

    def __init__(
        self,
        spec: ChainSpec,
        index: int,
        stacks: MapStack,
        trace: ForwardTrace,
        read_gradients: ReadGradients,
        end: Tensor,
    ) -> None:
        members = spec.map_groups[index]
        M, wide, Q = stacks.M, stacks.wide, stacks.Q
        N, P, L, self.J, small, large = M.shape
        R = wide.shape[3]
        self.members, self.L, self.R = members, L, R
        self.wide_all, self.narrow_all = wide, stacks.narrow
        transposed = [spec.transposed[i] for i in members]
        pairs = [(read_gradients.h[i], read_gradients.delta[i]) for i in members]
        self.grad_narrow_all = [
            pair[not is_transposed] for pair, is_transposed in zip(pairs, transposed, strict=True)
        ]
        self.grad_wide_all = stack_maps(
            [pair[is_transposed] for pair, is_transposed in zip(pairs, transposed, strict=True)]
        )
        left_factors, right_factors = (
            stack_maps([x[i] for i in members])
            for x in (read_gradients.left_factors, read_gradients.right_factors)
        )
        self.left_factors, self.right_factors = (
            x.flatten(1, 2).unbind(0) for x in (left_factors, right_factors)
        )
        self.Q, self.wide = Q.flatten(1, 2).flatten(3).unbind(0), wide.flatten(1, 2).unbind(0)
        self.flat = M.flatten(1, 2).flatten(3).mT.unbind(0)
        self.grad_Q_all = M.new_empty(N, P, L, R, self.J, small)
        self.grad_Q = self.grad_Q_all.unbind(0)
        self.grad_Q_flat = self.grad_Q_all.flatten(1, 2).flatten(3).unbind(0)
        self.grad_wide, self.grad_wide_flat = (
            x.unbind(0) for x in (self.grad_wide_all, self.grad_wide_all.flatten(1, 2))
        )
        # The first map has one pair of factors, the others two.
        rows = R if members == (0,) else 2 * R
        self.key_narrow, self.key_wide = (
            M.new_empty(N, P, L, rows, size) for size in (small, large)
        )
        if members[0] == 0 and rows > R:
            for x in (self.key_narrow, self.key_wide):
                x[:, :, 0, R:] = 0.0
        for m, (i, is_transposed) in enumerate(zip(members, transposed, strict=True)):
            into_h, into_delta = self.factor_views(m, is_transposed)
            h, delta = trace.h[i], trace.delta[i]
            if i:
                into_delta[:, :, :R].copy_(delta)
                into_h[:, :, R:].copy_(h)
            else:
                into_h[:, :, :R].copy_(h)
        self.key_factors = (
            self.key_narrow.flatten(1, 2).mT.unbind(0),
            self.key_wide.flatten(1, 2).unbind(0),
        )
        # Keys are a narrow factor of the first map; their gradient is completed after the loop.
        self.updated_narrow = [m for m, i in enumerate(members) if i or not transposed[0]]
        self.sizes = P * L, self.J * small, large
        self.grad = end.flatten(0, 1).flatten(2)
        self.scratch = torch.empty_like(self.grad)

    def factor_views(self, member: int, transposed: bool) -> tuple[Tensor, Tensor]:
        """Return a map's factors of Ā over inputs and outputs, ``[N, P, rows, ·]``."""
        narrow, wide = self.key_narrow[:, :, member], self.key_wide[:, :, member]
        return (narrow, wide) if transposed else (wide, narrow)

    def cross_boundary(
        self, n: int, T: Tensor | None, c: Sequence[Tensor], commit: bool | Tensor
    ) -> Tensor:
        """Run the backward pass of the boundary after batch n; return M̄′ of committed elements.

        Args:
            n: Index of the batch.
            T: Boundary transition ``[P L, J, J]``, or ``None``.
            c: Coefficients of A and S, ``[P, R, 1]``.
            commit: Whether the batch commits, or a mask of the elements that do.
        """
        mask = commit if isinstance(commit, Tensor) else None
        grad_end = self.grad if mask is None else torch.where(mask, self.grad, 0.0)
        flat = grad_end.view(self.sizes)
        self.grad_wide_flat[n].baddbmm_(self.Q[n], flat)
        torch.bmm(self.wide[n], flat.mT, out=self.grad_Q_flat[n])
        for m in self.updated_narrow:
            for part, each in zip(self.grad_Q[n][:, m].unbind(2), c, strict=True):
                self.grad_narrow_all[m][n].addcmul_(part, each)
        grad = self.scratch
        if T is None:
            grad.copy_(grad_end)
        elif self.J == 1:
            torch.mul(grad_end, T, out=grad)
        else:
            apply_transition(grad, T, grad_end, transpose=True)
        if mask is not None:
            grad.add_(torch.where(mask, 0.0, self.grad))
        self.grad, self.scratch = grad, self.grad
        return grad_end

    def skip_boundary(self, n: int) -> None:
        """Run the backward pass of a boundary that no element commits."""
        self.grad_Q[n].zero_()

    def accumulate(self, n: int) -> None:
        """Add the products of reads to M̄, and those of keys to Ā."""
        stacked = self.grad.view(self.sizes)
        stacked.baddbmm_(self.left_factors[n].mT, self.right_factors[n])
        narrow, wide = self.key_factors
        PL, entries, large = self.sizes
        grad_A = stacked.view(PL, self.J, entries // self.J, large)[:, 0]
        add_matmul(grad_A, narrow[n], wide[n])
