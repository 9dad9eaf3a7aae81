"""`MemoryLayer`: projections, gates, convolution and normalisation around a recipe."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from recollect.choices.runtime import product_dtype
from recollect.functional.checks import refuse_transforms
from recollect.functional.packing import compact, scatter
from recollect.layer.checks import (
    check_depth,
    check_options,
    check_sizes,
    check_state,
    check_state_shapes,
    check_tokens,
    resolve_layer,
)
from recollect.layer.gates import GateProjection, normalize_to_length
from recollect.layer.head_factors import GroupedRMSNorm, InputOutputFactors, QKAffine, QKScale
from recollect.layer.inspection import MemorySpec
from recollect.layer.key_recurrence import Sequences
from recollect.layer.options import LayerOptions
from recollect.layer.recipe_module import RecipeModule, run_memory, state_after
from recollect.layer.recorded_call import RecordedCall
from recollect.layer.rotary import (
    ComplexDecayPhase,
    num_rotated,
    positions,
    rope_cos_sin,
    rotate_by_phase,
    rotate_pairs,
)
from recollect.layer.short_conv import ShortConvolution
from recollect.layer.state import LayerState, MemoryInputs
from recollect.layer.token_shift import TokenShift, tail
from recollect.messages import RecipeError, suggest_arguments
from recollect.recipe.resolve import RecipeLike

__all__ = ["MemoryLayer"]

NORM_EPS = 1e-6


class MemoryLayer(RecipeModule):
    """A sequence layer whose memory is a recipe.

    x → linear q, k, v → causal depthwise convolution → SiLU → (RoPE) → L2 norm of q and k per head
    → `recall` → RMS norm per head → ⊙ SiLU(linear(x)) → linear, each according to the options
    (MIRAS 5.4, ATLAS 5.1). The recipe declares the gates and params.

    Args:
        d_model: width of the tokens.
        num_heads: number of query heads.
        recipe: the regression problem of each head, a preset, or the name of an architecture.
        options: everything but the regression. Default: the preset's options, `LayerOptions()` for
            a recipe.
        num_kv_heads: H, number of memories; ``num_heads`` is a multiple (grouped heads).
            Default: ``num_heads``.
        head_dim: K, size of queries and keys. Default: d_model / num_heads.
        value_dim: V, size of values. Default: K.
        engine: engine, as in `recall`; the attribute with this name can be set later.
        chunk_size: number of tokens per chunk, as in `recall`.
        precision: precision of the memory's matrix products, as in `recall`; the attribute with
            this name can be set later.
        depth: (index of this layer, number of layers), for decays that depend on it.
        memory_value_dim: size of the values that the memory learns, if a composition replaces the
            values of the layer by others. Default: V.

    Shapes: x ``[B, T, d_model]`` → y ``[B, T, d_model]``.

    Raises:
        RecipeError: sizes or options that do not fit the recipe.
        ValueError: an unknown engine or precision.

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

    @suggest_arguments
    def __init__(
        self,
        d_model: int,
        num_heads: int,
        recipe: RecipeLike,
        options: LayerOptions | None = None,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        engine: str = "auto",
        chunk_size: int | None = None,
        precision: str | None = None,
        depth: tuple[int, int] = (0, 1),
        memory_value_dim: int | None = None,
    ) -> None:
        super().__init__()
        recipe, options = resolve_layer(d_model, recipe, options)
        d_model, num_heads, num_kv_heads, head_dim, value_dim = check_sizes(
            d_model, num_heads, num_kv_heads, head_dim, value_dim, recipe, options
        )
        self.d_model, self.num_heads = d_model, num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_dim = head_dim or options.key_dim or d_model // num_heads
        self.value_dim = value_dim or head_dim or d_model // num_heads
        self.memory_value_dim = memory_value_dim or self.value_dim
        self._recipe, self.options = recipe, options
        self.chunk_size, self.depth = chunk_size, check_depth(depth)
        check_options(recipe, options)
        self._bind(engine, precision)

        n, group_size = recipe.associations_per_token, options.key_group_size
        num_queries = num_heads * n if options.mimo else num_heads
        num_values = 1 if options.mimo else n - options.zero_values
        # Queries and keys of a token.
        self.qk_heads = [num_queries // group_size, self.num_kv_heads * n // group_size]
        self.qkv_sizes = [
            *(count * self.head_dim for count in self.qk_heads),
            self.num_kv_heads * num_values * self.value_dim,
        ]
        self._build_ties()
        if options.qk == "ones":
            self.qkv_sizes[:2] = 0, 0
        elif self.ties.makes_keys:
            self.qkv_sizes[1] = 0
        elif self.ties.makes_queries:
            self.qkv_sizes[0] = self.qk_heads[0] = 0
        width, channels = num_heads * self.value_dim, sum(self.qkv_sizes)
        # One product and one convolution for q, k and v: fewer and larger operations.
        self.qkv = nn.Linear(d_model, channels, bias=False)
        self.conv = None
        if options.conv_size:
            self.conv = ShortConvolution(channels, options.conv_size, bias=options.conv_bias)
        self.conv_state_shape = (options.conv_size - 1, channels) if options.conv_size else None
        has_norm, has_gate = options.output_norm == "rms", options.output_gate != "none"
        self.norm = None
        if has_norm and options.norm_group_size is not None:
            sizes = (num_heads, self.value_dim, options.norm_group_size)
            self.norm = GroupedRMSNorm(*sizes, eps=options.norm_eps)
        elif has_norm:
            self.norm = nn.RMSNorm(self.value_dim, eps=options.norm_eps)
        rank = options.output_gate_rank
        rank = None if rank is None or rank >= min(d_model, width) else rank
        self.output_gate_down = nn.Linear(d_model, rank, bias=False) if rank else None
        self.output_gate = nn.Linear(rank or d_model, width, bias=bool(rank)) if has_gate else None
        is_sigmoid = options.output_gate == "sigmoid"
        self.gate_activation = torch.sigmoid if is_sigmoid else functional.silu
        self.out = nn.Linear(width, d_model, bias=False)
        self.qk_affine = QKAffine(sum(self.qk_heads), self.head_dim) if options.qk_affine else None
        self.qk_scale = None
        if options.qk_scale != "none":
            is_zero_centered = options.qk_scale == "zero_centered"
            self.qk_scale = QKScale(self.head_dim, zero_centered=is_zero_centered)
        uses_queries = self.ties.makes_queries or self.ties.follows_query
        if self.num_heads != self.num_kv_heads and uses_queries:
            raise RecipeError(
                "a tie that follows 'q' or copies 'k' to 'q' needs one query head per memory: "
                "leave num_kv_heads out"
            )
        self._build_gates()
        self.phase = None
        if options.complex_decay != "none":
            self.phase = ComplexDecayPhase(
                options.complex_decay,
                d_model=d_model,
                heads=self.num_kv_heads,
                size=self.value_dim if recipe.memory.is_elementwise else self.num_rotated,
            )
        self.shift = None
        if options.token_shift != "none":
            streams = [name for name, size in zip("qkv", self.qkv_sizes, strict=True) if size]
            streams += [name for name, gate in self.gates.items() if gate.source == "input"]
            streams += ["out"] if has_gate else []
            self.shift = TokenShift(options.token_shift, d_model, streams)
        self.mimo = None
        if options.mimo:
            sizes = {"count": n, "size": self.value_dim}
            self.mimo = InputOutputFactors(num_heads, self.num_kv_heads, has_gate=has_gate, **sizes)
        self.skip = None
        if options.value_skip:
            size = 1 if options.value_skip_per == "head" else self.value_dim
            self.skip = nn.Parameter(torch.ones(self.num_kv_heads, size))
        self.memory = self._build_initial_memory()

    def reset_parameters(self) -> None:
        """Sample new values of all weights."""
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
        output_final_state: bool = True,
        calls: list[RecordedCall] | None = None,
    ) -> tuple[Tensor, LayerState | None]:
        """Return outputs and the state after the last token.

        Args:
            x: tokens ``[B, T, d_model]``.
            state: state of an earlier call, to continue from.
            attention_mask: ``[B, T]``, nonzero at valid tokens, padded on either side. Outputs are
                those of each sequence without its masked tokens, and 0 at masked tokens.
            cu_seqlens: ``[N + 1]`` boundaries of N documents packed in one sequence (B = 1). The
                documents are independent, and states have one row per document.
            output_final_state: whether to return the state; if not, ``None``.
            calls: list to which this call is appended, for states after fewer tokens; not together
                with ``cu_seqlens``.

        Raises:
            ValueError: shapes, types or devices that do not fit, or a state of another layer.
            RuntimeError: a call inside a transform of `torch.func`, or with forward-mode
                derivatives.
        """
        if not torch.compiler.is_compiling():
            refuse_transforms(itertools.chain((x,), self.parameters()))
        if self.memory_value_dim != self.value_dim:
            raise ValueError(
                f"the memory of this layer learns values of size {self.memory_value_dim}, which "
                "a composition computes: call the layer of the composition"
            )
        weight = self.qkv.weight
        rows = check_tokens(x, attention_mask, cu_seqlens, d_model=self.d_model, weight=weight)
        check_state(state, rows=rows)
        batch, lengths, tokens = None, None, x
        if attention_mask is not None:
            batch = compact(attention_mask)
            lengths, tokens = batch.lengths, batch.gather(x)
        inputs = self.memory_inputs(
            tokens, state, lengths, cu_seqlens, output_conv_inputs=calls is not None
        )
        if calls is not None:
            recompute = partial(self._state_at, inputs, tokens, state)
            calls.append(
                RecordedCall(
                    num_tokens=x.shape[1],
                    state=state,
                    attention_mask=attention_mask,
                    recompute=recompute,
                )
            )
        y, memory = run_memory(
            *(self, inputs, state),
            batch=batch,
            cu_seqlens=cu_seqlens,
            output_final_state=output_final_state,
        )
        final_state = None if memory is None else state_after(inputs, memory)
        y = self.output(y, inputs)
        return y if batch is None else scatter(y, batch), final_state

    def check_state_shapes(self, state: LayerState) -> None:
        """Raise ValueError for a state of another layer, whose tensors have other shapes."""
        phase = None if self.phase is None else (self.num_kv_heads, self.phase.size // 2)
        shift = None if self.shift is None else (1, self.d_model)
        keys = (self.ties.num_recurrences,) if self.ties.num_recurrences else None
        shapes = {"conv": self.conv_state_shape, "phase": phase, "shift": shift, "keys": keys}
        check_state_shapes(state, shapes)

    def memory_inputs(
        self,
        x: Tensor,
        state: LayerState | None = None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        output_conv_inputs: bool = False,
    ) -> MemoryInputs:
        """Return the queries, keys, values and gates of tokens.

        They are the arguments of `recollect.recall`, after the projections, the convolution,
        rotations and norms.

        Args:
            x: tokens ``[B, T, d_model]``.
            state: state after the previous tokens.
            lengths: number of valid tokens per sequence ``[B]``, if sequences are padded on the
                right.
            cu_seqlens: ``[N + 1]`` boundaries of N documents packed in one sequence.
            output_conv_inputs: whether to return the inputs of the convolution.

        Returns:
            ``q [B, T, heads, K]``, ``k [B, T, num_kv_heads, K]``, ``v [B, T, num_kv_heads, V]``,
            ``gates`` and ``params`` by name. Keys and values are ``[B, T, num_kv_heads, n, ·]`` if
            a token has n > 1 associations, and a head has n queries with `LayerOptions.mimo`.

        Examples:
            >>> layer = rc.zoo.get("gated_delta_net").build(d_model=8, num_heads=2)
            >>> inputs = layer.memory_inputs(torch.randn(1, 6, 8))
            >>> inputs.k.shape, sorted(inputs.gates)
            (torch.Size([1, 6, 2, 4]), ['log_decay', 'lr'])
            >>> y, state = rc.recall(layer, inputs.q, inputs.k, inputs.v, inputs.gates)
            >>> rc.read(layer, inputs.k[:, :1], state=state).shape  # the first value, read back
            torch.Size([1, 1, 2, 4])
        """
        if state is not None:
            self.check_state_shapes(state)
        options, n, K = self.options, self.recipe.associations_per_token, self.head_dim
        if self.shift is None and isinstance(self.qkv.weight, Tensor):  # not a quantised map
            x = x.to(product_dtype(x))  # autocast would copy x for every projection
        shifted, last_token = self.shift_tokens(x, state, lengths, cu_seqlens)
        u, conv_state, conv = self.project_qkv(x, shifted), None, self.conv
        conv_inputs = u if output_conv_inputs and conv is not None else None
        if conv is not None:
            conv_state = None if state is None else state.conv
            u, conv_state = conv(u, conv_state, lengths=lengths, cu_seqlens=cu_seqlens)
        if options.conv_activation == "silu":
            u = functional.silu(u) if options.conv_activation_on == "qkv" else self._activate(u)
        qk_width = self.qkv_sizes[0] + self.qkv_sizes[1]
        projected, v = u.split_with_sizes([qk_width, self.qkv_sizes[2]], dim=-1)
        zeros, mimo = options.zero_values, self.mimo
        heads = (self.num_kv_heads, n - zeros) if n > 1 and mimo is None else (self.num_kv_heads,)
        v = v.view(*x.shape[:2], *heads, self.value_dim)
        if mimo is not None:
            v = mimo.expand_values(v)
        if zeros:
            v = functional.pad(v, (0, 0, zeros, 0))
        values = self.compute_gates(x, shifted)
        # Queries, then keys. If both are projected, they are heads of one tensor, so that each
        # operation below runs once.
        if options.qk == "ones":
            qk = [v.new_ones(*x.shape[:2], count, K) for count in self.qk_heads]
        elif self.qkv_sizes[1]:
            qk = [projected.view(*x.shape[:2], sum(self.qk_heads), K)]
        else:
            q = projected.unflatten(-1, (self.num_heads, K))
            qk = [q, self.ties.complement(values, q.dtype)]
        is_normalized = self.qk_affine is not None or self.qk_scale is not None
        if is_normalized:  # before rotations, which would not commute with factors per channel
            qk = self._normalize(qk, values)
            if self.qk_scale is not None:
                qk = [self.qk_scale(part, self.qk_heads) for part in qk]
            if self.qk_affine is not None:
                qk = [self.qk_affine(part) for part in qk]
        if options.rope_theta is not None:
            start = None if state is None else state.position
            position, size = positions(x, start, cu_seqlens), self.num_rotated
            cos, sin = rope_cos_sin(position, size, options.rope_theta)
            qk = [rotate_pairs(part, cos, sin) for part in qk]
            for name in self.key_like_gates:
                values[name] = rotate_pairs(values[name], cos, sin)
        rotated_v, phase, final_phase = v, None, None
        if self.phase is not None:
            start = None if state is None else state.phase
            factor = self.ties.angle_factor(values, self.gates)
            phase, final_phase = self.phase(
                x, start, lengths=lengths, cu_seqlens=cu_seqlens, factor=factor
            )
            if self.recipe.memory.is_elementwise:
                rotated_v = rotate_by_phase(v, phase)
            else:
                qk = [rotate_by_phase(part, phase) for part in self._split_qk(qk)]
        if not is_normalized:
            qk = self._normalize(qk, values)
        q, k = self._split_qk(qk)
        if options.qk_norm == "scaled":
            k = k * K**-0.5
        history = None
        if options.ties:
            start = None if state is None else state.keys
            sequences = Sequences(keys=start, lengths=lengths, cu_seqlens=cu_seqlens)
            tied = self.ties.apply_ties(q, k, rotated_v, values, self.gates, sequences)
            q, k, rotated_v, values, history = tied.q, tied.k, tied.v, tied.gates, tied.history
            v = rotated_v if phase is None else v
        gates, params = self._apply_stability_limit(values)
        return MemoryInputs(
            q=q,
            k=k,
            v=rotated_v.to(q.dtype),
            gates=gates,
            params=params,
            unrotated_values=v,
            phase=phase,
            gate_input=shifted.get("out", x),
            conv=conv_state,
            final_phase=final_phase,
            shift=last_token,
            conv_inputs=conv_inputs,
            keys=None if history is None else history.per_token,
            final_keys=None if history is None else history.final,
        )

    def _activate(self, u: Tensor) -> Tensor:
        """Apply SiLU to the projections that have an activation, if not all have one."""
        on = self.options.conv_activation_on
        parts = zip("qkv", u.split_with_sizes(self.qkv_sizes, dim=-1), strict=True)
        return torch.cat([functional.silu(x) if name in on else x for name, x in parts], dim=-1)

    def _normalize(self, qk: Sequence[Tensor], values: dict[str, Tensor]) -> Sequence[Tensor]:
        """Return queries and keys of the length of ``qk_norm``; normalize gates that are keys."""
        norm, eps = self.options.qk_norm, self.options.qk_norm_eps
        if norm not in ("l2", "rms"):
            return qk
        length = math.sqrt(self.head_dim) if norm == "rms" else 1.0
        for name in self.key_like_gates:
            values[name] = normalize_to_length(values[name], length, eps)
        return [normalize_to_length(part, length, eps) for part in qk]

    def _state_at(
        self,
        inputs: MemoryInputs,  # inputs of the memory at the tokens of the call
        x: Tensor,  # tokens of the call, padded on the right
        state: LayerState | None,  # state before the call
        n: int,  # number of tokens of the caller
        mask: Tensor | None,  # attention mask of these tokens [B, n]; None if all are valid
    ) -> LayerState:
        """Return the state after the first n tokens of a call, from the inputs of its memory."""
        batch = None if mask is None else compact(mask)
        lengths, inputs = None if batch is None else batch.lengths, inputs.first(n)
        _, memory = run_memory(self, inputs, state, batch=batch)
        assert memory is not None
        if self.conv is not None and inputs.conv_inputs is not None:
            earlier = None if state is None else state.conv
            inputs.conv = tail(earlier, inputs.conv_inputs, self.conv.width - 1, lengths)
        if self.shift is not None:
            earlier = None if state is None else state.shift
            inputs.shift = tail(earlier, x[:, :n], 1, lengths)
        if inputs.phase is not None:
            earlier = None if state is None or state.phase is None else state.phase.unsqueeze(1)
            phase = tail(earlier, inputs.phase, 1, lengths)
            inputs.final_phase = phase.squeeze(1).remainder(2 * math.pi)
        if inputs.keys is not None:
            earlier = None if state is None or state.keys is None else state.keys.unsqueeze(1)
            inputs.final_keys = tail(earlier, inputs.keys, 1, lengths).squeeze(1)
        return state_after(inputs, memory)

    @property
    def num_rotated(self) -> int:
        """Number of channels of queries and keys that are rotated."""
        return num_rotated(self.head_dim, self.options.partial_rotary_factor)

    def _split_qk(self, qk: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return queries ``[B, T, heads, K]`` and keys ``[B, T, H, (n,) K]`` of all memories."""
        if len(qk) == 1:
            q, k = qk[0].split_with_sizes(self.qk_heads, dim=2)
            n, group_size = self.recipe.associations_per_token, self.options.key_group_size
            if n > 1:
                k = k.unflatten(2, (-1, n))
            if group_size > 1:
                q = q if self.mimo is None else q.unflatten(2, (-1, n))
                q, k = (x.repeat_interleave(group_size, dim=2) for x in (q, k))
                q = q if self.mimo is None else q.flatten(2, 3)
            return q, k
        return qk

    def output(self, y: Tensor, inputs: MemoryInputs) -> Tensor:
        """Apply the norm, the gate and the output map to the outputs of the memory.

        Args:
            y: outputs of the memory ``[B, T, heads, V]``, n per head with `LayerOptions.mimo`.
            inputs: inputs of the memory at the tokens.
        """
        mimo = self.mimo
        if mimo is not None:
            y = y.unflatten(2, (self.num_heads, mimo.count))
        if inputs.phase is not None and self.recipe.memory.is_elementwise:
            y = rotate_by_phase(y, inputs.phase, inverse=True)
        if self.skip is not None:
            v = inputs.unrotated_values
            group_size = self.num_heads // self.num_kv_heads
            skip = self.skip if mimo is None else self.skip.unsqueeze(1)
            y = y + (skip.to(v.dtype) * v).repeat_interleave(group_size, 2)
        norm, gate = self.norm, self.output_gate  # access to a submodule is slow: once each
        is_norm_first = self.options.norm_before_gate
        if norm is not None and is_norm_first:
            y = norm(y.to(norm.weight.dtype)).to(y.dtype)
        if gate is not None:
            x, down = inputs.gate_input, self.output_gate_down
            z = gate(x if down is None else down(x))
            z = z.view_as(y) if mimo is None else mimo.expand_gates(z)
            y = y * self.gate_activation(z)
        if norm is not None and not is_norm_first:
            y = norm(y.to(norm.weight.dtype)).to(y.dtype)
        return self.out((y if mimo is None else mimo.combine_outputs(y)).flatten(2))

    @property
    def memory_spec(self) -> MemorySpec:
        """The recipe, sizes and engine, for `recollect.explain` and `recollect.diagnose`."""
        ranges: dict[str, tuple[float, float]] = {}
        for name, gate in self.gates.items():
            if isinstance(gate, GateProjection) and name not in self.ties.gate_names:
                activation = gate.activation
                is_bounded = activation.kind == "sigmoid"
                if is_bounded or name in self.recipe.log_decays:
                    ranges[name] = (activation.low, activation.high)
        return MemorySpec(
            recipe=self.recipe,
            d_model=self.d_model,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            num_heads=self.num_heads * (1 if self.mimo is None else self.mimo.count),
            engine=self.engine,
            precision=self.precision,
            chunk_size=self.chunk_size,
            initial_memory=self.initial_memory,
            gate_ranges=ranges,
            stability_limit=self.limit,
            options=self.options,
        )

    def shift_tokens(
        self,
        x: Tensor,
        state: LayerState | None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Mapping[str, Tensor], Tensor | None]:
        """Return the shifted inputs of projections by name, and the last token for the next call.

        Args:
            x: tokens ``[B, T, d_model]``.
            state: state after the previous tokens.
            lengths: number of valid tokens per sequence ``[B]``, if sequences are padded on the
                right.
            cu_seqlens: ``[N + 1]`` boundaries of N documents packed in one sequence.
        """
        if self.shift is None:
            return {}, None
        last_token = None if state is None else state.shift
        return self.shift(x, last_token, lengths=lengths, cu_seqlens=cu_seqlens)

    def project_qkv(self, x: Tensor, shifted: Mapping[str, Tensor]) -> Tensor:
        """Return q, k and v along one axis, as the convolution takes them.

        Args:
            x: tokens ``[B, T, d_model]``.
            shifted: inputs of projections by name, from `shift_tokens`.

        Raises:
            ValueError: a token shift and a quantised map, whose weight has no parts.
        """
        if self.shift is None:
            return self.qkv(x)
        if not isinstance(self.qkv.weight, Tensor):
            raise ValueError(
                "a layer with a token shift multiplies parts of the weight of qkv, and the weight "
                "of a quantised map has none: leave qkv as it is"
            )
        weights = self.qkv.weight.split(self.qkv_sizes)
        bias = self.qkv.bias
        biases = [None] * 3 if bias is None else bias.split(self.qkv_sizes)
        maps = zip("qkv", weights, biases, strict=True)
        return torch.cat(
            [functional.linear(shifted[name], w, b) for name, w, b in maps if w.numel()], -1
        )

    def extra_repr(self) -> str:
        """Return the sizes, and the engine of the recipe."""
        has_groups = self.num_kv_heads != self.num_heads
        groups = f", num_kv_heads={self.num_kv_heads}" if has_groups else ""
        precision = "" if self.precision is None else f", precision={self.precision!r}"
        return (
            f"{self.d_model}, num_heads={self.num_heads}{groups}, K={self.head_dim}, "
            f"V={self.value_dim}, engine={self.engine!r} ({self._bound.engine.name}){precision}"
        )
