"""The configuration: recipes and options in full, as JSON, and the sizes of the backbone."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

from transformers import GenerationConfig, PretrainedConfig

from recollect.blocks.compositions import read_mixer
from recollect.blocks.mixers import Mixer, RecipeMixer, as_mixer
from recollect.choices.matmul_precision import PRECISIONS, precision_error
from recollect.engines.select import select_engine
from recollect.fields import as_int
from recollect.layer.block import mlp_width
from recollect.layer.options import LayerOptions
from recollect.lm.model.checkpoint import check_config
from recollect.lm.publishing.remote_code import RemoteConfig
from recollect.messages import RecipeError, argument_name, short_repr, suggestion
from recollect.recipe.recipe import Recipe
from recollect.zoo.preset import Hybrid, Preset, find

__all__ = ["SCHEMA", "Named", "RecollectConfig", "resolved"]

SCHEMA = 2

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")
_OPTIONAL = (
    *("num_attention_heads", "num_key_value_heads"),
    *("head_dim", "value_dim", "intermediate_size"),
)
_LARGEST, _DEEPEST = 2**31 - 1, 10_000  # a mistake is told from a wish before it takes all memory
_REAL = ("float32", "bfloat16", "float16", "float64")

# What the base class reads from a configuration: its fields, those it takes by name, and those that
# other parts of transformers write into the file.
_INHERITED = frozenset(
    {*vars(PretrainedConfig()), *GenerationConfig().to_dict()}
    | {"transformers_version", "model_type", "architectures", "dtype", "torch_dtype", "auto_map"}
    | {"name_or_path", "num_labels", "output_attentions", "attn_implementation"}
    | {"experts_implementation", "per_layer_config", "quantization_config", "tokenizer_class"}
    | {"finetuning_task", "task_specific_params", "is_decoder", "cross_attention_hidden_size"}
)
Named = str | Preset | Hybrid | Mixer | Recipe | tuple[Recipe, LayerOptions]
"""What may stand for a layer: a zoo name, a preset, a mixer, or a recipe with its options."""

MLP = "mlp"
"""The word that stands for an MLP among the names of a pattern."""


class RecollectConfig(RemoteConfig, PretrainedConfig):
    """Configuration of a language model whose sequence layers are recipes.

    Most easily made by `from_recipes`.

    Args:
        vocab_size, hidden_size, num_hidden_layers: of the backbone.
        num_attention_heads: query heads. When omitted: 12 where they divide hidden_size or head_dim
            is given, else the most of at least 64 channels that divide it (8 for 512).
        num_key_value_heads: memories per layer; the query heads' number when omitted.
        head_dim, value_dim: K and V; hidden_size / heads, and K, when omitted.
        intermediate_size: of the SwiGLU MLP; 8/3 · hidden_size when omitted.
        recipes: ``{name: {"recipe": ..., "options": ...}}`` in full, as ``to_dict`` writes them; in
            the place of a recipe a composition may stand, as `recollect.blocks.Mixer.to_dict`
            writes it.
        layers: names of recipes from the first layer on, repeated over the depth; all in order when
            omitted. An MLP follows every layer; where the word ``"mlp"`` stands among the names,
            one follows the layers before it alone.
        schema: of this mapping.
        engine: engine, as in `recall`.
        precision: of the memories' products, as in `recall`: one for all layers, or
            ``{name: precision}`` for those of some recipes. What a layer does around its memory is
            autocast's matter.
        rms_norm_eps: of the norms.
        initializer_range: standard deviation of linear maps and embeddings; hidden_size^(−1/2) when
            omitted, which is the customary 0.02 at 2500.
        tie_word_embeddings: whether the output reads the embedding.
        logit_scale: > 0, factor of the logits. 1 but for models whose output reads the embedding
            and that were begun under rules for width (`recollect.lm.scale_for_width`).
        router_aux_loss_coef: ≥ 0, what the training loss adds of the load-balancing loss, where
            tokens are routed to memories (`recollect.blocks.MixtureOfMemories`); 0.01 as in Du et
            al. 2025.
        loss_chunk_size: tokens whose logits a training loss holds at once; 0 is all of them.
        use_cache: whether a forward pass out of training returns states.
        pad_token_id, bos_token_id, eos_token_id: of the tokenizer.

    Raises:
        RecipeError: a recipe with an unregistered member, another schema, or an unknown name.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes(
        ...     "gated_delta_net", vocab_size=32, hidden_size=16, num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> config.layers, config.head_dim
        (['gated_delta_net'], None)
        >>> recipe, options = config.recipe("gated_delta_net")
        >>> recipe == rc.zoo.get("gated_delta_net").recipe
        True
    """

    model_type = "recollect"
    remote_classes: ClassVar[dict[str, str]] = {
        "AutoConfig": "RecollectConfig",
        "AutoModel": "RecollectModel",
        "AutoModelForCausalLM": "RecollectForCausalLM",
        "AutoModelForSequenceClassification": "RecollectForSequenceClassification",
    }
    # How transformers divides a model that `from_pretrained(distributed_config=...)` loads: FSDP2
    # block by block. Layers are divided by heads by `recollect.lm.sharding` alone.
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

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        num_attention_heads: int | None = None,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        intermediate_size: int | None = None,
        recipes: dict[str, Any] | None = None,
        layers: list[str] | None = None,
        schema: int = SCHEMA,
        engine: str = "auto",
        precision: str | dict[str, str] | None = None,
        rms_norm_eps: float = 1e-6,
        initializer_range: float | None = None,
        tie_word_embeddings: bool = False,
        logit_scale: float = 1.0,
        router_aux_loss_coef: float = 0.01,
        loss_chunk_size: int = 1024,
        use_cache: bool = True,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        if schema != SCHEMA or type(schema) is not int:  # true is 1, too
            raise RecipeError(
                f"this configuration has schema {short_repr(schema)} and this version of recollect "
                f"reads schema {SCHEMA}: rename its fields as "
                "CHANGELOG.md lists, or install the version that wrote it"
            )
        _check_unknown(kwargs)
        for name in ("dtype", "torch_dtype"):
            given = kwargs.get(name)
            if given is not None and str(given).removeprefix("torch.") not in _REAL:
                raise RecipeError(
                    f"RecollectConfig({name}=...) must be one of {', '.join(_REAL)}, not {given!r}"
                )
        super().__init__(**kwargs)
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads: Any = num_attention_heads
        self.num_key_value_heads: Any = num_key_value_heads
        self.head_dim, self.value_dim = head_dim, value_dim
        self.intermediate_size: Any = intermediate_size
        self.recipes = {} if recipes is None else recipes
        self.layers: list[str] = layers  # type: ignore[assignment]  # completed below
        self.schema = schema
        self.engine, self.precision = engine, precision
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        self.tie_word_embeddings = tie_word_embeddings
        self.logit_scale = logit_scale
        self.router_aux_loss_coef = router_aux_loss_coef
        self.loss_chunk_size = loss_chunk_size
        self.use_cache = use_cache
        self.pad_token_id, self.bos_token_id = pad_token_id, bos_token_id
        self.eos_token_id = eos_token_id
        _check_fields(self)
        self.recipes = dict(self.recipes)
        self.layers = list(self.recipes if layers is None else layers)
        if num_attention_heads is None:
            self.num_attention_heads = 12 if head_dim is not None else _heads(hidden_size)
        if num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if intermediate_size is None:
            self.intermediate_size = mlp_width(hidden_size)
        if initializer_range is None:
            self.initializer_range = hidden_size**-0.5
        self._check()

    def _check(self) -> None:
        for name in self.layers:
            if name not in self.recipes and name != MLP:
                raise RecipeError(
                    f"layers names the recipe {name!r}, which is not among: "
                    f"{', '.join(self.recipes) or 'none'}"
                )
        for name in self.recipes:
            if name == MLP:
                raise RecipeError(
                    f"a recipe cannot be named {MLP!r}, which stands for an MLP among the layers: "
                    "give it another name"
                )
            for leaf in self.mixer(name).leaves.values():
                select_engine(leaf.recipe, self.engine)
        for name in self.precision if isinstance(self.precision, Mapping) else ():
            if name not in self.recipes:
                raise RecipeError(
                    f"precision names the recipe {short_repr(name)}, which is not among: "
                    f"{', '.join(self.recipes) or 'none'}"
                )
        pairs = zip(self.layers, [*self.layers[1:], *self.layers[:1]], strict=True)
        if self.layers[:1] == [MLP] or any(a == b == MLP for a, b in pairs):
            raise RecipeError(
                f"layers must begin with a recipe and have one between two {MLP!r}, not "
                f"{short_repr(self.layers)}"
            )

    @classmethod
    def from_recipes(
        cls,
        recipes: Named | Sequence[str] | Mapping[str, Named],
        *,
        layers: Sequence[str] | None = None,
        **sizes: Any,
    ) -> RecollectConfig:
        """A configuration from zoo names, presets or recipes.

        Args:
            recipes: a zoo name, a preset, a mixer, a recipe (or with its options, as a tuple),
                several zoo names, or a mapping of names to any of these.
            layers: the pattern of names over the depth.
            sizes: the other arguments of `RecollectConfig`.

        Raises:
            RecipeError: an unknown zoo name or argument.
        """
        known = _arguments()
        for name in sizes:
            if name not in (*known, "dtype") or name in ("recipes", "layers", "schema"):
                raise RecipeError(
                    f"RecollectConfig has no argument {name!r}; {suggestion(name, known)}"
                )
        if layers is not None and (isinstance(layers, str) or not isinstance(layers, Sequence)):
            where = "RecollectConfig.from_recipes(layers=...)"
            raise RecipeError(
                f"{where} must be a list of names of recipes, not {short_repr(layers)}"
            )
        chosen = _by_name(recipes)
        if not isinstance(recipes, Mapping) and layers is None and len(chosen) == 1:
            (one,) = chosen.values()
            system = find(one) if isinstance(one, str) else one
            if isinstance(system, Hybrid):  # a pattern of several mixers brings their names
                chosen = dict(system.layers)
        recipe_data = {name: as_mixer(value).to_dict() for name, value in chosen.items()}
        return cls(recipes=recipe_data, layers=None if layers is None else list(layers), **sizes)

    def recipe(self, name: str) -> tuple[Recipe, LayerOptions]:
        """A recipe of this configuration, and its options.

        Raises:
            RecipeError: a member that nobody registered (nothing is imported or run to find it), or
                a composition of several recipes.
        """
        mixer = self.mixer(name)
        if not isinstance(mixer, RecipeMixer):
            raise RecipeError(
                f"{name} composes {', '.join(mixer.leaves)}, and one recipe is asked for: take "
                f"mixer({name!r}).leaves"
            )
        return mixer.recipe, mixer.options

    def precision_of(self, name: str) -> str | None:
        """The precision of products in the layers of a recipe."""
        said = self.precision
        return said.get(name) if isinstance(said, Mapping) else said

    def mixer(self, name: str) -> Mixer:
        """A recipe of this configuration, or a composition of several; raises as `recipe`."""
        entry = self.recipes[name]
        composed = isinstance(entry, Mapping) and "mixer" in entry
        if not composed and (not isinstance(entry, Mapping) or set(entry) - {"recipe", "options"}):
            given = [*entry] if isinstance(entry, Mapping) else entry
            raise RecipeError(
                f"recipes[{name!r:.80}] must be {{'recipe': ..., 'options': ...}} or {{'mixer': "
                f"..., ...}}, not {short_repr(given):.200}"
            )
        return read_mixer(entry if composed else {"recipe": {}, **entry})

    def all_recipes(self) -> dict[str, Recipe]:
        """Return all recipes by name, those of a composition as ``name.part``."""
        return {
            f"{name}.{path}".removesuffix("."): leaf.recipe
            for name in self.recipes
            for path, leaf in self.mixer(name).leaves.items()
        }

    @property
    def mixed(self) -> list[tuple[Mixer, bool]]:
        """The mixer of every layer, and whether an MLP follows it."""
        by_name = {name: self.mixer(name) for name in set(self.pattern)}
        mixers = [by_name[name] for name in self.pattern]
        return list(zip(mixers, self.followed, strict=True))

    @property
    def followed(self) -> list[bool]:
        """Whether an MLP follows, of every layer."""
        told, size = self.layers, len(self.layers)
        if MLP not in told:
            return [True] * self.num_hidden_layers
        after = [told[(i + 1) % size] == MLP for i in range(size) if told[i] != MLP]
        return [after[i % len(after)] for i in range(self.num_hidden_layers)]

    @property
    def pattern(self) -> list[str]:
        """The recipe's name of every layer.

        Raises:
            RecipeError: there are no recipes.
        """
        if not self.layers:
            raise RecipeError(
                "this configuration has no recipes: make one with "
                "RecollectConfig.from_recipes('gated_delta_net')"
            )
        names = [name for name in self.layers if name != MLP]
        return [names[i % len(names)] for i in range(self.num_hidden_layers)]

    @classmethod
    def _dict_from_json_file(cls, json_file: Any) -> dict[str, Any]:
        """As in transformers, of a file that is a mapping and names each key once.

        Raises:
            CheckpointError: another file, or a key that Python reserves.
        """
        check_config(Path(json_file))
        return super()._dict_from_json_file(json_file)

    def to_diff_dict(self) -> dict[str, Any]:
        """What ``config.json`` holds: never without the recipes, the pattern and the schema."""
        whole = self.to_dict()
        return {**super().to_diff_dict(), **{k: whole[k] for k in ("recipes", "layers", "schema")}}

    def __eq__(self, other: object) -> bool:
        """Equal when all arguments are, wherever the configurations came from."""
        if not isinstance(other, RecollectConfig):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _arguments())

    __hash__ = None  # type: ignore[assignment]


def _heads(width: int) -> int:
    """Heads of a configuration that names none."""
    if width % 12 == 0:
        return 12
    return next(n for n in range(max(width // 64, 1), 0, -1) if width % n == 0)


def _check_unknown(fields: Mapping[str, Any]) -> None:
    """Check that the base class has the other fields: a typing mistake is no attribute."""
    for name in fields:
        # transformers passes private names of its own, which replace nothing of the class.
        private = name.startswith("_") and not name.startswith("__")
        if name in _INHERITED or (private and not hasattr(RecollectConfig, name)):
            continue
        raise RecipeError(
            f"RecollectConfig has no field {name!r}: {suggestion(name, _arguments())}"
        )


def _check_fields(config: RecollectConfig) -> None:
    """Types and ranges of everything but the recipes."""

    def refuse(name: str, wanted: str) -> None:
        given = repr(getattr(config, name))
        given = given if len(given) <= 80 else f"{given[:77]}..."
        label = argument_name(name, f"RecollectConfig({name}=...)")
        raise RecipeError(f"{label} must be {wanted}, not {given}")

    for name in (*_SIZES, *_OPTIONAL):
        value = getattr(config, name)
        most = _DEEPEST if name == "num_hidden_layers" else _LARGEST
        number = as_int(value)
        fits = number is not None and 1 <= number <= most
        if not fits and not (value is None and name in _OPTIONAL):
            refuse(name, f"a whole number from 1 to {most:,}")
        setattr(config, name, number)
    chunk = as_int(config.loss_chunk_size)
    if chunk is None or not 0 <= chunk <= _LARGEST:
        refuse("loss_chunk_size", f"a whole number from 0 to {_LARGEST:,}")
    config.loss_chunk_size = chunk or 0
    for name in ("rms_norm_eps", "initializer_range", "logit_scale"):
        value = getattr(config, name)
        fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e3
        if not fits and not (value is None and name == "initializer_range"):
            refuse(name, "a number above 0 and below 1000")
    share = config.router_aux_loss_coef
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1e3:
        refuse("router_aux_loss_coef", "a number from 0 and below 1000")
    for name in ("tie_word_embeddings", "use_cache"):
        if not isinstance(getattr(config, name), bool):
            refuse(name, "True or False")
    said = config.precision
    for one in said.values() if isinstance(said, Mapping) else [said]:
        if one is not None and one not in PRECISIONS:
            subject = argument_name("precision", "RecollectConfig(precision=...)")
            expected = "'float32' or 'tf32', or one of these by recipe"
            raise RecipeError(f"{subject} {precision_error(one, expected)}")
    if not isinstance(config.engine, str):
        refuse("engine", "the name of an engine")
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, name)
        several = isinstance(value, list) and name == "eos_token_id"
        for token in value if several else [value]:
            number = as_int(token)
            if token is not None and (number is None or not 0 <= number < config.vocab_size):
                refuse(name, f"a token from 0 to {config.vocab_size - 1}")
    if not isinstance(config.recipes, Mapping):
        refuse("recipes", "a mapping of names to recipes")
    names = config.layers
    if names is not None and not (
        isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    ):
        refuse("layers", "a list of names of recipes")


def _arguments() -> list[str]:
    """Names of the configuration's own arguments, without those of the base class."""
    return [*inspect.signature(RecollectConfig.__init__).parameters][1:-1]


def _by_name(recipes: Named | Sequence[str] | Mapping[str, Named]) -> dict[str, Named]:
    if isinstance(recipes, Mapping):
        return dict(recipes)
    if isinstance(recipes, str):
        return {recipes: recipes}
    if isinstance(recipes, Preset | Hybrid):
        return {recipes.name: recipes}
    if isinstance(recipes, Mixer):
        return {recipes.kind: recipes}
    if isinstance(recipes, Recipe):
        return {"memory": recipes}
    if isinstance(recipes, tuple) and recipes and isinstance(recipes[0], Recipe):
        return {"memory": cast(Named, recipes)}
    return {name: name for name in cast(Sequence[str], recipes)}


def resolved(value: Named) -> tuple[Recipe, LayerOptions]:
    """What a name, a preset or a recipe of one's own stands for, where one recipe is asked for.

    Raises:
        RecipeError: an unknown zoo name, a composition of several recipes, or something else.
    """
    mixer = as_mixer(value)
    if isinstance(mixer, RecipeMixer):
        return mixer.recipe, mixer.options
    raise RecipeError(
        f"one recipe is asked for here, and rc.blocks.{type(mixer).__name__} composes "
        f"{len(mixer.leaves)}: give one of them"
    )
