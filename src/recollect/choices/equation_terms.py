"""Signed terms of equations, from which `explain` renders a recipe.

A term is a signed number times factors, so that a minus never meets another minus as text. Members
return terms (`Bias.error_terms`, `Memory.outer`, `Algorithm.moves`), and only `render_sum` makes a
string of a sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Gradient", "Term", "Terms", "format_number", "parenthesise", "power", "render_sum"]

_SUPERSCRIPTS = str.maketrans("0123456789−", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


@dataclass(frozen=True)
class Term:
    """coefficient · factor · factor …: ``Term(("v_t", "k_tᵀ"), -0.5)`` is −0.5 v_t k_tᵀ."""

    factors: tuple[str, ...]
    coefficient: float = 1.0

    def times(self, *left: float | str) -> Term:
        """This term with factors put before it; numbers go into the coefficient."""
        coefficient, words = self.coefficient, []
        for factor in left:
            if isinstance(factor, str):
                words.append(factor)
            else:
                coefficient *= factor
        return Term((*words, *self.factors), coefficient)

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
    """A sum as it is written: ``a − b + c``; terms of coefficient 0 are left out."""
    text = ""
    for term in terms:
        if term.coefficient == 0:
            continue
        if not text:
            text = str(term)
        else:
            text += f" {'−' if term.coefficient < 0 else '+'} {term.body}"
    return text or "0"


def format_number(x: float | str) -> str:
    """A number as it is written, a letter as it is."""
    return x if isinstance(x, str) else f"{x:.4g}".replace("-", "−")


def parenthesise(text: str) -> str:
    """``text`` in parentheses, unless it is one factor already."""
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter in "(⟨") - (letter in ")⟩")
        if letter == " " and depth == 0:
            return f"({text})"
        if letter == "−" and index == 0:
            return f"({text})"
    return text


def power(exponent: float) -> str:
    """An exponent as superscript; nothing for 1."""
    if exponent == 1:
        return ""
    if exponent == int(exponent):
        return format_number(int(exponent)).translate(_SUPERSCRIPTS)
    return f"^{format_number(exponent)}"


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """g_t as it is written.

    Attributes:
        terms: in the form that reads best by itself, e.g. (W k) kᵀ − v kᵀ.
        compact: as one term, e.g. (W k − v) kᵀ.
        erase, write: the parts with and without the prediction, for errors affine in it.
    """

    terms: Terms
    compact: Terms
    erase: Terms = ()
    write: Terms = ()

    def scaled(self, *left: float | str, compact: bool = False) -> Terms:
        """Every term times a factor."""
        return tuple(term.times(*left) for term in (self.compact if compact else self.terms))
