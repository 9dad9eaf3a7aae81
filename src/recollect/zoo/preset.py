"""Presets: named systems of the literature, each a recipe and options, and how faithful it is."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from recollect.blocks.builder import build
from recollect.blocks.mixers import Mixer, as_mixer
from recollect.layer.checks import fit_options
from recollect.layer.feed_forward import FeedForward, build_layer
from recollect.layer.memory_layer import MemoryLayer
from recollect.layer.options import LayerOptions
from recollect.messages import RecipeError, short_repr
from recollect.recipe.recipe import CHOICES, Recipe
from recollect.report.notebook import equations_of, facts

__all__ = [
    "Fidelity",
    "Hybrid",
    "Preset",
    "Reference",
    "find",
    "get",
    "hybrid",
    "hybrids",
    "names",
    "preset",
]

KINDS = ("exact", "approximation", "reconstruction")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Where a system comes from.

    Attributes:
        where: equation, section or table.

    Examples:
        >>> print(rc.zoo.Reference(paper="Katharopoulos et al.", year=2020, where="eqs. 18–20"))
        Katharopoulos et al. (2020), eqs. 18–20
    """

    paper: str
    year: int
    where: str

    def __str__(self) -> str:
        return f"{self.paper} ({self.year}), {self.where}"


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """How close a system is to its source.

    Attributes:
        kind: ``"exact"``, ``"approximation"`` or ``"reconstruction"`` (the source leaves something
            open).
        source: the equation that the system follows, as in ``"ATLAS eqs. 12–13"``.
        source_equation: that equation as it is printed, with paper and number behind each line.
            Empty if the system's ``rule`` is the printed equation up to notation.
        deviations: each difference from the source, and each choice that the source leaves open, in
            the recipe and in the layer around it. One sentence each.

    Raises:
        RecipeError: an unknown kind, or deviations that are no tuple of texts.

    Examples:
        >>> print(rc.zoo.get("linear_attention").fidelity.kind)
        exact
        >>> print(rc.zoo.get("ffn_relu").fidelity)
        exact, from AM eq. 14
        >>> print(rc.zoo.Fidelity(kind="exact", source="1", deviations=("It has no gate.",)))
        exact, from 1
        - It has no gate.
    """

    kind: str
    source: str
    source_equation: str = ""
    deviations: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RecipeError(
                f"Fidelity(kind=...) must be one of {', '.join(KINDS)}, not {self.kind!r}"
            )
        texts = isinstance(self.deviations, tuple) and all(
            isinstance(item, str) for item in self.deviations
        )
        if not texts:
            raise RecipeError(
                f"Fidelity(deviations=...) must be a tuple of sentences, not {self.deviations!r}"
            )

    def __str__(self) -> str:
        lines = [f"{self.kind}, from {self.source}", *(f"- {item}" for item in self.deviations)]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named system: a recipe, the layer's options, and where both come from.

    Attributes:
        name: as in `names`.
        title: what the system is called.
        recipe, options: what it is.
        rule: the write rule that it computes, in the source's letters.
        family: the file it lives in.
        row: its number in the table of architectures.
        references, fidelity: whose it is, and how faithful.
        summary: one sentence.

    Examples:
        >>> preset = rc.zoo.get("gated_delta_net")
        >>> preset.title, preset.family
        ('Gated DeltaNet', 'delta_rule')
        >>> preset.rule
        'M_t = α_t M_(t−1)(I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ'
        >>> layer = preset.build(d_model=16, num_heads=2)
        >>> layer(torch.randn(1, 4, 16))[0].shape
        torch.Size([1, 4, 16])
    """

    name: str
    title: str
    recipe: Recipe
    options: LayerOptions = field(default_factory=LayerOptions)
    rule: str
    family: str
    row: int
    references: tuple[Reference, ...]
    fidelity: Fidelity
    summary: str = ""

    def build(
        self, d_model: int, num_heads: int, *, options: LayerOptions | None = None, **overrides: Any
    ) -> MemoryLayer | FeedForward:
        """A layer of this system with fresh weights.

        Args:
            d_model: width of the tokens.
            num_heads: query heads.
            options: in place of the preset's own, e.g. ``replace(preset.options, conv_size=0)``.
            **overrides: other keywords of `MemoryLayer`: num_kv_heads, head_dim, value_dim, engine,
                chunk_size, precision, depth.

        Raises:
            RecipeError: an override that `MemoryLayer` does not take.
        """
        known = (
            *("num_kv_heads", "head_dim", "value_dim"),
            *("engine", "chunk_size", "precision", "depth"),
        )
        for name in overrides:
            if name not in known:
                raise RecipeError(
                    f"build has no override {name!r}; it takes options, {', '.join(known)}"
                )
        options = self.options if options is None else options
        return build_layer(d_model, num_heads, self.recipe, options, **overrides)

    def replace(self, **changes: Any) -> Preset:
        """Return this system with some choices of its recipe replaced.

        Its layer options are kept. Those that do not fit the changed recipe are reset: options of
        a gate that the recipe does not have, values in a unit that a gate does not have, and ties.
        A warning names them, and so does ``fidelity``.

        Args:
            **changes: choices by name, as `Recipe.replace` takes them.

        Raises:
            RecipeError: a choice is unknown or does not fit the others, or no layer of the system
                has the changed recipe.

        Warns:
            UserWarning: layer options were reset.

        Examples:
            >>> mine = rc.zoo.get("titans").replace(bias=rc.bias.Huber())
            >>> mine.recipe.bias.brief, mine.options == rc.zoo.get("titans").options
            ('Huber()', True)
            >>> layer = mine.build(d_model=16, num_heads=2)
        """
        if not changes:
            return self
        recipe = self.recipe.replace(**changes)
        options, reset = fit_options(recipe, self.options, self.recipe)
        said = ", ".join(f"{name} = {change.brief}" for name, change in changes.items())
        deviations = [f"The recipe has {said}."]
        if reset:
            deviations.append(f"Layer options were reset: {', '.join(reset)}.")
            warnings.warn(
                f"{self.name} with {said} resets layer options that do not fit: "
                f"{', '.join(reset)}; others are given by build(options=...)",
                UserWarning,
                stacklevel=2,
            )
        return replace(
            self,
            name=f"{self.name}, {said}",
            title=f"{self.title} with {said}",
            recipe=recipe,
            options=options,
            rule="",
            fidelity=Fidelity(
                kind="reconstruction", source=self.name, deviations=tuple(deviations)
            ),
            summary="",
        )

    def _repr_html_(self) -> str:
        recipe = [(name, [getattr(self.recipe, name).brief]) for name in CHOICES]
        rows = [
            ("rule", [self.rule]),
            ("printed", self.fidelity.source_equation.splitlines()),
            *recipe,
            *equations_of(self),
            ("fidelity", str(self.fidelity).splitlines()),
            ("from", [str(reference) for reference in self.references]),
        ]
        code = ("rule", "printed", *CHOICES, *(name for name, _ in equations_of(self)))
        return facts(f"`{self.name}`: {self.title}", rows, equations=code)


@dataclass(frozen=True, kw_only=True)
class Hybrid:
    """A named system of several recipes: a mixer, or a pattern of mixers over the depth.

    Attributes:
        name: as in `hybrids`.
        title: what the system is called.
        layers: its mixers in the order in which they stand over the depth, each under a name. Every
            one is followed by an MLP.
        rule: how they work together, in the paper's form.
        family: the file it lives in.
        row: its number in the table of architectures.
        references, fidelity: whose it is, and how faithful.
        summary: one sentence.

    Examples:
        >>> system = rc.zoo.find("titans_mal")
        >>> system.rule
        'y = M([p, x]),  o = SWA(y)'
        >>> layer = system.build(d_model=16, num_heads=2)
        >>> layer(torch.randn(1, 4, 16))[0].shape
        torch.Size([1, 4, 16])
    """

    name: str
    title: str
    layers: tuple[tuple[str, Mixer], ...]
    rule: str
    family: str
    row: int
    references: tuple[Reference, ...]
    fidelity: Fidelity
    summary: str = ""

    @property
    def mixer(self) -> Mixer:
        """The one mixer that every layer is.

        Raises:
            RecipeError: the layers differ.
        """
        if len(self.layers) > 1:
            raise RecipeError(
                f"{self.name} is a pattern of layers, {', '.join(dict(self.layers))}, and no "
                "single mixer: make a model of it, by RecollectConfig.from_recipes("
                f"{self.name!r})"
            )
        return next(mixer for _, mixer in self.layers)

    def _repr_html_(self) -> str:
        rows = [
            ("rule", [self.rule]),
            ("layers", [", ".join(dict(self.layers))] if len(self.layers) > 1 else []),
            ("composes", [line for _, mixer in self.layers for line in mixer.equations]),
            ("fidelity", str(self.fidelity).splitlines()),
            ("from", [str(reference) for reference in self.references]),
        ]
        return facts(f"`{self.name}`: {self.title}", rows, equations=("rule", "composes"))

    def build(self, d_model: int, num_heads: int, **sizes: Any) -> Any:
        """A layer of this system with fresh weights, as `recollect.blocks.build`.

        Args:
            d_model: width of the tokens.
            num_heads: query heads of every part.
            **sizes: other keywords of `MemoryLayer`.

        Raises:
            RecipeError: a pattern of different layers, or sizes that do not fit.
        """
        return build(self.mixer, d_model, num_heads, **sizes)


_PRESETS: dict[str, Preset] = {}
_HYBRIDS: dict[str, Hybrid] = {}

Maker = Callable[[], tuple[Recipe, LayerOptions]]
Composer = Callable[[], "Mixer | Mapping[str, Any]"]


def preset(
    title: str,
    *,
    row: int,
    rule: str,
    references: tuple[Reference, ...],
    fidelity: Fidelity,
) -> Callable[[Maker], Maker]:
    """Decorator: register a function that returns recipe and options under its own name.

    Its docstring's first line is the summary, its module the family.

    Args:
        title: what the system is called.
        row: its number in the table of architectures.
        rule: the write rule that it computes, in the source's letters.
        references: whose it is.
        fidelity: how close the recipe is to its source.

    Raises:
        RecipeError: a name that another preset has.

    Examples:
        >>> @rc.zoo.preset(
        ...     "Half delta net",
        ...     row=999,
        ...     rule="W_t = W_(t−1) − ½ (W_(t−1) k_t − v_t) k_tᵀ",
        ...     references=(rc.zoo.Reference(paper="none", year=2026, where="here"),),
        ...     fidelity=rc.zoo.Fidelity(kind="exact", source="the rule above"),
        ... )
        ... def half_delta_net():
        ...     algorithm = rc.algorithm.GradientDescent(lr=0.5)
        ...     return rc.Recipe(algorithm=algorithm), rc.LayerOptions()
        >>> rc.zoo.get("half_delta_net").title
        'Half delta net'
    """

    def register(make: Maker) -> Maker:
        recipe, options = make()
        name = make.__name__
        if name in _PRESETS or name in _HYBRIDS:
            raise RecipeError(f"a preset named {name!r} exists already: choose another name")
        _PRESETS[name] = Preset(
            name=name,
            title=title,
            recipe=recipe,
            options=options,
            rule=rule,
            family=make.__module__.rpartition(".")[2],
            row=row,
            references=references,
            fidelity=fidelity,
            summary=(make.__doc__ or "").strip().split("\n")[0],
        )
        return make

    return register


def hybrid(
    title: str,
    *,
    row: int,
    rule: str,
    references: tuple[Reference, ...],
    fidelity: Fidelity,
) -> Callable[[Composer], Composer]:
    """Decorator: register a function that returns a mixer, or the mixers of a pattern by name.

    Its docstring's first line is the summary, its module the family.

    Args:
        title: what the system is called.
        row: its number in the table of architectures.
        rule: how the parts work together.
        references: whose it is.
        fidelity: how close it is to its source.

    Raises:
        RecipeError: a name that another system has.

    Examples:
        >>> @rc.zoo.hybrid(
        ...     "Delta net, then a window",
        ...     row=999,
        ...     rule="y = window(delta(x))",
        ...     references=(rc.zoo.Reference(paper="none", year=2026, where="here"),),
        ...     fidelity=rc.zoo.Fidelity(kind="exact", source="the rule above"),
        ... )
        ... def delta_then_window():
        ...     return rc.blocks.Sequential("delta_net", "sliding_window_attention")
        >>> rc.zoo.find("delta_then_window").title
        'Delta net, then a window'
    """

    def register(make: Composer) -> Composer:
        made, name = make(), make.__name__
        if name in _PRESETS or name in _HYBRIDS:
            raise RecipeError(f"a system named {name!r} exists already: choose another name")
        layers = made if isinstance(made, Mapping) else {name: made}
        _HYBRIDS[name] = Hybrid(
            name=name,
            title=title,
            layers=tuple((key, as_mixer(value)) for key, value in layers.items()),
            rule=rule,
            family=make.__module__.rpartition(".")[2],
            row=row,
            references=references,
            fidelity=fidelity,
            summary=(make.__doc__ or "").strip().split("\n")[0],
        )
        return make

    return register


def hybrids() -> list[str]:
    """Names of all systems of several recipes, in the order of the table.

    Examples:
        >>> "titans_mal" in rc.zoo.hybrids()
        True
    """
    return [h.name for h in sorted(_HYBRIDS.values(), key=lambda h: h.row)]


def find(name: str) -> Preset | Hybrid:
    """The system of that name, of one recipe or of several.

    Raises:
        RecipeError: there is none; the nearest names are suggested.

    Examples:
        >>> rc.zoo.find("gla").title, rc.zoo.find("samba").title
        ('gated linear attention (GLA)', 'Samba')
    """
    if isinstance(name, str) and name in _HYBRIDS:  # pyright: ignore[reportUnnecessaryIsInstance]
        return _HYBRIDS[name]
    return get(name)


def names(family: str | None = None) -> list[str]:
    """Names of all presets in the order of the table, or of one family.

    Raises:
        RecipeError: an unknown family.

    Examples:
        >>> rc.zoo.names("titans")
        ['titans', 'titans_with_base', 'titans_minus']
    """
    families = sorted({p.family for p in _PRESETS.values()})
    if family is not None and family not in families:
        raise RecipeError(
            f"the zoo has no family {short_repr(family)}; it has {', '.join(families)}"
        )
    chosen = [p for p in _PRESETS.values() if family in (None, p.family)]
    return [p.name for p in sorted(chosen, key=lambda p: p.row)]


def get(name: str) -> Preset:
    """The preset of that name.

    Raises:
        RecipeError: there is none; the nearest names are suggested.

    Examples:
        >>> print(rc.explain(rc.zoo.get("gla")).write[0])
        W_t = W_(t−1) Diag(α_t) + v_t k_tᵀ
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RecipeError(
            'the zoo knows architectures by name, as in rc.zoo.get("gla"), and not '
            f"{short_repr(name)}"
        )
    if name in _PRESETS:
        return _PRESETS[name]
    if name in _HYBRIDS:
        parts = [key for key, _ in _HYBRIDS[name].layers if key != name]
        made = f"layers of {', '.join(parts)}" if parts else "several recipes in one layer"
        raise RecipeError(
            f"{name} is {made}, and one recipe is asked for here: rc.zoo.find({name!r}) gives the "
            "system, and rc.blocks builds such layers"
        )
    near = difflib.get_close_matches(name, [*_PRESETS, *_HYBRIDS], n=3, cutoff=0.5)
    all_of_them = f"rc.zoo.names() lists all {len(_PRESETS)}, such as {', '.join(names()[:3])}"
    hint = f"did you mean {' or '.join(near)}?" if near else all_of_them
    raise RecipeError(f"the zoo has no architecture named {short_repr(name)}; {hint}")
