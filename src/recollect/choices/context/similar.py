"""Context weighted by similarity to the query: local regression."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from recollect.choices.context.base import Context
from recollect.choices.features.base import Kernel
from recollect.choices.features.kernels import Exponential
from recollect.choices.member import member
from recollect.fields import slot

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["KernelWeighted"]


@member
class KernelWeighted(Context):
    """Associations weighted by the similarity of their keys to the query, s(k_i, q) (TTR 48).

    Args:
        kernel: s, e.g. ``features.Exponential()``.
        restrictions: contexts with weights that multiply, e.g. ``(Window(size=64, gated=False),)``.

    Examples:
        >>> window = rc.context.Window(size=2, gated=False)
        >>> recipe = rc.Recipe(  # attention over a sliding window of two tokens
        ...     memory=rc.memory.LocalConstant(),
        ...     context=rc.context.KernelWeighted(restrictions=(window,)),
        ...     algorithm=rc.algorithm.Analytic(),
        ... )
        >>> q, k, v = torch.randn(3, 1, 5, 1, 4)
        >>> y, _ = rc.recall(recipe, q, k, v)
        >>> window_only, _ = rc.recall(recipe, q[:, 3:], k[:, 3:], v[:, 3:])
        >>> torch.allclose(y[:, 4], window_only[:, 1], atol=1e-6)  # token 4 sees tokens 3 and 4
        True
    """

    kernel: Kernel | None = slot(Exponential(), "features")
    restrictions: tuple[Context, ...] = slot((), "context", many=True)

    @property
    def horizon(self) -> int | None:
        # torch.compile does not support min(default=).
        horizons = [part.horizon for part in self.restrictions if part.horizon is not None]
        return min(horizons) if horizons else None

    @property
    def _tightest(self) -> Context | None:
        """Restriction that keeps the fewest associations."""
        tightest, fewest = None, math.inf  # a loop: torch.compile does not support min(key=)
        for part in self.restrictions:
            if part.num_kept is not None and part.num_kept < fewest:
                tightest, fewest = part, part.num_kept
        return tightest

    @property
    def num_kept(self) -> int | None:
        return None if self._tightest is None else self._tightest.num_kept

    @property
    def num_sinks(self) -> int:  # type: ignore[override]
        return 0 if self._tightest is None else self._tightest.num_sinks

    @property
    def key_transition(self) -> str | None:  # type: ignore[override]
        kinds = [part.key_transition for part in self.restrictions]
        return next((kind for kind in kinds if kind is not None), None)

    @property
    def reweighs(self) -> bool:  # type: ignore[override]
        return any(part.reweighs for part in self.restrictions)

    @property
    def hides_current(self) -> bool:  # type: ignore[override]
        return any(part.hides_current for part in self.restrictions)

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        if not isinstance(self.kernel, Kernel):
            yield (
                "context.KernelWeighted needs a kernel such as features.Exponential(), and "
                f"{self.kernel!r} is a finite map"
            )
        if recipe.memory.degree is None:
            yield (
                f"context.KernelWeighted weights associations by the query, and "
                f"{recipe.memory.title} is written before the query: use memory.LocalConstant()"
            )
        for part in self.restrictions:
            if not part.is_restriction:
                yield (
                    "context.KernelWeighted(restrictions=...) restricts by Window(size=c, "
                    f"gated=False), Prefix(), TopBlocks() or Bilinear(), not by {part.brief}"
                )
        windows = [p for p in self.restrictions if p.horizon is not None]
        with_gaps = [p for p in self.restrictions if p.num_kept is not None and p.horizon is None]
        others = [
            p
            for p in self.restrictions
            if p not in with_gaps and (p.horizon is not None or not p.uniform)
        ]
        if with_gaps and others:
            yield (
                f"{with_gaps[0].title} drops associations between the first and the last, and "
                f"{others[0].brief} needs consecutive associations: use one of the two"
            )
        blocks = [part for part in self.restrictions if part.block > 1]
        if blocks and windows:
            yield (
                f"{blocks[0].title} scores blocks by all of their keys, and {windows[0].brief} "
                "drops some of them: use one of the two"
            )
        yield from self._unique_part_conflicts()
        if recipe.bias.is_affine and recipe.bias.sees_prediction:
            if isinstance(self.kernel, Kernel) and not self.kernel.nonnegative:
                yield (
                    f"a mean under {recipe.bias.title} needs weights >= 0, and "
                    f"{self.kernel.title} in context.KernelWeighted may be negative: use "
                    "features.Exponential(), or bias.DotProduct() for a plain sum"
                )
            for part in self.restrictions:
                if part.signed:
                    yield (
                        f"a mean under {recipe.bias.title} needs weights >= 0, and {part.brief} "
                        "may be negative: use context.Bilinear(link='sigmoid'), or "
                        "bias.DotProduct() for a plain sum"
                    )

    def _unique_part_conflicts(self) -> Iterator[str]:
        moving = [part for part in self.restrictions if part.key_transition is not None]
        if len(moving) > 1:
            yield (
                f"{moving[0].title} and {moving[1].title} both move the keys, in an order that "
                "restrictions do not define: use one of the two"
            )
        reweighing = [part for part in self.restrictions if part.reweighs]
        if len(reweighing) > 1:
            yield (
                f"{reweighing[0].title} and {reweighing[1].title} both replace the weights: use "
                "one of the two"
            )
        if reweighing and isinstance(self.kernel, Kernel) and not self.kernel.positive:
            yield (
                f"{reweighing[0].title} needs the logarithm of the similarity, and "
                f"{self.kernel.title} may be 0 or negative: use features.Exponential()"
            )
        if reweighing and any(part.signed for part in self.restrictions):
            yield (
                f"{reweighing[0].title} needs the logarithm of all weights, and one restriction "
                "may be negative: use context.Bilinear(link='sigmoid')"
            )

    @property
    def _weight_text(self) -> str:
        """Text of the similarity times the weights of the restrictions that do not replace it."""
        key = "k_i" if self.key_transition is None else "k_i^(t)"
        parts = [part.factor for part in self.restrictions if not part.reweighs]
        return " ".join((*filter(None, parts), f"s({key}, q_t)"))

    def total(self, term: str) -> str:
        last = "i<t" if self.hides_current else "i≤t"
        sum_text = f"Σ_(t−{self.horizon}<{last})" if self.horizon else f"Σ_({last})"
        replaced = [part.factor for part in self.restrictions if part.reweighs]
        return " ".join((sum_text, *(replaced or [self._weight_text]), term))

    def notes(self) -> tuple[str, ...]:
        assert self.kernel is not None  # only None is refused by requires()
        likeness = f"s(k, q) = {self.kernel.similarity('k', 'q')}"
        logits = (f"z_i = log {self._weight_text}",) if self.reweighs else ()
        return (likeness, *logits, *super().notes())
