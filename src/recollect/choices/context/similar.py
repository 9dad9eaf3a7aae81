"""A context weighted by similarity to the query: local regression."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from recollect.choices.context.base import Context
from recollect.choices.features.base import Kernel
from recollect.choices.features.kernels import Exponential
from recollect.choices.fields import slot
from recollect.choices.member import member

if TYPE_CHECKING:
    from recollect.choices.questions import RecipeLike

__all__ = ["Similar"]


@member
class Similar(Context):
    """Associations weighed by their keys' likeness to the query, s(k_i, q) (TTR 48).

    Args:
        kernel: s, e.g. ``features.Exponential()``.
        within: contexts whose weights multiply, e.g. ``(Window(size=64, gated=False),)``.

    Examples:
        >>> window = rc.context.Window(size=2, gated=False)
        >>> recipe = rc.Recipe(  # attention over a sliding window of two tokens
        ...     memory=rc.memory.LocalConstant(),
        ...     context=rc.context.Similar(within=(window,)),
        ...     algorithm=rc.algorithm.Analytic(),
        ... )
        >>> q, k, v = torch.randn(3, 1, 5, 1, 4)
        >>> y, _ = rc.recall(recipe, q, k, v)
        >>> alone, _ = rc.recall(recipe, q[:, 3:], k[:, 3:], v[:, 3:])
        >>> torch.allclose(y[:, 4], alone[:, 1], atol=1e-6)  # token 4 sees tokens 3 and 4
        True
    """

    kernel: Kernel | None = slot(Exponential(), "features")
    within: tuple[Context, ...] = slot((), "context", many=True)

    @property
    def horizon(self) -> int | None:
        spans = [part.horizon for part in self.within if part.horizon is not None]
        return min(spans) if spans else None

    @property
    def _keeping(self) -> Context | None:
        """The part that lets most associations go."""
        fewest: Context | None = None  # a loop: torch.compile follows no min(key=)
        for part in self.within:
            if part.keeps is not None and (fewest is None or part.keeps < (fewest.keeps or 0)):
                fewest = part
        return fewest

    @property
    def keeps(self) -> int | None:
        part = self._keeping
        return None if part is None else part.keeps

    @property
    def first(self) -> int:  # type: ignore[override]
        part = self._keeping
        return 0 if part is None else part.first

    def requires(self, recipe: RecipeLike) -> Iterator[str]:
        yield from super().requires(recipe)
        if not isinstance(self.kernel, Kernel):
            yield (
                "context.Similar needs a kernel such as features.Exponential(), and "
                f"{self.kernel!r} is a finite map"
            )
        if recipe.memory.degree is None:
            yield (
                f"context.Similar weighs associations by the query, and {recipe.memory.title} is "
                "written before the query is known: use memory.LocalConstant()"
            )
        for part in self.within:
            if not part.restricts:
                yield (
                    "context.Similar(within=...) restricts by Window(size=c, gated=False), "
                    f"Prefix(), Blocks() or Bilinear(), not by {part.brief}"
                )
        gapped = [p for p in self.within if p.keeps is not None and p.horizon is None]
        if gapped:
            rest = [part for part in self.within if part not in gapped]
            others = [part for part in rest if part.horizon is not None or not part.uniform]
            if others:
                yield (
                    f"{gapped[0].title} lets associations go between the first and the last, and "
                    f"{others[0].brief} needs those that it sees in a row: use one of the two"
                )
        blocks = [part for part in self.within if part.block > 1]
        spans = [part for part in self.within if part.horizon is not None]
        if blocks and spans:
            yield (
                f"{blocks[0].title} scores blocks by all of their keys, and {spans[0].brief} lets "
                "some of those go: use one of the two"
            )
        affine = recipe.bias.affine
        if affine is not None and affine[0] != 0:
            if isinstance(self.kernel, Kernel) and not self.kernel.nonnegative:
                yield (
                    f"a mean under {recipe.bias.title} needs weights >= 0, and "
                    f"{self.kernel.title} in context.Similar may be negative: use "
                    "features.Exponential(), or bias.DotProduct() for a plain sum"
                )
            for part in self.within:
                if part.signed:
                    yield (
                        f"a mean under {recipe.bias.title} needs weights >= 0, and {part.brief} "
                        "may be negative: use context.Bilinear(link='sigmoid'), or "
                        "bias.DotProduct() for a plain sum"
                    )

    def total(self, term: str) -> str:
        return f"{self.span} {self.weighed} {term}"

    @property
    def span(self) -> str:
        """The sum over the associations that count."""
        return f"Σ_(t−{self.horizon}<i≤t)" if self.horizon else "Σ_(i≤t)"

    @property
    def weighed(self) -> str:
        """The weight of one association."""
        return " ".join([*filter(None, (part.factor for part in self.within)), "s(k_i, q_t)"])

    def notes(self) -> tuple[str, ...]:
        assert self.kernel is not None  # only None is refused by requires()
        return (f"s(k, q) = {self.kernel.similarity('k', 'q')}", *super().notes())
