"""A layer norm after the last map under an affine error, and its gradient, in few operations.

What `ending` is for, written out where the error is a M − b v. With n and r the norm's unit output
and scale, w and β what it has learned, J = ∂n/∂z = r (1 − mean − n mean(n ·)), which is symmetric:

    M = k + w ⊙ n + β,    g = a M − b v,    s = w ⊙ g,    δ_L = J s,    N = ⟨e, g⟩,  e = M − v̂

(k where there is a residual, v̂ what of a value can be said.)

Backwards, with the gradients δ̄, N̄ = π/N and ḡ = 2εQ̄ g of these (`shares`):

    s̄ = J δ̄,    ḡ_t = w ⊙ s̄ + N̄ e + ḡ,    M̄ = a ḡ_t + N̄ g,    k̄ = β̄ = M̄,    v̄ = −b ḡ_t
    w̄ = g ⊙ s̄ + n ⊙ M̄,    v̂̄ = −N̄ g
    z̄ = J (w ⊙ M̄ − r mean(s ⊙ n) δ̄ − r mean(δ̄ ⊙ n) s) − r mean(δ̄ ⊙ δ_L) n
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from recollect.choices.memory.norms import NORM_EPS, layer_norm_vjp
from recollect.engines.deep.chain.ends.ending import End, Ending

__all__ = ["LayerNormEnd", "LayerNormGradients"]

Values = Mapping[str, Tensor]


def _per_matrix(x: Tensor, like: Tensor) -> Tensor:
    """A param ``[H, V]`` as ``[P, 1, V]``, P a multiple of H, in the type of ``like``."""
    P = like.shape[-3]
    return x.to(like.dtype).expand(P // len(x), *x.shape).reshape(P, 1, -1)


def _normalised(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """n, the mean and r of z."""
    return torch.native_layer_norm(z, z.shape[-1:], None, None, NORM_EPS)


class LayerNormEnd:
    """`Ending.of` batch by batch, without a graph."""

    def __init__(self, ending: Ending, given: Values, params: Values) -> None:
        """For all batches.

        Args:
            ending: a layer norm (`Ending.layer_norm`).
            given, params: as in `Ending.of`; of all batches, ``[N, P, R, ·]``.
        """
        assert ending.bias.affine is not None
        self.memory, (self.a, b), v = ending.memory, ending.bias.affine, given["v"]
        self.weight = _per_matrix(params["norm_weight"], v)
        if self.a == 0:
            self.fixed = -b * v
        else:  # g is a w ⊙ n and this
            center = _per_matrix(params["norm_bias"], v)
            center = center + given["raw"] if ending.residual else center
            self.fixed = torch.sub(center if self.a == 1 else self.a * center, v, alpha=b)
            self.scale = self.weight if self.a == 1 else self.a * self.weight
        self.apart: Tensor | None = None
        if ending.target is not None:  # e is g/a and this
            self.apart = (v if b == self.a else (b / self.a) * v) - given["said"]

    def error(self, unit: Tensor, fixed: Tensor) -> Tensor:
        """g, from n and `fixed`."""
        return fixed if self.a == 0 else torch.addcmul(fixed, unit, self.scale)

    def away(self, g: Tensor, apart: Tensor) -> Tensor:
        """e, from g and `apart`."""
        return torch.add(apart, g, alpha=1 / self.a)

    def of(self, z: Tensor, n: int) -> End:
        """What follows the last map in a batch.

        Args:
            z: what it says, ``[P, R, V]``. n: the batch.
        """
        unit, mean, r = _normalised(z)
        g = self.error(unit, self.fixed[n])
        delta = layer_norm_vjp(g * self.weight, z, mean, r)
        away = None if self.apart is None else self.away(g, self.apart[n])
        return End(memory=self.memory, delta=delta, error=g, away=away)


class LayerNormGradients:
    """z̄ of batch after batch, and then what else the end takes gets."""

    def __init__(
        self,
        ending: Ending,
        given: Values,
        params: Values,
        z: Tensor,
        shares: tuple[Tensor, Tensor] | None,
    ) -> None:
        """For all batches.

        Args:
            ending, given, params: as in `LayerNormEnd`.
            z: what the last map says, ``[N, P, R, V]``.
            shares: N̄ of a unit of π, and what that adds to ḡ in units of g, ``[N, P, R, 1]``; where
                steps are normalised.
        """
        self.ending, self.params, end = ending, params, LayerNormEnd(ending, given, params)
        assert ending.bias.affine is not None
        (self.a, self.b), self.weight, V = ending.bias.affine, end.weight, z.shape[-1]
        unit, mean, r = _normalised(z)
        g = end.error(unit, end.fixed)
        s = g * end.weight
        self.unit, self.g = unit, g
        self.stats = [x.unbind(0) for x in (z, mean, r)]
        # What stands beside δ̄, mean(δ̄ ⊙ n) and mean(δ̄ ⊙ δ_L) in z̄.
        beside_up = -r * (s * unit).mean(-1, keepdim=True)
        per = -r / V
        self.beside = [x.unbind(0) for x in (beside_up, per * s, per * unit)]
        self.along = torch.stack([unit, layer_norm_vjp(s, z, mean, r)], dim=-2).unbind(0)
        self.shares: list[tuple[Tensor, ...]] | None = None
        self.to_said: Tensor | None = None
        if shares is not None and end.apart is not None:
            to_N, to_g = shares
            self.to_said = to_N * g  # of a unit of π
            error = (to_N * end.away(g, end.apart)).addcmul_(to_g, g)
            self.shares = [x.unbind(0) for x in (error, self.to_said)]
        self.found: dict[int, tuple[Tensor, ...]] = {}

    def pull(self, n: int, up: Tensor, pi: Tensor | None, out: Tensor) -> None:
        """z̄ of a batch.

        Args:
            n: the batch. up: δ̄ ``[P, R, V]``. out: takes it.
            pi: π ``[P, R]``, where steps are normalised.
        """
        stats, up = [x[n] for x in self.stats], up.contiguous()
        of_up, of_unit, of_delta = (x[n] for x in self.beside)
        to_s = layer_norm_vjp(up, *stats)
        to_g = to_s * self.weight
        if self.shares is None or pi is None:
            to_M = to_g if self.a == 1 else self.a * to_g
        else:
            per = pi.unsqueeze(-1)
            to_g.addcmul_(self.shares[0][n], per)
            to_M = torch.addcmul(to_g if self.a == 1 else self.a * to_g, self.shares[1][n], per)
        unit, delta = (self.along[n] * up.unsqueeze(-2)).sum(-1, keepdim=True).unbind(-2)
        inner = (to_M * self.weight).addcmul_(up, of_up).addcmul_(of_unit, unit)
        torch.addcmul(layer_norm_vjp(inner, *stats), of_delta, delta, out=out)
        self.found[n] = to_s, to_g, to_M

    def gradients(self, needs: Mapping[str, bool], pi: Tensor | None) -> dict[str, Tensor]:
        """What values, raw keys, what can be said of values, and params get, by name.

        Args:
            needs: by name, whether that is asked for.
            pi: π of all batches ``[N, P, R]``, where steps are normalised.
        """
        each = zip(*(self.found[n] for n in range(len(self.found))), strict=True)
        to_s, to_g, to_M = map(torch.stack, each)
        made = {"v": -self.b * to_g}
        if self.ending.residual:
            made["raw"] = to_M
        if self.to_said is not None and pi is not None:
            made["said"] = -pi.unsqueeze(-1) * self.to_said
        found = {name: x for name, x in made.items() if needs[name]}
        totals = {"norm_weight": self.g * to_s + self.unit * to_M, "norm_bias": to_M}
        for name, x in self.params.items():
            if name in totals and needs[f"param {name}"]:
                total = totals[name].sum((0, 2)).unflatten(0, (-1, len(x)))
                found[f"param {name}"] = total.sum(0).to(x.dtype)
        return found
