"""Coordinate check: sizes of activations and of their changes in training, at several widths.

Under correct rules for width neither depends on the width (Yang and Hu et al. 2022, appendix D.1).
The check takes a few steps at several widths. On one batch it measures the outputs x of every
module, the *coordinates*, before the first step and after s steps:

    size_n = rms(x_0),      change_n = rms(x_s − x_0).

The slope of log change_n over log n is 0 if the change does not depend on the width n, and 1 if it
doubles with the width.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from recollect.choices.runtime import seeded_generators
from recollect.layer.gates import GateProjection
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.model import RecollectForCausalLM
from recollect.lm.mup.roles import config_at_width
from recollect.lm.mup.rules import lr_scales, scale_for_width, split_groups_by_lr, width_rules
from recollect.serialization import plain

__all__ = ["TOLERANCE", "Coordinate", "Coordinates", "check_coordinates"]

TOLERANCE = 0.25
"""Largest slope that counts as flat; without rules the update of a matrix has slope 1."""


@dataclass(frozen=True, kw_only=True)
class Coordinate:
    """Size and change of one kind of activation, over all layers that have it.

    Attributes:
        name: name of the module, after the name of the layer's recipe.
        sizes: root mean square before the first step, by width.
        changes: root mean square of the change, by width.
        size_slope, change_slope: slopes of their logarithms over the logarithm of the width;
            ``None`` if the value is 0 at every width.
        shrinks: whether the activation is computed from outputs of a fixed number. Initial weights
            give them the slope −1/2 and learned ones the slope 0, so −1/2 counts as flat. The
            learned part of a linear layer is a separate coordinate.
        flat: whether both slopes are within the tolerance.

    Examples:
        >>> coordinate = rc.lm.Coordinate(
        ...     name="lm_head", sizes={64: 1.0, 256: 0.5}, changes={64: 0.1, 256: 0.1},
        ...     size_slope=-0.5, change_slope=0.0, shrinks=True, flat=True,
        ... )
        >>> coordinate.sizes[256]
        0.5
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
    """Result of `check_coordinates`.

    Attributes:
        parametrization: ``"standard"`` or ``"mup"``.
        base_width: base width of the rules; ``None`` without rules.
        widths, lr, steps, seeds: arguments of the check.
        tolerance: largest slope that counts as flat.
        coordinates: in the order of the forward pass.

    Examples:
        >>> result = rc.lm.Coordinates(
        ...     parametrization="mup", base_width=64, widths=(64, 256), lr=0.01, steps=4, seeds=2,
        ...     tolerance=0.25, coordinates=(),
        ... )
        >>> result.flat
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
        """Whether all coordinates are flat."""
        return all(coordinate.flat for coordinate in self.coordinates)

    @property
    def steepest(self) -> Coordinate:
        """The coordinate with the largest slope of the change, by absolute value."""
        return max(self.coordinates, key=lambda coordinate: abs(coordinate.change_slope or 0.0))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; numbers that are not finite are ``None``."""
        return {**plain(asdict(self)), "flat": self.flat}


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
    """Take one step of Adam per batch at several widths, and measure the coordinates.

    Args:
        config: configuration of the model. Its width is replaced, with heads of the same size.
        batches: arguments of the model's forward pass, with labels. The coordinates are measured on
            the first batch.
        widths: at least two, ascending.
        lr: learning rate, constant, without weight decay and clipping.
        base_width: base width of the rules (muP); ``None`` for the standard parametrization.
        seeds: number of seeds of the initial weights to average over.
        betas: Adam's coefficients.
        tolerance: largest slope that counts as flat.

    Raises:
        RecipeError: a width is not a multiple of the size of the heads, or the rules do not cover
            the model.
        ValueError: fewer than two widths, or no batch.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes(
        ...     "gated_delta_net", vocab_size=32, hidden_size=16, num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> ids = torch.randint(32, (4, 16))
        >>> result = rc.lm.check_coordinates(
        ...     config, [{"input_ids": ids, "labels": ids}], widths=[16, 32], lr=0.01, seeds=1,
        ... )
        >>> result.parametrization, result.coordinates[0].name, sorted(result.coordinates[0].sizes)
        ('standard', 'embed_tokens', [16, 32])
    """
    if len(set(widths)) < 2 or list(widths) != sorted(set(widths)):
        raise ValueError(f"a slope needs two widths or more, ascending, not {list(widths)}")
    if not batches:
        raise ValueError("a coordinate check needs at least one batch: one per step")
    configs = [config_at_width(config, width) for width in widths]
    # The rules of all widths are checked before the first model is trained.
    output_names, *_ = [_output_names(width_config, base_width) for width_config in configs]
    measure = partial(
        _measure_width,
        batches=batches,
        output_names=output_names,
        lr=lr,
        base_width=base_width,
        seeds=seeds,
        betas=betas,
    )
    measured = [measure(width_config) for width_config in configs]
    coordinates: list[Coordinate] = []
    for name in measured[0]:
        if not all(name in by_name for by_name in measured):
            continue
        sizes, changes = (
            {width: by_name[name][i] for width, by_name in zip(widths, measured, strict=True)}
            for i in (0, 1)
        )
        shrinks = any(f"{name}.".startswith(f"{output}.") for output in output_names)
        slopes, minimum = (_slope(sizes), _slope(changes)), -tolerance - 0.5 * shrinks
        coordinate = Coordinate(
            name=name,
            sizes=sizes,
            changes=changes,
            size_slope=slopes[0],
            change_slope=slopes[1],
            shrinks=shrinks,
            flat=all(slope is None or minimum <= slope <= tolerance for slope in slopes),
        )
        coordinates.append(coordinate)
    return Coordinates(
        parametrization="standard" if base_width is None else "mup",
        base_width=base_width,
        widths=tuple(widths),
        lr=lr,
        steps=len(batches),
        seeds=seeds,
        tolerance=tolerance,
        coordinates=tuple(coordinates),
    )


def _slope(by_width: Mapping[int, float]) -> float | None:
    """Return the slope of log₂ value over log₂ width by least squares."""
    values = np.array([*by_width.values()])
    if not (np.isfinite(values) & (values > 0)).all():
        return math.inf if values.any() else None
    return float(np.polyfit(np.log2([*by_width]), np.log2(values), 1)[0])


def _measure_width(
    config: RecollectConfig,
    *,
    batches: Sequence[Mapping[str, Tensor]],
    output_names: set[str],
    lr: float,
    base_width: int | None,
    seeds: int,
    betas: tuple[float, float],
) -> dict[str, tuple[float, float]]:
    """Train models of one width; return the mean size and change of every coordinate."""
    squares: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for seed in range(seeds):
        with seeded_generators(seed, []), torch.device("cpu"):  # weights are drawn on the CPU
            model = RecollectForCausalLM(config)
        if base_width is not None:
            scale_for_width(model, base_width)
        cast(nn.Module, model).to(next(iter(batches[0].values())).device)
        recorder = CoordinateRecorder(model, output_names)
        initial = recorder.record(batches[0])
        groups = [{"params": [*model.parameters()], "lr": lr, "weight_decay": 0.0}]
        if base_width is not None:
            groups = split_groups_by_lr(groups, lr_scales(model, base_width))
        optimizer = torch.optim.AdamW(groups, betas=betas)
        model.train()
        for batch in batches:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
        for name, x in recorder.record(batches[0]).items():
            squares[name].append((_mean_square(initial[name]), _mean_square(x - initial[name])))
    means = {name: np.sqrt(np.mean(pairs, axis=0)) for name, pairs in squares.items()}
    return {name: (float(size), float(change)) for name, (size, change) in means.items()}


def _mean_square(x: Tensor) -> float:
    return float(x.double().square().sum()) / max(x.numel(), 1)


class CoordinateRecorder:
    """Records the outputs of all modules of a model, by coordinate.

    Of the linear layers in ``output_names`` it also records the learned part, (U_s − U_0) x.
    """

    def __init__(self, model: RecollectForCausalLM, output_names: set[str]) -> None:
        self.model = model
        self.names = {
            module: name
            for path, module in model.named_modules()
            if not isinstance(module, nn.ParameterList | nn.ParameterDict)
            and (name := _coordinate_name(path, cast(RecollectConfig, model.config))) is not None
        }
        self.initial_weights: dict[nn.Module, Tensor] = {
            module: module.weight.detach().clone()
            for module, name in self.names.items()
            if isinstance(module, nn.Linear) and name in output_names
        }
        self.tensors: dict[str, list[Tensor]] = {}

    @torch.no_grad()
    def record(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the model on a batch; return all outputs of each coordinate as one vector."""
        self.tensors = defaultdict(list)
        self.model.eval()
        with ExitStack() as hooks:
            for module, name in self.names.items():
                hook = partial(self._add_output, name)
                hooks.enter_context(module.register_forward_hook(hook))
            self.model(**{n: x for n, x in batch.items() if n != "labels"}, use_cache=False)
        return {
            name: torch.cat([torch.zeros(0), *(x.float().flatten().cpu() for x in tensors)])
            for name, tensors in self.tensors.items()
        }

    def _add_output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.tensors[name] += [x.detach().clone() for x in _output_tensors(module, args, output)]
        if (initial := self.initial_weights.get(module)) is not None:
            learned = cast(Tensor, module.weight) - initial
            self.tensors[f"{name}, learned"].append(functional.linear(args[0], learned))


_BLOCK = re.compile(r"blocks\.(\d+)(?:\.(.*))?$")


def _coordinate_name(path: str, config: RecollectConfig) -> str | None:
    """Return the name of a module's output; ``None`` for the model and the list of blocks."""
    path = path.removeprefix("model.")
    if path in ("", "model", "blocks"):
        return None
    block = _BLOCK.match(path)
    if block is None:
        return path
    inner = block[2]
    if inner is None:
        return "residual stream"
    if not inner.startswith("layer"):
        return inner
    return config.layer_names[int(block[1])] + inner.removeprefix("layer")


def _output_tensors(module: nn.Module, args: Any, output: Any) -> list[Tensor]:
    """Return a module's output tensors; of a gate its pre-activation, which has no bounds."""
    if isinstance(module, GateProjection):
        return [] if module.source == "constant" else [_pre_activation(module, args[0])]
    if isinstance(output, Mapping):
        return [x for x in output.values() if isinstance(x, Tensor)]
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        # An initial memory returns its parameters; other modules an output, and then a state.
        parameters = {id(weight) for weight in module.parameters()}
        return [x for x in output if id(x) in parameters] or [output[0]]
    return []


def _pre_activation(gate: GateProjection, x: Tensor) -> Tensor:
    z = x.new_zeros(()) if gate.bias is None else gate.bias
    if gate.weight is not None:
        h = x if gate.down is None else functional.linear(x, gate.down)
        z = z + functional.linear(h, gate.weight).unflatten(-1, gate.shape)
    return z


def _output_names(config: RecollectConfig, base_width: int | None) -> set[str]:
    """Return the coordinates of parameters with the role ``"output"``; the logits without rules."""
    names = {"lm_head"}
    if base_width is not None:
        for path, rule in width_rules(config, base_width).items():
            if rule.role == "output":
                names.add(_coordinate_name(path.rpartition(".")[0], config) or path)
    return names
