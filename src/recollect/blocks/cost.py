"""What a composition costs: the price of each of its recipes on the stream that it runs over.

==========  =====================================================================================
Chain       every part over T tokens, and the persistent ones
Gated       the same
AsContext   the memory over T tokens, and as many reads again; the attention over ⌈T/C⌉ rows of
            2C tokens and the persistent ones; of the state, the memory twice (as it is, and as it
            stood when the segment began) and the attention when a segment is full
==========  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from recollect.blocks.mixers import AsContext, Chain, Gated, Leaf, Mixer, mixer_of
from recollect.cost import Cost
from recollect.cost import cost as cost_of_recipe

__all__ = ["EARLIER", "Stream", "cost", "streams"]

EARLIER = " when the segment began"
"""Ends the names of what is kept of a memory as it stood earlier."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """What one recipe of a composition runs over, for a text of T tokens.

    Attributes:
        name: of the recipe, as in `Mixer.leaves`.
        leaf: the recipe.
        rows: streams beside or after each other, per text.
        tokens: of each.
        per_token: of this recipe, for each token of the text.
        asks: whether every token also reads the memory without writing.
        fresh: whether each of the rows begins anew, and only the last is remembered.
    """

    name: str
    leaf: Leaf
    rows: int
    tokens: int
    per_token: int = 1
    asks: bool = False
    fresh: bool = False


def streams(mixer: Mixer, T: int) -> Iterator[Stream]:
    """The streams of all recipes of a mixer.

    Args:
        mixer: of which.
        T: tokens of the text.
    """
    if isinstance(mixer, Leaf):
        yield Stream(name="", leaf=mixer, rows=1, tokens=T)
        return
    for name, child in mixer.children.items():
        rows, tokens, each, asks = 1, T, 1, False
        if isinstance(mixer, Chain | Gated):
            tokens += mixer.persistent
        elif isinstance(mixer, AsContext) and name == "attention":
            rows, each = max(1, -(-T // mixer.segment)), 2
            tokens = mixer.persistent + 2 * min(mixer.segment, T)
        else:
            asks = True
        for inner in streams(child, tokens):
            yield Stream(
                name=f"{name}.{inner.name}" if inner.name else name,
                leaf=inner.leaf,
                rows=rows * inner.rows,
                tokens=inner.tokens,
                per_token=each * inner.per_token,
                asks=asks or inner.asks,
                fresh=each > 1 or inner.fresh,
            )


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
    training = decode = grows = moved = 0
    hows, notes = list[str](), list[str]()
    for stream in streams(mixer, T):
        recipe = stream.leaf.recipe
        if stream.leaf.options.persistent:
            continue  # learned pairs are weights, like those of an MLP
        price = cost_of_recipe(recipe, T=stream.tokens, B=B * stream.rows, **sizes)
        held = cost_of_recipe(recipe, T=stream.tokens, B=B, **sizes)
        more = price.forward.get("read", 0) if stream.asks else 0
        forward |= {f"{stream.name} {part}": flops for part, flops in price.forward.items()}
        if more:
            forward[f"{stream.name} retrieval"] = more
        state |= {f"{stream.name} {part}": size for part, size in held.state.items()}
        if stream.asks:
            state |= {f"{stream.name} {part}{EARLIER}": x for part, x in held.state.items()}
        training += price.training + 3 * more
        decode += held.decode * stream.per_token + more // max(1, T)
        grows += 0 if stream.fresh else held.grows * (1 + stream.asks)
        moved += price.moved
        hows.append(f"{stream.name}: {held.engine} ({held.how})")
        notes += [f"{stream.name}: {note}" for note in held.notes]
    return Cost(
        engine=type(mixer).__name__,
        how="; ".join(hows),
        sizes={"B": B, "T": T, **{k: v for k, v in sizes.items() if isinstance(v, int)}},
        forward=forward,
        training=training,
        decode=decode,
        state=state,
        grows=grows,
        moved=moved,
        notes=tuple(notes),
    )


def _composition(value: Any) -> Mixer | None:
    """The composition that this states; ``None`` for what `recollect.cost.cost` takes itself."""
    if not isinstance(value, str | Mixer) and not hasattr(value, "mixer"):
        return None
    mixer = mixer_of(value)
    return None if isinstance(mixer, Leaf) else mixer
