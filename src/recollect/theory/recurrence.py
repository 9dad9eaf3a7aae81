"""The general recurrence S_t = A_t S_{t−1} B_t + C_t and its objective: AM 35, 36 and table 2.

`general_form` reads A, B and C off what a recipe does at a token, whatever it is made of: C is what
a state of zeros becomes, and the rest, S ↦ T(S) − C, is a linear map of V×F matrices. It has the
form S ↦ A S B exactly when its rearrangement to V²×F² has rank one (Van Loan and Pitsianis); its
singular vectors are A and B. The objective of AM 36 is

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
        A: ``[V, V]``, over values. B: ``[F, F]``, over (lifted) keys. C: ``[V, F]``, the write.
        before, after: S_{t−1} and S_t of the recipe, ``[V, F]``.

    Examples:
        >>> k, v = torch.randn(2, 3, 4, dtype=torch.float64)
        >>> recipe = rc.zoo.get("linear_attention").recipe
        >>> first, *_ = rc.theory.general_form(recipe, k, v)
        >>> torch.allclose(first.C, torch.outer(v[0], k[0]))  # what linear attention writes
        True
    """

    A: Tensor
    B: Tensor
    C: Tensor
    before: Tensor
    after: Tensor

    @property
    def symmetric(self) -> bool:
        """Whether A and B are symmetric, so that `objective` exists."""
        close = [torch.allclose(x, x.T, atol=1e-9) for x in (self.A, self.B)]
        return all(close)

    def objective(self, S: Tensor) -> Tensor:
        """ℓ(S) of AM 36, whose gradient step of length 1 is the recurrence.

        Raises:
            RecipeError: A or B is not symmetric.
        """
        if not self.symmetric:
            raise RecipeError("the objective of AM 36 needs symmetric A and B, and these are not")
        kept = (S * (self.A @ S @ self.B)).sum()
        return S.square().sum() / 2 - kept / 2 - (self.C * S).sum()


def general_form(
    recipe: RecipeLike,
    k: Tensor,
    v: Tensor,
    *,
    gates: Gates | None = None,
    params: Params | None = None,
) -> list[GeneralForm]:
    """A, B and C of every token of one sequence.

    Args:
        recipe: a matrix memory over finite features with inner batches of one token.
        k: float64 ``[T, K]``, or ``[T, n, K]`` with n associations per token.
        v: float64 ``[T, V]``, or ``[T, n, V]``.
        gates: as `recall` takes them, ``[1, T, 1, ...]``.
        params: as `recall` takes them.

    Cost: V·F + 1 one-token calls per token, in one batch.

    Raises:
        RecipeError: a memory that is not one matrix, or a step that is not of this form, saying so.

    Examples:
        >>> k, v = torch.randn(2, 3, 4, dtype=torch.float64)
        >>> gates = {"lr": torch.full((1, 3, 1), 0.5, dtype=torch.float64)}
        >>> first, *_ = rc.theory.general_form(rc.Recipe(), k, v, gates=gates)
        >>> torch.allclose(first.A @ first.before @ first.B + first.C, first.after)
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

    def run(piece: slice, rows: int, state: State | None) -> State:
        """Some tokens, the same in every row."""
        q, k, v = (x[:, piece].expand(rows, *[-1] * (x.dim() - 1)) for x in tokens)
        now = {
            name: g[:, piece].expand(rows, *[-1] * (g.dim() - 1))
            for name, g in (gates or {}).items()
        }
        _, after = recall(recipe, q, k, v, now, params=params, state=state)
        assert after is not None
        return after

    state = run(slice(0, 0), 1, None)
    basis = torch.eye(V * F, dtype=k.dtype).view(V * F, V, F)
    probes = torch.cat([torch.zeros(1, V, F, dtype=k.dtype), basis])
    found: list[GeneralForm] = []
    for t in range(T):
        token = slice(t, t + 1)
        rows = dataclasses.replace(state.repeat(len(probes)), weights=(probes[:, None],), cache={})
        moved, after = run(token, len(probes), rows), run(token, 1, state)
        images = moved.weights[0][:, 0]
        C = images[0]
        A, B = _factors(images[1:] - C, V, F)
        form = GeneralForm(
            A=A, B=B, C=C, before=state.weights[0][0, 0], after=after.weights[0][0, 0]
        )
        predicted = A @ form.before @ B + C
        if not torch.allclose(predicted, form.after, atol=1e-8, rtol=1e-8):
            raise RecipeError(f"the step of token {t} is not affine in the state: AM 35 needs that")
        found.append(form)
        state = after
    return found


def _factors(images: Tensor, V: int, F: int) -> tuple[Tensor, Tensor]:
    """A and B with A E B = image for every matrix of the basis ``[V·F, V, F]``.

    (A E_{jl} B)_{im} = A_{ij} B_{lm}: rearranged to rows (i, j) and columns (l, m), rank one.
    """
    rearranged = images.view(V, F, V, F).permute(2, 0, 1, 3).reshape(V * V, F * F)
    U, s, Wt = torch.linalg.svd(rearranged, full_matrices=False)
    if float(s[0]) == 0:
        return torch.zeros(V, V, dtype=images.dtype), torch.eye(F, dtype=images.dtype)
    if len(s) > 1 and float(s[1]) > 1e-8 * float(s[0]):
        raise RecipeError(
            "what is kept of the state is no product A S B: a decay per entry, or one that differs "
            "between value channels beside an erasure, needs more than one such term"
        )
    A, B = (s[0] * U[:, 0]).view(V, V), Wt[0].view(F, F)
    # A and B are known up to a factor. Where one of them is a multiple of the identity it is made
    # the identity, as in AM's table 2; otherwise the largest entry of A in size is made 1.
    for one, is_first in ((A, True), (B, False)):
        n = len(one)
        mean = one.diagonal().mean()
        eye = mean * torch.eye(n, dtype=one.dtype)
        if float(mean) != 0 and torch.allclose(one, eye, atol=1e-9 * float(mean.abs())):
            return (A / mean, B * mean) if is_first else (A * mean, B / mean)
    scale = A.flatten()[A.abs().argmax()]
    return A / scale, B * scale
