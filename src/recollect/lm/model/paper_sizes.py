"""The sizes that the papers train."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from recollect.lm.model.config import Named, RecollectConfig

__all__ = ["PAPER_SIZES", "PaperSize", "paper_config", "paper_size"]


@dataclass(frozen=True, kw_only=True)
class PaperSize:
    """A size of MIRAS table 5 and ATLAS table 7, trained with AdamW and a cosine.

    Attributes:
        name: the papers' own, which counts parameters loosely.
        depth, width, heads: of the backbone.
        lr: peak learning rate.
        tokens: that the papers train on.
        vocab: of their tokenizer. context: tokens of a row. batch_tokens: of a step.

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
    """A size of the papers by name.

    Raises:
        ValueError: an unknown name, with the nearest.
    """
    if name not in PAPER_SIZES:
        near = difflib.get_close_matches(str(name), PAPER_SIZES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"the papers have no size {name!r}; did you mean {near!r}? There are "
            f"{', '.join(PAPER_SIZES)}"
        )
    return PAPER_SIZES[name]


def paper_config(size: str, recipes: Named, **sizes: Any) -> RecollectConfig:
    """The configuration of a model of a size of the papers.

    Args:
        size: ``"170M"``, ``"340M"``, ``"760M"`` or ``"1.3B"``.
        recipes: as in `RecollectConfig.from_recipes`.
        **sizes: fields of `RecollectConfig`, in place of the size's own.

    Raises:
        ValueError: an unknown size.

    Examples:
        >>> config = rc.lm.paper_config("170M", "gated_delta_net", vocab_size=1000)
        >>> config.hidden_size, config.num_hidden_layers, config.vocab_size
        (768, 12, 1000)
    """
    paper = paper_size(size)
    own = {
        "vocab_size": paper.vocab,
        "hidden_size": paper.width,
        "num_hidden_layers": paper.depth,
        "num_attention_heads": paper.heads,
    }
    return RecollectConfig.from_recipes(recipes, **{**own, **sizes})
