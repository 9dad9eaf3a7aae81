"""`MemoryLayer`: projections, gates, convolution and normalisation around a recipe."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from recollect.layer.checks import (
    check_depth,
    check_options,
    check_sizes,
    check_state,
    check_tokens,
    stated_layer,
)
from recollect.layer.convolution import ShortConvolution
from recollect.layer.gates import scaled
from recollect.layer.numbers import RecipeNumbers
from recollect.layer.options import LayerOptions
from recollect.layer.rotation import (
    Phase,
    angles,
    check_phase,
    positions,
    rotate,
    turn,
)
from recollect.layer.state import Associations, LayerState
from recollect.layer.token_shift import TokenShift
from recollect.recall.modes import refuse_transforms
from recollect.recall.packing import CompactedBatch, compact, scatter
from recollect.recipe.argument import Stated
from recollect.wording import hinted

__all__ = ["MemoryLayer"]

NORM_EPS = 1e-6


class MemoryLayer(RecipeNumbers):
    """A sequence layer whose memory is a recipe.

    x → linear q, k, v → causal depthwise convolution → SiLU → (RoPE) → L2 norm of q and k per head
    → `recall` → RMS norm per head → ⊙ SiLU(linear(x)) → linear, each as its options say
    (MIRAS 5.4, ATLAS 5.1). Gates and params are made from what the recipe declares.

    Args:
        d_model: width of the tokens.
        heads: query heads.
        recipe: the regression problem each head solves; the name of an architecture, or a preset,
            will do.
        options: what is not regression. Default: the preset's own, `LayerOptions` of a recipe.
        kv_heads: H, number of memories, of which ``heads`` is a multiple (grouped heads). Default:
            heads.
        head_dim: K, size of queries and keys. Default: d_model / heads.
        value_dim: V, size of values. Default: K.
        method: engine, as in `recall`; the attribute of the same name may be set later.
        chunk_size: an execution detail, as in `recall`.
        precision: of the memory's products, as in `recall`; the attribute of the same name may be
            set later.
        depth: (index of this layer, number of layers), for decays that depend on it.

    Shapes: x ``[B, T, d_model]`` → y ``[B, T, d_model]``.

    Raises:
        RecipeError: sizes or options that do not fit the recipe.
        ValueError: an unknown method or precision.

    Examples:
        >>> recipe = rc.Recipe(retention=rc.retention.Decay(when="before"))
        >>> layer = rc.MemoryLayer(8, 2, recipe)
        >>> x = torch.randn(1, 6, 8)
        >>> y, state = layer(x)
        >>> first, state = layer(x[:, :4])
        >>> rest, state = layer(x[:, 4:], state)
        >>> torch.allclose(torch.cat([first, rest], 1), y, atol=1e-5)
        True
    """

    @hinted
    def __init__(
        self,
        d_model: int,
        heads: int,
        recipe: Stated,
        options: LayerOptions | None = None,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        method: str = "auto",
        chunk_size: int | None = None,
        precision: str | None = None,
        depth: tuple[int, int] = (0, 1),
    ) -> None:
        super().__init__()
        recipe, options = stated_layer(d_model, recipe, options)
        d_model, heads, kv_heads, head_dim, value_dim = check_sizes(
            d_model, heads, kv_heads, head_dim, value_dim, recipe, options
        )
        depth = check_depth(depth)
        self.d_model, self.heads, self.kv_heads = d_model, heads, kv_heads or heads
        self.head_dim = head_dim or options.key_dim or d_model // heads
        self.value_dim = value_dim or head_dim or d_model // heads
        self._recipe, self.options = recipe, options
        self.chunk_size, self.depth = chunk_size, depth
        check_options(recipe, options)
        self._bind(method, precision)

        per_memory = self.kv_heads * recipe.associations
        self.sizes = [
            heads * self.head_dim,
            per_memory * self.head_dim,
            per_memory * self.value_dim,
        ]
        self.sharing = [heads, per_memory]  # query heads, and keys of a token
        self._make_ties()
        if options.qk == "ones":
            self.sizes[:2] = 0, 0
        elif self.ties.makes_keys:
            self.sizes[1] = 0
        width = heads * self.value_dim
        # One product for q, k and v, and one convolution: fewer, larger operations.
        self.qkv = nn.Linear(d_model, sum(self.sizes), bias=False)
        self.conv = ShortConvolution(sum(self.sizes), options.conv) if options.conv else None
        self.tail = (options.conv - 1, sum(self.sizes)) if options.conv else None
        self.norm = (
            nn.RMSNorm(self.value_dim, eps=NORM_EPS) if options.output_norm == "rms" else None
        )
        gated = options.output_gate == "silu"
        self.output_gate = nn.Linear(d_model, width, bias=False) if gated else None
        self.out = nn.Linear(width, d_model, bias=False)
        self._make_numbers()
        self.phase = None
        if options.phase != "none":
            size = self.value_dim if recipe.memory.diagonal else self.head_dim
            check_phase(options, size)
            self.phase = Phase(options.phase, d_model=d_model, heads=self.kv_heads, size=size)
        self.shift = None
        if options.shift != "none":
            made = [name for name, number in self.gates.items() if number.source == "input"]
            streams = [*(name for name, size in zip("qkv", self.sizes, strict=True) if size), *made]
            self.shift = TokenShift(options.shift, d_model, [*streams, *(["out"] if gated else [])])
        self.skip = (
            nn.Parameter(torch.ones(self.kv_heads, self.value_dim)) if options.skip else None
        )
        self.memory = self._initial_memory()

    def reset_parameters(self) -> None:
        """Draw all weights anew."""
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]
        if self.skip is not None:
            nn.init.ones_(self.skip)

    def forward(
        self,
        x: Tensor,
        state: LayerState | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        output_state: bool = True,
    ) -> tuple[Tensor, LayerState | None]:
        """Outputs and the state after the last token.

        Args:
            x: tokens ``[B, T, d_model]``.
            state: of an earlier call, to continue from.
            attention_mask: ``[B, T]``, nonzero at real tokens, padded on either side. Masked tokens
                occupy no slot anywhere, as if each row were run alone, and their output is 0.
            cu_seqlens: ``[N + 1]`` borders of N documents packed in one row (B = 1); nothing leaks
                across them, and states have one row per document.
            output_state: False returns ``None`` in place of the state.

        Raises:
            ValueError: shapes, types or devices that do not fit, or a state of another layer.
            RuntimeError: inside a transform of `torch.func`, or forward-mode derivatives.
        """
        if not torch.compiler.is_compiling():
            refuse_transforms(itertools.chain((x,), self.parameters()))
        weight = self.qkv.weight
        check_tokens(x, attention_mask, cu_seqlens, d_model=self.d_model, weight=weight)
        check_state(
            state,
            rows=x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1,
            tail=self.tail,
            phase=self.phase is not None,
            shift=self.shift is not None,
        )
        if attention_mask is None:
            return self._dense(x, state, None, cu_seqlens, output_state)
        batch = compact(attention_mask)
        y, after = self._dense(batch.gather(x), state, batch, None, output_state)
        return scatter(y, batch), after

    def associations(
        self,
        x: Tensor,
        state: LayerState | None = None,
        lengths: Tensor | None = None,
        borders: Tensor | None = None,
    ) -> Associations:
        """Return the queries, keys, values and gates that the layer makes of tokens.

        They are the arguments of `recollect.recall`, after the projections, the convolution,
        rotations and norms.

        Args:
            x: tokens ``[B, T, d_model]``.
            state: of the tokens before.
            lengths: real tokens per sequence ``[B]``, if sequences are padded on the right.
            borders: ``[N + 1]`` boundaries of N documents packed in one sequence.

        Returns:
            ``q [B, T, heads, K]``, ``k [B, T, kv_heads, K]``, ``v [B, T, kv_heads, V]``, ``gates``
            and ``params`` by name. Keys and values are ``[B, T, kv_heads, n, ·]`` if a token has
            n > 1 associations.

        Examples:
            >>> layer = rc.zoo.get("gated_delta_net").build(d_model=8, heads=2)
            >>> inputs = layer.associations(torch.randn(1, 6, 8))
            >>> inputs.k.shape, sorted(inputs.gates)
            (torch.Size([1, 6, 2, 4]), ['log_decay', 'lr'])
            >>> y, state = rc.recall(layer, inputs.q, inputs.k, inputs.v, inputs.gates)
            >>> rc.read(layer, inputs.k[:, :1], state=state).shape  # the first value, read back
            torch.Size([1, 1, 2, 4])
        """
        options, n = self.options, self.recipe.associations
        seen, last = self.streams(x, state, lengths, borders)
        u, tail, conv = self.project(x, seen), None, self.conv
        if conv is not None:
            tail = None if state is None else state.conv
            u, tail = conv(u, tail, lengths=lengths, borders=borders)
        if options.conv_activation == "silu":
            u = functional.silu(u)
        qk, v = u.split_with_sizes([self.sizes[0] + self.sizes[1], self.sizes[2]], dim=-1)
        lead = (self.kv_heads, n) if n > 1 else (self.kv_heads,)
        v = v.view(*x.shape[:2], *lead, self.value_dim)
        values = self.values(x, seen)
        # Queries, then keys. Where both are projected they are heads of one tensor: what is done
        # to each vector is done at once.
        if options.qk == "ones":
            parts = [v.new_ones(*x.shape[:2], h, self.head_dim) for h in self.sharing]
        elif self.sizes[1]:
            parts = [qk.view(*x.shape[:2], sum(self.sharing), self.head_dim)]
        else:
            q = qk.unflatten(-1, (self.heads, self.head_dim))
            parts = [q, self.ties.keys(None, values, q)]
        if options.rope is not None:
            start = None if state is None else state.position
            cos, sin = angles(positions(x, start, borders), self.head_dim, options.rope)
            parts = [rotate(part, cos, sin) for part in parts]
            for name in self.key_gates:
                values[name] = rotate(values[name], cos, sin)
        written, phase, after_phase = v, None, None
        if self.phase is not None:
            start = None if state is None else state.phase
            phase, after_phase = self.phase(x, start, lengths=lengths, borders=borders)
            if self.recipe.memory.diagonal:
                written = turn(v, phase)
            else:
                parts = [turn(part, phase) for part in self._apart(parts)]
        if options.qk_norm in ("l2", "rms"):
            length = math.sqrt(self.head_dim) if options.qk_norm == "rms" else 1.0
            parts = [scaled(part, length) for part in parts]
            for name in self.key_gates:
                values[name] = scaled(values[name], length)
        q, k = self._apart(parts)
        if options.qk_norm == "scaled":
            k = k * self.head_dim**-0.5
        if options.ties:
            values = self.ties.numbers(values, k, self.gates)
        if self.ties.key is not None and not self.ties.makes_keys:
            k = self.ties.keys(k, values, q)
        values, params = self._limited(values)
        return Associations(
            q=q,
            k=k,
            v=written.to(q.dtype),
            gates=values,
            params=params,
            plain=v,
            phase=phase,
            gated=seen.get("out", x),
            conv=tail,
            turned=after_phase,
            shift=last,
        )

    def _apart(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Queries ``[B, T, heads, K]`` and keys ``[B, T, H, (n,) K]``."""
        if len(parts) == 1:
            q, k = parts[0].split_with_sizes(self.sharing, dim=2)
            n = self.recipe.associations
            return q, k.unflatten(2, (self.kv_heads, n)) if n > 1 else k
        return parts

    def _dense(
        self,
        x: Tensor,
        state: LayerState | None,
        batch: CompactedBatch | None,
        borders: Tensor | None,
        output_state: bool,
    ) -> tuple[Tensor, LayerState | None]:
        """Rows without padding, or padded on the right only."""
        lengths = None if batch is None else batch.lengths
        inputs = self.associations(x, state, lengths, borders)
        y, memory = self.learn(
            inputs, state, batch=batch, borders=borders, output_state=output_state
        )
        after = None
        if memory is not None:
            after = LayerState(
                memory=memory, conv=inputs.conv, phase=inputs.turned, shift=inputs.shift
            )
        return self.outputs(y, inputs), after

    def outputs(self, y: Tensor, inputs: Associations) -> Tensor:
        """What the layer makes of what its memory said: the norm, the gate and the last map.

        Args:
            y: read from the memory, ``[B, T, heads, V]``.
            inputs: of the same tokens.
        """
        if inputs.phase is not None and self.recipe.memory.diagonal:
            y = turn(y, inputs.phase, back=True)
        if self.skip is not None:
            v = inputs.plain
            y = y + (self.skip.to(v.dtype) * v).repeat_interleave(self.heads // self.kv_heads, 2)
        norm, gate = self.norm, self.output_gate  # a module is found slowly: once each
        if norm is not None:
            y = norm(y.to(norm.weight.dtype)).to(y.dtype)
        y = y.flatten(2)
        if gate is not None:
            y = y * functional.silu(gate(inputs.gated))
        return self.out(y)

    def streams(
        self, x: Tensor, state: LayerState | None, lengths: Tensor | None, borders: Tensor | None
    ) -> tuple[Mapping[str, Tensor], Tensor | None]:
        """What a projection sees in place of x, by name, and the last token where it is needed.

        Args:
            x: tokens ``[B, T, d_model]``.
            state: of the tokens before.
            lengths: real tokens per row ``[B]``, where rows are padded on the right.
            borders: ``[N + 1]`` borders of N documents packed in one row.
        """
        if self.shift is None:
            return {}, None
        tail = None if state is None else state.shift
        return self.shift(x, tail, lengths=lengths, borders=borders)

    def project(self, x: Tensor, seen: Mapping[str, Tensor]) -> Tensor:
        """q, k and v beside each other, as the convolution takes them.

        Args:
            x: tokens ``[B, T, d_model]``.
            seen: of `streams`.
        """
        if self.shift is None:
            return self.qkv(x)
        weights = self.qkv.weight.split(self.sizes)
        bias = self.qkv.bias
        biases = [None] * 3 if bias is None else bias.split(self.sizes)
        parts = zip("qkv", weights, biases, strict=True)
        seen_by = [functional.linear(seen[name], w, b) for name, w, b in parts if w.numel()]
        return torch.cat(seen_by, -1)

    def extra_repr(self) -> str:
        """Sizes, and the engine that runs the recipe."""
        grouped = f", kv_heads={self.kv_heads}" if self.kv_heads != self.heads else ""
        engine = self._bound.engine.name
        asked = "" if self.precision is None else f", precision={self.precision!r}"
        return (
            f"{self.d_model}, heads={self.heads}{grouped}, K={self.head_dim}, V={self.value_dim}, "
            f"method={self.method!r} ({engine}){asked}"
        )
