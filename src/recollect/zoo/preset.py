"""Presets: named systems of the literature with recipes, layer options, references and fidelity."""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from recollect.blocks.builder import build
from recollect.blocks.mixers import Mixer, RecipeMixer, as_mixer
from recollect.layer.checks import fit_options
from recollect.layer.feed_forward import build_layer
from recollect.layer.options import GateOptions, LayerOptions
from recollect.messages import RecipeError, short_repr
from recollect.recipe.recipe import CHOICES, Recipe
from recollect.report.notebook import definition_table, get_equations
from recollect.zoo.fidelity import Deviation, Fidelity, deviation_items
from recollect.zoo.references import Reference

__all__ = [
    "KINDS",
    "Factory",
    "Preset",
    "decay_from",
    "get",
    "limit_multiple",
    "names",
    "preset",
    "published",
    "variants",
]

KINDS = ("attention", "matrix", "vector", "kernel", "deep", "feed_forward", "hybrid")
"""Structures of memories, see `Preset.kind`."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named system: its mixers, and their sources.

    Attributes:
        name: name in the zoo. A variant has the name of its preset and its own, as in
            ``"titans:published"``.
        title: name in the literature.
        layers: mixers by name, one per layer of the repeating pattern, from input to output. A
            model has an MLP after each.
        rule: the update that it computes, in the letters of the source.
        family: module of the zoo that defines it.
        references: sources.
        fidelity: closeness to the sources.
        summary: one sentence.
        twin_of: name of the preset of which it is a variation, or empty.

    Examples:
        >>> preset = rc.zoo.get("gated_delta_net")
        >>> preset.title, preset.family, preset.kind
        ('Gated DeltaNet', 'delta_rule', 'matrix')
        >>> preset.rule
        'M_t = α_t M_(t−1)(I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ'
        >>> layer = preset.build(d_model=16, num_heads=2)
        >>> layer(torch.randn(1, 4, 16))[0].shape
        torch.Size([1, 4, 16])
    """

    name: str
    title: str
    layers: tuple[tuple[str, Mixer], ...]
    rule: str
    family: str
    references: tuple[Reference, ...]
    fidelity: Fidelity
    summary: str = ""
    twin_of: str = ""

    def __repr__(self) -> str:
        return f"Preset({self.name!r})"

    @property
    def variant(self) -> str:
        """Name of the variant, or empty."""
        return self.name.partition(":")[2]

    @property
    def year(self) -> int | None:
        """Year of the first publication: of the earliest reference that introduces the system."""
        return min((source.year for source in self.references if source.introduces), default=None)

    @property
    def kind(self) -> str:
        """Structure of the memory.

        ``"attention"``: stored associations, fitted anew for every query. ``"matrix"`` and
        ``"vector"``: linear memories. ``"kernel"``: a linear memory over the infinitely many
        features of a kernel. ``"deep"``: maps with an activation or a norm. ``"feed_forward"``:
        learned associations that are read and never written. ``"hybrid"``: several recipes.
        """
        mixer = self.layers[0][1]
        if len(self.layers) > 1 or not isinstance(mixer, RecipeMixer):
            return "hybrid"
        recipe = mixer.recipe
        if mixer.options.persistent:
            return "feed_forward"
        if recipe.nonparametric:
            return "attention"
        if not recipe.memory.linear:
            return "deep"
        if not recipe.features.finite:
            return "kernel"
        return "vector" if recipe.memory.is_elementwise else "matrix"

    @property
    def mixer(self) -> Mixer:
        """The mixer of every layer.

        Raises:
            RecipeError: the layers differ.
        """
        if len(self.layers) == 1:
            return self.layers[0][1]
        raise RecipeError(
            f"{self.name} is a pattern of layers, {', '.join(dict(self.layers))}, and no single "
            f"mixer: make a model of it, by RecollectConfig.from_recipes({self.name!r})"
        )

    @property
    def recipe(self) -> Recipe:
        """The recipe of a system that has only one.

        Raises:
            RecipeError: the system is a hybrid.
        """
        return self._single.recipe

    @property
    def options(self) -> LayerOptions:
        """The layer options of a system that has only one recipe.

        Raises:
            RecipeError: the system is a hybrid.
        """
        return self._single.options

    @property
    def _single(self) -> RecipeMixer:
        mixer = self.layers[0][1]
        if len(self.layers) == 1 and isinstance(mixer, RecipeMixer):
            return mixer
        parts = [key for key, _ in self.layers if key != self.name]
        structure = f"layers of {', '.join(parts)}" if parts else "several recipes in one layer"
        raise RecipeError(
            f"{self.name} is {structure}, and one recipe is expected here: "
            f"rc.zoo.get({self.name!r}).layers are its parts, and rc.blocks builds such layers"
        )

    def build(
        self, d_model: int, num_heads: int, *, options: LayerOptions | None = None, **sizes: Any
    ) -> Any:
        """Return a layer of this system with new weights.

        Args:
            d_model: width of the tokens.
            num_heads: query heads, of every part.
            options: layer options of a system of one recipe instead of its own, such as
                ``replace(preset.options, conv_size=0)``.
            **sizes: other keywords of `MemoryLayer`: num_kv_heads, head_dim, value_dim, engine,
                chunk_size, precision, depth.

        Raises:
            RecipeError: a pattern of different layers, an unknown keyword, or sizes that do not
                fit.
        """
        known = (
            *("num_kv_heads", "head_dim", "value_dim"),
            *("engine", "chunk_size", "precision", "depth"),
        )
        for name in sizes:
            if name not in known:
                raise RecipeError(
                    f"build has no override {name!r}; it takes options, {', '.join(known)}"
                )
        if self.kind == "hybrid" and options is None:
            return build(self.mixer, d_model, num_heads, **sizes)
        options = self.options if options is None else options
        return build_layer(d_model, num_heads, self.recipe, options, **sizes)

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
        choices = ", ".join(f"{name} = {change.brief}" for name, change in changes.items())
        sentences = [f"The recipe has {choices}."]
        if reset:
            sentences.append(f"Layer options were reset: {', '.join(reset)}.")
            warnings.warn(
                f"{self.name} with {choices} resets layer options that do not fit: "
                f"{', '.join(reset)}; others are given by build(options=...)",
                UserWarning,
                stacklevel=2,
            )
        name = f"{self.name}, {choices}"
        return replace(
            self,
            name=name,
            title=f"{self.title} with {choices}",
            layers=((name, RecipeMixer(recipe=recipe, options=options)),),
            rule="",
            fidelity=Fidelity(
                kind="reconstruction",
                source=self.name,
                deviations=deviation_items(changed="\n".join(sentences)),
            ),
            summary="",
            twin_of=self.name,
        )

    def _repr_html_(self) -> str:
        if self.kind == "hybrid":
            parts = [("layers", [", ".join(dict(self.layers))] if len(self.layers) > 1 else [])]
            parts += [("composes", [x for _, mixer in self.layers for x in mixer.equations])]
        else:
            parts = [(name, [getattr(self.recipe, name).brief]) for name in CHOICES]
            parts += [(name, [*lines]) for name, lines in get_equations(self)]
        rows = [
            ("rule", [self.rule]),
            ("printed", self.fidelity.source_equation.splitlines()),
            *parts,
            ("fidelity", str(self.fidelity).splitlines()),
            ("from", [str(reference) for reference in self.references]),
        ]
        code = ("rule", "printed", *(name for name, _ in parts if name != "layers"))
        return definition_table(f"`{self.name}`: {self.title}", rows, equations=code)


_PRESETS: dict[str, Preset] = {}

Factory = Callable[[], "tuple[Recipe, LayerOptions] | Mixer | Mapping[str, Any]"]


def preset(
    title: str,
    *,
    rule: str,
    references: tuple[Reference, ...],
    fidelity: Fidelity,
    twin_of: str = "",
) -> Callable[[Factory], Factory]:
    """Decorate a function so that the system it returns is registered under its name.

    The function returns a recipe and layer options, a mixer, or the mixers of a pattern by name.
    The first line of its docstring is the summary, and its module is the family. A rate in
    multiples of the stability limit becomes a deviation with its numbers.

    Args:
        title: name in the literature.
        rule: the update that it computes, in the letters of the source.
        references: sources.
        fidelity: closeness to the sources.
        twin_of: name of the preset of which it is a variation.

    Raises:
        RecipeError: another preset has the name.

    Examples:
        >>> @rc.zoo.preset(
        ...     "Half delta net",
        ...     rule="W_t = W_(t−1) − ½ (W_(t−1) k_t − v_t) k_tᵀ",
        ...     references=(rc.zoo.Reference(paper="none", year=2026, location="here"),),
        ...     fidelity=rc.zoo.Fidelity(kind="exact", source="the rule above"),
        ... )
        ... def half_delta_net():
        ...     algorithm = rc.algorithm.GradientDescent(lr=0.5)
        ...     return rc.Recipe(algorithm=algorithm), rc.LayerOptions()
        >>> rc.zoo.get("half_delta_net").title
        'Half delta net'
    """

    def register(make: Factory) -> Factory:
        name = make.__name__
        _register(
            make, name, title=title, rule=rule, references=references, fidelity=fidelity,
            twin_of=twin_of,
        )  # fmt: skip
        return make

    return register


def published(
    name: str, *, rule: str, references: tuple[Reference, ...], fidelity: Fidelity
) -> Callable[[Factory], Factory]:
    """Decorate a function that returns the printed equation of a registered preset.

    The system is registered as the preset's variant ``"published"``.
    """

    def register(make: Factory) -> Factory:
        title = f"{get(name).title}, as published"
        _register(
            make, f"{name}:published", title=title, rule=rule, references=references,
            fidelity=fidelity, twin_of=name,
        )  # fmt: skip
        return make

    return register


def _register(make: Factory, name: str, *, fidelity: Fidelity, **fields: Any) -> None:
    if name in _PRESETS:
        raise RecipeError(f"a preset named {name!r} exists already: choose another name")
    system = make()
    layers = system if isinstance(system, Mapping) else {name: system}
    registered = Preset(
        name=name,
        layers=tuple((key, as_mixer(value)) for key, value in layers.items()),
        family=make.__module__.rpartition(".")[2],
        fidelity=fidelity,
        summary=(make.__doc__ or "").strip().split("\n")[0],
        **fields,
    )
    if registered.kind != "hybrid":
        items = (*fidelity.deviations, *_rate_deviation(registered.recipe, registered.options))
        registered = replace(registered, fidelity=replace(fidelity, deviations=items))
    _PRESETS[name] = registered


def _rate_deviation(recipe: Recipe, options: LayerOptions) -> tuple[Deviation, ...]:
    """Return the deviation of a rate in multiples of the stability limit, if it is in that unit."""
    rate = options.gate("lr")
    if rate.resolve_unit("lr", recipe) != "stability_limit":
        return ()
    low, high, init = rate.low or 0.0, rate.high or 1.0, rate.init or 0.5
    if isinstance(init, tuple):
        text = f"η_t is the stability limit times a gate between {low:g} and {high:g}."
        return deviation_items(rate=text)
    return deviation_items(rate=(low, high, init))


def limit_multiple(
    init: float, *, low: float | None = None, high: float | None = None
) -> GateOptions:
    """Return options of a rate in multiples of the stability limit, by default from 0 to 1."""
    return GateOptions(unit="stability_limit", init=init, low=low, high=high)


def decay_from(alpha: float) -> GateOptions:
    """Return options of a decay that starts at α, with memory times spread over the heads.

    They are from 1/4 to 4 times −1/log α tokens.
    """
    return GateOptions(init=math.log(alpha), head_spread=4.0)


def names(family: str | None = None, *, kind: str | None = None) -> list[str]:
    """Return the names of presets in the order of registration, without variants.

    Args:
        family: module of the zoo. By default, all.
        kind: structure of the memory, one of `KINDS`. By default, all but hybrids, which a family
            also includes.

    Raises:
        RecipeError: an unknown family or kind.

    Examples:
        >>> rc.zoo.names("titans")
        ['titans', 'titans_with_base', 'titans_minus']
        >>> rc.zoo.names(kind="vector")
        ['lru', 'rg_lru']
        >>> "titans_mal" in rc.zoo.names(kind="hybrid")
        True
    """
    presets = [preset for preset in _PRESETS.values() if not preset.variant]
    families = sorted({preset.family for preset in presets})
    for argument, value, known in (("family", family, families), ("kind", kind, KINDS)):
        if value is not None and value not in known:
            raise RecipeError(
                f"the zoo has no {argument} {short_repr(value)}; it has {', '.join(known)}"
            )
    if family is not None:
        presets = [preset for preset in presets if preset.family == family]
    elif kind is None:
        presets = [preset for preset in presets if preset.kind != "hybrid"]
    return [preset.name for preset in presets if kind in (None, preset.kind)]


def variants() -> list[str]:
    """Return the names of all variants of presets.

    Examples:
        >>> "titans:published" in rc.zoo.variants()
        True
    """
    return [name for name, preset in _PRESETS.items() if preset.variant]


def get(name: str, *, variant: str | None = None) -> Preset:
    """Return the preset of a name, of one recipe or of several.

    Args:
        name: as in `names`, also with the name of a variant, as in `variants`.
        variant: ``"published"`` for the printed equation of a preset whose steps or initial values
            differ from it. A preset that is a variation of another has the variants of the other.

    Raises:
        RecipeError: no preset or variant has the name.

    Examples:
        >>> print(rc.explain(rc.zoo.get("gla")).write_equations[0])
        W_t = W_(t−1) Diag(α_t) + v_t k_tᵀ
        >>> print(rc.zoo.get("titans", variant="published").rule)
        S_t = θ_t S_(t−1) − η_t ∇‖M_(t−1)(k_t) − v_t‖²,  M_t = α_t M_(t−1) + S_t
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RecipeError(
            'the zoo has architectures by name, as in rc.zoo.get("gla"), and not '
            f"{short_repr(name)}"
        )
    if variant is not None:
        name = f"{name}:{variant}"
    if name in _PRESETS:
        return _PRESETS[name]
    base, _, variant = name.partition(":")
    if variant and base in _PRESETS:
        twin = f"{_PRESETS[base].twin_of}:{variant}"
        if twin in _PRESETS:
            return _PRESETS[twin]
        raise RecipeError(
            f"{base} has no variant {short_repr(variant)}: rc.zoo.variants() lists all variants"
        )
    near = difflib.get_close_matches(name.lower(), list(_PRESETS), n=3, cutoff=0.5)
    known = names()
    all_of_them = f"rc.zoo.names() lists all {len(known)}, such as {', '.join(known[:3])}"
    hint = f"did you mean {' or '.join(near)}?" if near else all_of_them
    raise RecipeError(f"the zoo has no architecture named {short_repr(name)}; {hint}")
