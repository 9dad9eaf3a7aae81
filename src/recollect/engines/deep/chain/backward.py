"""Backward pass of a chain: the reads of all inner batches, then the recurrence.

M̄′ is the gradient of M at the next boundary, and h̄ and δ̄ are those of the reads. In the notation of
`forward`:

    M̄_i = Σ_j T[j, i] M̄_j′,    δ̄ += Σ_j c_j M̄_j′ h,    h̄ += Σ_j c_j M̄_j′ᵀ δ
    ū_l = σ′(z_(l−1)) ⊙ δ̄_(l−1),    δ̄_l += A_l ū_l,    z̄_L = (∂δ_L/∂z_L)ᵀ δ̄_L
    h̄_(l−1) += A_lᵀ z̄_l,    z̄_(l−1) = σ′ ⊙ h̄_(l−1) + σ″ ⊙ u_l ⊙ δ̄_(l−1)
    Ā_l += δ_l ū_lᵀ + z̄_l h_(l−1)ᵀ

With step scales, c′ replaces c. Writes and reads depend on ρ δ_l h_(l−1)ᵀ alone, so that

    π = ρ ρ̄ = Σ_l ⟨h̄_(l−1), h_(l−1)⟩ = Σ_l ⟨δ̄_l, δ_l⟩,    N̄ = π/N,    Q̄ = −π/Q
    h̄_(l−1) += 2Q̄|δ_l|² h_(l−1),    δ̄_l += 2Q̄|h_(l−1)|² δ_l,    ḡ += 2εQ̄ g

after the first line. z̄_L then has the terms N̄ ∂N/∂z_L and (∂g/∂z_L)ᵀ ḡ too.

With an erasure c, δ_l + c z_l is written and read. Every z̄_l has the term c δ̄_l of the first line.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from recollect.choices.algorithm.normalized_steps import EPS
from recollect.choices.memory.norms import NORM_EPS, layer_norm_vjp
from recollect.engines.deep.chain.chain import (
    ChainInputs,
    ChainSpec,
    Commits,
    ForwardTrace,
    OutputHead,
)
from recollect.engines.deep.chain.forward import (
    ReadCache,
    apply_transition,
    is_cpu,
    read_coefficients,
    squared_norms,
)

__all__ = ["ReadGradients", "backward", "backward_read"]

Tensors = list[Tensor]


# -- reads -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReadGradients:
    """Gradients through reads."""

    inputs: dict[str, Tensor]  # gradients of "q", "C" and "scale"
    h: Tensors  # gradients of the inputs at the keys per map [N, P, R, ·]
    delta: Tensors  # gradients of δ at the keys per map [N, P, R, ·]
    left_factors: Tensors  # left factors of M̄ [J narrow, wide] per map [N, P, Q, J narrow]
    right_factors: Tensors  # right factors of M̄ per map [N, P, Q, wide]


def backward_read(
    spec: ChainSpec,
    trace: ForwardTrace,
    inputs: ChainInputs,
    caches: Sequence[ReadCache],
    grad_output: Tensor,
) -> ReadGradients:
    """Return the gradients through reads, from those of the outputs ``[N, P, Q, V]``."""
    C = read_coefficients(trace, inputs)
    scale = None if inputs.scale is None else inputs.scale.flatten(0, 1).unsqueeze(-1)
    lead = inputs.q.shape[:2]
    grad_C, grad_scale = torch.zeros_like(C), None if scale is None else torch.zeros_like(scale)
    hs, deltas, lefts, rights = Tensors(), Tensors(), Tensors(), Tensors()
    z = grad_output.flatten(0, 1)
    for i in reversed(range(len(caches))):
        cache = caches[i]
        M, h, delta = (part[i].flatten(0, 1) for part in (trace.M, trace.h, trace.delta))
        J, stack = M.shape[1], M.flatten(1, 2)
        deltas.append(torch.bmm((cache.scores * C).mT, z))
        mask = torch.bmm(z, delta.mT)
        grad_C.addcmul_(mask, cache.scores)
        mask.mul_(C)
        hs.append(torch.bmm(mask.mT, cache.x))
        if spec.transposed[i]:
            x = torch.bmm(z, stack.mT)
            lefts.append(cache.x if cache.scaled is None else cache.scaled)
            rights.append(z)
            if scale is not None and grad_scale is not None:
                parts = x.unflatten(2, (J, -1))
                grad_scale += parts @ cache.x.unsqueeze(-1)
                x = parts.mul_(scale).sum(2)
        else:
            scaled = z
            if cache.scaled is not None and scale is not None and grad_scale is not None:
                grad_scale += cache.scaled @ z.unsqueeze(-1)
                scaled = (z.unsqueeze(2) * scale).flatten(2)
            x = torch.bmm(scaled, stack)
            lefts.append(scaled)
            rights.append(cache.x)
        x = x.baddbmm_(mask, h)
        z = x
        if cache.z is not None:
            z = spec.activation.vjp(x[..., : cache.z.shape[-1]], cache.z)
    if trace.rho is not None:
        grad_C.mul_(trace.rho.flatten(0, 1).unsqueeze(1))
    grads = {"q": z, "C": grad_C}
    if grad_scale is not None:
        grads["scale"] = grad_scale.squeeze(-1)
    h, delta, left_factors, right_factors = (
        [x.unflatten(0, lead) for x in reversed(xs)] for xs in (hs, deltas, lefts, rights)
    )
    return ReadGradients(
        inputs={name: x.unflatten(0, lead) for name, x in grads.items()},
        h=h,
        delta=delta,
        left_factors=left_factors,
        right_factors=right_factors,
    )


# -- the recurrence --------------------------------------------------------------------------------


def backward(
    spec: ChainSpec,
    inputs: ChainInputs,
    trace: ForwardTrace,
    commits: Commits,
    needs: Mapping[str, bool],
    read_gradients: ReadGradients,
    # gradients of M after the last batch [P, J, narrow, wide]; overwritten
    final_grads: Sequence[Tensor],
) -> tuple[dict[str, Tensor], Tensors]:
    """Return the gradients of the inputs by name, and of M before the first batch.

    The names are those of `ChainInputs`, and ``"head ..."``, ``"gate ..."`` and ``"param ..."``.
    """
    N, L = len(commits), len(trace.M)
    maps = [
        _MapGradient(spec, i, trace, read_gradients, grad) for i, grad in enumerate(final_grads)
    ]
    widths = [z.shape[-1] for z in trace.z]  # of the maps' outputs, without inputs of a bias
    derivative = [spec.activation.derivative(z).unbind(0) for z in trace.z[:-1]]
    second_derivative = [
        spec.activation.second_derivative(z).mul_(u).unbind(0)
        for z, u in zip(trace.z[:-1], trace.u, strict=True)
    ]
    grad_h, grad_delta = (
        [x.unbind(0) for x in xs] for xs in (read_gradients.h, read_gradients.delta)
    )
    A = [
        (M[:, :, 0] if is_in_out else M[:, :, 0].mT).unbind(0)
        for M, is_in_out in zip(trace.M, spec.transposed, strict=True)
    ]
    scales = None if trace.rho is None else _StepScaleGradients(trace, read_gradients)
    head = _HeadBackward(spec, inputs, trace, scales)
    grad_T = None if inputs.T is None or not needs.get("T") else torch.zeros_like(inputs.T)
    for n in reversed(range(N)):
        commit, T = commits[n], None if inputs.T is None else inputs.T[n]
        for each in maps:
            if commit is False:
                each.grad_Q[n].zero_()
                continue
            each.cross_boundary(n, T, commit, None if grad_T is None else grad_T[n])
        if scales is not None:
            scales.add(n)
        grad_erased = [grad[n] * spec.erasure for grad in grad_delta] if spec.erasure else None
        grad_u = Tensors()  # of every map but the first
        for i in range(L - 1):
            grad_u.append(grad_delta[i][n] * derivative[i][n])
            grad_delta[i + 1][n].baddbmm_(grad_u[i], A[i + 1][n][:, : widths[i]])
        grad_z = head.grad_z(n, grad_delta[-1][n])
        for i in reversed(range(L)):
            if grad_erased is not None:
                grad_z = grad_z + grad_erased[i]
            grad_h[i][n].baddbmm_(grad_z, A[i][n].mT)
            maps[i].accumulate(n, grad_u[i - 1] if i else None, grad_z)
            if i:
                grad_z = grad_h[i][n][..., : widths[i - 1]] * derivative[i - 1][n]
                grad_z.addcmul_(grad_delta[i - 1][n], second_derivative[i - 1][n])
    grads = head.other_gradients(needs, read_gradients.delta[-1])
    grads["k"] = read_gradients.h[0]
    if grad_T is not None:
        grads["T"] = grad_T
    if needs.get("c"):
        first, *rest = (each.coefficient_gradients() for each in maps)
        grads["c"] = functools.reduce(torch.Tensor.add_, rest, first)
        if trace.rho is not None:
            grads["c"] *= trace.rho.unsqueeze(-1)
    return grads, [each.grad.view_as(w) for each, w in zip(maps, final_grads, strict=True)]


class _MapGradient:
    """Gradient of M of one map, from the last batch to the first."""

    def __init__(
        self,
        spec: ChainSpec,
        i: int,
        trace: ForwardTrace,
        read_gradients: ReadGradients,
        grad: Tensor,
    ) -> None:
        self.transposed, self.grad, self.spare = spec.transposed[i], grad.flatten(2), None
        self.M = trace.M[i].flatten(3).unbind(0)
        factors = trace.h[i], trace.delta[i]
        grads = read_gradients.h[i], read_gradients.delta[i]
        # The backward pass of u has δ without an erasure.
        delta = (
            torch.sub(factors[1], trace.z[i], alpha=spec.erasure) if spec.erasure else factors[1]
        )
        self.delta = delta.unbind(0)
        if not self.transposed:
            factors, grads = factors[::-1], grads[::-1]
        self.narrow_all, wide = factors
        weights = trace.weights
        self.sizes = trace.M[i].shape[1:]
        self.weights = weights.unsqueeze(-1).unbind(0)
        Q = self.narrow_all.unsqueeze(3) * weights.unsqueeze(-1)
        self.Q, self.narrow, self.wide = (
            x.unbind(0) for x in (Q.flatten(3).mT, self.narrow_all, wide)
        )
        self.grad_narrow, self.grad_wide = (x.unbind(0) for x in grads)
        self.grad_Q = torch.empty_like(Q)
        self.left_factors, self.right_factors = (
            x[i].unbind(0) for x in (read_gradients.left_factors, read_gradients.right_factors)
        )

    def cross_boundary(
        self, n: int, T: Tensor | None, commit: bool | Tensor, grad_T: Tensor | None
    ) -> None:
        """Run the backward pass of the boundary after batch n; add to T̄ ``[P, J, J]``."""
        P, J, narrow, wide = self.sizes
        mask = commit if isinstance(commit, Tensor) else None
        end = self.grad if mask is None else torch.where(mask, self.grad, 0.0)
        flat = end.view(P, J * narrow, wide)
        self.grad_wide[n].baddbmm_(self.Q[n].mT, flat)
        torch.bmm(self.wide[n], flat.mT, out=self.grad_Q[n].flatten(2))
        for part, c in zip(self.grad_Q[n].unbind(2), self.weights[n].unbind(2), strict=True):
            self.grad_narrow[n].addcmul_(part, c)
        if grad_T is not None:
            grad_T.baddbmm_(end, self.M[n].mT)
        if T is None:  # A and S keep their gradients
            return
        moved = apply_transition(T.mT, end, self.spare)
        if mask is not None:
            moved.add_(torch.where(mask, 0.0, self.grad))
        self.grad, self.spare = moved, self.grad

    def accumulate(self, n: int, grad_u: Tensor | None, grad_z: Tensor) -> None:
        """Add the products of reads to M̄, and those of keys to Ā."""
        P, J, narrow_size, wide_size = self.sizes
        stacked = self.grad.view(P, J * narrow_size, wide_size)
        stacked.baddbmm_(self.left_factors[n].mT, self.right_factors[n])
        narrow, wide = self.narrow[n], self.wide[n]
        pairs = [(narrow, grad_z) if self.transposed else (grad_z, wide)]
        if grad_u is not None:
            delta = self.delta[n]
            bias = (narrow if self.transposed else wide).shape[-1] - grad_u.shape[-1]
            if bias:
                grad_u = functional.pad(grad_u, (0, bias))
            pairs.append((grad_u, delta) if self.transposed else (delta, grad_u))
        grad_A, on_cpu = stacked[:, :narrow_size], is_cpu(stacked)
        if on_cpu and grad_u is not None:
            lefts, rights = zip(*pairs, strict=True)
            pairs = [(torch.cat(lefts, dim=1), torch.cat(rights, dim=1))]
        for x, y in pairs:
            if on_cpu and J > 1:  # faster than a product into strided memory
                grad_A.add_(torch.bmm(x.mT, y))
            else:
                grad_A.baddbmm_(x.mT, y)

    def coefficient_gradients(self) -> Tensor:
        """Return the gradient of c, or of c′, ``[N, P, R, J]``."""
        return (self.grad_Q @ self.narrow_all.unsqueeze(-1)).squeeze(-1)


class _StepScaleGradients:
    """Gradients through the step scales, batch by batch."""

    def __init__(self, trace: ForwardTrace, read_gradients: ReadGradients) -> None:
        assert trace.alignment is not None and trace.rho is not None
        N, rho = trace.alignment, trace.rho
        info = torch.finfo(N.dtype)
        is_zero = N.abs() < info.tiny / info.eps  # reciprocals of smaller numbers overflow
        self.pi = torch.empty_like(rho)
        self.to_alignment = N.masked_fill(is_zero, torch.inf).reciprocal_().unsqueeze(-1)  # N̄/π
        twice = -2 * rho.unsqueeze(-1) * self.to_alignment  # 2Q̄/π
        self.to_error = EPS * twice  # ḡ/(π g)
        sizes = squared_norms((*trace.delta, *trace.h)).unsqueeze(-1)
        self.scales = (sizes * twice).unbind(1)  # of h̄ and δ̄ per unit of π [2 L, P, R, 1]
        self.factors = [x.unbind(0) for x in (*trace.h, *trace.delta)]
        self.grads = [x.unbind(0) for x in (*read_gradients.h, *read_gradients.delta)]
        self.L = len(trace.h)

    def add(self, n: int) -> None:
        """Compute π of batch n, and add the terms of h̄ and δ̄."""
        pi = self.pi[n]
        for i in range(self.L):
            product = self.grads[i][n] * self.factors[i][n]
            if i == 0:
                torch.sum(product, dim=-1, out=pi)
            else:
                pi += product.sum(-1)
        scales = (self.scales[n] * pi.unsqueeze(-1)).unbind(0)
        for grad, x, scale in zip(self.grads, self.factors, scales, strict=True):
            grad[n].addcmul_(x[n], scale)


class _HeadBackward:
    """Backward pass of the output head, from δ̄_L and π; by autograd but for a layer norm."""

    def __init__(
        self,
        spec: ChainSpec,
        inputs: ChainInputs,
        trace: ForwardTrace,
        scales: _StepScaleGradients | None,
    ) -> None:
        self.output_head, self.scales, self.z = spec.output_head, scales, trace.z[-1].detach()
        kinds = inputs.head, inputs.gates, inputs.params
        self.norm: _LayerNormBackward | None = None
        self.inputs, self.gates, self.params = (
            {name: x.detach() for name, x in xs.items()} for xs in kinds
        )
        if self.output_head.layer_norm:
            with torch.no_grad():
                self.norm = _LayerNormBackward(
                    self.output_head, (self.z, self.inputs, self.gates, self.params), scales
                )

    def grad_z(self, n: int, grad_delta: Tensor) -> Tensor:
        """Return z̄ ``[P, R, V]`` of the last map in batch n from δ̄ ``[P, R, V]``."""
        scales, steps = self.scales, None
        pi = None if scales is None else scales.pi[n].unsqueeze(-1)
        if self.norm is not None:
            return self.norm.grad_z(n, grad_delta, pi)
        z = self.z[n].requires_grad_()
        if scales is not None and pi is not None:
            steps = pi * scales.to_alignment[n], pi * scales.to_error[n]
        head_inputs, gates = (
            {name: x[n] for name, x in xs.items()} for xs in (self.inputs, self.gates)
        )
        return self._pull((z, head_inputs, gates, self.params), [z], grad_delta, steps)[0]

    def other_gradients(self, needs: Mapping[str, bool], grad_delta: Tensor) -> dict[str, Tensor]:
        """Return the gradients of the head's other inputs by name, from δ̄ of all batches."""
        leaves: dict[str, Tensor] = {}

        def prepare(kind: str, xs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            prepared: dict[str, Tensor] = {}
            for name, x in xs.items():
                key = f"{kind} {name}"
                prepared[name] = x.detach() if kind == "param" else x.flatten(0, 1).detach()
                if needs.get(key):
                    leaves[key] = prepared[name].requires_grad_()
            return prepared

        inputs, gates = prepare("head", self.inputs), prepare("gate", self.gates)
        params = prepare("param", self.params)
        if not leaves:
            return {}
        steps = None
        if self.scales is not None:
            pi, scales = self.scales.pi.unsqueeze(-1), self.scales
            steps = (pi * scales.to_alignment).flatten(0, 1), (pi * scales.to_error).flatten(0, 1)
        values = self.z.flatten(0, 1), inputs, gates, params
        grads = self._pull(values, [*leaves.values()], grad_delta.flatten(0, 1), steps)
        lead = self.z.shape[:2]
        return {
            key: grad if key.startswith("param ") else grad.unflatten(0, lead)
            for key, grad in zip(leaves, grads, strict=True)
        }

    def _pull(
        self,
        values: tuple[Tensor, dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]],
        leaves: list[Tensor],
        grad_delta: Tensor,
        steps: tuple[Tensor, Tensor] | None,  # N̄, and ḡ/g [P, R, 1]
    ) -> Sequence[Tensor]:
        """Return the gradients of ``leaves`` among the inputs of `OutputHead.gradients`."""
        with torch.enable_grad():
            head = self.output_head.gradients(*values, create_graph=True)
        pairs = [(head.delta, grad_delta)]
        if steps is not None and head.target_error is not None:
            to_alignment, to_error = steps
            e, g = head.target_error.detach(), head.error.detach()
            pairs.append((head.target_error, to_alignment * g))
            pairs.append((head.error, (to_alignment * e).addcmul_(to_error, g)))
        pairs = [(y, grad) for y, grad in pairs if y.requires_grad]
        if not pairs:
            return [torch.zeros_like(x) for x in leaves]
        ys, grads = zip(*pairs, strict=True)
        return torch.autograd.grad(ys, leaves, grads, allow_unused=True, materialize_grads=True)


class _LayerNormBackward:
    """z̄ through a layer norm with an affine error, in few operations per batch.

    With n and r the norm's output and scale, J = ∂n/∂z and a the slope of the error:

        M = k + w ⊙ n + b,    s = w ⊙ g,    δ_L = J s = r (s − mean(s) − n mean(s ⊙ n))
        M̄ = a (w ⊙ J δ̄ + N̄ e + ḡ) + N̄ g
        z̄ = J (w ⊙ M̄ − r mean(s ⊙ n) δ̄ − r mean(δ̄ ⊙ n) s) − r mean(δ̄ ⊙ δ_L) n
    """

    def __init__(
        self,
        output_head: OutputHead,
        values: tuple[Tensor, Mapping[str, Tensor], Mapping[str, Tensor], Mapping[str, Tensor]],
        scales: _StepScaleGradients | None,
    ) -> None:
        z, params = values[0], values[-1]
        head = output_head.gradients(*values, create_graph=False)
        self.weight, _ = output_head.norm_params(params, z)
        assert output_head.bias.affine is not None
        self.slope = output_head.bias.affine[0]
        unit, mean, r = torch.native_layer_norm(z, z.shape[-1:], None, None, NORM_EPS)
        s, V = head.error * self.weight, z.shape[-1]
        self.stats = [x.unbind(0) for x in (z, mean, r)]
        # Factors of δ̄, ⟨δ̄, n⟩ and ⟨δ̄, δ_L⟩.
        factors = -r * (s * unit).mean(-1, keepdim=True), -r / V * s, -r / V * unit
        self.factors = [x.unbind(0) for x in factors]
        self.directions = torch.stack([unit, head.delta], dim=-2).unbind(0)
        # Factors of π in a (N̄ e + ḡ) + N̄ g.
        self.steps: Sequence[Tensor] | None = None
        if scales is not None and head.target_error is not None:
            to_M = head.target_error * scales.to_alignment
            to_M.addcmul_(scales.to_error, head.error).mul_(self.slope)
            self.steps = to_M.addcmul_(scales.to_alignment, head.error).unbind(0)

    def grad_z(self, n: int, grad_delta: Tensor, pi: Tensor | None) -> Tensor:
        """Return z̄ ``[P, R, V]`` in batch n from δ̄ ``[P, R, V]`` and π ``[P, R, 1]``."""
        stats, grad_delta = [x[n] for x in self.stats], grad_delta.contiguous()
        to_delta, to_unit, to_projection = (x[n] for x in self.factors)
        to_M = layer_norm_vjp(grad_delta, *stats).mul_(self.weight)
        if self.slope != 1:
            to_M.mul_(self.slope)
        if self.steps is not None and pi is not None:
            to_M.addcmul_(self.steps[n], pi)
        products = (self.directions[n] * grad_delta.unsqueeze(-2)).sum(-1, keepdim=True)
        with_unit, with_delta = products.unbind(-2)
        inner = to_M.mul_(self.weight).addcmul_(grad_delta, to_delta).addcmul_(to_unit, with_unit)
        return layer_norm_vjp(inner, *stats).addcmul_(to_projection, with_delta)
