"""What a composition costs: the price of each of its recipes on the stream that it runs over.

==========  =====================================================================================
Chain       every part over T tokens, and the persistent ones
Gated       the same, and so Together
AsContext   the memory over T tokens, and as many reads of it as it stood when their segment
            began; the attention over ⌈T/C⌉ rows of 2C tokens and the persistent ones; of the
            state, the memory twice (as it is, and as it stood when the segment began) and the
            attention when a segment is full
Boosted     both over T tokens, the first with one more query per token, which is the key
Routed      the shared one over T tokens, each of M memories over ⌈T k / M⌉
==========  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from recollect.blocks.mixers import Leaf, Mixer, Stream, mixer_of
from recollect.cost import BASELINE, Cost, reading
from recollect.cost import cost as cost_of_recipe
from recollect.fields import as_whole

__all__ = ["EARLIER", "LeafStream", "cost", "priced", "retrieval", "streams"]

EARLIER = " when the segment began"
"""Ends the names of what is kept of a memory as it stood earlier."""


@dataclass(frozen=True, kw_only=True)
class LeafStream:
    """What one recipe of a composition runs over.

    Attributes:
        name: of the recipe, as in `Mixer.leaves`.
        leaf: the recipe.
        stream: rows and tokens, all compositions around it counted.
    """

    name: str
    leaf: Leaf
    stream: Stream


def streams(mixer: Mixer, T: int) -> Iterator[LeafStream]:
    """The streams of all recipes of a mixer.

    Args:
        mixer: of which.
        T: tokens of the text.
    """
    if isinstance(mixer, Leaf):
        yield LeafStream(name="", leaf=mixer, stream=Stream(tokens=T))
        return
    for name, outer in mixer.streams(T).items():
        for found in streams(mixer.children[name], outer.tokens):
            inner = found.stream
            stream = Stream(
                rows=outer.rows * inner.rows,
                tokens=inner.tokens,
                per_token=outer.per_token * inner.per_token,
                queries=outer.queries + inner.queries,
                asks=outer.asks or inner.asks,
                fresh=outer.fresh or inner.fresh,
            )
            path = f"{name}.{found.name}" if found.name else name
            yield LeafStream(name=path, leaf=found.leaf, stream=stream)


def cost(recipe: Any, *, T: int = 4096, B: int = 1, **sizes: Any) -> Cost:
    """What one call over T tokens costs, of a recipe or of a composition of several.

    Args:
        recipe: a recipe, a mixer, a preset or a name of the zoo; sizes are those of every part.
        T: tokens, ≥ 0.
        B: rows, ≥ 1.
        **sizes: K, V, H, G, dtype_bytes and method, as in `recollect.cost.cost`.

    Raises:
        RecipeError: sizes that a recipe cannot have, a method that cannot run it, or an engine
            that states no cost.
        ValueError: a size that is no whole number or below its least, or an unknown method.

    Examples:
        >>> mac = rc.blocks.AsContext("gated_delta_net", "softmax_attention", segment=64)
        >>> price = rc.cost(mac, K=16, V=16, H=2, T=1024)
        >>> price.grows, price.state_bytes == rc.cost(mac, K=16, V=16, H=2, T=2048).state_bytes
        (0, True)
    """
    mixer = _composition(recipe)
    if mixer is None:
        return cost_of_recipe(recipe, T=T, B=B, **sizes)
    forward: dict[str, int] = {}
    state: dict[str, int] = {}
    training = decode = grows = moved = steps = 0
    seconds = 0.0
    hows, notes = list[str](), list[str]()
    for found in streams(mixer, T):
        recipe, stream = found.leaf.recipe, found.stream
        if found.leaf.options.persistent:
            continue  # learned pairs are weights, like those of an MLP
        price = priced(found, B=B, **sizes)
        held = cost_of_recipe(recipe, T=stream.tokens, B=B, **more_queries(stream, sizes))
        more, last = retrieval(found, B=B, **sizes), 0
        if stream.asks:
            began = stream.tokens - stream.tokens % stream.asks
            read = {name: size for name, size in sizes.items() if name != "dtype_bytes"}
            last = reading(recipe, 1, T=began, B=B, **read)
        forward |= {f"{found.name} {part}": flops for part, flops in price.forward.items()}
        if more:
            forward[f"{found.name} retrieval"] = more
        state |= {f"{found.name} {part}": size for part, size in held.state.items()}
        if stream.asks:
            state |= {f"{found.name} {part}{EARLIER}": x for part, x in held.state.items()}
        training += price.training + 3 * more
        decode += round((held.decode + last) * stream.per_token)
        if not stream.fresh:
            grows += round(held.grows * (1 + bool(stream.asks)) * stream.per_token)
        moved += price.moved
        steps += price.sequential_steps
        seconds += price.cpu_seconds
        hows.append(f"{found.name}: {held.engine} ({held.how})")
        notes += [f"{found.name}: {note}" for note in held.notes]
    baseline = cost_of_recipe(BASELINE, T=T, B=B, **{**sizes, "method": "auto"})
    return Cost(
        engine=type(mixer).__name__,
        how="; ".join(hows),
        sizes={
            "B": B,
            "T": T,
            **{k: n for k, v in sizes.items() if (n := as_whole(v)) is not None},
        },
        forward=forward,
        training=training,
        decode=decode,
        state=state,
        grows=grows,
        moved=moved,
        sequential_steps=steps,
        cpu_seconds=seconds,
        relative_time=seconds / baseline.cpu_seconds,
        notes=tuple(notes),
    )


def more_queries(stream: Stream, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes with the further queries of a stream.

    Args:
        stream: of a recipe.
        sizes: as in `recollect.cost.cost`.
    """
    return {**sizes, "G": sizes.get("G", 1) + stream.queries}


def priced(found: LeafStream, *, B: int = 1, **sizes: Any) -> Cost:
    """The price of a recipe on all rows of its stream, without what is read beside.

    Args:
        found: the recipe and its stream.
        B: texts.
        **sizes: as in `recollect.cost.cost`.
    """
    stream = found.stream
    sizes = more_queries(stream, sizes)
    return cost_of_recipe(found.leaf.recipe, T=stream.tokens, B=B * stream.rows, **sizes)


def retrieval(found: LeafStream, *, B: int = 1, dtype_bytes: int = 4, **sizes: Any) -> int:
    """FLOPs of what all tokens of a stream read without writing, segment by segment.

    Args:
        found: a recipe and its stream; 0 where nothing asks.
        B: texts.
        dtype_bytes: does not matter here.
        **sizes: K, V, H, G and method, as in `recollect.cost.cost`.
    """
    recipe, T, C = found.leaf.recipe, found.stream.tokens, found.stream.asks
    rows = B * found.stream.rows
    starts = range(0, T, C) if C else ()
    return sum(reading(recipe, min(C, T - at), T=at, B=rows, **sizes) for at in starts)


def _composition(value: Any) -> Mixer | None:
    """The composition that this states; ``None`` for what `recollect.cost.cost` takes itself."""
    if not isinstance(value, str | Mixer) and not hasattr(value, "mixer"):
        return None
    mixer = mixer_of(value)
    return None if isinstance(mixer, Leaf) else mixer
