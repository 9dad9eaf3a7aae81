"""What the layers of compositions share: their parts, checks, and tokens before the text."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from recollect.blocks.mixers import Mixer
from recollect.blocks.state import AnyState, MixerState
from recollect.choices.devices import looks
from recollect.layer.checks import check_tokens
from recollect.layer.feed_forward import FeedForward
from recollect.layer.memory_layer import NORM_EPS, MemoryLayer
from recollect.layer.numbers import RecipeNumbers

__all__ = [
    "Composed",
    "GateOf",
    "MixerLayer",
    "PersistentTokens",
    "begins",
    "initial_memory_of",
    "kept",
]


class MixerLayer(Protocol):
    """A sequence layer, of one recipe or of several."""

    d_model: int

    def __call__(
        self,
        x: Tensor,
        state: Any = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        output_state: bool = True,
    ) -> tuple[Tensor, Any]:
        """Outputs and the state after the last token, as `MemoryLayer`."""
        ...


def initial_memory_of(layer: nn.Module) -> Any:
    """What ``state.reset`` takes to begin rows of this layer anew."""
    if isinstance(layer, Composed):
        return layer.initial_memory
    return layer.initial_memory if isinstance(layer, RecipeNumbers) else None


class PersistentTokens(nn.Module):
    """Learned tokens in front of the text, the same for every input (Titans section 3.3).

    They have unit root mean square like the normed tokens that a layer receives.

    Args:
        count: how many.
        d_model: width of the tokens.
    """

    def __init__(self, count: int, d_model: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(count, d_model))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw them anew."""
        nn.init.normal_(self.tokens)

    def rows(self, x: Tensor) -> Tensor:
        """The tokens for every row of ``x``, ``[B, count, d_model]``, in its type."""
        return self.tokens.to(x.dtype).expand(x.shape[0], -1, -1)


class GateOf(nn.Module):
    """One stream passing the other: w_a ⊙ RMS(a) ⊙ σ(w_m ⊙ RMS(m)) (Titans, after eq. 28).

    Args:
        d_model: channels of both.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(d_model, eps=NORM_EPS)
        self.memory_norm = nn.RMSNorm(d_model, eps=NORM_EPS)

    def forward(self, attention: Tensor, memory: Tensor) -> Tensor:
        """``[..., d_model]`` of both to the same; where the attention is 0, so is what passes."""
        dtype = self.attention_norm.weight.dtype
        passing = self.attention_norm(attention.to(dtype))
        return (passing * functional.sigmoid(self.memory_norm(memory.to(dtype)))).to(
            attention.dtype
        )


class Composed(nn.Module):
    """The layer of a composition: tokens in, tokens out, and a `MixerState`.

    Args:
        d_model: width of the tokens.
        mixer: what is composed.
        parts: a layer for each of its children, by name.

    Shapes: x ``[B, T, d_model]`` → y ``[B, T, d_model]``.
    """

    keeps_attention = False  # whether its attention begins anew by itself, and is trimmed then
    reads_itself: Sequence[str] = ()  # parts that learn its own tokens without being called

    def __init__(self, d_model: int, mixer: Mixer, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.d_model, self.mixer = d_model, mixer
        self.parts = nn.ModuleDict(parts)

    @property
    def initial_memory(self) -> dict[str, Any]:
        """What ``state.reset`` takes: the initial memories of the parts by name."""
        return {name: initial_memory_of(part) for name, part in self.parts.items()}

    @property
    def leaves(self) -> dict[str, MemoryLayer | FeedForward]:
        """The layers of all recipes, by the names that lead to them joined with dots."""
        found: dict[str, MemoryLayer | FeedForward] = {}
        for name, part in self.parts.items():
            if isinstance(part, Composed):
                found |= {f"{name}.{path}": leaf for path, leaf in part.leaves.items()}
            elif isinstance(part, MemoryLayer | FeedForward):
                found[name] = part
        return found

    def reset_parameters(self) -> None:
        """Draw all weights anew."""
        for module in self.modules():
            if module is not self and not isinstance(module, Composed):
                reset = getattr(module, "reset_parameters", None)
                if reset is not None:
                    reset()

    def forward(
        self,
        x: Tensor,
        state: MixerState | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        output_state: bool = True,
    ) -> tuple[Tensor, MixerState | None]:
        """Outputs and the state after the last token, as `MemoryLayer`.

        Args:
            x: tokens ``[B, T, d_model]``.
            state: of an earlier call, to continue from.
            attention_mask: ``[B, T]``, nonzero at real tokens, padded on either side.
            cu_seqlens: ``[N + 1]`` borders of N documents packed in one row (B = 1).
            output_state: False returns ``None`` in place of the state.

        Raises:
            ValueError: shapes, types or devices that do not fit, or a state of another layer.
        """
        weight = next(self.parameters())
        check_tokens(x, attention_mask, cu_seqlens, d_model=self.d_model, weight=weight)
        rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self._check_state(state, rows)
        y, after = self.mix(x, state, attention_mask, cu_seqlens, output_state=output_state)
        return y, after if output_state else None

    @abstractmethod
    def mix(
        self,
        x: Tensor,
        state: MixerState | None,
        mask: Tensor | None,
        borders: Tensor | None,
        *,
        output_state: bool,
    ) -> tuple[Tensor, MixerState | None]:
        """`forward`, of checked arguments."""
        raise NotImplementedError

    def _check_state(self, state: object, rows: int) -> None:
        if state is None:
            return
        if not isinstance(state, MixerState):
            raise ValueError(
                f"state must be what this layer returned earlier, not {type(state).__name__}"
            )
        missing = sorted(self.parts.keys() - state.parts.keys())
        if missing:
            raise ValueError(
                f"this state belongs to another layer: it has parts {', '.join(state.parts)}, and "
                f"not {missing[0]}"
            )
        if state.rows != rows:
            raise ValueError(f"the state has {state.rows} rows and this call {rows}")

    def extra_repr(self) -> str:
        """What is composed."""
        return f"{self.d_model}, {self.mixer.kind}"


def kept(layer: nn.Module, state: Any, n: int) -> Any:
    """A state without the empty slots that rows leave which begin anew at different tokens.

    Args:
        layer: whose state it is.
        state: after at most n tokens of every row since it began.
        n: tokens.
    """
    if isinstance(layer, RecipeNumbers):
        grows = layer.recipe.span is None or layer.recipe.dual
        return state.last(n) if grows else state
    if not isinstance(layer, Composed):
        return state
    more = n + (0 if layer.keeps_attention else getattr(layer.mixer, "persistent", 0))
    parts = dict(state.parts)
    for name, part in parts.items():
        if not (layer.keeps_attention and name == "attention"):
            # What is none of the layer's parts is a memory as it stood earlier.
            parts[name] = kept(layer.parts[name if name in layer.parts else "memory"], part, more)
    return replace(state, parts=parts)


def begins(state: AnyState | None, rows: int, device: torch.device) -> Tensor | bool:
    """Which rows are before their first token: all, none, or ``[B]``.

    Args:
        state: of the part that sees everything, learned tokens too.
        rows: B.
        device: where the answer is.
    """
    if state is None:
        return True
    if state.seen is not None:
        return state.seen == 0
    fresh = state.position.to(device) == 0
    if looks(fresh):
        return fresh if bool(fresh.any()) else False
    return fresh
