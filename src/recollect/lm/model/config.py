"""Configuration of a model: complete recipes and options, and the sizes of the backbone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

from transformers import GenerationConfig, PretrainedConfig

from recollect.blocks.compositions import read_mixer
from recollect.blocks.mixers import Mixer, RecipeMixer, as_mixer
from recollect.choices.matmul_precision import PRECISIONS, precision_error
from recollect.engines.select import select_engine
from recollect.fields import (
    as_int,
    field_spec,
    flag,
    int_check,
    number,
    text,
    validate,
    validated_field,
)
from recollect.layer.block import mlp_width
from recollect.layer.options import LayerOptions
from recollect.lm.model.checkpoint import check_config
from recollect.lm.publishing.remote_code import RemoteConfig
from recollect.messages import RecipeError, argument_name, short_repr, suggestion
from recollect.recipe.recipe import Recipe
from recollect.zoo.preset import Preset, get

__all__ = ["BASE_FIELDS", "SCHEMA", "RecipeLike", "RecollectConfig", "resolve_recipe"]

SCHEMA = 2

_MAX_SIZE, MAX_LAYERS = 2**31 - 1, 10_000  # catch typos before memory is allocated
_FLOAT_DTYPES = ("float32", "bfloat16", "float16", "float64")

# Keys of the base class, and keys that other parts of transformers write into the file.
BASE_FIELDS = frozenset(
    {*vars(PretrainedConfig()), *GenerationConfig().to_dict()}
    | {"transformers_version", "model_type", "architectures", "dtype", "torch_dtype", "auto_map"}
    | {"name_or_path", "num_labels", "output_attentions", "attn_implementation"}
    | {"experts_implementation", "per_layer_config", "quantization_config", "tokenizer_class"}
    | {"finetuning_task", "task_specific_params", "is_decoder", "cross_attention_hidden_size"}
)
RecipeLike = str | Preset | Mixer | Recipe | tuple[Recipe, LayerOptions]
"""A layer: a zoo name, a preset, a mixer, a recipe, or a recipe with its options."""

_RECIPE_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim", "value_dim")
"""Sizes that the layers of a recipe may have of their own."""

MLP = "mlp"
"""Name of an MLP among the names of layers."""


def _size(default: int | None, *, at_most: int = _MAX_SIZE) -> Any:
    """Return a field for a positive integer, or for ``None`` if that is its default."""
    return validated_field(default, int_check(1, at_most), optional=default is None)


def _check_recipes(value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"must be a mapping of names to recipes, not {short_repr(value)}")
    return dict(value or {})


def _check_recipe_sizes(value: Any) -> dict[str, dict[str, int]]:
    sizes = value or {}
    if not isinstance(sizes, Mapping) or not all(isinstance(x, Mapping) for x in sizes.values()):
        raise ValueError(f"must map names of recipes to sizes, not {short_repr(value)}")
    for name, size in (
        (name, size) for by_name in sizes.values() for name, size in by_name.items()
    ):
        if name not in _RECIPE_SIZES:
            raise ValueError(f"has no size {short_repr(name)}: {suggestion(name, _RECIPE_SIZES)}")
        int_check(1, _MAX_SIZE)(size)
    return {recipe: dict(by_name) for recipe, by_name in sizes.items()}


def _check_layers(value: Any) -> list[str]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"must be a list of names of recipes, not {short_repr(value)}")
    return list(value)


def _check_precision(value: Any) -> Any:
    for name in value.values() if isinstance(value, Mapping) else [value]:
        if name is not None and name not in PRECISIONS:
            raise ValueError(
                precision_error(name, "'float32' or 'tf32', or one of these by recipe")
            )
    return value


class RecollectConfig(RemoteConfig, PretrainedConfig):
    """Configuration of a language model whose sequence layers are recipes.

    `from_recipes` makes one from zoo names, presets or recipes.

    Args:
        vocab_size: number of tokens in the vocabulary.
        hidden_size: width of the backbone.
        num_hidden_layers: number of blocks.
        num_attention_heads: number of query heads. By default 12 if they divide ``hidden_size`` or
            ``head_dim`` is given, else the most of at least 64 channels that divide it (8 for 512).
        num_key_value_heads: number of memories per layer; by default the number of query heads.
        head_dim, value_dim: channels K of keys and V of values; by default hidden_size / heads, and
            K.
        recipe_sizes: sizes of the layers of a recipe that differ from those of the model:
            ``{name: {"num_attention_heads": ..., "num_key_value_heads": ..., "head_dim": ...,
            "value_dim": ...}}``, each with any of these keys.
        intermediate_size: width of the SwiGLU MLP; by default 8/3 · hidden_size. 0: no layer has
            an MLP.
        recipes: complete recipes ``{name: {"recipe": ..., "options": ...}}``, or compositions as
            `recollect.blocks.Mixer.to_dict` returns them.
        layers: names of recipes from the first layer on, repeated over the depth; by default all in
            order. An MLP follows every layer; with ``"mlp"`` among the names, an MLP follows only
            the layers before that word.
        schema: version of this format.
        engine: engine, as in `recall`.
        precision: precision of the products of memories, as in `recall`: one for all layers, or
            ``{name: precision}`` by recipe. Autocast governs the rest of a layer.
        rms_norm_eps: ε of the norms.
        zero_centered_norms: whether the norms of the backbone multiply by 1 + w, with w initially
            0, instead of w.
        initializer_range: standard deviation of initial linear maps and embeddings; by default
            hidden_size^(−1/2), which is the usual 0.02 at 2500.
        tie_word_embeddings: whether the output layer shares the weight of the embedding.
        logit_scale: factor of the logits, > 0. Only tied models that were scaled for width
            (`recollect.lm.scale_for_width`) have another one than 1.
        router_aux_loss_coef: factor of the load-balancing loss in the training loss, ≥ 0, for
            `recollect.blocks.MixtureOfMemories`; 0.01 as in Du et al. 2025.
        loss_chunk_size: number of tokens whose logits a training loss computes at once; 0: all.
        use_cache: whether a forward pass outside of training returns a cache.
        pad_token_id, bos_token_id, eos_token_id: special tokens of the tokenizer.

    Raises:
        RecipeError: a value is not valid, or a recipe has an unregistered member.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes("gla", vocab_size=32, hidden_size=16)
        >>> config.layers, config.head_dim
        (['gla'], None)
        >>> recipe, options = config.recipe("gla")
        >>> recipe == rc.zoo.get("gla").recipe
        True
    """

    model_type = "recollect"
    remote_classes: ClassVar[dict[str, str]] = {
        "AutoConfig": "RecollectConfig",
        "AutoModel": "RecollectModel",
        "AutoModelForCausalLM": "RecollectForCausalLM",
        "AutoModelForSequenceClassification": "RecollectForSequenceClassification",
    }
    # FSDP2 of `from_pretrained(distributed_config=...)` shards block by block. Only
    # `recollect.lm.distributed` divides layers by heads.
    base_model_fsdp_plan: ClassVar[dict[Any, str]] = {
        "embed_tokens": "free_full_weight",
        "blocks.*": "free_full_weight",
        "norm": "keep_full_weight",
    }
    base_model_tp_plan: ClassVar[dict[str, Any] | None] = {
        "blocks.*.mlp.gate_up": "packed_colwise",
        "blocks.*.mlp.down": "rowwise",
    }
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012

    vocab_size: int = _size(32000)
    hidden_size: int = _size(768)
    num_hidden_layers: int = _size(12, at_most=MAX_LAYERS)
    num_attention_heads: Any = _size(None)
    num_key_value_heads: Any = _size(None)
    head_dim: int | None = _size(None)
    value_dim: int | None = _size(None)
    recipe_sizes: dict[str, dict[str, int]] = validated_field(None, _check_recipe_sizes)
    intermediate_size: Any = validated_field(None, int_check(0, _MAX_SIZE), optional=True)
    recipes: dict[str, Any] = validated_field(None, _check_recipes)
    layers: list[str] = validated_field(None, _check_layers, optional=True)
    schema: int = SCHEMA
    engine: str = text("auto")
    precision: str | dict[str, str] | None = validated_field(None, _check_precision)
    rms_norm_eps: float = number(1e-6, above=0, below=1000)
    zero_centered_norms: bool = flag(False)
    initializer_range: Any = number(None, above=0, below=1000, optional=True)
    tie_word_embeddings: bool = flag(False)
    logit_scale: float = number(1.0, above=0, below=1000)
    router_aux_loss_coef: float = number(0.01, at_least=0, below=1000)
    loss_chunk_size: int = validated_field(1024, int_check(0, _MAX_SIZE))
    use_cache: bool = flag(True)
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.schema != SCHEMA or type(self.schema) is not int:  # true is 1, too
            raise RecipeError(
                f"this configuration has schema {short_repr(self.schema)} and this version of "
                f"recollect reads schema {SCHEMA}: rename its fields as CHANGELOG.md lists, or "
                "install the version that wrote it"
            )
        _check_unknown(kwargs)
        for name, dtype in (("dtype", self.dtype), ("torch_dtype", kwargs.get("torch_dtype"))):
            if dtype is not None and str(dtype).removeprefix("torch.") not in _FLOAT_DTYPES:
                choices = ", ".join(_FLOAT_DTYPES)
                raise RecipeError(
                    f"RecollectConfig({name}=...) must be one of {choices}, not {dtype!r}"
                )
        for field in dataclasses.fields(self):
            if (spec := field_spec(field)) is not None:
                self._set_checked(field.name, spec.validated)
        for name in ("pad_token_id", "bos_token_id"):
            self._set_checked(name, self._check_token)
        self._set_checked("eos_token_id", self._check_tokens)
        super().__post_init__(**kwargs)
        vars(self).pop("base_model_tp_plan", None)  # transformers 5.17 adds the tied embedding
        if self.layers is None:
            self.layers = list(self.recipes)
        if self.num_attention_heads is None:
            has_head_dim = self.head_dim is not None
            self.num_attention_heads = 12 if has_head_dim else _default_num_heads(self.hidden_size)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = mlp_width(self.hidden_size)
        if self.initializer_range is None:
            self.initializer_range = self.hidden_size**-0.5
        self._check()

    def _set_checked(self, name: str, check: Callable[[Any], Any]) -> None:
        label = argument_name(name, f"RecollectConfig({name}=...)")
        try:
            setattr(self, name, validate(label, check, getattr(self, name)))
        except ValueError as error:
            raise RecipeError(str(error)) from None

    def _check_token(self, value: Any) -> Any:
        number = as_int(value)
        if value is not None and (number is None or not 0 <= number < self.vocab_size):
            raise ValueError(
                f"must be a token from 0 to {self.vocab_size - 1}, not {short_repr(value)}"
            )
        return value

    def _check_tokens(self, value: Any) -> Any:
        for token in value if isinstance(value, list) else [value]:
            self._check_token(token)
        return value

    def _check(self) -> None:
        for argument, names in (
            ("layers", [name for name in self.layers if name != MLP]),
            ("precision", self.precision if isinstance(self.precision, Mapping) else ()),
            ("recipe_sizes", self.recipe_sizes),
        ):
            for name in names:
                if name not in self.recipes:
                    raise RecipeError(
                        f"{argument} names the recipe {short_repr(name)}, which is not among: "
                        f"{', '.join(self.recipes) or 'none'}"
                    )
        if MLP in self.recipes:
            raise RecipeError(
                f"a recipe cannot be named {MLP!r}, which stands for an MLP among the layers: "
                "give it another name"
            )
        for name in self.recipes:
            for leaf in self.mixer(name).leaves.values():
                select_engine(leaf.recipe, self.engine)
        # The pattern is repeated, so its last name precedes the first.
        pairs = zip(self.layers, [*self.layers[1:], *self.layers[:1]], strict=True)
        if self.layers[:1] == [MLP] or any(a == b == MLP for a, b in pairs):
            raise RecipeError(
                f"layers must begin with a recipe and have one between two {MLP!r}, not "
                f"{short_repr(self.layers)}"
            )

    @classmethod
    def from_recipes(
        cls,
        recipes: RecipeLike | Sequence[str] | Mapping[str, RecipeLike],
        *,
        layers: Sequence[str] | None = None,
        **sizes: Any,
    ) -> RecollectConfig:
        """Return a configuration of zoo names, presets or recipes.

        Args:
            recipes: a zoo name, a preset, a mixer, a recipe, a recipe with its options as a tuple,
                several zoo names, or a mapping of names to any of these.
            layers: names of recipes over the depth.
            sizes: other arguments of `RecollectConfig`.

        Raises:
            RecipeError: an unknown zoo name or argument.
        """
        named = _as_named_mapping(recipes)
        if not isinstance(recipes, Mapping) and layers is None and len(named) == 1:
            (value,) = named.values()
            system = get(value) if isinstance(value, str) else value
            if isinstance(system, Preset):  # a pattern of several mixers has names for them
                named = dict(system.layers)
        sizes["recipes"] = {name: as_mixer(value).to_dict() for name, value in named.items()}
        return cls(**{**sizes, "layers": layers})

    def recipe(self, name: str) -> tuple[Recipe, LayerOptions]:
        """Return a recipe by name, and its options.

        Raises:
            RecipeError: an unregistered member (nothing is imported or run to find it), or a
                composition of several recipes.
        """
        return resolve_recipe(self.mixer(name))

    def precision_of(self, name: str) -> str | None:
        """Return the precision of products in the layers of a recipe."""
        precision = self.precision
        return precision.get(name) if isinstance(precision, Mapping) else precision

    def sizes_of(self, name: str) -> dict[str, int | None]:
        """Return the numbers of heads and the sizes of heads in the layers of a recipe."""
        sizes = self.recipe_sizes.get(name, {})
        heads = sizes.get("num_attention_heads", self.num_attention_heads)
        has_own_heads = "num_attention_heads" in sizes
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": heads if has_own_heads else self.num_key_value_heads,
            "head_dim": self.head_dim,
            "value_dim": None if "head_dim" in sizes else self.value_dim,
            **sizes,
        }

    def mixer(self, name: str) -> Mixer:
        """Return the recipe or composition of a name.

        Raises:
            RecipeError: an entry that is neither, or an unregistered member.
        """
        entry = self.recipes[name]
        is_mapping = isinstance(entry, Mapping)
        if is_mapping and "mixer" in entry:
            return read_mixer(entry)
        if is_mapping and not set(entry) - {"recipe", "options"}:
            return read_mixer({"recipe": {}, **entry})
        raise RecipeError(
            f"recipes[{name!r:.80}] must be {{'recipe': ..., 'options': ...}} or {{'mixer': "
            f"..., ...}}, not {short_repr([*entry] if is_mapping else entry):.200}"
        )

    def all_recipes(self) -> dict[str, Recipe]:
        """Return all recipes by name, those of a composition as ``name.part``."""
        return {
            f"{name}.{path}".removesuffix("."): leaf.recipe
            for name in self.recipes
            for path, leaf in self.mixer(name).leaves.items()
        }

    @property
    def layer_specs(self) -> list[tuple[Mixer, bool]]:
        """Mixer of every layer, and whether an MLP follows it."""
        by_name = {name: self.mixer(name) for name in set(self.layer_names)}
        mixers = [by_name[name] for name in self.layer_names]
        return list(zip(mixers, self.has_mlp, strict=True))

    @property
    def has_mlp(self) -> list[bool]:
        """Whether an MLP follows, for every layer."""
        names, size = self.layers, len(self.layers)
        if not self.intermediate_size:
            return [False] * self.num_hidden_layers
        if MLP not in names:
            return [True] * self.num_hidden_layers
        is_next_mlp = [names[(i + 1) % size] == MLP for i in range(size) if names[i] != MLP]
        return [is_next_mlp[i % len(is_next_mlp)] for i in range(self.num_hidden_layers)]

    @property
    def layer_names(self) -> list[str]:
        """Name of the recipe of every layer.

        Raises:
            RecipeError: there are no recipes.
        """
        names = [name for name in self.layers if name != MLP]
        if not names:
            raise RecipeError(
                "this configuration has no recipes: make one with "
                "RecollectConfig.from_recipes('gated_delta_net')"
            )
        return [names[i % len(names)] for i in range(self.num_hidden_layers)]

    @classmethod
    def _dict_from_json_file(cls, json_file: Any) -> dict[str, Any]:
        check_config(Path(json_file))  # a mapping without repeated keys or attributes of Python
        return super()._dict_from_json_file(json_file)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RecollectConfig):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _field_names())

    __hash__ = None  # type: ignore[assignment]


def _default_num_heads(width: int) -> int:
    """Return 12, or the most heads of at least 64 channels that divide the width."""
    if width % 12 == 0:
        return 12
    return next(n for n in range(max(width // 64, 1), 0, -1) if width % n == 0)


def _check_unknown(fields: Mapping[str, Any]) -> None:
    """Raise for a key that is no field of the base class, such as a misspelled name."""
    for name in fields:
        # transformers passes private names of its own, which replace nothing of the class.
        private = name.startswith("_") and not name.startswith("__")
        if name not in BASE_FIELDS and not (private and not hasattr(RecollectConfig, name)):
            raise RecipeError(
                f"RecollectConfig has no field {name!r}: {suggestion(name, _field_names())}"
            )


def _field_names() -> list[str]:
    """Return the names of the fields of `RecollectConfig`, without those of the base class."""
    names = [field.name for field in dataclasses.fields(RecollectConfig)]
    return [name for name in names if name not in PretrainedConfig.__dataclass_fields__]


def _as_named_mapping(
    recipes: RecipeLike | Sequence[str] | Mapping[str, RecipeLike],
) -> dict[str, RecipeLike]:
    match recipes:
        case Mapping():
            return dict(recipes)
        case str():
            return {recipes: recipes}
        case Preset():
            return {recipes.name: recipes}
        case Mixer():
            return {recipes.kind: recipes}
        case Recipe() | (Recipe(), *_):
            return {"memory": recipes}
        case _:
            return {name: name for name in cast(Sequence[str], recipes)}


def resolve_recipe(value: RecipeLike) -> tuple[Recipe, LayerOptions]:
    """Return the recipe and options of a name, a preset, a mixer or a recipe."""
    mixer = as_mixer(value)
    if isinstance(mixer, RecipeMixer):
        return mixer.recipe, mixer.options
    raise RecipeError(
        f"rc.blocks.{type(mixer).__name__} composes {', '.join(mixer.leaves)}, and one recipe is "
        "expected here: pass one of them"
    )
