"""Gate projections: modules that compute the gates and params that a recipe declares.

A gate or param says its name, axes, range and initial value; from these follow its squashing, its
shape and its bias. Defaults:

========================================  =====================================================
declared range                            value of z
========================================  =====================================================
[a, b)                                    a + (b − a) sigmoid(z)
≥ a, and a *rate* (lr, erase, window)     a + sigmoid(z): with keys of unit length a step in
                                          (0, 1) neither vanishes nor overshoots
≥ a, any other (thresholds, radii)        a + softplus(z)
≤ b (log decays)                          b + logsigmoid(z)
everything                                z; a gate over K is a key, and is treated like one
========================================  =====================================================

Decays start near their declared value, 0.98, with memory times spread over the heads by 8 either
way (6 to 400 tokens), so that some heads remember long and some forget soon. Projections start
small: a token of unit root mean square moves z by about 0.2.
"""

# More than 400 lines: a number's squashing, projection and start, which follow from each other.

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from recollect.choices.devices import autocasts, constant, lasts
from recollect.choices.fields import Gate, Param
from recollect.choices.member import RecipeError
from recollect.fields import Range
from recollect.layer.options import GateOptions
from recollect.recipe.initial_params import start

if TYPE_CHECKING:
    from recollect.recipe.limit import StepLimit
    from recollect.recipe.recipe import Recipe

__all__ = ["GateProjection", "Squash", "limit_of_rate", "scaled"]

RATES = frozenset({"lr", "erase", "window"})  # they scale a write, an erasure or a gradient
SPREAD = 8.0
RANK = 32
MOVES = 0.2  # standard deviation of z that a token of unit root mean square causes at the start
BEGINS = 0.5  # of the stability limit, for a rate stated as a share of it: docs/design/steps.md
LEAST = 1e-6  # of the sum of a window's weights: a window that weighs nothing writes nothing
NEAREST = 0.05  # share of a range between an end that options chose and a declared initial value
MARGIN = 1e-6  # keeps values off an end that the range excludes, also in float32


@dataclass(frozen=True, kw_only=True)
class Squash:
    """A monotone map from the real line onto a range, and back.

    Attributes:
        kind: as in `GateOptions`, and ``"minus_exp"`` for the exponential below an end.
        low, high: the ends that the kind uses.
    """

    kind: str
    low: float = 0.0
    high: float = 1.0
    temperature: float = 1.0

    def __call__(self, z: Tensor) -> Tensor:
        """Values of ``z``, entry by entry."""
        if self.kind == "sigmoid":
            share = torch.sigmoid(z)
            if self.low == 0.0 and self.high == 1.0:
                return share
            if share.requires_grad:
                return self.low + (self.high - self.low) * share
            return torch.rsub(share, self.low, alpha=self.low - self.high)  # in one operation
        if self.kind == "softplus":
            return self.low + functional.softplus(z)
        if self.kind == "logsigmoid":
            z = functional.logsigmoid(z)
            if self.high == 0.0 and self.temperature == 1.0:
                return z
            return self.high + z / self.temperature
        if self.kind == "celu":
            return functional.celu(z, alpha=-self.low)
        if self.kind == "exp":
            return self.low + z.exp()
        if self.kind == "minus_exp":
            return self.high - z.exp()
        return z

    def inverse(self, values: Tensor) -> Tensor:
        """z with ``self(z) == values``; values at an end go as far out as 1e-4 of the scale."""
        if self.kind == "sigmoid":
            share = (values - self.low) / (self.high - self.low)
            return torch.logit(share.clamp(1e-4, 1 - 1e-4))
        if self.kind == "softplus":
            return _unsoftplus((values - self.low).clamp_min(1e-4))
        if self.kind == "logsigmoid":
            return -_unsoftplus(((self.high - values) * self.temperature).clamp_min(1e-4))
        if self.kind == "celu":
            below = -self.low * (1 - values / self.low).clamp_min(1e-4).log()
            return torch.where(values < 0, below, values)
        if self.kind == "exp":
            return (values - self.low).clamp_min(1e-4).log()
        if self.kind == "minus_exp":
            return (self.high - values).clamp_min(1e-4).log()
        return values

    @property
    def ends(self) -> tuple[float | None, float | None]:
        """What values approach from above and from below; ``None`` where they have no end."""
        low = self.low if self.kind in ("sigmoid", "softplus", "celu", "exp") else None
        return low, self.high if self.kind in ("sigmoid", "logsigmoid", "minus_exp") else None

    def reaches(self, value: float) -> bool:
        """Whether a value lies within the ends, included."""
        bottom, top = self.ends
        return (bottom is None or value >= bottom) and (top is None or value <= top)

    def said(self, unit: float) -> str:
        """The ends as a message has them, ``unit`` being what its reader counts as 1."""
        low, high = (None if end is None else end / unit for end in self.ends)
        return str(Range(low=low, high=high))


def _unsoftplus(y: Tensor) -> Tensor:
    return y + torch.log(-torch.expm1(-y))


def _source(declared: Gate | Param) -> str:
    if isinstance(declared, Gate):
        return "input"
    return "learned" if declared.learned else "fixed"


def squash_of(declared: Gate | Param, options: GateOptions, *, unit: float = 1.0) -> Squash:
    """The squashing of a declared number; see the module's docstring.

    Args:
        declared: the number.
        options: in its own unit.
        unit: that of whoever wrote the options: a message speaks in it.

    Raises:
        RecipeError: ends that leave the declared range.
    """
    span, name = declared.range, declared.name
    start = declared.init if isinstance(declared.init, int | float) else 0.0
    low, high = options.low, options.high
    kind = options.squash
    if kind is None:
        if span.low is not None or low is not None:
            bounded = span.high is not None or high is not None
            kind = "sigmoid" if bounded or name in RATES else "softplus"
        else:
            kind = "identity" if span.high is None and high is None else "logsigmoid"
    if kind == "exp" and span.low is None and low is None:
        kind = "minus_exp"
    if kind == "celu" and (low is None or low >= 0 or high is not None):
        raise RecipeError(
            f"options of {name!r}: squash='celu' leaves what is above 0 as it is and ends at "
            "low < 0: give it low, and no high"
        )
    if low is None:
        low = 0.0 if span.low is None else span.low + MARGIN * span.low_open
    if high is None and span.high is not None:
        high = span.high - MARGIN * span.high_open
    if high is None and options.unit == "share" and low < 1:
        high = 1.0  # the limit, from whatever share on
    if high is None:
        # A rate that starts at 1 or above sits in the middle of its range.
        high = (
            0.0 if kind in ("logsigmoid", "minus_exp") else low + (1.0 if start < 1 else 2 * start)
        )
    squash = Squash(kind=kind, low=low, high=high, temperature=options.temperature)
    if kind == "sigmoid" and low >= high:
        raise RecipeError(
            f"options of {name!r}: low must be below high, and they are {low / unit:g} and "
            f"{high / unit:g}: choose another low, high or squash"
        )
    bottom, top = squash.ends
    fits = (span.low is None or (bottom is not None and bottom >= span.low)) and (
        span.high is None or (top is not None and top <= span.high)
    )
    if not fits:
        raise RecipeError(
            f"options of {name!r}: {kind} gives values {squash.said(unit)}, and {declared.owner} "
            f"allows {span}: choose another squash, low or high"
        )
    return squash


def _filled(size: int, value: float) -> Tensor:
    return torch.full((size,), value, dtype=torch.float64)


def _means(size: int) -> Tensor:
    """1/place."""
    return 1 / torch.arange(1, size + 1, dtype=torch.float64)


def _number(value: float) -> Tensor:
    return torch.full((), value, dtype=torch.float64)


def limit_of_rate(limit: StepLimit, values: Mapping[str, Tensor]) -> Tensor:
    """The stability limit of every token, as a factor of the rate ``"lr"`` ``[B, T, H, ...]``.

    Args:
        limit: of the recipe. values: gates and params by name, the rate among them.
    """
    rate, number = values["lr"], 2 * (1 - limit.theta) / (limit.batch * limit.window)
    if not (limit.gated or limit.momentum):
        return constant(_number, number, device=rate.device, dtype=rate.dtype)
    found: Tensor | float = number
    if limit.momentum:
        found = torch.rsub(values["momentum"], number, alpha=number)  # number · (1 − momentum)
    if limit.gated:
        found = found / values["window"].sum(-1).clamp_min(LEAST)
    assert isinstance(found, Tensor)
    return found.view(*found.shape, *(1,) * (rate.dim() - 3)) if rate.dim() > 3 else found


def scaled(x: Tensor, length: float) -> Tensor:
    """x of the given length over the last axis, in float32 at least; 0 stays 0."""
    work, K = x if x.dtype == torch.float64 else x.float(), x.shape[-1]
    if x.device.type != "cpu":  # one launch, where the other way takes five
        weight = constant(_filled, K, length / K**0.5, device=x.device, dtype=work.dtype)
        return functional.rms_norm(work, (K,), weight, 1e-12 / K).to(x.dtype)
    inverse = (work.square().sum(-1, keepdim=True) + 1e-12).rsqrt()
    return (work * (inverse if length == 1 else length * inverse)).to(x.dtype)


def _schedule(name: str, shape: tuple[int, ...], depth: tuple[int, int]) -> Tensor:
    """log α of shape ``[H, ...]``; or 1, 2, … along the last axis."""
    H, last = shape[0], shape[-1]
    if name == "integers":
        return torch.arange(1, last + 1, dtype=torch.float64).expand(shape).clone()
    h = torch.arange(H, dtype=torch.float64).view(-1, *(1,) * (len(shape) - 1))
    if name == "alibi":
        layer, layers = depth
        return (-(2.0 ** (-8 * (h + 1) / H)) * (1 - layer / layers)).expand(shape).clone()
    value = torch.log1p(-(2.0 ** (-5 - h)))
    if name == "xpos":
        pair = torch.arange(last, dtype=torch.float64) % (last // 2)
        value = value + ((2 * pair / last + 0.4) / 1.4).log() / 512
    return value.expand(shape).clone()


def _spread(log_decay: Tensor, factor: float) -> Tensor:
    """Numbers, or memory times −1/log α, spread geometrically along the last axis of size > 1."""
    axis = log_decay.dim() - 1 if log_decay.dim() > 1 else 0
    size = log_decay.shape[axis]
    if size == 1:
        return log_decay
    place = torch.linspace(1, -1, size, dtype=log_decay.dtype)
    return log_decay * (factor**place).view(
        [size if i == axis else 1 for i in range(log_decay.dim())]
    )


class GateProjection(nn.Module):
    """One gate ``[B, T, H, (n,) *axes]`` or param ``[H, *axes]`` of a recipe.

    Args:
        declared: what the recipe says about it.
        options: what the layer's options say about it.
        sizes: of the recipe's symbolic axes.
        d_model: width of the tokens.
        heads: H, number of memories.
        depth: (index of this layer, number of layers), for schedules.
        recipe: whose number it is.
        unit: what counts as 1 for whoever wrote the options, which come in the number's own unit
            (`GateOptions.lengths`): messages speak in it. Where it differs by place of the inner
            batch (``unit="mean"``) options come as they were written, and `forward` counts in it.

    Raises:
        RecipeError: options that do not fit the declaration.
    """

    def __init__(
        self,
        declared: Gate | Param,
        options: GateOptions,
        *,
        sizes: dict[str, int],
        d_model: int,
        heads: int,
        depth: tuple[int, int],
        recipe: Recipe,
        unit: float = 1.0,
    ) -> None:
        super().__init__()
        self.declared, self.options = declared, options
        self.by_place = options.unit == "mean"
        self.heads, self.depth = heads, depth
        gate = isinstance(declared, Gate)
        source = options.source or _source(declared)
        several = isinstance(declared, Gate) and recipe.per_association(declared)
        inner = [sizes[axis] for axis in declared.axes]
        self.shape = (heads, *([recipe.associations] if several else []), *inner)
        fan = declared.fan if isinstance(declared, Param) else ""
        self._fan = sizes[fan] if fan else None
        self._whole = self.shape  # where `shape` may be that of a part of the heads
        self.log = gate and declared.name.startswith("log_") and declared.range.high is not None
        self.decays = self.log or (not gate and declared.name in recipe.logs())
        if options.schedule not in (None, "integers") and not self.decays:
            raise RecipeError(f"options of {declared.name!r}: schedules are for decays")
        if options.schedule == "xpos" and (not inner or inner[-1] % 2):
            raise RecipeError(
                f"options of {declared.name!r}: schedule='xpos' is for decays of an even number of "
                "channels, as Decay(per='key') has"
            )
        if isinstance(options.init, tuple) and len(options.init) != heads:
            raise RecipeError(
                f"options of {declared.name!r}: init has {len(options.init)} values and there are "
                f"{heads} heads: give one per head, or one number"
            )
        self.drawn = not gate and declared.draw is not None
        if self.drawn and (options.init is not None or options.squash is not None):
            raise RecipeError(
                f"options of {declared.name!r}: {declared.owner} draws it, so init and squash have "
                "no place; only source may be given, 'learned' or 'fixed'"
            )
        self.squash = squash_of(declared, options, unit=unit)
        default = replace(options, low=None, high=None, squash=None)
        self._default_squash = squash_of(declared, default, unit=unit)
        self.key = self.squash.kind == "identity" and declared.axes[-1:] == ("K",)
        rank = options.rank
        if rank is None:
            rank = RANK if inner and "c" not in declared.axes and not self.key else 0
        self.rank = rank if rank < min(d_model, math.prod(self.shape)) else 0
        self._check_init(unit)

        self.weight = self.down = self.bias = None
        # A fixed number follows from the options: no buffer, which half precision would round
        # (0.999 to 1) and a checkpoint might lose.
        self._starts: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._kept: slice | None = None
        if source == "learned" or (source == "input" and not self.key):
            self.bias = nn.Parameter(torch.empty(self.shape))
        elif self.drawn:
            # What was drawn cannot be computed again: it is kept with the weights, untrained.
            self.bias = nn.Parameter(torch.empty(self.shape), requires_grad=False)
        if source == "input":
            width = self.rank or d_model
            self.weight = nn.Parameter(torch.empty(math.prod(self.shape), width))
            if self.rank:
                self.down = nn.Parameter(torch.empty(self.rank, d_model))
        self.source = source
        self.reset_parameters()

    def _check_init(self, unit: float) -> None:
        given = self.options.init
        for value in given if isinstance(given, tuple) else (given,):
            if value is not None and not self.squash.reaches(value):
                raise RecipeError(
                    f"options of {self.declared.name!r}: init must be {self.squash.said(unit)}, "
                    f"not {value / unit:g}"
                )

    def initial(self) -> Tensor:
        """Values at a zero input ``[H, (n,) *axes]``, in float64 on the CPU; drawn ones anew."""
        if torch.compiler.is_compiling():  # of models that are built: no device is being built on
            return self._initial()
        # Whatever device a model is being built on (meta, while a checkpoint is loaded).
        with torch.device("cpu"):
            return self._initial()

    def _initial(self) -> Tensor:
        options, value = self.options, self._declared_initial()
        exact = options.init is not None and options.spread is None
        return value if exact else self._inside(value)

    def _inside(self, value: Tensor) -> Tensor:
        """Move initial values away from the ends that the options chose.

        A value ends no nearer to such an end than a share `NEAREST` of the range, or than the value
        was to the end that the options replaced.
        """
        ends, default_ends = self.squash.ends, self._default_squash.ends
        if ends == default_ends:
            return value
        nearest = torch.logit(value.new_tensor(1 - NEAREST))
        z = self._default_squash.inverse(value).abs().maximum(nearest)
        below, above = self.squash(-z), self.squash(z)
        if ends[0] is not None and ends[0] != default_ends[0]:
            value = value.maximum(below.minimum(above))
        if ends[1] is not None and ends[1] != default_ends[1]:
            value = value.minimum(below.maximum(above))
        return value

    def _declared_initial(self) -> Tensor:
        """Values at a zero input before `_inside`."""
        options, declared = self.options, self.declared
        if isinstance(declared, Param) and self.drawn:
            return start(declared, self._whole, fan=self._fan)
        if options.schedule is not None:
            value = _schedule(options.schedule, self._whole, self.depth)
            return value.exp() if self.decays and not self.log else value
        given = options.init
        if given is None:
            given = BEGINS if options.unit == "share" else declared.init
        if isinstance(given, tuple) and options.init is None:
            # A member's tuple runs along the last axis, an option's over heads.
            return torch.tensor(given, dtype=torch.float64).expand(self._whole).clone()
        value = torch.tensor(given, dtype=torch.float64)
        value = self._per_head(value.expand(self.heads))
        factor = options.spread or (SPREAD if options.init is None else 1.0)
        if self.decays and not self.log and factor != 1:
            return _spread(value.log(), factor).exp()
        if factor != 1 and (self.decays or options.spread is not None):
            value = _spread(value, factor)
        return value

    def start(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """`initial`, kept where it was asked for."""
        place = (device, dtype)
        if place in self._starts:
            return self._starts[place]
        with torch.inference_mode(False):  # it will be used outside of the mode too
            value = self.initial() if self._kept is None else self.initial()[self._kept]
            value = value.to(device=device, dtype=dtype)
            value = value * self._unit(value) if self.by_place else value
        if lasts(value):
            self._starts[place] = value
        return value

    def _unit(self, like: Tensor) -> Tensor:
        """What counts as 1 for the options, where it differs by place of the inner batch."""
        return constant(_means, self.shape[-1], device=like.device, dtype=like.dtype)

    def keep_heads(self, index: int, parts: int) -> None:
        """Be the projection of one part of the heads; its weights are cut by whoever asks for it.

        Fixed numbers stay those of these heads: schedules and spreads run over all of them.

        Args:
            index: of the part, from 0.
            parts: equal ones.
        """
        each = self.heads // parts
        self._kept = slice(index * each, (index + 1) * each)
        self.shape = (each, *self.shape[1:])
        self._starts.clear()

    def _per_head(self, value: Tensor) -> Tensor:
        return value.view(-1, *(1,) * (len(self._whole) - 1)).expand(self._whole).clone()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to the start: `initial` at a zero input, and small projections."""
        if self.bias is not None and not self.bias.is_meta:
            z = self.squash.inverse(self.initial())
            self.bias.copy_(z * self._unit(z) if self.by_place else z)
        scale = 1.0 if self.key else MOVES
        if self.weight is not None:
            nn.init.normal_(self.weight, std=scale * self.weight.shape[1] ** -0.5)
        if self.down is not None:
            nn.init.normal_(self.down, std=self.down.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """The gate at tokens ``x [B, T, d_model]``; a param is the same for all.

        Squashed in float32 at least: half precision would round a decay of 0.999 to 1.
        """
        work = torch.float64 if x.dtype == torch.float64 else torch.float32
        weight, bias, down = self.weight, self.bias, self.down
        if self.source == "fixed" and bias is None:
            value = self.start(x.device, work)
        else:
            z = None if bias is None else bias.to(work)
            if weight is not None:
                h = x if down is None else functional.linear(x, down)
                flat = len(self.shape) == 1
                plain = flat and z is not None and x.dtype == h.dtype == weight.dtype == work
                if plain and not (torch.is_grad_enabled() or autocasts(x.device.type)):
                    z = functional.linear(h, weight, z)  # one operation where each one counts
                else:
                    moved = functional.linear(h, weight).to(work)
                    moved = moved if flat else moved.unflatten(-1, self.shape)
                    z = moved if z is None else moved + z
            assert z is not None
            if self.by_place:
                unit = self._unit(z)
                value = self.squash(z / unit) * unit
            else:
                value = self.squash(z)
        if weight is None and isinstance(self.declared, Gate):
            return value.expand(*x.shape[:2], *self.shape)
        return value

    def extra_repr(self) -> str:
        """Shape, source and squashing."""
        low_rank = f", rank={self.rank}" if self.rank and self.source == "input" else ""
        return f"{list(self.shape)}, {self.source}, {self.squash.kind}{low_rank}"
