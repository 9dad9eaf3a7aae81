"""Cost of a composition: the cost of each of its recipes on the stream that it runs over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from recollect.blocks.mixers import Mixer, RecipeMixer, Stream, as_mixer
from recollect.costs import BASELINE, Cost, Workload, read_cost, recipe_cost
from recollect.recipe.resolve import as_recipe

__all__ = [
    "SEGMENT_START_SUFFIX",
    "LeafWorkload",
    "cost",
    "leaf_cost",
    "leaf_workloads",
    "retrieval_flops",
]

SEGMENT_START_SUFFIX = " when the segment began"
"""Suffix of the names of state parts at the start of the segment."""


@dataclass(frozen=True, kw_only=True)
class LeafWorkload:
    """A recipe of a composition, and the sequences that it runs over.

    Attributes:
        name: of the recipe, as in `Mixer.leaves`.
        leaf: the recipe.
        stream: sequences and tokens, including the compositions around it.
    """

    name: str
    leaf: RecipeMixer
    stream: Stream


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
            )
            path = f"{name}.{part.name}" if part.name else name
            yield LeafWorkload(name=path, leaf=part.leaf, stream=stream)


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
) -> Cost:
    """Return the cost of one call over T tokens, of a recipe or of a composition.

    `recollect.costs` lists the formulas. Sizes are those of every recipe of a composition.

    Args:
        recipe: a recipe, a mixer, a preset or a name of the zoo.
        K: key channels, ≥ 1.
        V: value channels, ≥ 1.
        H: memories (heads of keys and values), ≥ 1.
        T: tokens, ≥ 0.
        B: sequences, ≥ 1.
        G: query heads per memory, ≥ 1.
        dtype_bytes: of q, k and v: 2, 4 or 8; states have 4, or 8 when these have 8.
        engine: as for `recollect.recall`.

    Raises:
        RecipeError: sizes that a recipe cannot have, an engine that cannot run it, or an engine
            without counted costs.
        ValueError: a size that is not a whole number or is below its minimum, or an unknown
            engine.

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
    if isinstance(recipe, str | Mixer) or hasattr(recipe, "mixer"):
        mixer = as_mixer(recipe)
        if not isinstance(mixer, RecipeMixer):
            return _composition_cost(mixer, workload)
    return recipe_cost(as_recipe(recipe, "rc.cost"), workload)


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
        price, retrieval = leaf_cost(part, workload), retrieval_flops(part, workload)
        row = _leaf_workload(part, workload)
        row_cost, last_read, copies = recipe_cost(recipe, row), 0, 1
        forward |= {f"{name} {key}": flops for key, flops in price.forward_flops.items()}
        if retrieval:
            forward[f"{name} retrieval"] = retrieval
        state |= {f"{name} {key}": size for key, size in row_cost.state.items()}
        if stream.retrieval_segment:
            before_segment = replace(
                workload, T=stream.tokens - stream.tokens % stream.retrieval_segment
            )
            last_read, copies = read_cost(recipe, before_segment, 1), 2
            state |= {
                f"{name} {key}{SEGMENT_START_SUFFIX}": size for key, size in row_cost.state.items()
            }
        training += price.training + 3 * retrieval
        decode += round((row_cost.decode + last_read) * stream.tokens_per_token)
        if not stream.restarts:
            grows = row_cost.state_bytes_per_token * copies * stream.tokens_per_token
            state_bytes_per_token += round(grows)
        min_bytes_moved += price.min_bytes_moved
        steps += price.sequential_steps
        seconds += price.cpu_seconds
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
    return replace(workload, T=part.stream.tokens, G=workload.G + part.stream.queries)


def leaf_cost(part: LeafWorkload, workload: Workload) -> Cost:
    """Return the cost of a recipe on all sequences of its stream, without retrievals."""
    rows = replace(_leaf_workload(part, workload), B=workload.B * part.stream.rows)
    return recipe_cost(part.leaf.recipe, rows)


def retrieval_flops(part: LeafWorkload, workload: Workload) -> int:
    """Return the FLOPs of all reads without writing of a stream, segment by segment."""
    T, C = part.stream.tokens, part.stream.retrieval_segment
    rows = replace(workload, B=workload.B * part.stream.rows)
    return sum(
        read_cost(part.leaf.recipe, replace(rows, T=start), min(C, T - start))
        for start in (range(0, T, C) if C else ())
    )
