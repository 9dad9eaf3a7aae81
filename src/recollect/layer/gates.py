"""Gate projections: modules that compute the gates and params that a recipe declares.

The declared range, axes and initial value of a gate determine its activation, shape and bias:

========================================  =====================================================
declared range                            value of z
========================================  =====================================================
[a, b)                                    a + (b − a) sigmoid(z)
≥ a, and a *rate* (lr, erase, window)     a + sigmoid(z): with keys of unit length a step in
                                          (0, 1) neither vanishes nor overshoots
≥ a, any other (thresholds, radii)        a + softplus(z)
≤ b (log decays)                          b + logsigmoid(z)
everything                                z; a gate over K is a key, with the norm of keys
========================================  =====================================================

Decays start near their declared value, 0.98, with memory times spread over the heads by a factor of
8 in both directions (6 to 400 tokens). Projections start small: a token of unit root mean square
changes z by about 0.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from recollect.choices.runtime import autocast_enabled, cached_constant, is_cacheable
from recollect.fields import Gate, Param, Range
from recollect.layer.depth_floors import DepthFloors
from recollect.layer.options import GateOptions
from recollect.messages import RecipeError
from recollect.recipe.initial_params import initial_value

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe
    from recollect.recipe.stability import StabilityLimit

__all__ = [
    "GateProjection",
    "RangeMap",
    "normalize_to_length",
    "share_depth_floors",
    "stability_limit",
]

DECAY_SPREAD = 8.0
GATE_RANK = 32
GATE_INIT_STD = 0.2  # initial standard deviation of z for tokens of unit root mean square
INITIAL_SHARE = 0.5  # initial multiple of the stability limit: docs/design/steps.md
MIN_WINDOW_SUM = 1e-6  # lower bound of the sum of a window's weights
NEAREST = 0.05  # distance of an initial value from an end that options chose, per width of range
OPEN_END_MARGIN = 1e-6  # distance from an end that the range excludes, effective in float32


@dataclass(frozen=True, kw_only=True)
class RangeMap:
    """A monotone map from the real line onto a range, and its inverse."""

    kind: str  # kind in `GateOptions`, or "minus_exp" for the exponential below an end
    low: float = 0.0  # lower end of the range, if the kind uses it
    high: float = 1.0  # upper end of the range, if the kind uses it
    temperature: float = 1.0  # divisor of the logarithm of the sigmoid

    def __call__(self, z: Tensor) -> Tensor:
        if self.kind == "sigmoid":
            share = torch.sigmoid(z)
            if self.low == 0.0 and self.high == 1.0:
                return share
            if share.requires_grad:
                return self.low + (self.high - self.low) * share
            return torch.rsub(share, self.low, alpha=self.low - self.high)  # one operation
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
        """Return z with ``self(z) == values``; values at an end are moved inside by 1e-4."""
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
        """Lower and upper limit of the values; ``None`` if there is no limit."""
        low = self.low if self.kind in ("sigmoid", "softplus", "celu", "exp") else None
        return low, self.high if self.kind in ("sigmoid", "logsigmoid", "minus_exp") else None

    def contains(self, value: float) -> bool:
        """Whether a value lies between the ends, inclusive."""
        bottom, top = self.ends
        return (bottom is None or value >= bottom) and (top is None or value <= top)

    def range_text(self, unit: float) -> str:
        """Return the range for a message, in the given unit."""
        low, high = (None if end is None else end / unit for end in self.ends)
        return str(Range(low=low, high=high))


def _unsoftplus(y: Tensor) -> Tensor:
    return y + torch.log(-torch.expm1(-y))


def _source(declared: Gate | Param) -> str:
    if isinstance(declared, Gate):
        return "input"
    return "learned" if declared.learned else "constant"


def range_map(declared: Gate | Param, options: GateOptions, *, unit: float = 1.0) -> RangeMap:
    """Return the activation of a gate or param; see the module's docstring.

    Options are in the unit of the declaration. Messages give ends as multiples of ``unit``.
    """
    declared_range, name = declared.range, declared.name
    start = declared.init if isinstance(declared.init, int | float) else 0.0
    low, high = options.low, options.high
    kind = options.activation
    if kind is None:
        if declared_range.low is not None or low is not None:
            bounded = declared_range.high is not None or high is not None
            kind = "sigmoid" if bounded or declared.role == "rate" else "softplus"
        else:
            kind = "identity" if declared_range.high is None and high is None else "logsigmoid"
    if kind == "exp" and declared_range.low is None and low is None:
        kind = "minus_exp"
    if kind == "celu" and (low is None or low >= 0 or high is not None):
        raise RecipeError(
            f"options of {name!r}: activation='celu' has a lower end low < 0 and no upper end: set "
            "low, and leave high out"
        )
    if low is None:
        low = (
            0.0
            if declared_range.low is None
            else declared_range.low + OPEN_END_MARGIN * declared_range.low_open
        )
    if high is None and declared_range.high is not None:
        high = declared_range.high - OPEN_END_MARGIN * declared_range.high_open
    if high is None and options.unit == "stability_limit" and low < 1:
        high = 1.0  # the stability limit
    if high is None:
        # A rate that starts at 1 or above starts in the middle of its range.
        high = (
            0.0 if kind in ("logsigmoid", "minus_exp") else low + (1.0 if start < 1 else 2 * start)
        )
    range_ = RangeMap(kind=kind, low=low, high=high, temperature=options.temperature)
    if kind == "sigmoid" and low >= high:
        raise RecipeError(
            f"options of {name!r}: low must be below high, and they are {low / unit:g} and "
            f"{high / unit:g}: choose another low, high or activation"
        )
    bottom, top = range_.ends
    fits = (
        declared_range.low is None or (bottom is not None and bottom >= declared_range.low)
    ) and (declared_range.high is None or (top is not None and top <= declared_range.high))
    if not fits:
        raise RecipeError(
            f"options of {name!r}: {kind} has values {range_.range_text(unit)}, and "
            f"{declared.owner} allows {declared_range}: choose another activation, low or high"
        )
    return range_


def _full(shape: tuple[int, ...], value: float) -> Tensor:
    return torch.full(shape, value, dtype=torch.float64)


def _inverse_places(size: int) -> Tensor:
    """1/position."""
    return 1 / torch.arange(1, size + 1, dtype=torch.float64)


def stability_limit(limit: StabilityLimit, values: Mapping[str, Tensor]) -> Tensor:
    """Return the stability limit of the rate ``"lr"`` at every token ``[B, T, H, ...]``.

    ``values`` are gates and params by name, including the rate.
    """
    rate = values["lr"]
    factor = 2 * (1 - limit.constant_momentum) / (limit.batch_size * limit.window)
    if not (limit.gated or limit.momentum):
        return cached_constant(_full, (), factor, device=rate.device, dtype=rate.dtype)
    result: Tensor | float = factor
    if limit.momentum:
        result = torch.rsub(values["momentum"], factor, alpha=factor)  # factor · (1 − momentum)
    if limit.gated:
        result = result / values["window"].sum(-1).clamp_min(MIN_WINDOW_SUM)
    assert isinstance(result, Tensor)
    return result.view(*result.shape, *(1,) * (rate.dim() - 3)) if rate.dim() > 3 else result


def normalize_to_length(x: Tensor, length: float, eps: float = 1e-12) -> Tensor:
    """Return length · x/√(‖x‖² + ε) over the last axis, computed in at least float32."""
    work, K = x if x.dtype == torch.float64 else x.float(), x.shape[-1]
    if x.device.type != "cpu":  # one kernel launch instead of five
        weight = cached_constant(_full, (K,), length / K**0.5, device=x.device, dtype=work.dtype)
        return functional.rms_norm(work, (K,), weight, eps / K).to(x.dtype)
    inverse = (work.square().sum(-1, keepdim=True) + eps).rsqrt()
    return (work * (inverse if length == 1 else length * inverse)).to(x.dtype)


def _schedule(name: str, shape: tuple[int, ...], depth: tuple[int, int]) -> Tensor:
    """Return log α of shape ``[H, ...]``, or 1, 2, … along the last axis."""
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


def _geometric_spread(log_decay: Tensor, factor: float, *, axis: int) -> Tensor:
    """Spread values (or memory times −1/log α) geometrically along an axis."""
    axis %= log_decay.dim()
    size = log_decay.shape[axis]
    if size == 1:
        return log_decay
    exponent = torch.linspace(1, -1, size, dtype=log_decay.dtype)
    return log_decay * (factor**exponent).view(
        [size if i == axis else 1 for i in range(log_decay.dim())]
    )


class GateProjection(nn.Module):
    """One gate ``[B, T, H, (n,) *axes]`` or param ``[H, *axes]`` of a recipe."""

    def __init__(
        self,
        declared: Gate | Param,
        # Options of the gate, in the unit of the declaration (`GateOptions.in_value_units`).
        # Options with unit="batch_mean" keep their unit, which `forward` applies.
        options: GateOptions,
        *,
        sizes: dict[str, int],  # sizes of the recipe's symbolic axes
        d_model: int,  # width of the tokens
        heads: int,  # H, number of memories
        depth: tuple[int, int],  # (index of this layer, number of layers), for schedules
        recipe: Recipe,  # recipe with the declaration
        # whether all associations of a token have one value, without the axis n
        per_token: bool = False,
        # size of the unit in which the options were written, for error messages
        unit: float = 1.0,
    ) -> None:
        super().__init__()
        self.declared, self.options = declared, options
        self.unit_is_per_position = options.unit == "batch_mean"
        self.heads, self.depth = heads, depth
        gate = isinstance(declared, Gate)
        source = options.source or _source(declared)
        per_association = isinstance(declared, Gate) and recipe.per_association(declared)
        per_association = per_association and not per_token
        inner = [sizes[axis] for axis in declared.axes]
        # Sizes of the axes along which values are equal.
        self.shared_sizes = tuple(inner) if options.per == "head" else ()
        inner = [1] * len(inner) if self.shared_sizes else inner
        self.shape = (heads, *([recipe.associations_per_token] if per_association else []), *inner)
        fan = declared.fan if isinstance(declared, Param) else ""
        self._fan_in = sizes[fan] if fan else None
        self._full_shape = self.shape  # `shape` is that of a part of the heads after `shard_heads`
        self.is_decay = declared.role == "decay" and declared.is_log
        self.is_log = gate and self.is_decay  # a log decay, as engines take it
        if options.init_schedule not in (None, "integers") and not self.is_decay:
            raise RecipeError(f"options of {declared.name!r}: schedules are for decays")
        if options.init_schedule == "xpos" and (not inner or inner[-1] % 2):
            raise RecipeError(
                f"options of {declared.name!r}: init_schedule='xpos' is for decays of an even "
                "number of channels, as Decay(per='key') has"
            )
        if isinstance(options.init, tuple) and len(options.init) != heads:
            raise RecipeError(
                f"options of {declared.name!r}: init has {len(options.init)} values and there are "
                f"{heads} heads: set one per head, or one number"
            )
        if options.depth_floor and not self.is_log:
            raise RecipeError(
                f"options of {declared.name!r}: depth_floor=True is for log decays: leave it out"
            )
        self.floors = DepthFloors(depth[1], self.shape) if options.depth_floor else None
        self._shared_floors: tuple[DepthFloors, ...] = ()  # in a tuple, so no submodule
        self.is_random = not gate and declared.draw is not None
        if self.is_random and (options.init is not None or options.activation is not None):
            raise RecipeError(
                f"options of {declared.name!r}: {declared.owner} samples its values, so init and "
                "activation have no effect: set only source, to 'learned' or 'constant'"
            )
        self.activation = range_map(declared, options, unit=unit)
        default = replace(options, low=None, high=None, activation=None)
        self._default_activation = range_map(declared, default, unit=unit)
        self.is_key = self.activation.kind == "identity" and declared.axes[-1:] == ("K",)
        rank = options.rank
        if rank is None:
            has_channels = inner and not self.shared_sizes
            is_low = has_channels and "c" not in declared.axes and not self.is_key
            rank = GATE_RANK if is_low else 0
        self.rank = rank if rank < min(d_model, math.prod(self.shape)) else 0
        self._check_init(unit)

        self.weight = self.down = self.bias = None
        # A constant follows from the options. It is not a buffer, because half precision would
        # round it (0.999 to 1).
        self._fixed_values: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._head_slice: slice | None = None
        if not options.bias and source != "input":
            raise RecipeError(
                f"options of {declared.name!r}: bias=False is for gates of the input, and this one "
                f"is {source}: leave it out"
            )
        if source == "learned" or (source == "input" and options.bias and not self.is_key):
            self.bias = nn.Parameter(torch.empty(self.shape))
        elif self.is_random:
            # Random values are saved with the weights, without training.
            self.bias = nn.Parameter(torch.empty(self.shape), requires_grad=False)
        if source == "input":
            width = self.rank or d_model
            self.weight = nn.Parameter(torch.empty(math.prod(self.shape), width))
            if self.rank:
                self.down = nn.Parameter(torch.empty(self.rank, d_model))
        self.source = source
        self.reset_parameters()

    def _check_init(self, unit: float) -> None:
        init = self.options.init
        for value in init if isinstance(init, tuple) else (init,):
            if value is not None and not self.activation.contains(value):
                raise RecipeError(
                    f"options of {self.declared.name!r}: init must be "
                    f"{self.activation.range_text(unit)}, not {value / unit:g}"
                )

    def initial(self) -> Tensor:
        """Return values at a zero input ``[H, (n,) *axes]``, in float64 on the CPU."""
        if torch.compiler.is_compiling():  # the default device is not changed in compiled code
            return self._initial()
        # The default device may be another one, such as meta while a checkpoint is loaded.
        with torch.device("cpu"):
            return self._initial()

    def _initial(self) -> Tensor:
        options = self.options
        if not options.bias:
            return self.activation(torch.zeros(self._full_shape, dtype=torch.float64))
        value = self._declared_initial()
        exact = options.init is not None and options.head_spread is None
        return value if exact else self._inside(value)

    def _inside(self, value: Tensor) -> Tensor:
        """Move initial values away from the ends that the options chose.

        The distance from such an end is at least `NEAREST` of the range, or the distance of the
        declared value from the end that the options replaced.
        """
        ends, default_ends = self.activation.ends, self._default_activation.ends
        if ends == default_ends:
            return value
        nearest = torch.logit(value.new_tensor(1 - NEAREST))
        z = self._default_activation.inverse(value).abs().maximum(nearest)
        below, above = self.activation(-z), self.activation(z)
        if ends[0] is not None and ends[0] != default_ends[0]:
            value = value.maximum(below.minimum(above))
        if ends[1] is not None and ends[1] != default_ends[1]:
            value = value.minimum(below.maximum(above))
        return value

    def _declared_initial(self) -> Tensor:
        """Return values at a zero input before `_inside`."""
        options, declared = self.options, self.declared
        if isinstance(declared, Param) and self.is_random:
            return initial_value(declared, self._full_shape, fan=self._fan_in)
        if options.init_schedule is not None:
            value = _schedule(options.init_schedule, self._full_shape, self.depth)
            return value.exp() if self.is_decay and not self.is_log else value
        init = options.init
        if init is None:
            init = INITIAL_SHARE if options.unit == "stability_limit" else declared.init
        if isinstance(init, tuple) and options.init is None:
            # A tuple of a member runs along the last axis, a tuple of options over heads.
            return torch.tensor(init, dtype=torch.float64).expand(self._full_shape).clone()
        value = torch.tensor(init, dtype=torch.float64)
        value = self._per_head(value.expand(self.heads))
        factor = options.head_spread or (DECAY_SPREAD if options.init is None else 1.0)
        if self.is_decay and not self.is_log and factor != 1:
            return self._spread(value.log(), factor).exp()
        if factor != 1 and (self.is_decay or options.head_spread is not None):
            value = self._spread(value, factor)
        return value

    def value_at_zero(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return `initial` in the unit of the declaration, cached by device and dtype."""
        key = (device, dtype)
        if key in self._fixed_values:
            return self._fixed_values[key]
        with torch.inference_mode(False):  # the value is also used outside inference mode
            value = self.initial()
            value = value if self._head_slice is None else value[self._head_slice]
            value = value.to(device=device, dtype=dtype)
            value = value * self._unit(value) if self.unit_is_per_position else value
        if is_cacheable(value):
            self._fixed_values[key] = value
        return value

    def _unit(self, like: Tensor) -> Tensor:
        """Return the unit of the options at each position of the inner batch."""
        return cached_constant(
            _inverse_places, self.shape[-1], device=like.device, dtype=like.dtype
        )

    def shard_heads(self, index: int, parts: int) -> None:
        """Make this the projection of one of equal parts of the heads; the caller cuts the weights.

        Constants are those of these heads: schedules and spreads run over all heads.
        """
        size = self.heads // parts
        self._head_slice = slice(index * size, (index + 1) * size)
        self.shape = (size, *self.shape[1:])
        self._fixed_values.clear()

    def share_floors(self, floors: DepthFloors) -> None:
        """Take the lower ends of other layers, which another module owns."""
        self.floors, self._shared_floors = None, (floors,)

    def _spread(self, log_decay: Tensor, factor: float) -> Tensor:
        """Spread values over the channels, or over the heads if there are no separate channels."""
        return _geometric_spread(log_decay, factor, axis=0 if self.shared_sizes else -1)

    def _per_head(self, value: Tensor) -> Tensor:
        return value.view(-1, *(1,) * (len(self._full_shape) - 1)).expand(self._full_shape).clone()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset the bias to `initial`, and sample small projections."""
        if self.bias is not None and not self.bias.is_meta:
            z = self.activation.inverse(self.initial())
            self.bias.copy_(z * self._unit(z) if self.unit_is_per_position else z)
        scale = 1.0 if self.is_key else GATE_INIT_STD
        if self.weight is not None:
            nn.init.normal_(self.weight, std=scale * self.weight.shape[1] ** -0.5)
        if self.down is not None:
            nn.init.normal_(self.down, std=self.down.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the gate at tokens ``x [B, T, d_model]``, or the param.

        The activation runs in at least float32: half precision rounds a decay of 0.999 to 1.
        """
        work = torch.float64 if x.dtype == torch.float64 else torch.float32
        weight, bias, down = self.weight, self.bias, self.down
        if self.source == "constant" and bias is None:
            value = self.value_at_zero(x.device, work)
        else:
            z = None if bias is None else bias.to(work)
            if weight is not None:
                h = x if down is None else functional.linear(x, down)
                flat = len(self.shape) == 1
                one_dtype = flat and z is not None and x.dtype == h.dtype == weight.dtype == work
                if one_dtype and not (torch.is_grad_enabled() or autocast_enabled(x.device.type)):
                    z = functional.linear(h, weight, z)  # one operation
                else:
                    projected = functional.linear(h, weight).to(work)
                    projected = projected if flat else projected.unflatten(-1, self.shape)
                    z = projected if z is None else projected + z
            assert z is not None
            if self.unit_is_per_position:
                unit = self._unit(z)
                value = self.activation(z / unit) * unit
            else:
                value = self.activation(z)
        for floors in self._shared_floors if self.floors is None else (self.floors,):
            value = floors(value, self.depth[0])
        if weight is None and isinstance(self.declared, Gate):
            value = value.expand(*x.shape[:2], *self.shape)
        if self.shared_sizes:
            value = value.expand(*value.shape[: -len(self.shared_sizes)], *self.shared_sizes)
        return value

    def extra_repr(self) -> str:
        low_rank = f", rank={self.rank}" if self.rank and self.source == "input" else ""
        return f"{list(self.shape)}, {self.source}, {self.activation.kind}{low_rank}"


def share_depth_floors(model: nn.Module) -> DepthFloors | None:
    """Let all gates with lower ends by depth share those of the first one, and return them.

    Raises:
        RecipeError: gates of different shapes.
    """
    gates = [m for m in model.modules() if isinstance(m, GateProjection) and m.floors is not None]
    if not gates:
        return None
    floors = gates[0].floors
    assert floors is not None
    for gate in gates:
        if gate.shape != gates[0].shape:
            raise RecipeError(
                "GateOptions(depth_floor=True) shares lower ends among layers, and their decays "
                f"have the shapes {[*gates[0].shape]} and {[*gate.shape]}: use one shape"
            )
        gate.share_floors(floors)
    return floors
