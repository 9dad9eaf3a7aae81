"""Training plans: a TOML file with four tables, checked before data or models are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from recollect.choices.matmul_precision import PRECISIONS, precision_error
from recollect.fields import (
    LARGEST,
    Range,
    Validated,
    flag,
    float_check,
    int_check,
    integer,
    number,
    option,
    validate,
    validated_field,
)
from recollect.lm.model.paper_sizes import PAPER_SIZES, paper_size
from recollect.lm.mup.rules import BASE_WIDTH
from recollect.messages import argument_name, short_repr, suggestion
from recollect.recipe.toml_text import MAX_BYTES, read_toml
from recollect.report.files import read_regular

__all__ = ["DataPlan", "ModelPlan", "OptimizerPlan", "RunPlan", "TrainPlan", "load_plan"]


def _type_check(expected: str, *types: type) -> Callable[[Any], Any]:
    """Return a check for values of some types, which also copies mappings."""

    def check(value: Any) -> Any:
        if not isinstance(value, types):
            raise ValueError(f"must be {expected}, not {short_repr(value)}")
        return dict(value) if isinstance(value, Mapping) else value

    return check


parse_text = _type_check("a string", str)
parse_table = _type_check("a table", Mapping)
parse_recipe = _type_check("a string or a table", str, Mapping)
_parse_list = _type_check("a list of strings", list, tuple)
_parse_betas = _type_check("two numbers in [0, 1)", list, tuple)


def parse_name(value: Any) -> str:
    """Return a string of one line that is not blank."""
    if not parse_text(value).isprintable():
        raise ValueError(f"must be a string without control characters, not {short_repr(value)}")
    if not value.strip():
        raise ValueError(f"must be a name, not {value!r}")
    return value


def parse_names(value: Any) -> tuple[str, ...]:
    """Return a tuple of names; a string is a tuple of one."""
    names = _parse_list((value,) if isinstance(value, str) else value)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"must be a list of strings, not {short_repr(value)}")
    return tuple(map(parse_name, names))


def parse_betas(value: Any) -> tuple[float, float]:
    """Return the two coefficients of AdamW."""
    if len(_parse_betas(value)) != 2:
        raise ValueError(f"must be two numbers in [0, 1), not {short_repr(value)}")
    beta = float_check(Range.of(at_least=0, below=1))
    return beta(value[0]), beta(value[1])


def parse_parallel(value: Any) -> str | dict[str, int]:
    """Return ``"ddp"``, ``"fsdp"``, or the sizes of a mesh by name."""
    if isinstance(value, str):
        if value not in ("ddp", "fsdp"):
            raise ValueError(
                f"must be 'ddp', 'fsdp' or a mesh as {{data = 4, tensor = 2}}, not {value!r}"
            )
        return value
    sizes: dict[str, int] = parse_table(value)
    for name, size in sizes.items():
        if name not in ("data", "tensor", "context"):
            raise ValueError(f"has the sizes data, tensor and context, and no {short_repr(name)}")
        if type(size) is not int or size < 1:
            raise ValueError(f"needs whole numbers >= 1, and {name} is {short_repr(size)}")
    return sizes


def parse_precision(value: Any) -> str | dict[str, str]:
    """Return a precision of matrix products, or precisions by the name of the recipe."""
    for precision in value.values() if isinstance(value, Mapping) else [value]:
        if precision not in PRECISIONS:
            expected = "'float32' or 'tf32', or a table of these by recipe"
            raise ValueError(precision_error(precision, expected))
    return dict(value) if isinstance(value, Mapping) else str(value)


_KEY_ALIASES = {
    "lr": "learning_rate peak_lr max_lr",
    "steps": "max_steps num_steps iterations",
    "batch": "batch_size micro_batch_size per_device_train_batch_size",
    "accumulate": "gradient_accumulation_steps grad_accum",
    "clip": "max_grad_norm grad_clip clip_grad",
    "warmup": "warmup_ratio warmup_steps",
    "width": "hidden_size d_model dim",
    "depth": "num_layers num_hidden_layers n_layers",
    "heads": "num_heads num_attention_heads n_heads",
    "mlp": "intermediate_size ffn_dim",
    "context": "seq_len sequence_length max_length block_size",
    "vocab": "vocab_size",
    "out": "output_dir out_dir",
    "save_every": "save_steps",
    "eval_every": "eval_steps",
    "log_every": "logging_steps",
    "checkpointing": "gradient_checkpointing",
    "parallel": "strategy fsdp mesh distributed",
}
"""Names of a plan's keys in other libraries."""


def hint(name: str, known: Mapping[str, list[str]], table: str | None = None) -> str:
    """Return advice for an unknown key of a table, or for an unknown table."""
    key = next((key for key, aliases in _KEY_ALIASES.items() if name in aliases.split()), name)
    if table is not None and key in known[table]:
        return f"did you mean {key!r}?"
    owner = next((owner for owner, keys in known.items() if key in keys), None)
    if owner is not None:
        return f"{key} is a key of [{owner}]"
    return suggestion(name, list(known) if table is None else known[table])


VOCAB = 32_000
"""Default vocabulary size of a BPE that the run trains."""


class _Section(Validated):
    """Base of a plan's tables."""

    @classmethod
    def field_label(cls, field: str) -> str:
        return argument_name(f"[{cls.__name__.removesuffix('Plan').lower()}] {field}")


@dataclass(frozen=True, kw_only=True)
class ModelPlan(_Section):
    """``[model]``: layers and sizes of the model.

    Attributes:
        recipe: a zoo name, a ``.json`` or ``.toml`` file, or a table as written by
            ``Recipe.to_dict`` or `recollect.blocks.Mixer.to_dict`. Parts of a mixer may be names
            and files, too.
        options: layer options as written by ``LayerOptions.to_dict``; default: those of the preset.
        recipes: several recipes by name, each like ``recipe``, which they replace.
        layers: names of recipes in the order of the layers, repeated over the depth; ``"mlp"`` is a
            layer that is only an MLP.
        size: a size of the papers, ``"170M"`` to ``"1.3B"``; other keys override its values.
        width, depth, heads: sizes of the backbone; without a size 256, 4 and 4.
        kv_heads, key_dim, value_dim, mlp: further sizes; defaults as in `RecollectConfig`.
        parameters: number of parameters to reach by the width of the MLP, instead of ``mlp``.
        tie: whether the output layer shares the embedding.
        engine: engine, as in `recall`.
        precision: precision of the memories' matrix products, ``"float32"`` or ``"tf32"``, or of
            some recipes, ``{titans = "tf32"}``; as in `RecollectConfig`.
        start: folder of a saved model to start from, with its configuration and tokenizer.
    """

    recipe: str | dict[str, Any] = validated_field("gated_delta_net", parse_recipe)
    options: dict[str, Any] | None = validated_field(None, parse_table, optional=True)
    recipes: dict[str, Any] = validated_field(dict, parse_table)
    layers: tuple[str, ...] = validated_field((), parse_names)
    size: str | None = validated_field(None, parse_name, optional=True)
    width: int | None = integer(None, at_least=1, optional=True)
    depth: int | None = integer(None, at_least=1, optional=True)
    heads: int | None = integer(None, at_least=1, optional=True)
    kv_heads: int | None = integer(None, at_least=1, optional=True)
    key_dim: int | None = integer(None, at_least=1, optional=True)
    value_dim: int | None = integer(None, at_least=1, optional=True)
    mlp: int | None = integer(None, at_least=1, optional=True)
    parameters: int | None = integer(None, at_least=1, optional=True)
    tie: bool = flag(False)
    engine: str = validated_field("auto", parse_name)
    precision: str | dict[str, str] | None = validated_field(None, parse_precision, optional=True)
    start: str | None = validated_field(None, parse_name, optional=True)

    def validate(self) -> None:
        if self.size is not None:
            paper_size(self.size)
        changed = [f.name for f in fields(self) if getattr(self, f.name) not in (f.default, {})]
        if self.recipes and ("recipe" in changed or self.options is not None):
            raise ValueError(
                "[model] recipes replaces recipe and options: leave these out, or set the options "
                "of each recipe in recipes, {recipe = ..., options = ...}"
            )
        if self.mlp is not None and self.parameters is not None:
            raise ValueError("[model] mlp and parameters exclude each other: one sets the other")
        names = [name for name in changed if name not in ("start", "engine")]
        if self.start is not None and names:
            raise ValueError(
                f"[model] start uses the saved model without changes: leave out {', '.join(names)}"
            )


@dataclass(frozen=True, kw_only=True)
class DataPlan(_Section):
    """``[data]``: texts, tokens and rows.

    Attributes:
        train: files, folders or patterns: text, ``.jsonl``, ``.parquet``.
        heldout: files, folders or patterns to evaluate on.
        heldout_share: fraction of the rows to evaluate on instead of training, without ``heldout``.
        dataset: name of a dataset on the hub instead of ``train``, streamed; with ``name``,
            ``split`` and ``heldout_split``.
        column: field of a JSON line or a Parquet row that contains the text.
        separator: separates the documents of a text file; by default the file is one document.
        tokenizer: ``"bytes"``, ``"bpe"`` (trained on ``train``), or a folder or hub name.
        vocab: vocabulary size of a trained BPE.
        context: tokens per row.
        packing: ``"documents"`` resets the memory at every document, ``"stream"`` at every row.
        segments: number of segments of a row. They run one after the other and pass on the state,
            with the memory of one segment.
        segment_gradient: ``"cut"`` at the boundaries of segments, or ``"kept"``: the gradient of
            the full row, for which each segment runs twice.
        bad_lines: ``"stop"`` or ``"skip"`` at a line that cannot be read; both report it.
        stream: whether to read while training, in order, with a shuffle buffer of ``shuffle`` rows;
            by default everything is read first.
        shuffle: size of the shuffle buffer in rows.
    """

    train: tuple[str, ...] = validated_field((), parse_names)
    heldout: tuple[str, ...] = validated_field((), parse_names)
    heldout_share: float = number(0.0, at_least=0, below=0.5)
    dataset: str | None = validated_field(None, parse_name, optional=True)
    name: str | None = validated_field(None, parse_name, optional=True)
    split: str = validated_field("train", parse_name)
    heldout_split: str | None = validated_field(None, parse_name, optional=True)
    column: str = validated_field("text", parse_name)
    separator: str = validated_field("", parse_text)
    tokenizer: str = validated_field("bytes", parse_name)
    vocab: int = integer(VOCAB, at_least=257)
    context: int = integer(512, at_least=2)
    packing: str = option("documents", "stream")
    segments: int = integer(1, at_least=1)
    segment_gradient: str = option("cut", "kept")
    bad_lines: str = option("stop", "skip")
    stream: bool = flag(False)
    shuffle: int = integer(1_000, at_least=1)

    def validate(self) -> None:
        if bool(self.train) == (self.dataset is not None):
            raise ValueError("[data] needs either train, a list of files, or dataset, a hub name")
        if self.tokenizer != "bpe" and self.vocab != VOCAB:
            raise ValueError(
                f"[data] vocab applies to a trained BPE, and tokenizer = {self.tokenizer!r} has "
                'its own vocabulary: leave vocab out, or set tokenizer = "bpe"'
            )
        if self.segments > self.context:
            raise ValueError(
                f"[data] segments = {self.segments:,} exceeds the {self.context:,} tokens of a row:"
                " use fewer segments, or a longer context"
            )
        if self.segment_gradient == "kept" and self.segments == 1:
            raise ValueError(
                '[data] segment_gradient = "kept" needs at least two segments: set segments, or '
                "leave it out"
            )
        if self.heldout_share and (self.heldout or self.heldout_split):
            raise ValueError("[data] heldout_share excludes heldout and heldout_split")
        if self.heldout_share and self.is_streaming:
            raise ValueError(
                "[data] heldout_share needs all rows at once, and this run streams: set heldout to "
                "files, or heldout_split to a split of the dataset"
            )
        if self.heldout_split is not None and self.dataset is None:
            raise ValueError("[data] heldout_split needs a dataset: for files, use heldout")

    @property
    def has_heldout(self) -> bool:
        """Whether there is held-out text."""
        return bool(self.heldout or self.heldout_share or self.heldout_split)

    @property
    def segment_length(self) -> int:
        """Number of tokens per segment of a row."""
        return -(-self.context // self.segments)

    @property
    def is_streaming(self) -> bool:
        """Whether rows are read while training."""
        return self.stream or self.dataset is not None


@dataclass(frozen=True, kw_only=True)
class OptimizerPlan(_Section):
    """``[optimizer]``: AdamW with linear warm-up and cosine decay.

    Attributes:
        lr: peak learning rate, at most 100; default: that of the size, or 3e-3.
        steps, tokens: length of the run, one of both; default: the tokens of the size.
        batch: rows per forward pass, over all processes in equal parts.
        accumulate: forward passes per step.
        warmup: fraction of the steps.
        floor: last learning rate of the cosine, as a fraction of ``lr``.
        weight_decay: weight decay of the parameters that `parameter_groups` selects.
        betas: AdamW's coefficients.
        clip: largest norm of the gradient; 0: no clipping.
        parametrization: ``"standard"``: one learning rate; ``"mup"``: learning rates and initial
            scales by the role of the parameter (`recollect.lm.width_rules`), so that one ``lr``
            serves all widths. Widths grow by heads of one size.
        base_width: width at which ``"mup"`` equals ``"standard"``; default: 256.
    """

    lr: float | None = number(None, above=0, at_most=100, optional=True)
    steps: int | None = integer(None, at_least=1, optional=True)
    tokens: int | None = integer(None, at_least=1, optional=True)
    batch: int = integer(8, at_least=1)
    accumulate: int = integer(1, at_least=1)
    warmup: float = number(0.05, at_least=0, below=1)
    floor: float = number(0.0, at_least=0, below=1)
    weight_decay: float = number(0.1, at_least=0)
    betas: tuple[float, float] = validated_field((0.9, 0.95), parse_betas)
    clip: float = number(1.0, at_least=0)
    parametrization: str = option("standard", "mup")
    base_width: int | None = integer(None, at_least=1, optional=True)

    def validate(self) -> None:
        if self.steps is not None and self.tokens is not None:
            raise ValueError("[optimizer] steps and tokens exclude each other")
        if self.base_width is not None and self.parametrization == "standard":
            raise ValueError(
                '[optimizer] base_width needs parametrization = "mup": set that, or leave it out'
            )

    @property
    def mup_base_width(self) -> int | None:
        """Base width of the rules for width; ``None`` in the standard parametrization."""
        return None if self.parametrization == "standard" else self.base_width or BASE_WIDTH


@dataclass(frozen=True, kw_only=True)
class RunPlan(_Section):
    """``[run]``: folder, checkpoints, logs and computation.

    Attributes:
        out: folder of checkpoints, logs and, in ``out/model``, the trained model.
        seed: seed of the weights and of the order of rows.
        save_every: steps between checkpoints; 0: only when the run is interrupted.
        keep: number of checkpoints that are kept.
        log_every, eval_every: steps between log lines and evaluations; 0: evaluate at the end only.
        heldout_rows: largest number of rows to evaluate on.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"``; default: a GPU, if there is one.
        parallel: use of several processes: ``"ddp"`` replicates the model, ``"fsdp"`` shards its
            weights. A mesh, ``{"data": 4, "context": 2, "tensor": 2}``, shards weights over data
            and context, the tokens of a row over context, and layers by heads over tensor.
        bf16: whether matrix products run in bfloat16, with weights in float32.
        checkpointing: whether activations are recomputed in the backward pass.
        loss_chunk: number of tokens whose logits the training loss holds at once; 0: all.
        tensorboard: whether to write TensorBoard logs to ``out/logs``.
    """

    out: str = validated_field("runs/train", parse_name)
    seed: int = validated_field(0, int_check(0, 2**32 - 1))
    save_every: int = integer(500)
    keep: int = integer(3, at_least=1)
    log_every: int = integer(10, at_least=1)
    eval_every: int = integer(0)
    heldout_rows: int = integer(256, at_least=1)
    device: str | None = validated_field(None, parse_name, optional=True)
    parallel: str | dict[str, int] = validated_field("ddp", parse_parallel)
    bf16: bool = flag(False)
    checkpointing: bool = flag(False)
    loss_chunk: int = integer(1024)
    tensorboard: bool = flag(False)


_SECTIONS: dict[str, type[_Section]] = {
    "model": ModelPlan,
    "data": DataPlan,
    "optimizer": OptimizerPlan,
    "run": RunPlan,
}


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """Plan of a training run.

    Attributes:
        model, data, optimizer, run: the tables.
        imports: modules of the user that register members or presets; ``import`` in the file, above
            the tables. `train` imports them.
        import_dir: folder that is searched for them: the folder of the plan's file.

    Raises:
        ValueError: tables that contradict each other.

    Examples:
        >>> plan = rc.lm.TrainPlan.from_dict(
        ...     {
        ...         "model": {"recipe": "gated_delta_net", "width": 16, "depth": 1, "heads": 2},
        ...         "data": {"train": "text.txt", "context": 16},
        ...         "optimizer": {"steps": 2, "batch": 2},
        ...         "run": {"out": "runs/example", "save_every": 0},
        ...     }
        ... )
        >>> plan.steps, plan.lr
        (2, 0.003)
    """

    model: ModelPlan = field(default_factory=ModelPlan)
    data: DataPlan
    optimizer: OptimizerPlan = field(default_factory=OptimizerPlan)
    run: RunPlan = field(default_factory=RunPlan)
    imports: tuple[str, ...] = ()
    import_dir: str = "."

    def __post_init__(self) -> None:
        if self.run.eval_every and not self.data.has_heldout:
            raise ValueError(
                "[run] eval_every needs held-out text, and [data] names none: set heldout or "
                "heldout_share, or leave it out"
            )
        if self.steps < 1:  # raises without a length
            raise ValueError("[optimizer] tokens must be enough for at least one step")
        if self.steps * self.optimizer.batch * self.optimizer.accumulate > LARGEST:
            raise ValueError("[optimizer] needs more rows than 64 bits count: use fewer steps")

    @property
    def steps(self) -> int:
        """Number of optimizer steps; with ``tokens``, rounded up."""
        if self.optimizer.steps is not None:
            return self.optimizer.steps
        tokens = self.optimizer.tokens
        if tokens is None and self.model.size is not None:
            tokens = PAPER_SIZES[self.model.size].tokens
        if tokens is None:
            raise ValueError("[optimizer] needs steps or tokens, the length of the run")
        return -(-tokens // self.tokens_per_step)

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens per optimizer step, over all processes."""
        return self.optimizer.batch * self.optimizer.accumulate * self.data.context

    @property
    def lr(self) -> float:
        """Peak learning rate."""
        if self.optimizer.lr is not None:
            return self.optimizer.lr
        return 3e-3 if self.model.size is None else PAPER_SIZES[self.model.size].lr

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that `from_dict` reads."""
        data: dict[str, Any] = {"import": list(self.imports)} if self.imports else {}
        for name in _SECTIONS:
            values = asdict(getattr(self, name))
            data[name] = {k: list(x) if isinstance(x, tuple) else x for k, x in values.items()}
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, import_dir: str = ".") -> TrainPlan:
        """Return the plan of plain data.

        Args:
            data: the tables by name, and ``import``.
            import_dir: folder that is searched for the modules of ``import``.

        Raises:
            ValueError: an unknown table or key, with the closest known name, or a value that its
                key refuses.
        """
        imports = validate("import", parse_names, data.get("import", ()))
        known = {name: [f.name for f in fields(x)] for name, x in _SECTIONS.items()}  # type: ignore[arg-type]
        for name, values in data.items():
            if name == "import":
                continue
            if name not in _SECTIONS:
                raise ValueError(f"there is no table [{name[:60]}]; {hint(name, known)}")
            if not isinstance(values, Mapping):
                raise ValueError(f"{name} must be a table, [{name}], not {short_repr(values)}")
            for key in values:
                if key not in known[name]:
                    advice = hint(key, known, name)
                    raise ValueError(f"[{name}] has no key {short_repr(key)}; {advice}")
        sections: dict[str, Any] = {n: x(**data.get(n, {})) for n, x in _SECTIONS.items()}
        return cls(imports=imports, import_dir=import_dir, **sections)


def load_plan(path: str | PathLike[str]) -> TrainPlan:
    r"""Return the plan in a TOML file. No code in the file is run.

    Raises:
        ValueError: the file does not exist or is not TOML, or `TrainPlan.from_dict` refuses it.

    Examples:
        >>> from pathlib import Path
        >>> lines = ["[data]", 'train = "text.txt"', "[optimizer]", "steps = 2"]
        >>> _ = Path("run.toml").write_text("\n".join(lines))
        >>> rc.lm.load_plan("run.toml").steps
        2
    """
    path = Path(path)
    try:
        text = read_regular(path, limit=MAX_BYTES)
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder: name the TOML file of the run") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not TOML: not UTF-8 text at byte {error.start}") from None
    except (OSError, ValueError) as error:  # a ValueError if no file can have this name
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{str(path)!r} cannot be read: {reason}") from None
    data = validate(f"{path} is not TOML:", read_toml, text)
    return validate(f"{path}:", partial(TrainPlan.from_dict, import_dir=str(path.parent)), data)
