"""`MemoryLayer`: a recipe with everything around it that a sequence model needs."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from recollect.choices.fields import Gate, Param
from recollect.choices.member import RecipeError
from recollect.engines.select import select
from recollect.layer.complex_decay import Phase, check_phase, turn
from recollect.layer.convolution import ShortConvolution
from recollect.layer.gates import Number
from recollect.layer.initial_memory import InitialMemory, InitialPairs
from recollect.layer.options import LayerOptions
from recollect.layer.rotary import angles, rotate
from recollect.layer.state import LayerState
from recollect.layer.ties import OWNED, Ties, check_ties, scaled
from recollect.layer.token_shift import TokenShift
from recollect.recall.checks import check_mask
from recollect.recall.packing import Rows, compact, scatter
from recollect.recall.recall import recall
from recollect.recall.transforms import refuse_transforms
from recollect.recipe.recipe import Recipe
from recollect.state.state import State
from recollect.typing import Gates, Params

__all__ = ["MemoryLayer"]

NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Associations:
    """What a layer hands to its memory, and what it needs afterwards.

    Attributes:
        q, k, v, gates, params: as `recollect.recall` takes them.
        plain: the values before any rotation. phase: the rotation's angles.
        gated: what the output gate sees.
        conv, turned, shift: what the next call continues from: the convolution's tail, the last
            angle, the last token.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gates: dict[str, Tensor]
    params: dict[str, Tensor]
    plain: Tensor
    phase: Tensor | None
    gated: Tensor
    conv: Tensor | None
    turned: Tensor | None
    shift: Tensor | None


class MemoryLayer(nn.Module):
    """A sequence layer whose memory is a recipe.

    x → linear q, k, v → causal depthwise convolution → SiLU → (RoPE) → L2 norm of q and k per head
    → `recall` → RMS norm per head → ⊙ SiLU(linear(x)) → linear, each as its options say
    (MIRAS 5.4, ATLAS 5.1). Gates and params are made from what the recipe declares.

    Args:
        d_model: width of the tokens.
        heads: query heads.
        recipe: the regression problem each head solves.
        options: what is not regression.
        kv_heads: H, number of memories, of which ``heads`` is a multiple (grouped heads). Default:
            heads.
        head_dim: K, size of queries and keys. Default: d_model / heads.
        value_dim: V, size of values. Default: K.
        method: engine, as in `recall`; the attribute of the same name may be set later.
        chunk_size: an execution detail, as in `recall`.
        depth: (index of this layer, number of layers), for decays that depend on it.

    Shapes: x ``[B, T, d_model]`` → y ``[B, T, d_model]``.

    Raises:
        RecipeError: sizes or options that do not fit the recipe.
        ValueError: an unknown method.

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

    def __init__(
        self,
        d_model: int,
        heads: int,
        recipe: Recipe,
        options: LayerOptions | None = None,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        method: str = "auto",
        chunk_size: int | None = None,
        depth: tuple[int, int] = (0, 1),
    ) -> None:
        super().__init__()
        options = LayerOptions() if options is None else options
        _check_sizes(d_model, heads, kv_heads, head_dim, recipe, options)
        self.d_model, self.heads, self.kv_heads = d_model, heads, kv_heads or heads
        self.head_dim = head_dim or options.key_dim or d_model // heads
        self.value_dim = value_dim or head_dim or d_model // heads
        if options.rope is not None and self.head_dim % 2:
            raise RecipeError(
                f"LayerOptions(rope=...) turns pairs of channels and needs an even head_dim, not "
                f"{self.head_dim}"
            )
        self.recipe, self.options = recipe, options
        self.chunk_size, self.depth = chunk_size, depth
        self.method = method
        self._check_options()

        per_memory = self.kv_heads * recipe.associations
        self.sizes = [
            heads * self.head_dim,
            per_memory * self.head_dim,
            per_memory * self.value_dim,
        ]
        self.ties = Ties(options, heads=self.kv_heads, key_dim=self.head_dim)
        if options.qk == "ones":
            self.sizes[:2] = 0, 0
        elif self.ties.makes_keys:
            self.sizes[1] = 0
        width = heads * self.value_dim
        # One product for q, k and v, and one convolution: fewer, larger operations.
        self.qkv = nn.Linear(d_model, sum(self.sizes), bias=False)
        self.conv = ShortConvolution(sum(self.sizes), options.conv) if options.conv else None
        self.norm = (
            nn.RMSNorm(self.value_dim, eps=NORM_EPS) if options.output_norm == "rms" else None
        )
        gated = options.output_gate == "silu"
        self.output_gate = nn.Linear(d_model, width, bias=False) if gated else None
        self.out = nn.Linear(width, d_model, bias=False)
        self.gates, self.params = self._numbers(recipe.gates()), self._numbers(recipe.params())
        self.phase = None
        if options.phase != "none":
            size = self.value_dim if recipe.memory.diagonal else self.head_dim
            check_phase(recipe, options, size)
            self.phase = Phase(options.phase, d_model=d_model, heads=self.kv_heads, size=size)
        self.shift = None
        if options.shift != "none":
            made = [name for name, number in self.gates.items() if number.source == "input"]
            streams = [*(name for name, size in zip("qkv", self.sizes, strict=True) if size), *made]
            self.shift = TokenShift(options.shift, d_model, [*streams, *(["out"] if gated else [])])
        self.skip = (
            nn.Parameter(torch.ones(self.kv_heads, self.value_dim)) if options.skip else None
        )
        shapes = recipe.shapes(self.head_dim, self.value_dim) if recipe.needs_init() else ()
        self.memory: InitialMemory | InitialPairs | None = None
        if shapes:
            self.memory = InitialMemory(self.kv_heads, shapes, options.memory_scale)
        if recipe.dual and recipe.needs_init():
            self.memory = InitialPairs(
                self.kv_heads,
                recipe,
                K=self.head_dim,
                V=self.value_dim,
                pairs=options.anchors,
                length=1.0 if options.qk_norm == "l2" else math.sqrt(self.head_dim),
            )

    def _numbers(self, declarations: Sequence[Gate] | Sequence[Param]) -> nn.ModuleDict:
        """One `Number` for each, by name, but for those that a tie makes of another.

        A gate tied to another's rate is learned, and its tie makes it move.
        """
        rules = {tie.target: tie.rule for tie in self.options.ties}
        made: dict[str, nn.Module] = {}
        for declared in declarations:
            options = self.options.gate(declared.name)
            rule = rules.get(declared.name, OWNED[0])
            if rule not in OWNED:
                continue
            if declared.name in rules and rule == "rate":
                options = replace(options, source="learned")
            sizes = self.recipe.axes(self.head_dim, self.value_dim)
            if self._paired(declared):
                sizes = {axis: max(1, size // 2) for axis, size in sizes.items()}
            made[declared.name] = Number(
                declared,
                options,
                sizes=sizes,
                d_model=self.d_model,
                heads=self.kv_heads,
                depth=self.depth,
                recipe=self.recipe,
            )
        return nn.ModuleDict(made)

    def _paired(self, declared: Gate | Param) -> bool:
        """Whether real and imaginary channels share this number, so that angles commute with it."""
        if self.options.phase == "none":
            return False
        if self.recipe.memory.diagonal:
            return declared.axes in (("F",), ("V",))
        return declared.axes == ("F",) and declared.name in ("log_decay", "decay", "decay_scale")

    def _check_options(self) -> None:
        """Names in the options that the recipe knows nothing of, and ties that cannot be."""
        names = [item.name for item in (*self.recipe.gates(), *self.recipe.params())]
        for name, _ in self.options.gates:
            if name not in names:
                raise RecipeError(
                    f"LayerOptions(gates=...) names {name!r}, which this recipe does not ask for; "
                    f"it asks for: {', '.join(sorted(names)) or 'none'}"
                )
        check_ties(self.recipe, self.options)
        if self.recipe.associations > 1 and (self.options.skip or self.options.qk == "ones"):
            raise RecipeError(
                "LayerOptions(skip=..., qk=...) speak of one association per token, and this "
                f"recipe takes {self.recipe.associations}"
            )

    @property
    def method(self) -> str:
        """Engine: ``"auto"``, ``"reference"`` or a name; set it to run the same layer otherwise."""
        return self._method

    @method.setter
    def method(self, name: str) -> None:
        select(self.recipe, name)
        self._method = name

    @property
    def initial_memory(self) -> tuple[Tensor, ...] | None:
        """A₀ of every memory, ``[H, *shape]`` per map; ``None`` where memories start at zero."""
        return None if self.memory is None else self.memory()

    def reset_parameters(self) -> None:
        """Draw all weights anew."""
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]

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
            ValueError: shapes that do not fit.
            RuntimeError: inside a transform of `torch.func`, or forward-mode derivatives.
        """
        refuse_transforms(itertools.chain((x,), self.parameters()))
        self._check(x, attention_mask, cu_seqlens)
        self._check_state(x, state, cu_seqlens)
        if attention_mask is None:
            return self._dense(x, state, None, cu_seqlens, output_state)
        rows = compact(attention_mask)
        y, after = self._dense(rows.gather(x), state, rows, None, output_state)
        return scatter(y, rows), after

    def _check_state(self, x: Tensor, state: LayerState | None, borders: Tensor | None) -> None:
        if state is None:
            return
        if not isinstance(state, LayerState):
            raise ValueError(
                f"state must be what this layer returned earlier, not {type(state).__name__}"
            )
        rows = x.shape[0] if borders is None else borders.shape[0] - 1
        if state.rows != rows:
            raise ValueError(f"the state has {state.rows} rows and this call {rows}")
        wanted = None if self.conv is None else (self.conv.width - 1, self.conv.channels)
        found = None if state.conv is None else tuple(state.conv.shape[1:])
        if wanted != found:
            raise ValueError(
                f"this state belongs to another layer: its convolution tail is {found} and this "
                f"layer's is {wanted}"
            )
        for name, has, needs in (
            ("an angle", state.phase is not None, self.phase is not None),
            ("a last token", state.shift is not None, self.shift is not None),
        ):
            if has != needs:
                raise ValueError(
                    f"this state belongs to another layer: {name} is "
                    f"{'there' if has else 'missing'}"
                )

    def _check(self, x: Tensor, mask: Tensor | None, borders: Tensor | None) -> None:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            found = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"x must be a floating-point tensor [B, T, {self.d_model}], not {found}"
            )
        if x.dim() != 3 or x.shape[-1] != self.d_model:
            raise ValueError(f"x must have shape [B, T, {self.d_model}], not {list(x.shape)}")
        if mask is not None and borders is not None:
            raise ValueError(
                "attention_mask and cu_seqlens exclude each other: packed rows have no padding"
            )
        if mask is not None:
            check_mask(mask, x.shape[0], x.shape[1])
        if borders is not None and x.shape[0] != 1:
            raise ValueError(
                f"cu_seqlens packs documents in one row, so B must be 1, not {x.shape[0]}"
            )

    def associations(
        self,
        x: Tensor,
        state: LayerState | None = None,
        rows: Rows | None = None,
        borders: Tensor | None = None,
    ) -> Associations:
        """What tokens ``x`` memorise and ask, as `recollect.recall` takes it.

        Rows are without padding, or padded on the right only.

        Args:
            x: tokens ``[B, T, d_model]``.
            state: of the tokens before.
            rows: which rows are shorter than T, and how long they are.
            borders: ``[N + 1]`` borders of N documents packed in one row.
        """
        options, n = self.options, self.recipe.associations
        lengths = None if rows is None else rows.lengths
        seen, last = self._streams(x, state, lengths, borders)
        u, tail = self._project(seen), None
        if self.conv is not None:
            tail = None if state is None else state.conv
            u, tail = self.conv(u, tail, lengths=lengths, borders=borders)
        if options.conv_activation == "silu":
            u = functional.silu(u)
        q, k, v = u.split(self.sizes, dim=-1)
        lead = (self.kv_heads, n) if n > 1 else (self.kv_heads,)
        v = v.unflatten(-1, (*lead, self.value_dim))
        values = self._values(seen)
        if options.qk == "ones":
            q = v.new_ones(*x.shape[:2], self.heads, self.head_dim)
            k = v.new_ones(*x.shape[:2], self.kv_heads, self.head_dim)
        else:
            q = q.unflatten(-1, (self.heads, self.head_dim))
            own = k.unflatten(-1, (*lead, self.head_dim)) if self.sizes[1] else None
            k = own if own is not None else self.ties.keys(None, values, q)
        if options.rope is not None:
            cos, sin = angles(self._positions(x, state, borders), self.head_dim, options.rope)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            values = {
                n: rotate(g, cos, sin) if n in self.gates and self.gates[n].key else g
                for n, g in values.items()
            }
        written, phase, after_phase = v, None, None
        if self.phase is not None:
            start = None if state is None else state.phase
            phase, after_phase = self.phase(seen["phase"], start, lengths=lengths, borders=borders)
            if self.recipe.memory.diagonal:
                written = turn(v, phase)
            else:
                q, k = turn(q, phase), turn(k, phase)
        if options.qk_norm == "scaled":
            k = k * self.head_dim**-0.5
        elif options.qk_norm != "none":
            length = math.sqrt(self.head_dim) if options.qk_norm == "rms" else 1.0
            q, k = scaled(q, length), scaled(k, length)
            values = {
                n: scaled(g, length) if n in self.gates and self.gates[n].key else g
                for n, g in values.items()
            }
        values = self.ties.numbers(values, k, {**self.gates, **self.params})
        if self.ties.key is not None and not self.ties.makes_keys:
            k = self.ties.keys(k, values, q)
        wanted = {gate.name for gate in self.recipe.gates()}
        return Associations(
            q=q,
            k=k,
            v=written.to(q.dtype),
            gates={name: value for name, value in values.items() if name in wanted},
            params={name: value for name, value in values.items() if name not in wanted},
            plain=v,
            phase=phase,
            gated=seen.get("out", x),
            conv=tail,
            turned=after_phase,
            shift=last,
        )

    def _dense(
        self,
        x: Tensor,
        state: LayerState | None,
        rows: Rows | None,
        borders: Tensor | None,
        output_state: bool,
    ) -> tuple[Tensor, LayerState | None]:
        """Rows without padding, or padded on the right only."""
        told = self.associations(x, state, rows, borders)
        y, memory = self._recall(
            *(told.q, told.k, told.v),
            gates=told.gates,
            params=told.params,
            state=state,
            mask=None if rows is None else rows.real,
            borders=borders,
            output_state=output_state,
        )
        if told.phase is not None and self.recipe.memory.diagonal:
            y = turn(y, told.phase, back=True)
        if self.skip is not None:
            v = told.plain
            y = y + (self.skip.to(v.dtype) * v).repeat_interleave(self.heads // self.kv_heads, 2)
        if self.norm is not None:
            y = self.norm(y.to(self.norm.weight.dtype)).to(y.dtype)
        y = y.flatten(2)
        if self.output_gate is not None:
            y = y * functional.silu(self.output_gate(told.gated))
        after = None
        if memory is not None:
            after = LayerState(memory=memory, conv=told.conv, phase=told.turned, shift=told.shift)
        return self.out(y), after

    def _streams(
        self, x: Tensor, state: LayerState | None, lengths: Tensor | None, borders: Tensor | None
    ) -> tuple[Mapping[str, Tensor], Tensor | None]:
        """What each projection sees, by name, and the last token where that is needed."""
        if self.shift is None:
            return defaultdict(lambda: x), None
        tail = None if state is None else state.shift
        mixed, last = self.shift(x, tail, lengths=lengths, borders=borders)
        return defaultdict(lambda: x, mixed), last

    def _project(self, seen: Mapping[str, Tensor]) -> Tensor:
        """q, k and v beside each other."""
        if self.shift is None:
            return self.qkv(seen["qkv"])
        weights = self.qkv.weight.split(self.sizes)
        bias = self.qkv.bias
        biases = [None] * 3 if bias is None else bias.split(self.sizes)
        parts = zip("qkv", weights, biases, strict=True)
        seen_by = [functional.linear(seen[name], w, b) for name, w, b in parts if w.numel()]
        return torch.cat(seen_by, -1)

    def _values(self, seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every number that the layer makes, before ties."""
        made: dict[str, Tensor] = {}
        for name, number in (*self.gates.items(), *self.params.items()):
            assert isinstance(number, Number)
            value = number(seen[name])
            paired = self._paired(number.declared)
            made[name] = torch.cat([value, value], dim=-1) if paired else value
        return made

    def _recall(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        gates: Gates,
        params: Params,
        state: LayerState | None,
        mask: Tensor | None,
        borders: Tensor | None,
        output_state: bool,
    ) -> tuple[Tensor, State | None]:
        """`recall` with what this layer holds."""
        return recall(
            self.recipe,
            *(q, k, v),
            gates,
            params=params,
            init=self.initial_memory if state is None else None,
            state=None if state is None else state.memory,
            method=self.method,
            attention_mask=mask,
            cu_seqlens=borders,
            chunk_size=self.chunk_size,
            output_state=output_state,
        )

    def _positions(self, x: Tensor, state: LayerState | None, borders: Tensor | None) -> Tensor:
        """Index of each token in its document ``[B, T]`` (of padded tokens: anything)."""
        steps = torch.arange(x.shape[1], device=x.device)
        if borders is None:
            return steps.expand(x.shape[:2]) if state is None else state.position[:, None] + steps
        borders = borders.to(device=x.device, dtype=torch.long)
        document = torch.bucketize(steps, borders[1:], right=True)
        starts = borders[:-1] if state is None else borders[:-1] - state.position
        return (steps - starts[document])[None]

    def extra_repr(self) -> str:
        """Sizes, and the engine that runs the recipe."""
        grouped = f", kv_heads={self.kv_heads}" if self.kv_heads != self.heads else ""
        engine = select(self.recipe, self.method).engine.name
        return (
            f"{self.d_model}, heads={self.heads}{grouped}, K={self.head_dim}, V={self.value_dim}, "
            f"method={self.method!r} ({engine})"
        )


def _check_sizes(
    d_model: int,
    heads: int,
    kv_heads: int | None,
    head_dim: int | None,
    recipe: Recipe,
    options: LayerOptions,
) -> None:
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"MemoryLayer needs an rc.Recipe, not {recipe!r}")
    if not isinstance(options, LayerOptions):
        raise RecipeError(f"MemoryLayer needs rc.LayerOptions, not {options!r}")
    if d_model < 1 or heads < 1:
        raise RecipeError(f"d_model and heads must be at least 1, not {d_model} and {heads}")
    if head_dim is None and d_model % heads:
        raise RecipeError(
            f"d_model = {d_model} is no multiple of {heads} heads: choose other sizes, or give "
            "head_dim"
        )
    if kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
        raise RecipeError(
            f"heads = {heads} must be a multiple of kv_heads = {kv_heads}: several query heads "
            "share one memory, never the other way"
        )
