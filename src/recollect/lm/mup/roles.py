"""Roles of parameters: whether the inputs and outputs of each one grow with the width.

A table declares, by the module that owns a parameter, the axis that is summed over (``in``) and the
axis of the result (``out``). All other axes are independent, such as heads or channels. A model is
built at two widths on the meta device, which uses no memory: an axis of another size grows. Modules
that the table does not list are refused.

=========  ====================  ==============================================================
role       ``in``, ``out``       examples
=========  ====================  ==============================================================
input      fixed or none         embedding, biases, norms, convolutions, initial memories,
                                 decays, the second matrix of a low rank
hidden     grows, grows          q, k, v; gates and steps, one row per head; the MLP
output     grows, fixed          the head over the vocabulary, a router, the first matrix of a
                                 low rank
=========  ====================  ==============================================================
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Literal

from torch import nn

from recollect.blocks.layers import PersistentTokens
from recollect.layer.depth_floors import DepthFloors
from recollect.layer.feed_forward import FeedForward
from recollect.layer.gates import GateProjection
from recollect.layer.head_factors import GroupedRMSNorm, InputOutputFactors, QKAffine, QKScale
from recollect.layer.memory_layer import MemoryLayer
from recollect.layer.recipe_module import InitialKernelRows, InitialMemory
from recollect.layer.rotary import ComplexDecayPhase
from recollect.layer.short_conv import ShortConvolution
from recollect.layer.ties import Ties
from recollect.layer.token_shift import TokenShift
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.counts import meta_model
from recollect.messages import RecipeError

__all__ = ["Role", "config_at_width", "roles", "uses_default_init"]

Role = Literal["input", "hidden", "output"]

_SIZE_TOLERANCE = 0.2  # relative, between the growth of a size and of the width: sizes are integers

_MATRIX_AXES: dict[type[nn.Module], dict[str, tuple[int, int]]] = {
    nn.Linear: {"weight": (0, 1)},
    nn.Embedding: {"weight": (1, 0)},
    GateProjection: {"weight": (0, 1), "down": (0, 1)},
    ComplexDecayPhase: {"weight": (0, 1)},
    TokenShift: {"down": (2, 1), "up": (2, 1)},
    FeedForward: {"keys": (1, 2), "values": (2, 1), "gates": (1, 2)},
}
"""Axes (out, in) of parameters that are matrices, by the module that owns them."""

_PER_HEAD_MODULES = (InitialMemory, InitialKernelRows)
_VECTOR_MODULES = (
    *(nn.RMSNorm, GroupedRMSNorm, MemoryLayer, Ties, QKAffine, QKScale, ShortConvolution),
    *(InputOutputFactors, PersistentTokens, DepthFloors),
    *_PER_HEAD_MODULES,
)
"""Modules whose own parameters are vectors, or matrices inside a head."""


def roles(config: RecollectConfig, base_width: int) -> dict[str, Role]:
    """Return the role of every parameter of a model, by name.

    The model is compared with one at the base width; at the base width, with one at twice its
    width. Raises RecipeError if sizes do not scale to integers, the structure depends on the width,
    or a module declares no axes.
    """
    width = config.hidden_size
    reference_width = 2 * base_width if width == base_width else base_width
    factor = width / reference_width
    model, reference = meta_model(config), meta_model(config_at_width(config, reference_width))
    sizes = {name: p.shape for name, p in reference.named_parameters()}
    ndims = [{(name, p.dim()) for name, p in x.named_parameters()} for x in (model, reference)]
    if changed := sorted(ndims[0] ^ ndims[1]):
        raise RecipeError(
            'parametrization = "mup" needs one structure at all widths, and '
            f"{changed[0][0]} is not the same kind of parameter at width {reference_width} as at "
            f"width {width}: use a larger base_width"
        )
    result: dict[str, Role] = {}
    for name, owner, local_name, weight in _parameters_with_owner(model):
        for size, base in zip(weight.shape, sizes[name], strict=True):
            if size != base and abs(size - base * factor) > _SIZE_TOLERANCE * base * factor:
                raise RecipeError(
                    'parametrization = "mup" needs sizes that are fixed or grow with the width, '
                    f"and a size of {name} is {base} at width {reference_width} and {size} at "
                    f"width {width}: use another base_width"
                )
        grows = [size != base for size, base in zip(weight.shape, sizes[name], strict=True)]
        axes = _axes(owner, local_name, name)
        if isinstance(owner, _PER_HEAD_MODULES) and any(grows[1:]):
            raise RecipeError(
                f'parametrization = "mup" needs heads of one size, and {name} grows within a head '
                f"from width {reference_width} to width {width}: use parametrization = "
                '"standard"'
            )
        if axes is None or not grows[axes[1]]:
            result[name] = "input"
        else:
            result[name] = "hidden" if grows[axes[0]] else "output"
    return result


def config_at_width(config: RecollectConfig, width: int) -> RecollectConfig:
    """Return a configuration at another width: heads of the same size, MLPs in proportion.

    Raises RecipeError if the number of heads or of memories would not be an integer.
    """
    result = copy.deepcopy(config)
    if width == config.hidden_size:
        return result
    factor = width / config.hidden_size
    result.hidden_size = width
    labels = {"num_attention_heads": "heads", "num_key_value_heads": "kv_heads"}
    for sizes in (vars(result), *result.recipe_sizes.values()):
        for name, label in labels.items():
            if name not in sizes:
                continue
            count = sizes[name] * factor
            if count < 1 or count != int(count):
                raise RecipeError(
                    f"the number of heads grows with the width, and {sizes[name]} {label} "
                    f"of width {config.hidden_size} are {count:g} of width {width}: use a width "
                    "that makes it an integer, or another number of heads"
                )
            sizes[name] = int(count)
    if config.intermediate_size:
        result.intermediate_size = max(1, round(config.intermediate_size * factor))
    if uses_default_init(config):
        result.initializer_range = width**-0.5
    return result


def uses_default_init(config: RecollectConfig) -> bool:
    """Whether the initial deviation of linear layers is width^(−1/2), the default."""
    return abs(config.initializer_range * config.hidden_size**0.5 - 1) < 1e-6


def _parameters_with_owner(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield name, owner, name within the owner and tensor; lists of parameters own nothing."""
    for name, weight in model.named_parameters():
        path = name.rpartition(".")[0]
        while isinstance(owner := model.get_submodule(path), nn.ParameterList | nn.ParameterDict):
            path = path.rpartition(".")[0]
        yield name, owner, name.removeprefix(f"{path}."), weight


def _axes(owner: nn.Module, local_name: str, name: str) -> tuple[int, int] | None:
    """Return the axes (out, in) of a matrix; ``None`` for vectors and matrices inside a head."""
    declared = next((axes for cls, axes in _MATRIX_AXES.items() if isinstance(owner, cls)), {})
    if not declared and not isinstance(owner, _VECTOR_MODULES):
        raise RecipeError(
            f'parametrization = "mup" does not cover {name}: {type(owner).__name__} declares no '
            'axes; use parametrization = "standard"'
        )
    return declared.get(local_name.partition(".")[0])
