"""The layer of `Routed`: every token is written to and read from some of its memories.

A memory runs over the tokens that came to it, gathered to the left of its own rows, so that the
others are not there for it: no decay, convolution, position or window counts them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recollect.blocks.composed import Composed, kept
from recollect.blocks.compositions import Routed
from recollect.blocks.state import MixerState
from recollect.choices.devices import holds
from recollect.recall.packing import compact

__all__ = ["RoutedLayer", "Router", "Routing", "watched_routers"]


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Where the tokens of a call went.

    Attributes:
        probabilities: p ``[B, T, M]``.
        chosen: the k memories of each token ``[B, T, k]``.
        weights: of these, summing to 1, ``[B, T, k]``.
        real: ``[B, T]``, which tokens there are; ``None`` where all are real.
    """

    probabilities: Tensor
    chosen: Tensor
    weights: Tensor
    real: Tensor | None

    @property
    def balance_loss(self) -> Tensor:
        """M Σ_j f_j P_j: f_j the share of tokens that came to memory j, P_j the mean of p_j.

        It is k where all memories are used alike, and up to M where the same ones always are. Its
        gradient goes through P alone. 0 without a token.
        """
        M = self.probabilities.shape[-1]
        came = nn.functional.one_hot(self.chosen, M).sum(-2).to(self.probabilities.dtype)
        real = torch.ones_like(came[..., :1]) if self.real is None else self.real[..., None]
        count = real.sum().clamp_min(1)
        shares = [
            torch.where(real != 0, x, 0.0).sum((0, 1)) / count for x in (came, self.probabilities)
        ]
        return M * (shares[0] * shares[1]).sum()


class Router(nn.Module):
    """p = softmax(W x) over M memories, in float32 at the least, and the k largest of them.

    Args:
        d_model: width of the tokens.
        memories: M.
        top: k.
    """

    def __init__(self, d_model: int, memories: int, top: int) -> None:
        super().__init__()
        self.scores = nn.Linear(d_model, memories, bias=False)
        self.top = top

    def forward(self, x: Tensor, real: Tensor | None = None) -> Routing:
        """Where tokens ``[B, T, d_model]`` go.

        Args:
            x: tokens.
            real: ``[B, T]``, nonzero at those that there are.
        """
        if real is not None:
            x = torch.where(real[..., None] != 0, x, 0.0)
        scores = self.scores(x)
        wide = torch.promote_types(scores.dtype, torch.float32)
        p = scores.softmax(-1, dtype=wide)
        largest, chosen = p.topk(self.top, dim=-1)
        weights = largest / largest.sum(-1, keepdim=True)
        return Routing(probabilities=p, chosen=chosen, weights=weights, real=real)


@contextlib.contextmanager
def watched_routers(model: nn.Module) -> Iterator[list[Routing]]:
    """Collect where the calls of a model inside the block send their tokens, router by router.

    Args:
        model: any module; without a router nothing is collected.
    """
    found: list[Routing] = []

    def note(module: nn.Module, given: Any, routing: Any) -> None:
        found.append(routing)

    hooks = [
        module.register_forward_hook(note)
        for module in model.modules()
        if isinstance(module, Router)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


class RoutedLayer(Composed):
    """The layer of `Routed`.

    Args:
        d_model: width of the tokens.
        mixer: what is composed.
        parts: the layers of the memories by number, and of ``"shared"``, if there is one.
    """

    def __init__(self, d_model: int, mixer: Routed, parts: Mapping[str, nn.Module]) -> None:
        super().__init__(d_model, mixer, parts)
        self.router = Router(d_model, len(mixer.memories), mixer.top)

    def mix(
        self,
        x: Tensor,
        state: MixerState | None,
        mask: Tensor | None,
        borders: Tensor | None,
        *,
        output_state: bool,
    ) -> tuple[Tensor, MixerState | None]:
        if not holds(x):
            raise ValueError(
                "a router sends tokens by its numbers, and tensors of the meta device and fake "
                "ones have shapes alone: give real tensors"
            )
        before: Mapping[str, Any] = dict.fromkeys(self.parts) if state is None else state.parts
        routing = self.router(x, mask)
        parts: dict[str, Any] = {}
        y = None
        if "shared" in self.parts:
            how = {"attention_mask": mask, "cu_seqlens": borders, "output_state": output_state}
            y, parts["shared"] = self.parts["shared"](x, before["shared"], **how)
        for index in range(routing.probabilities.shape[-1]):
            name, here = str(index), routing.chosen == index
            came = here.any(-1) if mask is None else here.any(-1) & (mask != 0)
            weight = torch.where(here, routing.weights, 0.0).sum(-1, keepdim=True)
            said, parts[name] = self._memory(
                name, x, weight, before[name], came, borders, output_state=output_state
            )
            y = said if y is None else y + said
        assert y is not None
        if not output_state:
            return y, None
        order = {name: parts[name] for name in self.parts}
        if "shared" in parts:
            return y, MixerState(parts=order, clock="shared")
        position = _counted(x, state, mask, borders)
        return y, MixerState(parts=order, tensors={"position": position}, clock="position")

    def _memory(
        self,
        name: str,
        x: Tensor,
        weight: Tensor,
        before: Any,
        came: Tensor,
        borders: Tensor | None,
        *,
        output_state: bool,
    ) -> tuple[Tensor, Any]:
        """What one memory says of the tokens that came to it, weighed, and 0 of all others."""
        part = self.parts[name]
        if borders is not None:
            index = came[0].nonzero().squeeze(1)
            count = torch.cat([came.new_zeros(1, dtype=torch.long), came[0].long().cumsum(0)])
            ends = count[borders.to(device=x.device, dtype=torch.long)].to(borders)
            y, after = part(x[:, index], before, None, ends, output_state=output_state)
            y = y * weight[:, index].to(y.dtype)
            return torch.zeros_like(x, dtype=y.dtype).index_copy(1, index, y), after
        batch = compact(came)
        longest = int(batch.lengths.max()) if len(batch.lengths) else 0
        index, real = batch.index[:, :longest], batch.real[:, :longest]
        taken = x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))
        taken = torch.where(real[..., None], taken, 0.0)
        level = bool(real.all())
        y, after = part(taken, before, None if level else real, output_state=output_state)
        if after is not None and not level:  # rows that got fewer tokens have empty slots
            most = int(after.position.max())
            after = kept(part, after, most)
        y = torch.where(real[..., None], y * weight.gather(1, index[..., None]).to(y.dtype), 0.0)
        out = torch.zeros_like(x, dtype=y.dtype)
        return out.scatter(1, index[..., None].expand_as(y), y), after


def _counted(
    x: Tensor, state: MixerState | None, mask: Tensor | None, borders: Tensor | None
) -> Tensor:
    """Tokens that each row has seen ``[B]``, after a call."""
    if borders is not None:
        count = borders.diff().to(device=x.device, dtype=torch.long)
    elif mask is not None:
        count = (mask != 0).sum(1)
    else:
        count = torch.full((x.shape[0],), x.shape[1], device=x.device)
    return count if state is None else state.position + count
