"""Cost of a composition: the cost of each of its recipes on the stream that it runs over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, overload

from torch import nn

from recollect.blocks.layers import MixerLayer, layer_spec, memory_layers
from recollect.blocks.levels import CHUNK_SIZE, level_flops
from recollect.blocks.mixers import Mixer, RecipeMixer, Stream, as_mixer
from recollect.costs import BASELINE, Cost, ModelCost, Workload, read_cost, recipe_cost
from recollect.layer.memory_layer import MemoryLayer
from recollect.recipe.resolve import RecipeLike, as_recipe

__all__ = [
    "EARLIER_SEGMENTS_SUFFIX",
    "SEGMENT_START_SUFFIX",
    "LeafWorkload",
    "cost",
    "leaf_cost",
    "leaf_workloads",
    "retrieval_flops",
]

SEGMENT_START_SUFFIX = " when the segment began"
"""Suffix of the names of state parts at the start of the segment."""
EARLIER_SEGMENTS_SUFFIX = " of earlier segments"
"""Suffix of the names of state parts at the ends of earlier segments."""


@dataclass(frozen=True, kw_only=True)
class LeafWorkload:
    """A recipe of a composition, and the sequences that it runs over."""

    name: str  # name of the recipe in `Mixer.leaves`
    leaf: RecipeMixer
    stream: Stream  # sequences and tokens, including the compositions around it


def leaf_workloads(mixer: Mixer, T: int) -> Iterator[LeafWorkload]:
    """Yield all recipes of a mixer with their streams, for a text of T tokens."""
    if isinstance(mixer, RecipeMixer):
        yield LeafWorkload(name="", leaf=mixer, stream=Stream(tokens=T))
        return
    for name, outer in mixer.streams(T).items():
        for part in leaf_workloads(mixer.children[name], outer.tokens):
            inner = part.stream
            stream = Stream(
                rows=outer.rows * inner.rows,
                tokens=inner.tokens,
                tokens_per_token=outer.tokens_per_token * inner.tokens_per_token,
                queries=outer.queries + inner.queries,
                retrieval_segment=outer.retrieval_segment or inner.retrieval_segment,
                restarts=outer.restarts or inner.restarts,
                cached_states=outer.cached_states or inner.cached_states,
                cached_reads=outer.cached_reads or outer.rows * inner.cached_reads,
                cached_segment=outer.cached_segment or inner.cached_segment,
                key_dim=inner.key_dim or outer.key_dim,
                value_dim=inner.value_dim or outer.value_dim,
                levels=inner.levels or outer.levels,
            )
            path = f"{name}.{part.name}" if part.name else name
            yield LeafWorkload(name=path, leaf=part.leaf, stream=stream)


class _HasMixer(Protocol):
    @property
    def mixer(self) -> Mixer: ...


@overload
def cost(
    recipe: RecipeLike | Mixer | _HasMixer,
    *,
    K: int = 64,
    V: int = 64,
    H: int = 1,
    T: int = 4096,
    B: int = 1,
    G: int = 1,
    dtype_bytes: int = 4,
    engine: str = "auto",
) -> Cost: ...
@overload
def cost(
    recipe: nn.Module, *, T: int = 4096, B: int = 1, dtype_bytes: int = 4, engine: str = "auto"
) -> ModelCost: ...


def cost(
    recipe: Any,
    *,
    K: int = 64,
    V: int = 64,
    H: int = 1,
    T: int = 4096,
    B: int = 1,
    G: int = 1,
    dtype_bytes: int = 4,
    engine: str = "auto",
) -> Cost | ModelCost:
    """Return the cost of one call over T tokens, of a recipe, a composition or a model's memories.

    `recollect.costs` lists the formulas. Sizes are those of every recipe of a composition. The
    layers of a model have sizes of their own: leave out K, V, H and G.

    Args:
        recipe: a recipe, a mixer, a preset or a name of the zoo; or a model with memory layers.
        K: key channels, ≥ 1.
        V: value channels, ≥ 1.
        H: memories (heads of keys and values), ≥ 1.
        T: tokens, ≥ 0.
        B: sequences, ≥ 1.
        G: query heads per memory, ≥ 1.
        dtype_bytes: of q, k and v: 2, 4 or 8; states have 4, or 8 when these have 8.
        engine: as for `recollect.recall`.

    Raises:
        RecipeError: sizes that a recipe cannot have, an engine that cannot run it, an engine
            without counted costs, or a model without memory layers.
        ValueError: a size that is not a whole number or is below its minimum, an unknown engine,
            or sizes of heads with a model.

    Examples:
        >>> price = rc.cost(rc.Recipe(), K=16, V=16, H=2, T=128)
        >>> longer = rc.cost(rc.Recipe(), K=16, V=16, H=2, T=256)
        >>> longer.total == 2 * price.total, price.state_bytes_per_token
        (True, 0)
        >>> rc.cost("softmax_attention", K=16, V=16, H=2, T=128).state_bytes_per_token
        257
        >>> mac = rc.blocks.MemoryAsContext("gated_delta_net", "softmax_attention", segment=64)
        >>> price = rc.cost(mac, K=16, V=16, H=2, T=1024)
        >>> longer = rc.cost(mac, K=16, V=16, H=2, T=2048)
        >>> price.state_bytes_per_token, price.state_bytes == longer.state_bytes
        (0, True)
    """
    workload = Workload(K=K, V=V, H=H, T=T, B=B, G=G, dtype_bytes=dtype_bytes, engine=engine)
    if isinstance(recipe, nn.Module) and not isinstance(recipe, MemoryLayer | MixerLayer):
        if (K, V, H, G) != (64, 64, 1, 1):
            raise ValueError("the layers of a model have their own sizes: leave out K, V, H and G")
        return _model_cost(recipe, workload)
    if isinstance(recipe, str | Mixer) or hasattr(recipe, "mixer"):
        mixer = as_mixer(recipe)
        if not isinstance(mixer, RecipeMixer):
            return _composition_cost(mixer, workload)
    return recipe_cost(as_recipe(recipe, "rc.cost"), workload)


def _model_cost(model: nn.Module, workload: Workload) -> Cost | ModelCost:
    layers = memory_layers(model, "rc.cost")
    costs = {name: _layer_cost(layer, workload) for name, layer in layers.items()}
    if "" in layers:
        return costs[""]
    others = _other_modules(model, layers)
    return ModelCost(model=type(model).__name__, layers=costs, not_counted=others)


def _layer_cost(layer: nn.Module, workload: Workload) -> Cost:
    """Return the cost at the sizes of a layer, with its engine if the caller names none."""
    spec = layer_spec(layer)
    workload = replace(
        workload,
        K=spec.head_dim,
        V=spec.value_dim,
        H=spec.num_kv_heads,
        G=(spec.num_heads or spec.num_kv_heads) // spec.num_kv_heads,
        engine=spec.engine if workload.engine == "auto" else workload.engine,
    )
    if isinstance(layer, MixerLayer):
        return _composition_cost(layer.mixer, workload)
    return recipe_cost(spec.recipe, workload)


def _other_modules(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, int]:
    """Return the number of modules with matrices that have no part in the layers, by class.

    Lists of modules, and modules of a class that contains layers elsewhere, count by their parts.
    """
    outer = {name[:end] for name in layers for end in _ends(name)}
    containers = {type(model.get_submodule(name)) for name in outer}
    containers |= {nn.ModuleList, nn.ModuleDict, nn.Sequential}
    counts: Counter[str] = Counter()

    def visit(name: str, module: nn.Module) -> None:
        if name in layers:
            return
        if name in outer or type(module) in containers:
            for key, child in module.named_children():
                visit(f"{name}.{key}" if name else key, child)
        elif any(weight.dim() > 1 for weight in module.parameters()):
            counts[type(module).__name__] += 1

    visit("", model)
    return dict(counts)


def _ends(name: str) -> list[int]:
    """Return the lengths of the names of the modules around a module."""
    return [0, *(index for index, letter in enumerate(name) if letter == ".")] if name else []


def _composition_cost(mixer: Mixer, workload: Workload) -> Cost:
    forward: dict[str, int] = {}
    state: dict[str, int] = {}
    training = decode = state_bytes_per_token = min_bytes_moved = steps = 0
    seconds = 0.0
    descriptions: list[str] = []
    notes: list[str] = []
    for part in leaf_workloads(mixer, workload.T):
        if part.leaf.options.persistent:
            continue  # learned pairs are weights, like those of an MLP
        name, recipe, stream = part.name, part.leaf.recipe, part.stream
        price, additional = leaf_cost(part, workload), _additional_flops(part, workload)
        row = _leaf_workload(part, workload)
        row_cost, last_read, copies = recipe_cost(recipe, row), 0, 1
        forward |= {f"{name} {key}": flops for key, flops in price.forward_flops.items()}
        forward |= {f"{name} {key}": flops for key, flops in additional.items()}
        state |= {f"{name} {key}": size for key, size in row_cost.state.items()}
        if stream.retrieval_segment:
            before_segment = replace(
                workload, T=stream.tokens - stream.tokens % stream.retrieval_segment
            )
            last_read, copies = read_cost(recipe, before_segment, 1), 2
            state |= {
                f"{name} {key}{SEGMENT_START_SUFFIX}": size for key, size in row_cost.state.items()
            }
        if stream.cached_segment:
            n, state_bytes = stream.cached_states, sum(row_cost.state.values())
            last_read = n * read_cost(recipe, row, 1)
            state_bytes_per_token += round(state_bytes / stream.cached_segment)
            state |= {
                f"{name} {key}{EARLIER_SEGMENTS_SUFFIX}": n * size
                for key, size in row_cost.state.items()
                if n
            }
        training += price.training + 3 * sum(additional.values())
        decode += round((row_cost.decode + last_read) * stream.tokens_per_token)
        if not stream.restarts:
            grows = row_cost.state_bytes_per_token * copies * stream.tokens_per_token
            state_bytes_per_token += round(grows)
        min_bytes_moved += price.min_bytes_moved
        steps += price.sequential_steps
        seconds += price.cpu_seconds
        if stream.levels:
            steps += -(-stream.tokens // CHUNK_SIZE)
            seconds += price.cpu_seconds * additional.get("levels", 0) / max(price.total, 1)
        descriptions.append(f"{name}: {row_cost.engine} ({row_cost.how})")
        notes += [f"{name}: {note}" for note in row_cost.notes]
    w, baseline = workload, recipe_cost(BASELINE, replace(workload, engine="auto"))
    return Cost(
        engine=type(mixer).__name__,
        how="; ".join(descriptions),
        sizes={"B": w.B, "T": w.T, "H": w.H, "G": w.G, "K": w.K, "V": w.V},
        forward_flops=forward,
        training=training,
        decode=decode,
        state=state,
        state_bytes_per_token=state_bytes_per_token,
        min_bytes_moved=min_bytes_moved,
        sequential_steps=steps,
        cpu_seconds=seconds,
        relative_time=seconds / baseline.cpu_seconds,
        notes=tuple(notes),
    )


def _leaf_workload(part: LeafWorkload, workload: Workload) -> Workload:
    """Return the workload of one sequence of a recipe's stream."""
    stream = part.stream
    K, V = stream.key_dim or workload.K, stream.value_dim or workload.V
    V *= stream.levels or 1
    return replace(workload, T=stream.tokens, G=workload.G + stream.queries, K=K, V=V)


def leaf_cost(part: LeafWorkload, workload: Workload) -> Cost:
    """Return the cost of a recipe on all sequences of its stream, without additional reads."""
    rows = replace(_leaf_workload(part, workload), B=workload.B * part.stream.rows)
    if part.stream.levels and rows.T:  # chunks from unit matrices, see `levels_layer`
        C, F = min(CHUNK_SIZE, rows.T), part.leaf.recipe.axes(rows.K, rows.V)["F"]
        rows = replace(rows, V=C + F, T=C, B=rows.B * -(-rows.T // C))
    return recipe_cost(part.leaf.recipe, rows)


def _additional_flops(part: LeafWorkload, workload: Workload) -> dict[str, int]:
    """Return the FLOPs of a stream beside the calls of its recipe, by name."""
    stream, counts = part.stream, {"retrieval": retrieval_flops(part, workload)}
    if stream.levels:
        row = _leaf_workload(part, workload)
        sizes = {"K": row.K, "V": row.V // stream.levels, "G": row.G, "T": row.T}
        flops = level_flops(part.leaf.recipe, stream.levels, **sizes)
        counts["levels"] = flops * workload.B * stream.rows * workload.H
    return {name: flops for name, flops in counts.items() if flops}


def retrieval_flops(part: LeafWorkload, workload: Workload) -> int:
    """Return the FLOPs of all reads without writing of a stream, segment by segment."""
    T, C = part.stream.tokens, part.stream.retrieval_segment
    rows = replace(workload, B=workload.B * part.stream.rows)
    earlier = replace(_leaf_workload(part, workload), G=workload.G)
    reads = part.stream.cached_reads
    return (read_cost(part.leaf.recipe, earlier, reads) if reads else 0) + sum(
        read_cost(part.leaf.recipe, replace(rows, T=start), min(C, T - start))
        for start in (range(0, T, C) if C else ())
    )
