"""Backward of the recurrence over inner-batch boundaries.

M̄′ is the gradient of M at the next boundary, and h̄ and δ̄ are those of the reads. In the notation of
`forward`:

    M̄_i = Σ_j T[j, i] M̄_j′,    δ̄ += Σ_j c_j M̄_j′ h,    h̄ += Σ_j c_j M̄_j′ᵀ δ
    ū_l = σ′(z_(l−1)) ⊙ δ̄_(l−1),    δ̄_l += A_l ū_l,    z̄_L = (∂δ_L/∂z_L)ᵀ δ̄_L
    h̄_(l−1) += A_lᵀ z̄_l,    z̄_(l−1) = σ′ ⊙ h̄_(l−1) + σ″ ⊙ u_l ⊙ δ̄_(l−1)
    Ā_l += δ_l ū_lᵀ + z̄_l h_(l−1)ᵀ

With step scales, c′ replaces c. After the first line, h̄ and δ̄ get the terms of `step_scales`. z̄_L
then has the terms N̄ ∂N/∂z_L and (∂g/∂z_L)ᵀ ḡ too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.engines.deep.chain.map_groups import (
    GradientStacks,
    add_matmul,
    is_cpu,
    repeat_per_map,
    stack_maps,
)
from recollect.engines.deep.chain.output_head.backward import make_head_backward
from recollect.engines.deep.chain.step_scales import StepScaleGradients
from recollect.engines.deep.chain.trace import (
    ChainInputs,
    ChainSpec,
    Commits,
    ForwardTrace,
    ReadGradients,
)

__all__ = ["InputGradients", "backward"]


@dataclass(frozen=True, kw_only=True)
class InputGradients:
    """Gradients of the inputs of a forward pass, or ``None`` if they are not needed.

    Attributes:
        T: Gradient of the boundary transitions.
        k: Gradient of the features of keys.
        v: Gradient of the values.
        raw: Gradient of the keys before the feature map.
        c: Gradient of the write coefficients.
        named: Gradients of ``"nearest_value"``, ``"gate ..."`` and ``"param ..."``.
        start: Gradients of M before the first batch, per group.
    """

    T: Tensor | None
    k: Tensor | None
    v: Tensor | None
    raw: Tensor | None
    c: Tensor | None
    named: dict[str, Tensor]
    start: list[Tensor]


def backward(
    spec: ChainSpec,
    inputs: ChainInputs,
    trace: ForwardTrace,
    commits: Commits,
    needs: Mapping[str, bool],
    read_gradients: ReadGradients,
    final_grads: Sequence[Tensor],
) -> InputGradients:
    """Run the backward pass from the last batch to the first.

    Args:
        spec: Properties of the chain.
        inputs: Inputs of the forward pass.
        trace: Result of the forward pass.
        commits: Commits of the forward pass.
        needs: Whether a gradient of T, k, v, raw, c and the `named` inputs is needed, by name.
        read_gradients: Gradients through reads.
        final_grads: Gradients of A and S after the last batch ``[P, J, entries]``; overwritten.
    """
    saved = trace.saved
    assert saved is not None
    map_groups = [
        GradientStacks(spec, i, stacks, trace, read_gradients, head)
        for i, (stacks, head) in enumerate(zip(saved.map_groups, final_grads, strict=True))
    ]
    weights = inputs.c if trace.weights is None else trace.weights
    batch_backward = _BatchBackward(spec, map_groups, inputs, trace, needs)
    N, P, _, J = inputs.c.shape
    grams = [
        inputs.c.new_zeros(N, P * group.L, J, J) if needs["T"] else None for group in map_groups
    ]
    Ts = [
        None if inputs.T is None else repeat_per_map(inputs.T, group.L).unbind(0)
        for group in map_groups
    ]
    columns = [x.unsqueeze(-1).unbind(0) for x in weights.unbind(-1)]
    for n in reversed(range(N)):
        commit = commits[n]
        for group, T, gram in zip(map_groups, Ts, grams, strict=True):
            if commit is False:
                group.skip_boundary(n)
                continue
            is_committed = commit if commit is True else commit.repeat_interleave(group.L, 0)
            c = [x[n] for x in columns]
            grad_end = group.cross_boundary(n, None if T is None else T[n], c, is_committed)
            if gram is not None:
                torch.bmm(grad_end, group.flat[n], out=gram[n])
        batch_backward.run(n)
        for group in map_groups:
            group.accumulate(n)
    named = batch_backward.head.gradients(needs, batch_backward.pi)
    first_group = map_groups[0]
    grad_T = None
    for group, gram in zip(map_groups, grams, strict=True):
        if gram is not None:
            total = gram.unflatten(1, (P, group.L)).sum(2)
            grad_T = total if grad_T is None else grad_T + total
    return InputGradients(
        T=grad_T,
        k=_key_gradients(spec, batch_backward, first_group, weights) if needs["k"] else None,
        v=named.pop("v", None),
        raw=named.pop("raw", None),
        c=_coefficient_gradients(map_groups, trace.rho) if needs["c"] else None,
        named=named,
        start=[
            group.grad.view(P, group.L, *stacks.M.shape[3:])
            for group, stacks in zip(map_groups, saved.map_groups, strict=True)
        ],
    )


class _BatchBackward:
    """Backward pass within a batch, from h̄ and δ̄ to ū and z̄.

    Attributes:
        grad_z_first: z̄ of the first map, for all batches.
        head: Backward pass of the output head.
        pi: π of all batches with step scales, else ``None``.
    """

    def __init__(
        self,
        spec: ChainSpec,
        map_groups: Sequence[GradientStacks],
        inputs: ChainInputs,
        trace: ForwardTrace,
        needs: Mapping[str, bool],
    ) -> None:
        saved = trace.saved
        assert saved is not None
        self.spec, self.map_groups = spec, map_groups
        L, R = len(spec.transposed), trace.h[0].shape[2]
        group_of = {i: (group, m) for group in map_groups for m, i in enumerate(group.members)}
        grad_u: list[Tensor] = []
        grad_z: list[Tensor] = []
        grad_h: list[Tensor] = []
        grad_delta: list[Tensor] = []
        for i in range(L):
            group, m = group_of[i]
            is_transposed = spec.transposed[i]
            input_view, output_view = group.factor_views(m, is_transposed)
            narrow, wide = group.grad_narrow_all[m], group.grad_wide_all[:, :, m]
            grad_u.append(input_view[:, :, :R])
            grad_z.append(output_view[:, :, R if i else 0 :][:, :, :R])
            grad_h.append(narrow if is_transposed else wide)
            grad_delta.append(wide if is_transposed else narrow)
        affine = spec.output_head.affine
        # On a GPU, δ̄_L and z̄_L share memory if the error has slope 1 in z.
        self.shares_storage = affine is not None and affine[0] == 1 and not is_cpu(grad_z[-1])
        if self.shares_storage:
            grad_z[-1].copy_(grad_delta[-1])
            group, m = group_of[L - 1]
            if not spec.transposed[-1]:
                group.grad_narrow_all[m] = grad_delta[-1] = grad_z[-1]
            else:
                self.shares_storage = False
        grad_error, self.grad_z_first = grad_delta[-1], grad_z[0]
        self.grad_key = grad_h[0]
        derivative = [spec.activation.derivative(z) for z in saved.z]
        second_derivative = [
            spec.activation.second_derivative(z).mul_(u)
            for z, u in zip(saved.z, saved.u, strict=True)
        ]
        # σ″ ⊙ u ⊙ δ̄ and ū = σ′ ⊙ δ̄ are one operation if z̄ and ū are next to each other.
        self.fused: dict[int, tuple[Sequence[Tensor], Sequence[Tensor]]] = {}
        first_group = map_groups[0]
        if first_group.members[:2] == (0, 1) and spec.transposed[:2] == (True, False):
            scales = torch.stack([second_derivative[0], derivative[0]], dim=2)
            self.fused[0] = scales.unbind(0), first_group.key_wide[:, :, :2, :R].unbind(0)
            second_derivative[0], derivative[0] = scales.unbind(2)
        self.derivative, self.second_derivative = (
            [x.unbind(0) for x in xs] for xs in (derivative, second_derivative)
        )
        self.grad_u, self.grad_z, self.grad_h, self.grad_delta = (
            [x.unbind(0) for x in xs] for xs in (grad_u, grad_z, grad_h, grad_delta)
        )
        A = [
            w[:, :, 0] if is_transposed else w[:, :, 0].mT
            for w, is_transposed in zip(trace.M, spec.transposed, strict=True)
        ]
        self.A_first = A[0]
        self.A, self.A_mT = [x.unbind(0) for x in A], [x.mT.unbind(0) for x in A]
        self.step_scales: StepScaleGradients | None = None
        self.pi: Tensor | None = None
        if trace.rho is not None:
            self.step_scales = step_scales = StepScaleGradients.from_factors(
                trace.h, trace.delta, saved.alignment, saved.error_norm_sq
            )
            self.pi = torch.empty_like(trace.rho)
            self.key_scales = step_scales.h[0]
            self.scale_gradients = self._make_scale_gradients(trace, step_scales)
        head_scales = None if self.step_scales is None else self.step_scales.head
        self.head = make_head_backward(
            spec,
            inputs,
            saved.z_last,
            needs,
            buffers=(grad_error, grad_z[-1]),
            step_scales=head_scales,
        )

    def _make_scale_gradients(
        self, trace: ForwardTrace, step_scales: StepScaleGradients
    ) -> list[tuple[Sequence[Tensor], Sequence[Tensor]]]:
        """Return gradients and their terms per unit of π, ``[P, L, R, ·]`` or ``[P, R, ·]``."""
        pairs: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
        for group in self.map_groups:
            transposed = [self.spec.transposed[i] for i in group.members]
            wide = [
                (step_scales.delta if is_transposed else step_scales.h)[i]
                for i, is_transposed in zip(group.members, transposed, strict=True)
            ]
            unit_gradient = group.wide_all * stack_maps(wide)
            pairs.append((group.grad_wide_all.unbind(0), unit_gradient.unbind(0)))
            for m in group.updated_narrow:
                i = group.members[m]
                scale = (step_scales.h if transposed[m] else step_scales.delta)[i]
                unit_gradient = group.narrow_all[m] * scale
                pairs.append((group.grad_narrow_all[m].unbind(0), unit_gradient.unbind(0)))
        return pairs

    def run(self, n: int) -> None:
        """Compute ū and z̄ of batch n, after its boundary."""
        if self.step_scales is not None:
            self._add_scale_gradients(n)
        L, grad_h, grad_delta = len(self.grad_h), self.grad_h, self.grad_delta
        for i in range(L - 1):
            if i in self.fused:
                scales, targets = self.fused[i]
                torch.mul(grad_delta[i][n].unsqueeze(1), scales[n], out=targets[n])
            else:
                torch.mul(grad_delta[i][n], self.derivative[i][n], out=self.grad_u[i + 1][n])
            add_matmul(grad_delta[i + 1][n], self.grad_u[i + 1][n], self.A[i + 1][n])
        if not self.shares_storage:
            pi = None if self.pi is None else self.pi[n]
            self.head.backward(n, grad_delta[-1][n], pi, self.grad_z[-1][n])
        for i in range(L - 1, 0, -1):
            add_matmul(grad_h[i][n], self.grad_z[i][n], self.A_mT[i][n])
            if i - 1 in self.fused:
                self.grad_z[i - 1][n].addcmul_(grad_h[i][n], self.derivative[i - 1][n])
                continue
            z = torch.mul(grad_h[i][n], self.derivative[i - 1][n], out=self.grad_z[i - 1][n])
            z.addcmul_(grad_delta[i - 1][n], self.second_derivative[i - 1][n])

    def _add_scale_gradients(self, n: int) -> None:
        """Add the terms of the step scales to h̄ and δ̄."""
        assert self.pi is not None and self.step_scales is not None
        pi = self.pi[n]
        first_group, *others = self.map_groups
        torch.sum(first_group.grad_wide[n] * first_group.wide_all[n], dim=(1, 3), out=pi)
        for group in others:
            pi += (group.grad_wide[n] * group.wide_all[n]).sum((1, 3))
        for out, unit_gradient in self.scale_gradients:
            scale = pi.unsqueeze(-1)
            out[n].addcmul_(unit_gradient[n], scale if out[n].dim() == 3 else scale.unsqueeze(1))


def _key_gradients(
    spec: ChainSpec, batch_backward: _BatchBackward, first_group: GradientStacks, weights: Tensor
) -> Tensor:
    """Return the gradient of the features of keys, ``[N, P, R, F]``."""
    k = torch.add(batch_backward.grad_key, batch_backward.grad_z_first @ batch_backward.A_first.mT)
    if not spec.transposed[0]:
        return k
    grad_Q = first_group.grad_Q_all[:, :, 0]  # [N, P, R, J, narrow]
    k += (grad_Q * weights.unsqueeze(-1)).sum(-2)
    if batch_backward.step_scales is not None and batch_backward.pi is not None:
        k.addcmul_(
            first_group.narrow_all[0], batch_backward.key_scales * batch_backward.pi.unsqueeze(-1)
        )
    return k


def _coefficient_gradients(map_groups: Sequence[GradientStacks], rho: Tensor | None) -> Tensor:
    """Return the gradient of the write coefficients, ``[N, P, R, J]``."""
    total: Tensor | None = None
    for group in map_groups:
        for m in range(group.L):
            narrow = group.narrow_all[m]
            part = (group.grad_Q_all[:, :, m] @ narrow.unsqueeze(-1)).squeeze(-1)
            total = part if total is None else total.add_(part)
    assert total is not None
    return total if rho is None else total.mul_(rho.unsqueeze(-1))
