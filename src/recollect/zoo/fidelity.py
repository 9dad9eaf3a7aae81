"""Fidelity of a preset to its source: exact, approximation or reconstruction, and deviations."""

from __future__ import annotations

from dataclasses import dataclass, replace

from recollect.messages import RecipeError, short_repr

__all__ = ["DEVIATIONS", "Deviation", "Fidelity", "approximation", "exact", "reconstruction"]

KINDS = ("exact", "approximation", "reconstruction")

DEVIATIONS = {
    "blocks": "blocks of associations",
    "changed": "choices that `Preset.replace` replaced",
    "common_layer": "the layer around the memory",
    "decay": "the form or start of a decay",
    "features": "the feature map",
    "gates": "which values are gates, and their axes",
    "half_loss": "the factor ½ of a loss",
    "initial_memory": "the memory before the first token",
    "inner_batches": "the tokens whose gradients are taken at the same weights",
    "key_overlap": "rates that the overlap of keys reduces",
    "layer": "parts of the layer around the memory",
    "link": "the map from accumulated steps to weights",
    "logsigmoid_decay": "the activation of a decay",
    "loss": "the form of the loss",
    "memory": "the map from a key to a value",
    "momentum": "the momentum",
    "no_qk_norm": "the layer around the memory",
    "normalized_step": "gradients that are scaled to their errors",
    "normalizer": "the divisor of a sum of weights",
    "other_forms": "other equations in print",
    "query_key_norm": "the length of queries and keys",
    "rate": "the learning rate",
    "rate_per_head": "the axes of the learning rate",
    "ridge": "the ridge of least squares",
    "sign": "the sign in a printed equation",
    "sizes": "sizes that the source leaves open",
    "solver": "the solver of an inner problem",
    "step": "the form of a step",
    "unpublished": "a recurrence without a published layer",
    "window": "the number of associations in a window",
}
"""Keys of deviations, each with its subject."""

SENTENCES = {
    "common_layer": "The layer around the memory is the common one: short convolution, unit "
    "queries and keys, output norm and gate.",
    "half_loss": "The loss has a factor ½ that the source does not print.",
    "inner_batches": "Gradients are taken at the start of inner batches of {} tokens.",
    "key_overlap": "r_t reduces η_t by the overlap of the key with earlier keys of the inner "
    "batch.",
    "logsigmoid_decay": "The decay is log α = logsigmoid(linear(x)) in place of "
    "−a softplus(linear(x)).",
    "no_qk_norm": "The layer is the common one, without unit queries and keys.",
    "normalized_step": "Each gradient is scaled by ρ, so that η_t = 1 corrects the error of its "
    "association (Polyak's step where the loss is not squared).",
    "rate": "η_t is the stability limit times a gate between {} and {} that starts at {}.",
    "rate_per_head": "η_t is one number per head; the paper has one per channel.",
    "window": "The window holds {} associations.",
}
"""Sentences that several presets share, with places for their numbers."""


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """One difference from a source, or one choice that the source leaves open.

    Attributes:
        key: subject, a key of `recollect.zoo.fidelity.DEVIATIONS`.
        text: one sentence.

    Raises:
        RecipeError: an unknown key, or a text that is no string.

    Examples:
        >>> print(rc.zoo.Deviation(key="decay", text="The memory does not decay."))
        The memory does not decay.
    """

    key: str
    text: str

    def __post_init__(self) -> None:
        if self.key not in DEVIATIONS or not isinstance(self.text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RecipeError(
                "Deviation(key=..., text=...) takes a key of recollect.zoo.fidelity.DEVIATIONS and "
                f"a sentence, not {short_repr(self.key)} and {short_repr(self.text)}"
            )

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """Closeness of a system to its source.

    Attributes:
        kind: ``"exact"``, ``"approximation"`` or ``"reconstruction"`` (the source leaves something
            open).
        source: the equation that the system follows, as in ``"ATLAS eqs. 12–13"``.
        source_equation: that equation as it is printed, with paper and number after each line.
            Empty if the system's ``rule`` is the printed equation up to notation.
        deviations: differences from the source and choices that the source leaves open, in the
            recipe and in the layer around it.

    Raises:
        RecipeError: an unknown kind, or deviations that are no tuple of `Deviation`.

    Examples:
        >>> print(rc.zoo.get("linear_attention").fidelity.kind)
        exact
        >>> no_gate = rc.zoo.Deviation(key="gates", text="It has no gate.")
        >>> print(rc.zoo.Fidelity(kind="exact", source="eq. 1", deviations=(no_gate,)))
        exact, from eq. 1
        - It has no gate.
    """

    kind: str
    source: str
    source_equation: str = ""
    deviations: tuple[Deviation, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RecipeError(
                f"Fidelity(kind=...) must be one of {', '.join(KINDS)}, not {self.kind!r}"
            )
        items = self.deviations
        if not isinstance(items, tuple) or not all(isinstance(x, Deviation) for x in items):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RecipeError(
                "Fidelity(deviations=...) must be a tuple of rc.zoo.Deviation, not "
                f"{short_repr(items)}"
            )

    def __str__(self) -> str:
        lines = [f"{self.kind}, from {self.source}", *(f"- {item}" for item in self.deviations)]
        return "\n".join(lines)


Sentences = bool | float | str | tuple[float, ...]
"""True for a shared sentence, its numbers, or sentences of the preset, one per line."""


def deviation_items(**sentences: Sentences) -> tuple[Deviation, ...]:
    """Return deviations by their keys.

    A value is True for the shared sentence of `SENTENCES`, the number or the tuple of numbers that
    it needs, or the sentences of the preset, one per line.
    """
    items: list[Deviation] = []
    for key, value in sentences.items():
        if not isinstance(value, str):
            numbers = value if isinstance(value, tuple) else (value,)
            value = SENTENCES[key].format(*(f"{number:g}" for number in numbers))
        items += [Deviation(key=key, text=text) for text in value.split("\n")]
    return tuple(items)


def exact(source: str, *, source_equation: str = "", **sentences: Sentences) -> Fidelity:
    """Return the fidelity of a system that computes an equation exactly.

    ``source_equation`` is the printed text, if the rule of the system differs. Deviations are as in
    `deviation_items`.
    """
    items = deviation_items(**sentences)
    return Fidelity(kind="exact", source=source, source_equation=source_equation, deviations=items)


def reconstruction(source: str, *, source_equation: str = "", **sentences: Sentences) -> Fidelity:
    """Return the fidelity of a system whose source leaves something open; see `exact`."""
    fidelity = exact(source, source_equation=source_equation, **sentences)
    return replace(fidelity, kind="reconstruction")


def approximation(source: str, *, source_equation: str = "", **sentences: Sentences) -> Fidelity:
    """Return the fidelity of a system with another recurrence than its source; see `exact`."""
    fidelity = exact(source, source_equation=source_equation, **sentences)
    return replace(fidelity, kind="approximation")
