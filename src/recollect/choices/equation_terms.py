"""Signed terms of equations, from which `explain` renders a recipe.

A term is a signed number times factors, which avoids double minus signs in text. Members return
terms (`Bias.error_terms`, `Algorithm.update_equations`). Only `render_sum` converts a sum to text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "Gradient",
    "Term",
    "Terms",
    "format_number",
    "parenthesise",
    "power",
    "render_sum",
    "sum_over_batch",
]

_SUPERSCRIPTS = str.maketrans("0123456789−", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


@dataclass(frozen=True)
class Term:
    """coefficient · factor · factor …: ``Term(("v_t", "k_tᵀ"), -0.5)`` is −0.5 v_t k_tᵀ."""

    factors: tuple[str, ...]
    coefficient: float = 1.0

    def times(self, *factors: float | str) -> Term:
        """Return this term with factors before it; numbers multiply the coefficient."""
        coefficient, symbols = self.coefficient, list[str]()
        for factor in factors:
            if isinstance(factor, str):
                symbols.append(factor)
            else:
                coefficient *= factor
        return Term((*symbols, *self.factors), coefficient)

    def __neg__(self) -> Term:
        return Term(self.factors, -self.coefficient)

    @property
    def body(self) -> str:
        """The term without its sign."""
        size = abs(self.coefficient)
        numbers = () if size == 1 and self.factors else (format_number(size),)
        return " ".join((*numbers, *self.factors))

    def __str__(self) -> str:
        return f"{'−' if self.coefficient < 0 else ''}{self.body}"


Terms = tuple[Term, ...]


def render_sum(terms: Iterable[Term]) -> str:
    """Return the text of a sum, ``a − b + c``, without terms of coefficient 0."""
    text = ""
    for term in terms:
        if term.coefficient == 0:
            continue
        if not text:
            text = str(term)
        else:
            text += f" {'−' if term.coefficient < 0 else '+'} {term.body}"
    return text or "0"


def sum_over_batch(terms: Terms) -> Terms:
    """Return terms of token t summed over the tokens s of an inner batch."""
    token = r"(?<=[_>≤])t(?![a-z])|(?<=\^\()t(?=\))"
    return tuple(
        Term(("Σ_s", *(re.sub(token, "s", factor) for factor in term.factors)), term.coefficient)
        for term in terms
    )


def format_number(x: float | str) -> str:
    """Return the text of a number; letters are returned unchanged."""
    return x if isinstance(x, str) else f"{x:.4g}".replace("-", "−")


def parenthesise(text: str) -> str:
    """Return a text in parentheses, unless it is a single factor."""
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter in "(⟨") - (letter in ")⟩")
        if letter == " " and depth == 0:
            return f"({text})"
        if letter == "−" and index == 0:
            return f"({text})"
    return text


def power(exponent: float) -> str:
    """Return an exponent as superscript, empty for 1."""
    if exponent == 1:
        return ""
    if exponent == int(exponent):
        return format_number(int(exponent)).translate(_SUPERSCRIPTS)
    return f"^{format_number(exponent)}"


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """Text of g_t."""

    terms: Terms  # expanded form, for example (W k) kᵀ − v kᵀ
    compact: Terms  # form with a single term, for example (W k − v) kᵀ
    erase: Terms = ()  # part with the prediction, for errors affine in it
    write: Terms = ()  # part without the prediction, for errors affine in it

    def scaled(self, *factors: float | str, compact: bool = False) -> Terms:
        """Return the terms times factors."""
        return tuple(term.times(*factors) for term in (self.compact if compact else self.terms))
