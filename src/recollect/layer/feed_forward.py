"""`FeedForward`: a memory that is never written, only read: its associations are learned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from recollect.choices.member import RecipeError
from recollect.choices.products import check_precision_name
from recollect.engines.select import select
from recollect.layer.checks import check_heads, check_options
from recollect.layer.memory_layer import MemoryLayer
from recollect.layer.options import LayerOptions
from recollect.layer.state import LayerState
from recollect.recall.arguments import check_mask
from recollect.recall.reading import read
from recollect.recipe.recipe import Recipe
from recollect.state.state import State

__all__ = ["FeedForward", "layer_of"]


class FeedForward(nn.Module):
    """A feed-forward network as the associative memory it is (AM section 2.1).

    y = Σ_i v_i γ_i(x) κ(x, k_i) over learned pairs, divided by Σ_i γ_i κ where the recipe takes a
    mean: W_V ReLU(W_K x) with the ReLU kernel, SwiGLU with a bilinear gate and the swish kernel, a
    mixture of experts with blocks and router keys. It is ``rc.read`` over `bundle`, which is what
    ``init`` takes. With several heads each reads its slice of x, and a matrix joins them (AM
    19–23).

    Args:
        d_model: width of the tokens, of which ``heads`` is a divisor.
        heads: memories.
        recipe: a local constant memory; gates that a query asks for are the query itself.
        options: ``persistent`` says how many pairs, ``joined`` makes all heads one memory.
        precision: of products, as in `recollect.recall`; the attribute may be set later.

    Shapes: x ``[B, T, d_model]`` → y ``[B, T, d_model]``, and a state that only counts tokens.

    Raises:
        RecipeError: a recipe whose memory is written, or options that do not apply.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        recipe: Recipe,
        options: LayerOptions,
        *,
        precision: str | None = None,
    ) -> None:
        super().__init__()
        check_precision_name(precision)
        self.precision = precision
        check_options(recipe, options)
        plain = replace(_BARE, persistent=options.persistent, joined=options.joined)
        if options != plain:
            raise RecipeError(
                "LayerOptions(persistent=...) reads the tokens as they are: use conv=0, "
                "conv_activation='none', qk_norm='none', output_norm='none', output_gate='none', "
                "no rope, gates or ties"
            )
        heads = 1 if options.joined else heads
        check_heads(d_model, heads)
        self.d_model, self.heads, self.kv_heads = d_model, heads, heads
        self.head_dim = self.value_dim = d_model // heads
        self.recipe, self.options = recipe, options
        size = max((part.block for part in recipe.context.within), default=1)
        self.pairs = -(-max(1, round(options.persistent * d_model)) // size) * size
        self.block = size
        K = self.head_dim
        self.keys = nn.Parameter(torch.empty(heads, self.pairs, K))
        self.values = nn.Parameter(torch.empty(heads, self.pairs, K))
        travelling = [gate for gate in recipe.gates() if gate.travels]
        # One router key per block: its mean over the block is itself.
        self.gates = nn.ParameterDict(
            {
                gate.name: nn.Parameter(
                    torch.empty(heads, self.pairs // (size if gate.name == "router" else 1), K)
                )
                for gate in travelling
            }
        )
        self.out = nn.Linear(d_model, d_model, bias=False) if heads > 1 else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights anew: keys that keep lengths, values that sum to about one."""
        for key in (self.keys, *self.gates.values()):
            nn.init.normal_(key, std=self.head_dim**-0.5)
        nn.init.normal_(self.values, std=self.pairs**-0.5)
        if self.out is not None:
            self.out.reset_parameters()

    @property
    def method(self) -> str:
        """Pairs are read by the engine that the recipe selects."""
        return "auto"

    def bundle(self) -> tuple[Tensor, ...]:
        """The pairs as ``init`` takes them: keys, values, and the gates that travel with them."""
        gates = [
            x.repeat_interleave(self.block, dim=1) if name == "router" else x
            for name, x in self.gates.items()
        ]
        return (self.keys, self.values, *gates)

    def forward(
        self,
        x: Tensor,
        state: LayerState | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        output_state: bool = True,
    ) -> tuple[Tensor, LayerState | None]:
        """As `MemoryLayer`; nothing is remembered but the number of tokens.

        Args:
            x: tokens ``[B, T, d_model]``.
            state: of the tokens before, for their number alone.
            attention_mask: ``[B, T]``, nonzero at real tokens; outputs at others are 0.
            cu_seqlens: ``[N + 1]`` borders of N documents packed in one row (B = 1).
            output_state: False returns ``None`` in place of the state.

        Raises:
            ValueError: x or a mask of another shape.
        """
        if x.dim() != 3 or x.shape[-1] != self.d_model:
            raise ValueError(f"x must have shape [B, T, {self.d_model}], not {list(x.shape)}")
        B, T = x.shape[:2]
        if attention_mask is not None:
            check_mask(attention_mask, x)
            x = torch.where(attention_mask[..., None] != 0, x, 0.0)
        q = x.flatten(0, 1).unflatten(-1, (self.heads, self.head_dim)).unsqueeze(0)
        gates = {name: q for part in self.recipe.context.within for name in part.reads}
        bundle = tuple(p.to(q.dtype) for p in self.bundle())
        y = read(self.recipe, q, gates=gates, init=bundle, precision=self.precision)
        y = y[0].flatten(1).unflatten(0, (B, T))
        y = y.to(x.dtype) if self.out is None else self.out(y)
        if attention_mask is not None:
            y = torch.where(attention_mask[..., None] != 0, y, 0.0)
        if not output_state:
            return y, None
        if cu_seqlens is not None:
            count = cu_seqlens.diff().to(x.device)
        elif attention_mask is not None:
            count = (attention_mask != 0).sum(1)
        else:
            count = torch.full((B,), T, device=x.device)
        before = 0 if state is None else state.position
        sizes = (self.heads, self.head_dim, self.value_dim)
        position = (before + count).to(torch.long)
        return y, LayerState(memory=State(weights=(), position=position, sizes=sizes))

    def extra_repr(self) -> str:
        """Sizes, and the engine that runs the recipe."""
        engine = select(self.recipe).engine.name
        return f"{self.d_model}, heads={self.heads}, pairs={self.pairs} ({engine})"


_BARE = LayerOptions(
    conv=0, conv_activation="none", qk_norm="none", output_norm="none", output_gate="none"
)


def layer_of(
    d_model: int, heads: int, recipe: Recipe, options: LayerOptions, **sizes: Any
) -> MemoryLayer | FeedForward:
    """The layer that a recipe and its options ask for: one that is written, or one that is read.

    Args:
        d_model: width of the tokens.
        heads: query heads.
        recipe: the regression problem each head solves.
        options: what is not regression; ``persistent`` asks for a `FeedForward`.
        **sizes: other keywords of `MemoryLayer`; a `FeedForward` has a use for precision alone.

    Raises:
        RecipeError: sizes or options that do not fit the recipe.
    """
    if options.persistent:
        return FeedForward(d_model, heads, recipe, options, precision=sizes.get("precision"))
    return MemoryLayer(d_model, heads, recipe, options, **sizes)
