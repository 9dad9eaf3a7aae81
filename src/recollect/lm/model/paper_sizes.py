"""Sizes of the models in the papers."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from recollect.lm.model.config import RecipeLike, RecollectConfig

__all__ = ["PAPER_SIZES", "PaperSize", "paper_config", "paper_size"]


@dataclass(frozen=True, kw_only=True)
class PaperSize:
    """A size of MIRAS table 5 and ATLAS table 7, trained with AdamW and a cosine schedule.

    Attributes:
        name: name in the papers, a rough number of parameters.
        depth, width, heads: sizes of the backbone.
        lr: peak learning rate.
        tokens: number of training tokens.
        vocab: vocabulary size.
        context: tokens per sequence.
        batch_tokens: tokens per optimizer step.

    Examples:
        >>> size = rc.lm.PAPER_SIZES["340M"]
        >>> size.depth, size.width, size.heads, size.lr
        (24, 1024, 16, 0.0015)
    """

    name: str
    depth: int
    width: int
    heads: int
    lr: float
    tokens: int
    vocab: int = 32_000
    context: int = 4096
    batch_tokens: int = 500_000


PAPER_SIZES = {
    size.name: size
    for size in (
        PaperSize(name="170M", depth=12, width=768, heads=16, lr=3e-3, tokens=15 * 10**9),
        PaperSize(name="340M", depth=24, width=1024, heads=16, lr=1.5e-3, tokens=15 * 10**9),
        PaperSize(name="760M", depth=24, width=1536, heads=16, lr=1.25e-3, tokens=30 * 10**9),
        PaperSize(name="1.3B", depth=18, width=2048, heads=8, lr=7e-4, tokens=100 * 10**9),
    )
}
"""The sizes of MIRAS table 5 and ATLAS table 7 by name, as `PaperSize`.

Examples:
    >>> {name: (size.depth, size.width) for name, size in rc.lm.PAPER_SIZES.items()}
    {'170M': (12, 768), '340M': (24, 1024), '760M': (24, 1536), '1.3B': (18, 2048)}
"""


def paper_size(name: str) -> PaperSize:
    """Return a size by its name in the papers."""
    if name not in PAPER_SIZES:
        near = difflib.get_close_matches(str(name), PAPER_SIZES, n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"there is no size {name!r} among those of the papers, {', '.join(PAPER_SIZES)}{hint}"
        )
    return PAPER_SIZES[name]


def paper_config(size: str, recipes: RecipeLike, **overrides: Any) -> RecollectConfig:
    """Return the configuration of a model of a size in the papers.

    Args:
        size: ``"170M"``, ``"340M"``, ``"760M"`` or ``"1.3B"``.
        recipes: as in `RecollectConfig.from_recipes`.
        **overrides: fields of `RecollectConfig`, in place of those of the size.

    Raises:
        ValueError: an unknown size.

    Examples:
        >>> config = rc.lm.paper_config("170M", "gated_delta_net", vocab_size=1000)
        >>> config.hidden_size, config.num_hidden_layers, config.vocab_size
        (768, 12, 1000)
    """
    paper = paper_size(size)
    sizes = {
        "vocab_size": paper.vocab,
        "hidden_size": paper.width,
        "num_hidden_layers": paper.depth,
        "num_attention_heads": paper.heads,
    }
    return RecollectConfig.from_recipes(recipes, **{**sizes, **overrides})
