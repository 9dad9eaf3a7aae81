"""Back through what follows the last map: from δ̄ of it, and π of its share, to z̄.

Three forms: an affine error, which is a number; a layer norm under one (`norm`); and anything else,
by autograd, batch by batch on its own small piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from recollect.engines.deep.chain.ends.norm import LayerNormGradients
from recollect.engines.deep.chain.trace import ChainSpec, Keys

__all__ = ["EndGradients", "end_gradients"]


class EndGradients(Protocol):
    """From the last batch to the first."""

    def pull(self, n: int, up: Tensor, pi: Tensor | None, out: Tensor) -> None:
        """z̄ of a batch.

        Args:
            n: the batch. up: δ̄ ``[P, R, V]``. out: takes it.
            pi: π ``[P, R]``, where steps are normalised and the error is not affine.
        """

    def gradients(self, needs: Mapping[str, bool], pi: Tensor | None) -> dict[str, Tensor]:
        """What else the end takes gets, by name, when all batches have been pulled.

        Args:
            needs: by name, whether that is asked for.
            pi: of all batches ``[N, P, R]``.
        """
        ...


def end_gradients(
    spec: ChainSpec,
    keys: Keys,
    z: Tensor | None,
    needs: Mapping[str, bool],
    *,
    ends: tuple[Tensor, Tensor],
    shares: tuple[Tensor, Tensor] | None,
) -> EndGradients:
    """How a chain's end is gone through.

    Args:
        spec: of the chain. keys: of all batches. needs: by name, what is asked for.
        z: what the last map says ``[N, P, R, V]``, where the error is not affine.
        ends: δ̄ and z̄ of all batches, once they have been pulled.
        shares: `ShareSlopes.end`.
    """
    if spec.ending.affine is not None:
        return _Affine(spec, *ends)
    assert z is not None
    if spec.ending.layer_norm:
        return LayerNormGradients(spec.ending, keys.given, keys.params, z, shares)
    return _ByAutograd(spec, keys, z, needs, ends[1], shares)


class _Affine:
    """Of a z − b v, or a (z + k) − b v."""

    def __init__(self, spec: ChainSpec, up: Tensor, to_z: Tensor) -> None:
        assert spec.ending.affine is not None
        (self.a, self.b), self.residual = spec.ending.affine, spec.ending.residual
        self.up, self.to_z = up, to_z

    def pull(self, n: int, up: Tensor, pi: Tensor | None, out: Tensor) -> None:
        torch.mul(up, self.a, out=out)

    def gradients(self, needs: Mapping[str, bool], pi: Tensor | None) -> dict[str, Tensor]:
        found = {"v": -self.b * self.up} if needs["v"] else {}
        if needs["raw"] and self.residual:
            found["raw"] = self.to_z.clone()
        return found


class _ByAutograd:
    """Of any `Ending`."""

    def __init__(
        self,
        spec: ChainSpec,
        keys: Keys,
        z: Tensor,
        needs: Mapping[str, bool],
        to_z: Tensor,
        shares: tuple[Tensor, Tensor] | None,
    ) -> None:
        self.ending, self.keys, self.z, self.shares = spec.ending, keys, z, shares
        self.leaves = keys.given | {f"gate {name}": x for name, x in keys.gates.items()}
        self.params = {f"param {name}": x for name, x in keys.params.items()}
        memory = spec.ending.memory
        asked = {name: needs[name] for name in self.leaves | self.params}
        self.same: Tensor | None = None
        if not memory.has_output_map:  # to the key, if at all, goes what goes to z
            self.same = to_z if asked.pop("raw") and memory.residual else None
        every = self.leaves | self.params
        self.found = {name: torch.zeros_like(every[name]) for name, need in asked.items() if need}

    def pull(self, n: int, up: Tensor, pi: Tensor | None, out: Tensor) -> None:
        z = self.z[n].detach().requires_grad_()
        parts = {name: x[n] for name, x in self.leaves.items()} | self.params
        leaves = {name: x.detach().requires_grad_(name in self.found) for name, x in parts.items()}
        gates = {name: leaves[f"gate {name}"] for name in self.keys.gates}
        params = {name: leaves[f"param {name}"] for name in self.keys.params}
        with torch.enable_grad():
            end = self.ending.of(z, leaves, gates, params, outer=True)
        pairs = [(end.delta, up)]
        if pi is not None and self.shares is not None and end.away is not None:
            e, g = end.away.detach(), end.error.detach()
            to_N, to_g = (x[n] * pi.unsqueeze(-1) for x in self.shares)
            pairs += [(end.away, to_N * g), (end.error, (to_N * e).addcmul_(to_g, g))]
        pairs = [(y, above) for y, above in pairs if y.requires_grad]
        wanted = [z, *(leaves[name] for name in self.found)]
        grads = torch.autograd.grad(
            [y for y, _ in pairs],
            wanted,
            [above for _, above in pairs],
            allow_unused=True,
            materialize_grads=True,
        )
        out.copy_(grads[0])
        for (name, total), grad in zip(self.found.items(), grads[1:], strict=True):
            if name in self.params:
                total += grad
            else:
                total[n] = grad

    def gradients(self, needs: Mapping[str, bool], pi: Tensor | None) -> dict[str, Tensor]:
        return self.found if self.same is None else {**self.found, "raw": self.same.clone()}
