"""Training plans: a TOML file of four tables, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from recollect.fields import (
    LARGEST,
    Validated,
    flag,
    int_check,
    integer,
    number,
    option,
    validated_field,
)
from recollect.lm.model.paper_sizes import PAPER_SIZES, paper_size
from recollect.lm.training.plan_keys import (
    hint_of_key,
    hint_of_table,
    to_betas,
    to_mapping,
    to_name,
    to_parallel,
    to_precision,
    to_recipe,
    to_separator,
    to_string,
    to_strings,
)
from recollect.lm.width.rules import BASE_WIDTH
from recollect.messages import argument_name, short_repr
from recollect.recipe.toml_text import MAX_BYTES, read_toml
from recollect.report.files import read_regular

__all__ = [
    "DataPlan",
    "ModelPlan",
    "OptimizerPlan",
    "RunPlan",
    "TrainPlan",
    "default_of",
    "load_plan",
]

T = TypeVar("T", bound="_Table")

VOCAB = 32_000
"""Tokens of a BPE that is trained, where nothing else is said."""


class _Table(Validated):
    """A table of the file."""

    @classmethod
    def table(cls) -> str:
        """Its name."""
        return cls.__name__.removesuffix("Plan").lower()

    @classmethod
    def field_label(cls, field: str) -> str:
        return argument_name(f"[{cls.table()}] {field}")


@dataclass(frozen=True, kw_only=True)
class ModelPlan(_Table):
    """``[model]``: which layers, how many, how wide.

    Attributes:
        recipe: a zoo name, a ``.json`` or ``.toml`` file, or a table as ``Recipe.to_dict`` writes,
            or as `recollect.blocks.Mixer.to_dict` does, whose parts may be names and files too.
        options: layer options as ``LayerOptions.to_dict`` writes them; the preset's own if omitted.
        recipes: several recipes by name, each as ``recipe`` is; in place of it.
        layers: the pattern of their names over the depth, with ``"mlp"`` where MLPs stand.
        size: a size of the papers, ``"170M"`` to ``"1.3B"``; what is given beside it wins.
        width, depth, heads: of the backbone; 256, 4 and 4 without a size.
        kv_heads, key_dim, value_dim, mlp: further sizes; defaults as in `RecollectConfig`.
        parameters: trained numbers that the MLP's width is set to reach, in place of ``mlp``.
        tie: whether the output reads the embedding.
        engine: engine, as in `recall`.
        precision: of the memories' products, ``"float32"`` or ``"tf32"``, or of some recipes
            alone: ``{titans = "tf32"}``; as in `RecollectConfig`.
        start: folder of a saved model to go on from; its configuration and tokenizer are taken.
    """

    recipe: str | dict[str, Any] = validated_field("gated_delta_net", to_recipe)
    options: dict[str, Any] | None = validated_field(None, to_mapping, optional=True)
    recipes: dict[str, Any] = validated_field(dict, to_mapping)
    layers: tuple[str, ...] = validated_field((), to_strings)
    size: str | None = validated_field(None, to_string, optional=True)
    width: int | None = integer(None, at_least=1, optional=True)
    depth: int | None = integer(None, at_least=1, optional=True)
    heads: int | None = integer(None, at_least=1, optional=True)
    kv_heads: int | None = integer(None, at_least=1, optional=True)
    key_dim: int | None = integer(None, at_least=1, optional=True)
    value_dim: int | None = integer(None, at_least=1, optional=True)
    mlp: int | None = integer(None, at_least=1, optional=True)
    parameters: int | None = integer(None, at_least=1, optional=True)
    tie: bool = flag(False)
    engine: str = validated_field("auto", to_string)
    precision: str | dict[str, str] | None = validated_field(None, to_precision, optional=True)
    start: str | None = validated_field(None, to_string, optional=True)

    def validate(self) -> None:
        if self.size is not None:
            paper_size(self.size)
        default = ModelPlan.__dataclass_fields__["recipe"].default
        if self.recipes and (self.recipe != default or self.options is not None):
            raise ValueError(
                "[model] recipes stands in place of recipe and options: leave these out, or give "
                "each of recipes its own, {recipe = ..., options = ...}"
            )
        if self.mlp is not None and self.parameters is not None:
            raise ValueError("[model] mlp and parameters exclude each other: one sets the other")
        if self.start is not None:
            default = ModelPlan(start=None)
            names = [f.name for f in fields(self) if f.name not in ("start", "engine")]
            names = [name for name in names if getattr(self, name) != getattr(default, name)]
            if names:
                raise ValueError(
                    f"[model] start takes the saved model as it is: leave out {', '.join(names)}"
                )


@dataclass(frozen=True, kw_only=True)
class DataPlan(_Table):
    """``[data]``: texts, tokens, and how they fill rows.

    Attributes:
        train: files, folders or patterns: text, ``.jsonl``, ``.parquet``.
        heldout: the same, to measure on.
        heldout_share: in place of ``heldout``: this share of the rows is not trained on.
        dataset: a hub name in place of ``train``, streamed; with ``name``, ``split`` and
            ``heldout_split``.
        column: the field of a JSON line or a Parquet row that holds the text.
        separator: what divides a text file into documents; without it the file is one.
        tokenizer: ``"bytes"``, ``"bpe"`` (trained on ``train``), or a folder or hub name.
        vocab: of a trained BPE.
        context: tokens of a row.
        packing: ``"documents"``: the memory starts anew at every document; ``"stream"``: it runs on
            to the row's end.
        segments: pieces that a row is read in, one after the other; the state goes on, and memory
            is that of a piece.
        segment_gradient: ``"cut"`` at the borders of pieces, or ``"kept"``: that of the whole row,
            for which each piece is read twice.
        bad_lines: ``"stop"`` or ``"skip"`` at a line that cannot be read; either way it is named.
        stream: read while training, in order, with a shuffle over ``shuffle`` rows; otherwise all
            is read first.
        shuffle: rows that are held to be drawn from while streaming.
    """

    train: tuple[str, ...] = validated_field((), to_strings)
    heldout: tuple[str, ...] = validated_field((), to_strings)
    heldout_share: float = number(0.0, at_least=0, below=0.5)
    dataset: str | None = validated_field(None, to_string, optional=True)
    name: str | None = validated_field(None, to_string, optional=True)
    split: str = validated_field("train", to_name)
    heldout_split: str | None = validated_field(None, to_string, optional=True)
    column: str = validated_field("text", to_name)
    separator: str = validated_field("", to_separator)
    tokenizer: str = validated_field("bytes", to_name)
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
                f"[data] vocab is of a BPE that is trained, and tokenizer = {self.tokenizer!r} "
                'brings its own: leave vocab out, or set tokenizer = "bpe"'
            )
        if self.segments > self.context:
            raise ValueError(
                f"[data] segments = {self.segments:,} are more than the {self.context:,} tokens of "
                "a row: take fewer, or a longer context"
            )
        if self.segment_gradient == "kept" and self.segments == 1:
            raise ValueError(
                '[data] segment_gradient = "kept" says what crosses the borders of segments, and '
                "there is one: give segments, or leave it out"
            )
        if self.heldout_share and (self.heldout or self.heldout_split):
            raise ValueError("[data] heldout_share excludes heldout and heldout_split")
        if self.heldout_share and self.streams:
            raise ValueError(
                "[data] heldout_share needs all rows at once, and this run streams: name files in "
                "heldout, or a heldout_split of the dataset"
            )
        if self.heldout_split is not None and self.dataset is None:
            raise ValueError("[data] heldout_split is of a dataset, and none is given: use heldout")

    @property
    def measures(self) -> bool:
        """Whether any text is held out."""
        return bool(self.heldout or self.heldout_share or self.heldout_split)

    @property
    def piece(self) -> int:
        """Tokens of a row that are read at once."""
        return -(-self.context // self.segments)

    @property
    def streams(self) -> bool:
        """Whether rows are made while training."""
        return self.stream or self.dataset is not None


@dataclass(frozen=True, kw_only=True)
class OptimizerPlan(_Table):
    """``[optimizer]``: AdamW, linear warm-up, cosine.

    Attributes:
        lr: peak learning rate, at most 100; the size's, or 3e-3 without one.
        steps, tokens: how long; one of them, or the size's tokens.
        batch: rows of a forward pass, over all processes, which share them equally.
        accumulate: forward passes per step.
        warmup: share of the steps.
        floor: where the cosine ends, as a share of ``lr``.
        weight_decay: on the weights that `parameter_groups` names.
        betas: AdamW's.
        clip: largest gradient norm; 0 is none.
        parametrization: ``"standard"``: one learning rate; ``"mup"``: learning rates and initial
            scales by each parameter's role (`recollect.lm.width_rules`), so that ``lr`` holds at
            every width. For widths that grow by heads of one size.
        base_width: of ``"mup"``: the width at which both are the same; 256 when omitted.
    """

    lr: float | None = number(None, above=0, at_most=100, optional=True)
    steps: int | None = integer(None, at_least=1, optional=True)
    tokens: int | None = integer(None, at_least=1, optional=True)
    batch: int = integer(8, at_least=1)
    accumulate: int = integer(1, at_least=1)
    warmup: float = number(0.05, at_least=0, below=1)
    floor: float = number(0.0, at_least=0, below=1)
    weight_decay: float = number(0.1, at_least=0)
    betas: tuple[float, float] = validated_field((0.9, 0.95), to_betas)
    clip: float = number(1.0, at_least=0)
    parametrization: str = option("standard", "mup")
    base_width: int | None = integer(None, at_least=1, optional=True)

    def validate(self) -> None:
        if self.steps is not None and self.tokens is not None:
            raise ValueError("[optimizer] steps and tokens exclude each other")
        if self.base_width is not None and self.parametrization == "standard":
            raise ValueError(
                '[optimizer] base_width is of parametrization = "mup": set that, or leave it out'
            )

    @property
    def rules_from(self) -> int | None:
        """The base width of the rules for width; ``None`` where there are none."""
        if self.parametrization == "standard":
            return None
        return BASE_WIDTH if self.base_width is None else self.base_width


@dataclass(frozen=True, kw_only=True)
class RunPlan(_Table):
    """``[run]``: where it goes, what is kept, how it is computed.

    Attributes:
        out: folder of checkpoints, logs and, in ``out/model``, the trained model.
        seed: of weights and of the order of rows.
        save_every: steps between checkpoints; 0 writes one only when the run is interrupted.
        keep: checkpoints that stay; older ones are deleted.
        log_every, eval_every: steps between log lines and measurements; 0 measures at the end only.
        heldout_rows: rows measured on, at most.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"``; by default a GPU, if any.
        parallel: what several processes do: ``"ddp"``, each holds the model; ``"fsdp"``, they share
            its weights; or a mesh, ``{"data": 4, "context": 2, "tensor": 2}``, that shares weights
            over data and context, divides the tokens of a row over context, and layers by heads
            over tensor.
        bf16: matrix products in bfloat16, weights in float32.
        checkpointing: activations are computed again in the backward pass instead of kept.
        loss_chunk: tokens whose logits the training loss holds at once; 0 is all.
        compile: `torch.compile` for the MLPs; engines choose by what they see and run as they are.
        tensorboard: write its logs to ``out/logs``.
    """

    out: str = validated_field("runs/train", to_name)
    seed: int = validated_field(0, int_check(0, 2**32 - 1))
    save_every: int = integer(500)
    keep: int = integer(3, at_least=1)
    log_every: int = integer(10, at_least=1)
    eval_every: int = integer(0)
    heldout_rows: int = integer(256, at_least=1)
    device: str | None = validated_field(None, to_string, optional=True)
    parallel: str | dict[str, int] = validated_field("ddp", to_parallel)
    bf16: bool = flag(False)
    checkpointing: bool = flag(False)
    loss_chunk: int = integer(1024)
    compile: bool = flag(False)
    tensorboard: bool = flag(False)


_TABLES: dict[str, type[_Table]] = {
    "model": ModelPlan,
    "data": DataPlan,
    "optimizer": OptimizerPlan,
    "run": RunPlan,
}


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """A whole run.

    Attributes:
        model, data, optimizer, run: its tables.
        imports: modules of one's own that register what the recipe names, ``import`` in the file,
            above its tables. `train` imports them; reading a plan imports nothing.
        beside: the folder whose modules they may be: that of the plan's file.

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
    beside: str = "."

    def __post_init__(self) -> None:
        if self.run.eval_every and not self.data.measures:
            raise ValueError(
                "[run] eval_every measures held-out text, and [data] names none: give heldout or "
                "heldout_share, or leave it out"
            )
        if self.steps < 1:  # also asks whether a length is given at all
            raise ValueError("[optimizer] tokens must make at least one step")
        if self.steps * self.optimizer.batch * self.optimizer.accumulate > LARGEST:
            raise ValueError("[optimizer] asks for more rows than 64 bits count: take fewer steps")

    @property
    def steps(self) -> int:
        """Optimizer steps; from ``tokens`` rounded up."""
        if self.optimizer.steps is not None:
            return self.optimizer.steps
        tokens = self.optimizer.tokens
        if tokens is None and self.model.size is not None:
            tokens = PAPER_SIZES[self.model.size].tokens
        if tokens is None:
            raise ValueError("[optimizer] needs steps or tokens: how long to train")
        return -(-tokens // self.tokens_per_step)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, over all processes."""
        return self.optimizer.batch * self.optimizer.accumulate * self.data.context

    @property
    def lr(self) -> float:
        """The peak learning rate."""
        if self.optimizer.lr is not None:
            return self.optimizer.lr
        return 3e-3 if self.model.size is None else PAPER_SIZES[self.model.size].lr

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `from_dict` reads it."""
        tables = {name: asdict(getattr(self, name)) for name in _TABLES}
        written: dict[str, Any] = {"import": list(self.imports)} if self.imports else {}
        return written | {
            table: {name: list(x) if isinstance(x, tuple) else x for name, x in values.items()}
            for table, values in tables.items()
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, beside: str = ".") -> TrainPlan:
        """A plan from tables.

        Args:
            data: the tables by name, and ``import``.
            beside: as the attribute.

        Raises:
            ValueError: an unknown table or key (with the nearest that there is), or a value that
                its key refuses.
        """
        try:
            imports = to_strings(data.get("import", ()))
        except ValueError as error:
            raise ValueError(f"import {error}") from None
        for name, value in data.items():
            if name == "import":
                continue
            if name not in _TABLES:
                hint = hint_of_table(name, _known())
                raise ValueError(f"there is no table [{name[:60]}]{hint}")
            if not isinstance(value, Mapping):
                raise ValueError(f"{name} must be a table, [{name}], not {short_repr(value)}")
        tables: dict[str, Any] = {n: _made(kind, data.get(n, {})) for n, kind in _TABLES.items()}
        return cls(imports=imports, beside=beside, **tables)


def load_plan(path: str | PathLike[str]) -> TrainPlan:
    r"""The plan in a TOML file; nothing in it is run.

    Raises:
        ValueError: no such file, bad syntax, or what `TrainPlan.from_dict` refuses.

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
    except (OSError, ValueError) as error:  # a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{str(path)!r} cannot be read: {reason}") from None
    try:
        data = read_toml(text)
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    try:
        return TrainPlan.from_dict(data, beside=str(path.parent))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def default_of(table: str, key: str) -> Any:
    """What a plan holds, as plain data, where a key is left out; ``None`` without a default.

    A run that an earlier version began says nothing of keys that there were not.
    """
    found = {f.name: f for f in fields(_TABLES[table])}.get(key)  # type: ignore[arg-type]
    if found is None:
        return None
    made = found.default_factory() if found.default_factory is not MISSING else found.default
    return None if made is MISSING else list(made) if isinstance(made, tuple) else made


def _known() -> dict[str, list[str]]:
    """The keys of every table."""
    return {name: [f.name for f in fields(kind)] for name, kind in _TABLES.items()}  # type: ignore[arg-type]


def _made(kind: type[T], values: Mapping[str, Any]) -> T:
    """One table."""
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            hint = hint_of_key(name, kind.table(), _known())
            raise ValueError(f"[{kind.table()}] has no key {short_repr(name)}{hint}")
    return kind(**values)
