"""Training plans: four tables of a TOML file, checked before anything is loaded."""

# More than 400 lines: every table of run.toml, with its fields and their checks.

from __future__ import annotations

import difflib
import math
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, Union

from recollect.lm.model.paper_sizes import PAPER_SIZES, paper_size

__all__ = ["DataPlan", "ModelPlan", "OptimizerPlan", "RunPlan", "TrainPlan", "load_plan"]

T = TypeVar("T")


def _at_least(plan: object, low: float, *names: str) -> None:
    for name in names:
        value = getattr(plan, name)
        if value is not None and not (math.isfinite(value) and value >= low):
            raise ValueError(f"[{_table(plan)}] {name} must be at least {low:g}, not {value}")


def _share(plan: object, *names: str, below: float = 1.0) -> None:
    for name in names:
        if not 0 <= getattr(plan, name) < below:
            raise ValueError(
                f"[{_table(plan)}] {name} must be a share from 0 to below {below:g}, not "
                f"{getattr(plan, name)}"
            )


def _one_of(plan: object, name: str, words: tuple[str, ...]) -> None:
    if getattr(plan, name) not in words:
        raise ValueError(
            f"[{_table(plan)}] {name} must be one of {', '.join(words)}, not "
            f"{getattr(plan, name)!r}"
        )


def _table(plan: object) -> str:
    return type(plan).__name__.removesuffix("Plan").lower()


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """``[model]``: which layers, how many, how wide.

    Attributes:
        recipe: a zoo name, a ``.json`` or ``.toml`` file, or a table as ``Recipe.to_dict`` writes.
        options: layer options as ``LayerOptions.to_dict`` writes them; the preset's own if omitted.
        recipes: several recipes by name, each as ``recipe`` is; in place of it.
        layers: the pattern of their names over the depth.
        size: a size of the papers, ``"170M"`` to ``"1.3B"``; what is given beside it wins.
        width, depth, heads: of the backbone; 256, 4 and 4 without a size.
        kv_heads, key_dim, value_dim, mlp: further sizes; defaults as in `RecollectConfig`.
        parameters: trained numbers that the MLP's width is set to reach, in place of ``mlp``.
        tie: whether the output reads the embedding.
        method: engine, as in `recall`.
        start: folder of a saved model to go on from; its configuration and tokenizer are taken.
    """

    recipe: str | dict[str, Any] = "gated_delta_net"
    options: dict[str, Any] | None = None
    recipes: dict[str, Any] = field(default_factory=dict)
    layers: tuple[str, ...] = ()
    size: str | None = None
    width: int | None = None
    depth: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    key_dim: int | None = None
    value_dim: int | None = None
    mlp: int | None = None
    parameters: int | None = None
    tie: bool = False
    method: str = "auto"
    start: str | None = None

    def __post_init__(self) -> None:
        sizes = ("width", "depth", "heads", "kv_heads", "key_dim", "value_dim", "mlp", "parameters")
        _at_least(self, 1, *sizes)
        if self.size is not None:
            paper_size(self.size)
        if self.mlp is not None and self.parameters is not None:
            raise ValueError("[model] mlp and parameters exclude each other: one sets the other")
        if self.start is not None:
            default = ModelPlan(start=None)
            given = [f.name for f in fields(self) if f.name not in ("start", "method")]
            given = [name for name in given if getattr(self, name) != getattr(default, name)]
            if given:
                raise ValueError(
                    f"[model] start takes the saved model as it is: leave out {', '.join(given)}"
                )


@dataclass(frozen=True, kw_only=True)
class DataPlan:
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
        bad_lines: ``"stop"`` or ``"skip"`` at a line that cannot be read; either way it is named.
        stream: read while training, in order, with a shuffle over ``shuffle`` rows; otherwise all
            is read first.
        shuffle: rows that are held to be drawn from while streaming.
    """

    train: tuple[str, ...] = ()
    heldout: tuple[str, ...] = ()
    heldout_share: float = 0.0
    dataset: str | None = None
    name: str | None = None
    split: str = "train"
    heldout_split: str | None = None
    column: str = "text"
    separator: str = ""
    tokenizer: str = "bytes"
    vocab: int = 32_000
    context: int = 512
    packing: str = "documents"
    bad_lines: str = "stop"
    stream: bool = False
    shuffle: int = 1_000

    def __post_init__(self) -> None:
        if bool(self.train) == (self.dataset is not None):
            raise ValueError("[data] needs either train, a list of files, or dataset, a hub name")
        _at_least(self, 2, "context")
        _at_least(self, 1, "shuffle")
        _at_least(self, 257, "vocab")
        _share(self, "heldout_share", below=0.5)
        _one_of(self, "packing", ("documents", "stream"))
        _one_of(self, "bad_lines", ("stop", "skip"))
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
    def streams(self) -> bool:
        """Whether rows are made while training."""
        return self.stream or self.dataset is not None


@dataclass(frozen=True, kw_only=True)
class OptimizerPlan:
    """``[optimizer]``: AdamW, linear warm-up, cosine.

    Attributes:
        lr: peak learning rate; the size's, or 3e-3 without one.
        steps, tokens: how long; one of them, or the size's tokens.
        batch: rows per step and process.
        accumulate: forward passes per step.
        warmup: share of the steps.
        floor: where the cosine ends, as a share of ``lr``.
        weight_decay: on the weights that `parameter_groups` names.
        betas: AdamW's.
        clip: largest gradient norm; 0 is none.
    """

    lr: float | None = None
    steps: int | None = None
    tokens: int | None = None
    batch: int = 8
    accumulate: int = 1
    warmup: float = 0.05
    floor: float = 0.0
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0

    def __post_init__(self) -> None:
        _at_least(self, 1, "steps", "tokens", "batch", "accumulate")
        _at_least(self, 0, "weight_decay", "clip")
        _share(self, "warmup", "floor")
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"[optimizer] lr must be a finite number above 0, not {self.lr}")
        if self.steps is not None and self.tokens is not None:
            raise ValueError("[optimizer] steps and tokens exclude each other")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"[optimizer] betas must be two numbers in [0, 1), not {self.betas}")


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """``[run]``: where it goes, what is kept, how it is computed.

    Attributes:
        out: folder of checkpoints, logs and, in ``out/model``, the trained model.
        seed: of weights and of the order of rows.
        save_every: steps between checkpoints; 0 keeps none.
        keep: checkpoints that stay; older ones are deleted.
        log_every, eval_every: steps between log lines and measurements; 0 measures at the end only.
        heldout_rows: rows measured on, at most.
        bf16: matrix products in bfloat16, weights in float32.
        checkpointing: activations are computed again in the backward pass instead of kept.
        compile: `torch.compile` for the MLPs; engines choose by what they see and run as they are.
        tensorboard: write its logs to ``out/logs``.
    """

    out: str = "runs/train"
    seed: int = 0
    save_every: int = 500
    keep: int = 3
    log_every: int = 10
    eval_every: int = 0
    heldout_rows: int = 256
    bf16: bool = False
    checkpointing: bool = False
    compile: bool = False
    tensorboard: bool = False

    def __post_init__(self) -> None:
        _at_least(self, 0, "seed", "save_every", "eval_every")
        if self.seed >= 2**32:
            raise ValueError(f"[run] seed must be below 2^32, not {self.seed}")
        _at_least(self, 1, "keep", "log_every", "heldout_rows")


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """A whole run.

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

    def __post_init__(self) -> None:
        if self.run.eval_every and not self.data.measures:
            raise ValueError(
                "[run] eval_every measures held-out text, and [data] names none: give heldout or "
                "heldout_share, or leave it out"
            )
        if self.steps < 1:  # also asks whether a length is given at all
            raise ValueError("[optimizer] tokens must make at least one step")

    @property
    def steps(self) -> int:
        """Optimizer steps; from ``tokens`` rounded up, for one process."""
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
        """Tokens of an optimizer step of one process."""
        return self.optimizer.batch * self.optimizer.accumulate * self.data.context

    @property
    def lr(self) -> float:
        """The peak learning rate."""
        if self.optimizer.lr is not None:
            return self.optimizer.lr
        return 3e-3 if self.model.size is None else PAPER_SIZES[self.model.size].lr

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `from_dict` reads it."""
        return {
            table: {name: list(x) if isinstance(x, tuple) else x for name, x in values.items()}
            for table, values in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrainPlan:
        """A plan from tables.

        Raises:
            ValueError: an unknown table or key (with the nearest that there is), or a value that
                its key refuses.
        """
        tables = {"model": ModelPlan, "data": DataPlan, "optimizer": OptimizerPlan, "run": RunPlan}
        for name, value in data.items():
            if name not in tables:
                raise ValueError(f"there is no table [{name}]{_instead(name, list(tables))}")
            if not isinstance(value, Mapping):
                raise ValueError(f"{name} must be a table, [{name}], not {value!r}")
        return cls(**{name: _made(kind, data.get(name, {})) for name, kind in tables.items()})


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
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    try:
        return TrainPlan.from_dict(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _made(kind: type[T], values: Mapping[str, Any]) -> T:
    """One table, with every value of the type that its key has."""
    types_of = typing.get_type_hints(kind)
    table = kind.__name__.removesuffix("Plan").lower()
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"[{table}] has no key {name!r}{_instead(name, known)}")
        found = _fitted(value, types_of[name])
        if found is _NOTHING:
            raise ValueError(f"[{table}] {name} must be {_words(types_of[name])}, not {value!r}")
        given[name] = found
    return kind(**given)


_NOTHING = object()


def _fitted(value: Any, kind: Any) -> Any:
    """The value as its type, or `_NOTHING`: whole numbers stand for real ones, lists for tuples."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        found = (_fitted(value, option) for option in arguments)
        return next((x for x in found if x is not _NOTHING), _NOTHING)
    if origin is tuple:
        inner = arguments[0]
        items = [value] if isinstance(value, str) and inner is str else value
        if not isinstance(items, list | tuple):
            return _NOTHING
        made = tuple(_fitted(item, inner) for item in items)
        return _NOTHING if _NOTHING in made else made
    if origin is dict:
        return dict(value) if isinstance(value, Mapping) else _NOTHING
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, bool):
        return _NOTHING
    return value if isinstance(value, kind) else _NOTHING


def _words(kind: Any) -> str:
    """The type in words."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(_words(x) for x in arguments if x is not type(None))
    if origin is tuple:
        return f"a list of {_words(arguments[0]).split(' ', 1)[1]}s"
    if origin is dict:
        return "a table"
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}[kind]


def _instead(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"; did you mean {near[0]!r}? There are {', '.join(known)}"
