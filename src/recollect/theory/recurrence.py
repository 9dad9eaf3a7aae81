"""The general recurrence S_t = A_t S_{t−1} B_t + C_t and its objective: AM 35, 36 and table 2.

`general_form` computes A, B and C from the transition S ↦ T(S) of any recipe at a token. C = T(0),
and S ↦ T(S) − C is a linear map of V×F matrices. This map has the form S ↦ A S B exactly if its
rearrangement to V²×F² has rank one (Van Loan and Pitsianis); A and B are its singular vectors. The
objective of AM 36 is

    ℓ(S) = ½ tr(SᵀS) − ½ tr(SᵀASB) − tr(CᵀS),   S − ∇ℓ(S) = A S B + C   for symmetric A, B
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from recollect.functional.recall import recall
from recollect.messages import RecipeError
from recollect.recipe.resolve import RecipeLike, as_recipe
from recollect.state.state import State
from recollect.typing import Gates, Params

__all__ = ["GeneralForm", "general_form"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GeneralForm:
    """One token of S_t = A S_{t−1} B + C.

    Attributes:
        A: ``[V, V]``, over values.
        B: ``[F, F]``, over (lifted) keys.
        C: ``[V, F]``, the write.
        previous, current: S_{t−1} and S_t of the recipe, ``[V, F]``.

    Examples:
        >>> k, v = torch.randn(2, 3, 4, dtype=torch.float64)
        >>> recipe = rc.zoo.get("linear_attention").recipe
        >>> first, *_ = rc.theory.general_form(recipe, k, v)
        >>> torch.allclose(first.C, torch.outer(v[0], k[0]))  # the write of linear attention
        True
    """

    A: Tensor
    B: Tensor
    C: Tensor
    previous: Tensor
    current: Tensor

    @property
    def symmetric(self) -> bool:
        """Whether A and B are symmetric, so that `objective` exists."""
        return all(torch.allclose(x, x.T, atol=1e-9) for x in (self.A, self.B))

    def objective(self, S: Tensor) -> Tensor:
        """Return ℓ(S) of AM 36, whose gradient step of length 1 is the recurrence.

        Raises:
            RecipeError: A or B is not symmetric.
        """
        if not self.symmetric:
            raise RecipeError("the objective of AM 36 needs symmetric A and B, and these are not")
        retained = (S * (self.A @ S @ self.B)).sum()
        return S.square().sum() / 2 - retained / 2 - (self.C * S).sum()


def general_form(
    recipe: RecipeLike,
    k: Tensor,
    v: Tensor,
    *,
    gates: Gates | None = None,
    params: Params | None = None,
) -> list[GeneralForm]:
    """Return A, B and C of every token of one sequence.

    Args:
        recipe: Recipe with a matrix memory, finite features and one token per step.
        k: Keys in float64 ``[T, K]``, or ``[T, n, K]`` with n associations per token.
        v: Values in float64 ``[T, V]``, or ``[T, n, V]``.
        gates: Gates of `recall`, ``[1, T, 1, ...]``.
        params: Params of `recall`.

    Cost: V·F + 1 one-token calls per token, in one batch.

    Raises:
        RecipeError: The memory is not one matrix, or a step does not have this form.

    Examples:
        >>> k, v = torch.randn(2, 3, 4, dtype=torch.float64)
        >>> gates = {"lr": torch.full((1, 3, 1), 0.5, dtype=torch.float64)}
        >>> first, *_ = rc.theory.general_form(rc.Recipe(), k, v, gates=gates)
        >>> torch.allclose(first.A @ first.previous @ first.B + first.C, first.current)
        True
    """
    recipe = as_recipe(recipe, "general_form")
    T, K, V = len(k), k.shape[-1], v.shape[-1]
    q = k if k.dim() == 2 else k[:, 0]
    shapes = () if recipe.nonparametric or recipe.uses_kernel_rows else recipe.shapes(K, V)
    if len(shapes) != 1 or not recipe.memory.linear or recipe.memory.is_elementwise:
        raise RecipeError(f"{recipe.memory.title} is no single matrix: AM 35 does not describe it")
    if recipe.algorithm.batch_size > 1 or recipe.context.horizon is None:
        raise RecipeError(
            "AM 35 is one step per token: the recurrence of an inner batch, or of a solve for all "
            "of the past, depends on more than the last state"
        )
    F = shapes[0][-1]
    tokens = [x[None, :, None] for x in (q, k, v)]

    def run(part: slice, batch_size: int, state: State | None) -> State:
        """Return the state after a part of the tokens, repeated for every batch element."""

        def repeat(x: Tensor) -> Tensor:
            return x[:, part].expand(batch_size, *[-1] * (x.dim() - 1))

        q, k, v = (repeat(x) for x in tokens)
        part_gates = {name: repeat(g) for name, g in (gates or {}).items()}
        _, state = recall(recipe, q, k, v, part_gates, params=params, state=state)
        assert state is not None
        return state

    state = run(slice(0, 0), 1, None)
    basis = torch.eye(V * F, dtype=k.dtype).view(V * F, V, F)
    probes = torch.cat([torch.zeros(1, V, F, dtype=k.dtype), basis])
    forms: list[GeneralForm] = []
    for t in range(T):
        token = slice(t, t + 1)
        batch = dataclasses.replace(state.repeat(len(probes)), weights=(probes[:, None],), cache={})
        images = run(token, len(probes), batch).weights[0][:, 0]
        next_state = run(token, 1, state)
        C = images[0]
        A, B = _factors(images[1:] - C, V, F)
        previous, current = state.weights[0][0, 0], next_state.weights[0][0, 0]
        if not torch.allclose(A @ previous @ B + C, current, atol=1e-8, rtol=1e-8):
            raise RecipeError(f"the step of token {t} is not affine in the state: AM 35 needs that")
        forms.append(GeneralForm(A=A, B=B, C=C, previous=previous, current=current))
        state = next_state
    return forms


def _factors(images: Tensor, V: int, F: int) -> tuple[Tensor, Tensor]:
    """Return A and B with A E B = image for every matrix of the basis ``[V·F, V, F]``.

    (A E_{jl} B)_{im} = A_{ij} B_{lm}: rearranged to rows (i, j) and columns (l, m), rank one.
    """
    rearranged = images.view(V, F, V, F).permute(2, 0, 1, 3).reshape(V * V, F * F)
    U, s, Wt = torch.linalg.svd(rearranged, full_matrices=False)
    if float(s[0]) == 0:
        return torch.zeros(V, V, dtype=images.dtype), torch.eye(F, dtype=images.dtype)
    if len(s) > 1 and float(s[1]) > 1e-8 * float(s[0]):
        raise RecipeError(
            "the retained part of the state is no product A S B: a decay per entry, or a decay "
            "per value channel with an erasure, needs more than one such term"
        )
    A, B = (s[0] * U[:, 0]).view(V, V), Wt[0].view(F, F)
    # A and B are determined up to a factor. A multiple of the identity is scaled to the identity,
    # as in AM's table 2. Otherwise the entry of A with the largest magnitude is scaled to 1.
    if (scale := _identity_scale(A)) is not None:
        return A / scale, B * scale
    if (scale := _identity_scale(B)) is not None:
        return A * scale, B / scale
    scale = A.flatten()[A.abs().argmax()]
    return A / scale, B * scale


def _identity_scale(x: Tensor) -> Tensor | None:
    """Return the factor of a multiple of the identity, or None for another matrix."""
    scale = x.diagonal().mean()
    eye = scale * torch.eye(len(x), dtype=x.dtype)
    is_multiple = float(scale) != 0 and torch.allclose(x, eye, atol=1e-9 * float(scale.abs()))
    return scale if is_multiple else None
