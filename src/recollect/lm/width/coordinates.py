"""The coordinate check: how large activations are, and how far training moves them, by width.

Rules for width are right when neither depends on the width (Yang and Hu et al. 2022, appendix D.1).
So the same few steps are taken at several widths, and of the output of every module, its
*coordinates*,

    size_n = rms(x_0),      change_n = rms(x_s − x_0),

are measured on one batch, before the first step and after s of them. A line through log change_n
over log n has the slope 0 where a width may be as large as one likes, 1 where twice the width moves
twice as far.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from recollect.layer.gates import GateProjection
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.model import RecollectForCausalLM
from recollect.lm.training.weight_decay import parameter_groups
from recollect.lm.width.roles import at_width
from recollect.lm.width.rules import scale_for_width, width_rules

__all__ = ["TOLERANCE", "Coordinate", "Coordinates", "check_coordinates"]

TOLERANCE = 0.25
"""Largest slope that counts as flat: a quarter of what a matrix's update has without rules, 1."""


@dataclass(frozen=True, kw_only=True)
class Coordinate:
    """One kind of activation, over all layers that have it.

    Attributes:
        name: of the module, after the name of the layer's recipe.
        sizes: rms before the first step, by width.
        changes: rms of how far it moved, by width.
        size_slope, change_slope: of a line through their logarithms over that of the width;
            ``None`` of what is 0 at every width.
        shrinks: whether it is made of outputs of a fixed number, whose initial weights give
            n^(−1/2), and what they learn gives 1: slopes from −1/2 on are as they should be. Of a
            linear map what was learned stands beside it alone.
        flat: whether the slopes are as rules for width have them.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes(
        ...     "gla", vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        ... )
        >>> ids = torch.randint(32, (4, 16))
        >>> batches = [{"input_ids": ids, "labels": ids}]
        >>> found = rc.lm.check_coordinates(config, batches, widths=[16, 32], lr=0.01, seeds=1)
        >>> "embed_tokens" in {one.name for one in found.coordinates}
        True
    """

    name: str
    sizes: Mapping[int, float]
    changes: Mapping[int, float]
    size_slope: float | None
    change_slope: float | None
    shrinks: bool
    flat: bool


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """The whole check.

    Attributes:
        parametrization: ``"standard"`` or ``"mup"``.
        base_width: of the rules; ``None`` without any.
        widths, lr, steps, seeds: as they were given.
        tolerance: largest slope that counts as flat.
        coordinates: in the order of the forward pass.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes(
        ...     "gla", vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        ... )
        >>> ids = torch.randint(32, (4, 16))
        >>> batches = [{"input_ids": ids, "labels": ids}]
        >>> found = rc.lm.check_coordinates(config, batches, widths=[16, 32], lr=0.01, seeds=1)
        >>> found.flat == all(one.flat for one in found.coordinates)
        True
    """

    parametrization: str
    base_width: int | None
    widths: tuple[int, ...]
    lr: float
    steps: int
    seeds: int
    tolerance: float
    coordinates: tuple[Coordinate, ...]

    @property
    def flat(self) -> bool:
        """Whether all coordinates are."""
        return all(one.flat for one in self.coordinates)

    @property
    def steepest(self) -> Coordinate:
        """The coordinate whose change grows or shrinks most."""
        return max(self.coordinates, key=lambda one: abs(one.change_slope or 0.0))

    def to_dict(self) -> dict[str, Any]:
        """Plain data; numbers that are not finite are ``None``."""
        return {**_finite(asdict(self)), "flat": self.flat}


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _finite(x) for name, x in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(x) for x in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def check_coordinates(
    config: RecollectConfig,
    batches: Sequence[Mapping[str, Tensor]],
    *,
    widths: Sequence[int],
    lr: float,
    base_width: int | None = None,
    seeds: int = 2,
    betas: tuple[float, float] = (0.9, 0.95),
    tolerance: float = TOLERANCE,
) -> Coordinates:
    """Take one step of Adam on each batch at several widths, and measure the coordinates.

    Args:
        config: of the model; its width is replaced, by heads of one size.
        batches: what the model's forward takes, with labels. Activations are those of the first.
        widths: at least two, ascending.
        lr: learning rate, constant, without weight decay and clipping.
        base_width: of the rules for width (muP); ``None`` is the standard parametrization.
        seeds: initial weights that are averaged over.
        betas: Adam's.
        tolerance: largest slope that counts as flat.

    Raises:
        RecipeError: a width that heads of this size do not fill, or a model that the rules do not
            cover.
        ValueError: fewer than two widths, or no batch.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes(
        ...     "gated_delta_net", vocab_size=32, hidden_size=16, num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> ids = torch.randint(32, (4, 16))
        >>> found = rc.lm.check_coordinates(
        ...     config, [{"input_ids": ids, "labels": ids}], widths=[16, 32], lr=0.01, seeds=1,
        ... )
        >>> found.parametrization, found.coordinates[0].name, sorted(found.coordinates[0].sizes)
        ('standard', 'embed_tokens', [16, 32])
    """
    if len(set(widths)) < 2 or list(widths) != sorted(set(widths)):
        raise ValueError(f"a slope needs two widths or more, ascending, not {list(widths)}")
    if not batches:
        raise ValueError("a coordinate check needs a batch for every step, and there is none")
    configs = {width: at_width(config, width) for width in widths}
    if base_width is not None:
        for one in configs.values():  # refused before anything is trained
            width_rules(one, base_width)
    logs: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for width, one in configs.items():
        logs[width] = defaultdict(list)
        for seed in range(seeds):
            found = _measured(one, batches, lr=lr, base_width=base_width, seed=seed, betas=betas)
            for name, pair in found.items():
                logs[width][name].append(pair)
    shrinking = _shrinking(configs[widths[0]], base_width)
    names = [name for name in logs[widths[0]] if all(name in logs[width] for width in widths)]
    return Coordinates(
        parametrization="standard" if base_width is None else "mup",
        base_width=base_width,
        widths=tuple(widths),
        lr=lr,
        steps=len(batches),
        seeds=seeds,
        tolerance=tolerance,
        coordinates=tuple(
            _coordinate(
                name,
                {width: logs[width][name] for width in widths},
                shrinks=any(f"{name}.".startswith(f"{one}.") for one in shrinking),
                tolerance=tolerance,
            )
            for name in names
        ),
    )


def _coordinate(
    name: str,
    pairs: Mapping[int, list[tuple[float, float]]],
    *,
    shrinks: bool,
    tolerance: float,
) -> Coordinate:
    sizes = {width: _mean([size for size, _ in found]) for width, found in pairs.items()}
    changes = {width: _mean([change for _, change in found]) for width, found in pairs.items()}
    size, change = _slope(sizes), _slope(changes)
    least = -tolerance - 0.5 * shrinks
    flat = all(x is None or least <= x <= tolerance for x in (size, change))
    return Coordinate(
        name=name,
        sizes=sizes,
        changes=changes,
        size_slope=size,
        change_slope=change,
        shrinks=shrinks,
        flat=flat,
    )


def _mean(values: Sequence[float]) -> float:
    return math.sqrt(sum(x * x for x in values) / len(values))


def _slope(by_width: Mapping[int, float]) -> float | None:
    """Of the line of least squares through log₂ of both."""
    values = list(by_width.values())
    if not all(x > 0 and math.isfinite(x) for x in values):
        return None if all(x == 0 for x in values) else math.inf
    return float(np.polyfit(np.log2(list(by_width)), np.log2(values), 1)[0])


def _measured(
    config: RecollectConfig,
    batches: Sequence[Mapping[str, Tensor]],
    *,
    lr: float,
    base_width: int | None,
    seed: int,
    betas: tuple[float, float],
) -> dict[str, tuple[float, float]]:
    """Size and change of every coordinate at one width."""
    device = next(iter(batches[0].values())).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        model = RecollectForCausalLM(config)
        if base_width is not None:
            scale_for_width(model, base_width)
        cast(nn.Module, model).to(device)
        begun = _begun(model, _shrinking(config, base_width))
        before = _activations(model, batches[0], begun)
        groups = parameter_groups(model, weight_decay=0.0, lr=lr, base_width=base_width)
        optimizer = torch.optim.AdamW(groups, betas=betas)
        model.train()
        for batch in batches:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
        after = _activations(model, batches[0], begun)
    found: dict[str, tuple[float, float]] = {}
    for name, values in before.items():
        moved = [b - a for a, b in zip(values, after[name], strict=True)]
        found[name] = _rms(values), _rms(moved)
    return found


def _rms(tensors: Sequence[Tensor]) -> float:
    count = sum(x.numel() for x in tensors)
    total = sum(float(x.double().square().sum()) for x in tensors)
    return math.sqrt(total / max(count, 1))


@torch.no_grad()
def _activations(
    model: RecollectForCausalLM, batch: Mapping[str, Tensor], begun: Mapping[nn.Module, Tensor]
) -> dict[str, list[Tensor]]:
    """What every module gives, by coordinate; of some maps what they learned, too."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    given = {name: x for name, x in batch.items() if name != "labels"}
    model.eval()
    with _watched(model, found, begun):
        model(**given, use_cache=False)
    return dict(found)


@contextlib.contextmanager
def _watched(
    model: RecollectForCausalLM,
    found: dict[str, list[Tensor]],
    begun: Mapping[nn.Module, Tensor],
) -> Iterator[None]:
    handles: list[RemovableHandle] = []
    for path, module in model.named_modules():
        name = _named(path, cast(RecollectConfig, model.config))
        if name is None or isinstance(module, nn.ParameterList | nn.ParameterDict):
            continue

        def note(module: nn.Module, given: Any, output: Any, name: str = name) -> None:
            found[name] += [x.detach().clone() for x in _outputs(module, given, output)]
            if module in begun:
                learned = cast(Tensor, module.weight) - begun[module]
                found[f"{name}, learned"].append(functional.linear(given[0], learned))

        handles.append(module.register_forward_hook(note))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _begun(model: RecollectForCausalLM, names: set[str]) -> dict[nn.Module, Tensor]:
    """The initial weights of linear maps, of coordinates by name."""
    config = cast(RecollectConfig, model.config)
    return {
        module: module.weight.detach().clone()
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and _named(path, config) in names
    }


_BLOCK = re.compile(r"blocks\.(\d+)(?:\.(.*))?$")


def _named(path: str, config: RecollectConfig) -> str | None:
    """The coordinate that a module's output is; ``None`` of the whole model."""
    path = path.removeprefix("model.")
    if path in ("", "model", "blocks"):
        return None
    block = _BLOCK.match(path)
    if block is None:
        return path
    inside = block[2]
    if inside is None:
        return "residual stream"
    if not inside.startswith("layer"):
        return inside
    return config.pattern[int(block[1])] + inside.removeprefix("layer")


def _outputs(module: nn.Module, given: Any, output: Any) -> list[Tensor]:
    """The tensors that a module gives; of a gate, what it squashes, which has no bounds."""
    if isinstance(module, GateProjection):
        return [] if module.source == "constant" else [_unsquashed(module, given[0])]
    if isinstance(output, Mapping):
        return [x for x in output.values() if isinstance(x, Tensor)]
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        own = {id(weight) for weight in module.parameters()}
        # An initial memory gives all of its maps; others what they make, and then a state.
        return [x for x in output if id(x) in own] or [output[0]]
    return []


def _unsquashed(gate: GateProjection, x: Tensor) -> Tensor:
    z = x.new_zeros(()) if gate.bias is None else gate.bias
    if gate.weight is not None:
        h = x if gate.down is None else functional.linear(x, gate.down)
        z = z + functional.linear(h, gate.weight).unflatten(-1, gate.shape)
    return z


def _shrinking(config: RecollectConfig, base_width: int | None) -> set[str]:
    """Coordinates that parameters of the role ``"output"`` make; without rules only the logits."""
    found = {"lm_head"}
    if base_width is None:
        return found
    for name, rule in width_rules(config, base_width).items():
        if rule.role == "output":
            found.add(_named(name.rpartition(".")[0], config) or name)
    return found
