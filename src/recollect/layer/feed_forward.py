"""`FeedForward`: a memory of learned associations, which is read and never written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from recollect.choices.matmul_precision import check_precision_name
from recollect.engines.select import select_engine
from recollect.functional.packing import token_counts
from recollect.functional.read import read
from recollect.layer.checks import check_heads, check_options, check_state, check_tokens
from recollect.layer.memory_layer import MemoryLayer
from recollect.layer.options import LayerOptions
from recollect.layer.recorded_call import RecordedCall
from recollect.layer.state import LayerState
from recollect.messages import RecipeError
from recollect.recipe.recipe import Recipe
from recollect.state.state import State

__all__ = ["FeedForward", "build_layer"]


class FeedForward(nn.Module):
    """A feed-forward network as an associative memory (AM section 2.1).

    y = Σ_i v_i γ_i(x) κ(x, k_i) over learned pairs, divided by Σ_i γ_i κ if the recipe takes a
    mean: W_V ReLU(W_K x) with the ReLU kernel, SwiGLU with a bilinear gate and the swish kernel, a
    mixture of experts with blocks and router keys. It is ``rc.read`` of `initial_associations`.
    Each of several heads reads its slice of x, and a matrix combines them (AM 19–23).

    Args:
        d_model: width of the tokens, a multiple of ``num_heads``.
        num_heads: number of memories.
        recipe: a local constant memory; the gates of a query are the query itself.
        options: ``persistent`` is the number of pairs, and ``joined`` makes all heads one memory.
        precision: precision of matrix products, as in `recollect.recall`; it can be set later.

    Shapes: x ``[B, T, d_model]`` → y ``[B, T, d_model]``, and a state that only counts tokens.

    Raises:
        RecipeError: a recipe whose memory is written, or options without effect.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        recipe: Recipe,
        options: LayerOptions,
        *,
        precision: str | None = None,
    ) -> None:
        super().__init__()
        check_precision_name(precision)
        self.precision = precision
        check_options(recipe, options)
        required = replace(BARE_OPTIONS, persistent=options.persistent, joined=options.joined)
        if options != required:
            raise RecipeError(
                "LayerOptions(persistent=...) reads the tokens as they are: use conv_size=0, "
                "conv_activation='none', qk_norm='none', output_norm='none', output_gate='none', "
                "no rope, gates or ties"
            )
        num_heads = 1 if options.joined else num_heads
        d_model, num_heads = check_heads(d_model, num_heads)
        self.d_model, self.num_heads, self.num_kv_heads = d_model, num_heads, num_heads
        self.head_dim = self.value_dim = d_model // num_heads
        self.recipe, self.options = recipe, options
        size = max((part.block for part in recipe.context.restrictions), default=1)
        self.pairs = -(-max(1, round(options.persistent * d_model)) // size) * size
        self.block = size
        K = self.head_dim
        self.keys = nn.Parameter(torch.empty(num_heads, self.pairs, K))
        self.values = nn.Parameter(torch.empty(num_heads, self.pairs, K))
        association_gates = [gate for gate in recipe.gates() if gate.per_association]
        # One router key per block, which is its own mean over the block.
        self.gates = nn.ParameterDict(
            {
                gate.name: nn.Parameter(
                    torch.empty(num_heads, self.pairs // (size if gate.name == "router" else 1), K)
                )
                for gate in association_gates
            }
        )
        self.out = nn.Linear(d_model, d_model, bias=False) if num_heads > 1 else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sample new keys that preserve lengths, and values that sum to about one."""
        for key in (self.keys, *self.gates.values()):
            nn.init.normal_(key, std=self.head_dim**-0.5)
        nn.init.normal_(self.values, std=self.pairs**-0.5)
        if self.out is not None:
            self.out.reset_parameters()

    @property
    def engine(self) -> str:
        """Engine, selected for the recipe."""
        return "auto"

    def initial_associations(self) -> tuple[Tensor, ...]:
        """Return keys, values and gates of the pairs, as ``initial_memory`` takes them."""
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
        output_final_state: bool = True,
        calls: list[RecordedCall] | None = None,
    ) -> tuple[Tensor, LayerState | None]:
        """Return outputs, and a state with the number of tokens.

        Args:
            x: tokens ``[B, T, d_model]``.
            state: state with the number of earlier tokens.
            attention_mask: ``[B, T]``, nonzero at valid tokens; outputs at others are 0.
            cu_seqlens: ``[N + 1]`` boundaries of N documents packed in one sequence (B = 1).
            output_final_state: whether to return the state; if not, ``None``.
            calls: list to which this call is appended, as in `MemoryLayer`.

        Raises:
            ValueError: shapes, types or devices that do not fit, or another state.
        """
        weight = self.values
        rows = check_tokens(x, attention_mask, cu_seqlens, d_model=self.d_model, weight=weight)
        check_state(state, rows=rows)
        B, T = x.shape[:2]
        if calls is not None:
            calls.append(RecordedCall.of_forward(self, x, state, attention_mask))
        if attention_mask is not None:
            x = torch.where(attention_mask[..., None] != 0, x, 0.0)
        q = x.flatten(0, 1).unflatten(-1, (self.num_heads, self.head_dim)).unsqueeze(0)
        gates = {name: q for part in self.recipe.context.restrictions for name in part.query_gates}
        pairs = tuple(x.to(q.dtype) for x in self.initial_associations())
        y = read(self.recipe, q, gates=gates, initial_memory=pairs, precision=self.precision)
        y = y[0].flatten(1).unflatten(0, (B, T))
        y = y.to(x.dtype) if self.out is None else self.out(y)
        if attention_mask is not None:
            y = torch.where(attention_mask[..., None] != 0, y, 0.0)
        if not output_final_state:
            return y, None
        position = token_counts(x, attention_mask, cu_seqlens)
        if state is not None:
            position = position + state.position
        sizes = (self.num_heads, self.head_dim, self.value_dim)
        return y, LayerState(memory=State(weights=(), position=position, sizes=sizes))

    def extra_repr(self) -> str:
        """Return the sizes, and the engine of the recipe."""
        engine = select_engine(self.recipe).engine.name
        return f"{self.d_model}, num_heads={self.num_heads}, pairs={self.pairs} ({engine})"


BARE_OPTIONS = LayerOptions(
    conv_size=0, conv_activation="none", qk_norm="none", output_norm="none", output_gate="none"
)


def build_layer(
    d_model: int, num_heads: int, recipe: Recipe, options: LayerOptions, **sizes: Any
) -> MemoryLayer | FeedForward:
    """Build the layer of a recipe: a `FeedForward` if ``options.persistent``, else a `MemoryLayer`.

    Args:
        d_model: width of the tokens.
        num_heads: number of query heads.
        recipe: the regression problem of each head.
        options: options of the layer.
        **sizes: other keywords of `MemoryLayer`; a `FeedForward` uses precision only.

    Raises:
        RecipeError: sizes or options that do not fit the recipe.
    """
    if options.persistent:
        return FeedForward(d_model, num_heads, recipe, options, precision=sizes.get("precision"))
    return MemoryLayer(d_model, num_heads, recipe, options, **sizes)
