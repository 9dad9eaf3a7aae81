"""The layer of `MixtureOfMemories`: every token is written to and read from some of its memories.

Each memory runs over a gathered sequence of its own tokens. Its decay, convolution, positions and
windows therefore count these tokens only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recollect.blocks.compositions import MixtureOfMemories
from recollect.blocks.layers import MixerLayer, trim_state
from recollect.blocks.state import MixerState
from recollect.choices.runtime import has_data
from recollect.functional.packing import compact, token_counts

__all__ = ["MixtureOfMemoriesLayer", "Router", "Routing", "record_routing"]


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The memories that the tokens of a call are routed to."""

    probabilities: Tensor  # p [B, T, M]
    chosen: Tensor  # indices of the k memories of each token [B, T, k]
    weights: Tensor  # weights of these memories [B, T, k]; they sum to 1
    real: Tensor | None  # mask [B, T] of the valid tokens; None if all are valid

    @property
    def balance_loss(self) -> Tensor:
        """M Σ_j f_j P_j: f_j the fraction of tokens routed to memory j, P_j the mean of p_j.

        The loss is k if all memories are used equally, and at most M. Its gradient flows through P
        only. Without tokens it is 0.
        """
        M = self.probabilities.shape[-1]
        assigned = nn.functional.one_hot(self.chosen, M).sum(-2).to(self.probabilities.dtype)
        valid = torch.ones_like(assigned[..., :1]) if self.real is None else self.real[..., None]
        count = valid.sum().clamp_min(1)
        f, P = (
            torch.where(valid != 0, x, 0.0).sum((0, 1)) / count
            for x in (assigned, self.probabilities)
        )
        return M * (f * P).sum()


class Router(nn.Module):
    """p = softmax(W x) over M memories, in at least float32, and its k largest entries."""

    def __init__(self, d_model: int, memories: int, top: int) -> None:
        super().__init__()
        self.scores = nn.Linear(d_model, memories, bias=False)
        self.top = top

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Routing:
        """Route tokens ``[B, T, d_model]``."""
        if mask is not None:
            x = torch.where(mask[..., None] != 0, x, 0.0)
        scores = self.scores(x)
        p = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        largest, chosen = p.topk(self.top, dim=-1)
        weights = largest / largest.sum(-1, keepdim=True)
        return Routing(probabilities=p, chosen=chosen, weights=weights, real=mask)


@contextlib.contextmanager
def record_routing(model: nn.Module) -> Iterator[list[Routing]]:
    """Record the routing of every router that is called inside the context."""
    routings: list[Routing] = []

    def hook(module: nn.Module, args: Any, routing: Any) -> None:
        routings.append(routing)

    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, Router):
                hooks.enter_context(module.register_forward_hook(hook))
        yield routings


class MixtureOfMemoriesLayer(MixerLayer):
    """The layer of `MixtureOfMemories`: memories by index, and the part ``"shared"``, if any."""

    def __init__(
        self, d_model: int, mixer: MixtureOfMemories, parts: Mapping[str, nn.Module]
    ) -> None:
        super().__init__(d_model, mixer, parts)
        self.router = Router(d_model, len(mixer.memories), mixer.top)

    def forward_checked(
        self,
        x: Tensor,
        state: MixerState | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        *,
        output_final_state: bool,
    ) -> tuple[Tensor, MixerState | None]:
        if not has_data(x):
            raise ValueError(
                "a router needs the values of tokens, and tensors of the meta device and fake "
                "tensors have shapes only: give tensors with values"
            )
        states: Mapping[str, Any] = dict.fromkeys(self.parts) if state is None else state.parts
        routing = self.router(x, mask)
        final_states: dict[str, Any] = dict.fromkeys(self.parts)
        y = None
        if "shared" in self.parts:
            y, final_states["shared"] = self.parts["shared"](
                *(x, states["shared"], mask, cu_seqlens), output_final_state=output_final_state
            )
        for index in range(routing.probabilities.shape[-1]):
            name, is_chosen = str(index), routing.chosen == index
            assigned = is_chosen.any(-1) if mask is None else is_chosen.any(-1) & (mask != 0)
            weight = torch.where(is_chosen, routing.weights, 0.0).sum(-1, keepdim=True)
            output, final_states[name] = self._run_memory(
                *(name, x, weight, states[name], assigned, cu_seqlens, output_final_state)
            )
            y = output if y is None else y + output
        assert y is not None
        if not output_final_state:
            return y, None
        if "shared" in self.parts:
            return y, MixerState(parts=final_states, clock="shared")
        position = token_counts(x, mask, cu_seqlens)
        if state is not None:
            position = position + state.position
        return y, MixerState(parts=final_states, tensors={"position": position}, clock="position")

    def _run_memory(
        self,
        name: str,
        x: Tensor,
        weight: Tensor,
        state: Any,
        assigned: Tensor,
        cu_seqlens: Tensor | None,
        output_final_state: bool,
    ) -> tuple[Tensor, Any]:
        """Return the weighted outputs of one memory at its own tokens, and 0 at others."""
        part = self.parts[name]
        if cu_seqlens is not None:
            index = assigned[0].nonzero().squeeze(1)
            count = torch.cat(
                [assigned.new_zeros(1, dtype=torch.long), assigned[0].long().cumsum(0)]
            )
            ends = count[cu_seqlens.to(device=x.device, dtype=torch.long)].to(cu_seqlens)
            y, final_state = part(
                *(x[:, index], state, None, ends), output_final_state=output_final_state
            )
            y = y * weight[:, index].to(y.dtype)
            return torch.zeros_like(x, dtype=y.dtype).index_copy(1, index, y), final_state
        batch = compact(assigned)
        longest = int(batch.lengths.max()) if len(batch.lengths) else 0
        index, valid = batch.index[:, :longest], batch.mask[:, :longest]
        tokens = x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))
        tokens = torch.where(valid[..., None], tokens, 0.0)
        is_dense = bool(valid.all())
        y, final_state = part(
            *(tokens, state, None if is_dense else valid), output_final_state=output_final_state
        )
        if final_state is not None and not is_dense:  # shorter sequences have empty slots
            max_tokens = int(final_state.position.max())
            final_state = trim_state(part, final_state, max_tokens)
        y = torch.where(valid[..., None], y * weight.gather(1, index[..., None]).to(y.dtype), 0.0)
        out = torch.zeros_like(x, dtype=y.dtype)
        return out.scatter(1, index[..., None].expand_as(y), y), final_state
