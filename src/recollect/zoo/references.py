"""References of presets, and the papers that several presets cite."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AM", "ATLAS", "MIRAS", "TITANS", "TTR", "TTT", "Paper", "Reference"]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Source of a system.

    Attributes:
        paper: authors and title.
        year: year of the first version.
        location: equation, section or table.
        introduces: whether the paper introduces the system, and not only a part of it.

    Examples:
        >>> print(rc.zoo.Reference(paper="Katharopoulos et al.", year=2020, location="eqs. 18–20"))
        Katharopoulos et al. (2020), eqs. 18–20
    """

    paper: str
    year: int
    location: str
    introduces: bool = True

    def __str__(self) -> str:
        return f"{self.paper} ({self.year}), {self.location}"


@dataclass(frozen=True)
class Paper:
    """A paper that presets cite.

    Attributes:
        title: authors and title.
        year: year of the first version.

    Examples:
        >>> from recollect.zoo.references import Paper
        >>> print(Paper("Katsch, GateLoop", 2023).at("section 3"))
        Katsch, GateLoop (2023), section 3
    """

    title: str
    year: int

    def at(self, location: str, *, introduces: bool = True) -> Reference:
        """Return a reference to an equation, section or table of the paper.

        ``introduces`` is False if the paper introduces only a part of the system.
        """
        return Reference(paper=self.title, year=self.year, location=location, introduces=introduces)


AM = Paper(
    "Zhong et al., Understanding Transformer from the perspective of associative memory", 2025
)
ATLAS = Paper(
    "Behrouz et al., Atlas: learning to optimally memorize the context at test time", 2025
)
MIRAS = Paper(
    "Behrouz et al., It's All Connected: a journey through test-time memorization, "
    "attentional bias, retention, and online optimization",
    2025,
)
TITANS = Paper("Behrouz et al., Titans: learning to memorize at test time", 2024)
TTR = Paper(
    "Wang et al., Test-time regression: a unifying framework for designing sequence models with "
    "associative memory",
    2025,
)
TTT = Paper(
    "Sun et al., Learning to (learn at test time): RNNs with expressive hidden states", 2024
)
