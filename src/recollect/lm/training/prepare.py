"""Preparation of a run: tokenizer, training and held-out rows, and the initial model."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from recollect.blocks.compositions import KINDS, LIST_FIELDS, read_mixer
from recollect.blocks.mixers import Mixer, as_mixer
from recollect.layer.options import LayerOptions
from recollect.lm.data.rows import PackedDataset, PackedRow, PackedStream, TextStats, read_rows
from recollect.lm.data.sources import (
    BadLinePolicy,
    FileDocuments,
    HubDocuments,
    find_files,
    iter_chunks,
)
from recollect.lm.data.tokenizers import byte_tokenizer, load_tokenizer, train_bpe
from recollect.lm.model.config import Named, RecollectConfig
from recollect.lm.model.counts import match_parameters, parameter_count
from recollect.lm.model.model import RecollectForCausalLM
from recollect.lm.model.paper_sizes import PAPER_SIZES
from recollect.lm.sharding.layout import Layout
from recollect.lm.training.plan import ModelPlan, TrainPlan
from recollect.lm.width.rules import check_tied, scale_for_width
from recollect.messages import renamed_arguments, short_repr
from recollect.recipe.files import load_recipe
from recollect.recipe.recipe import Recipe
from recollect.report.ranks import is_first
from recollect.report.units import readable
from recollect.zoo.preset import get

__all__ = [
    "Stock",
    "build_model",
    "check_memory",
    "compile_blocks",
    "enough_memory",
    "least_memory",
    "measured_on_trained",
    "model_config",
    "rows_of",
    "tokenizer_of",
]


def build_model(plan: TrainPlan, tokenizer: PreTrainedTokenizerFast) -> RecollectForCausalLM:
    """The model that a plan starts from: new, or a saved one.

    Raises:
        ValueError: a recipe or sizes that cannot be.
    """
    if plan.model.start is not None:
        model = RecollectForCausalLM.from_pretrained(plan.model.start).float()
        if plan.optimizer.rules_from is not None:
            check_tied(model.config, plan.optimizer.rules_from)
    else:
        with renamed_arguments(_WORDS):
            model = RecollectForCausalLM(model_config(plan.model, tokenizer))
        if plan.optimizer.rules_from is not None:
            scale_for_width(model, plan.optimizer.rules_from)
    model.config.loss_chunk_size = plan.run.loss_chunk
    return model


def compile_blocks(model: RecollectForCausalLM) -> str:
    """Compile what one graph can hold, in place, and say what that is.

    Engines choose their way by what they see (how strong a decay is, whether a solve went well), so
    a graph through most memories breaks many times and gains nothing. MLPs are the same products
    for every batch.
    """
    for block in model.model.blocks:
        if block.mlp is not None:
            block.mlp.compile()  # type: ignore[union-attr]
    return (
        "compiled: the MLPs of all blocks; memory layers run as they are, because their engines "
        "choose by what they see"
    )


@contextlib.contextmanager
def enough_memory(plan: TrainPlan) -> Iterator[None]:
    """Say what to change when a batch does not fit.

    Raises:
        ValueError: it does not.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        full = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not full and "can't allocate memory" not in str(error):  # torch on a CPU
            raise
        rows = plan.optimizer.batch
        raise ValueError(
            f"[optimizer] batch = {rows}, of rows of {plan.data.context} tokens, does not fit into "
            "memory: take fewer rows and set accumulate in their place, set checkpointing = true "
            "in [run], or read rows in more segments of [data]"
        ) from error


_WORDS = {
    "hidden_size": "[model] width",
    "num_hidden_layers": "[model] depth",
    "num_attention_heads": "[model] heads",
    "num_key_value_heads": "[model] kv_heads",
    "head_dim": "[model] key_dim",
    "value_dim": "[model] value_dim",
    "intermediate_size": "[model] mlp",
    "target": "[model] parameters",
}
"""How a plan calls the arguments of a configuration."""

ALONE = Layout()
_PER_PARAMETER = 16
"""Bytes: a float32 weight, its gradient, and AdamW's two moments."""


def least_memory(plan: TrainPlan, config: RecollectConfig) -> tuple[int, int]:
    """Bytes that no run of these sizes can do without: for its weights, and for one batch.

    Of a batch only the input of every block is counted, which even ``checkpointing`` keeps, so a
    run may well take several times as much.

    Args:
        plan: says how many tokens a batch has.
        config: of the model.
    """
    tokens = plan.optimizer.batch * plan.data.piece
    each = 2 if plan.run.bf16 else 4
    batch = tokens * config.hidden_size * config.num_hidden_layers * each
    return parameter_count(config) * _PER_PARAMETER, batch


@renamed_arguments(_WORDS)
def check_memory(
    plan: TrainPlan, config: RecollectConfig, *, device: torch.device, layout: Layout = ALONE
) -> None:
    """Refuse what cannot fit, by the least that it takes.

    Args:
        plan: of the run.
        config: of its model.
        device: that it runs on.
        layout: of the processes that share weights and rows.

    Raises:
        ValueError: the device has less memory than that, naming what takes it.
    """
    weights, batch = least_memory(plan, config)
    weights, batch = weights // layout.holders, batch // layout.readers
    has = _memory(device)
    if has is None or weights + batch <= has:
        return
    where = f"of the {readable(has, 'B')} that {device.type} has"
    if weights > has:
        raise ValueError(
            f"[model] has {parameter_count(config):,} parameters, whose training takes at least "
            f"{readable(weights, 'B')} {where}: take a smaller width, depth, mlp or parameters"
        )
    raise ValueError(
        f"[optimizer] batch = {plan.optimizer.batch:,}, of rows of {plan.data.context:,} tokens, "
        f"takes at least {readable(batch, 'B')} {where}: take fewer rows and set accumulate in "
        "their place, a shorter context, or more segments of it"
    )


def _memory(device: torch.device) -> int | None:
    """Bytes that a device has in all, where it says so."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type != "cpu":
        return None
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not a POSIX system
        return None


@renamed_arguments(_WORDS)
def model_config(plan: ModelPlan, tokenizer: PreTrainedTokenizerFast) -> RecollectConfig:
    """The configuration that ``[model]`` describes, for a tokenizer.

    Raises:
        ValueError: a recipe or sizes that cannot be.
    """
    size = None if plan.size is None else PAPER_SIZES[plan.size]
    width, depth, heads = (256, 4, 4) if size is None else (size.width, size.depth, size.heads)
    named: Named | dict[str, Named]
    if plan.recipes:
        named = {name: _recipe(value, None) for name, value in plan.recipes.items()}
    else:
        recipe = _recipe(plan.recipe, plan.options)
        named = recipe if isinstance(recipe, str) else {_name(plan.recipe): recipe}
        if isinstance(recipe, Mixer):
            named = {recipe.kind: recipe}
    config = RecollectConfig.from_recipes(
        named,
        layers=plan.layers or None,
        vocab_size=-(-len(tokenizer) // 8) * 8,  # a multiple of 8 makes faster products
        hidden_size=plan.width or width,
        num_hidden_layers=plan.depth or depth,
        num_attention_heads=plan.heads or heads,
        num_key_value_heads=plan.kv_heads,
        head_dim=plan.key_dim,
        value_dim=plan.value_dim,
        intermediate_size=plan.mlp,
        tie_word_embeddings=plan.tie,
        engine=plan.engine,
        precision=plan.precision,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    if plan.parameters is not None:
        (config,) = match_parameters([config], plan.parameters)
    return config


def _recipe(value: Any, options: dict[str, Any] | None) -> Named:
    """A recipe by name, file or table, with options of its own where they are given."""
    if isinstance(value, str) and not value.endswith((".json", ".toml")):
        if options is None:
            return value
        return get(value).recipe, LayerOptions.from_dict(options)
    if isinstance(value, str):
        recipe = load_recipe(Path(value))
    else:
        if isinstance(value, dict) and "mixer" in value:
            return _composition(value, options)
        if isinstance(value, dict) and set(value) == {"recipe", "options"}:
            value, options = value["recipe"], value["options"]
        recipe = Recipe.from_dict(value)
    return recipe, LayerOptions() if options is None else LayerOptions.from_dict(options)


def _composition(value: dict[str, Any], options: dict[str, Any] | None) -> Mixer:
    """A composition as a table; in the place of a part a name of the zoo or a file may stand."""
    if options is not None:
        raise ValueError(
            "[model] options are those of one recipe: give each part of a composition its own, "
            "{recipe = ..., options = ...}"
        )

    def part(stated: Any) -> Any:
        if not isinstance(stated, str | dict):
            raise ValueError(
                "[model] a part of a composition is a name, a file or a table, not "
                f"{short_repr(stated)}"
            )
        return as_mixer(_recipe(stated, None)).to_dict()

    written = dict(value)
    kind = written.get("mixer")
    for name in KINDS[kind].mixer_fields if isinstance(kind, str) and kind in KINDS else ():
        several = written.get(name)
        if isinstance(several, list):
            written[name] = [part(one) for one in several]
        elif name in written and name not in LIST_FIELDS:
            written[name] = part(several)
    return read_mixer(written)


def _name(value: Any) -> str:
    return Path(value).stem if isinstance(value, str) else "memory"


@dataclass
class Stock:
    """Rows to train on and to measure on.

    Attributes:
        train, heldout: the rows. bytes_per_token: of the held-out text, for bits per byte.
    """

    train: PackedDataset | PackedStream
    heldout: list[PackedRow] = field(default_factory=list)
    bytes_per_token: float = 1.0


def rows_of(plan: TrainPlan, tokenizer: PreTrainedTokenizerFast, bad: BadLinePolicy) -> Stock:
    """The rows of a plan's texts.

    Raises:
        ValueError: texts that cannot be read or fill no row.
    """
    data, run = plan.data, plan.run
    length = plan.steps * plan.optimizer.batch * plan.optimizer.accumulate
    read = partial(read_rows, tokenizer=tokenizer, context=data.context)
    heldout, tally = [], None
    if data.heldout or data.heldout_split is not None:
        name = _named_text(plan, heldout=True)
        heldout, tally = read(_documents(plan, bad, heldout=True), source_name=name)
    if data.streams:
        stream = PackedStream(
            _documents(plan, bad),
            tokenizer,
            context=data.context,
            length=length,
            shuffle=data.shuffle,
            seed=run.seed,
            source_name=_named_text(plan),
        )
        return Stock(stream, _spread(heldout, run.heldout_rows), _ratio(tally))
    rows, read_all = read(_documents(plan, bad), source_name=_named_text(plan))
    if data.heldout_share:
        every = round(1 / data.heldout_share)
        heldout, tally = rows[every - 1 :: every], read_all
        rows = [row for i, row in enumerate(rows) if i % every != every - 1]
        if not heldout or not rows:
            raise ValueError(
                f"[data] heldout_share = {data.heldout_share:g} of {len(rows) + len(heldout)} rows "
                "leaves nothing on one side: give more text, or shorten context"
            )
    order = PackedDataset(rows, length=length, seed=run.seed)
    return Stock(order, _spread(heldout, run.heldout_rows), _ratio(tally or read_all))


def measured_on_trained(plan: TrainPlan, texts: Mapping[str, Any]) -> str | None:
    """A sentence where files are held out that are trained on, too: the same, or the same text.

    Args:
        plan: of the run.
        texts: a fingerprint of every file that it names.
    """
    if not plan.data.heldout or not plan.data.train:
        return None
    trained = {repr(texts[str(p)]): p for p in find_files(plan.data.train, key="train")}
    held = find_files(plan.data.heldout, key="heldout")
    both = [(p, trained[repr(texts[str(p)])]) for p in held if repr(texts[str(p)]) in trained]
    if not both:
        return None
    more = f" and {len(both) - 1} more" if len(both) > 1 else ""
    path, same = both[0]
    copied = "" if path.resolve() == same.resolve() else f" (it is {same}, word for word)"
    return (
        f"{path}{copied}{more} is held out and trained on, so what is measured says nothing of new "
        "text: take it out of [data] train or heldout, or set heldout_share in their place"
    )


def _ratio(tally: TextStats | None) -> float:
    return 1.0 if tally is None else tally.bytes_per_token


def _spread(rows: list[PackedRow], most: int) -> list[PackedRow]:
    """At most so many rows, evenly spread."""
    keep = min(most, len(rows))
    return [rows[i * len(rows) // keep] for i in range(keep)]


def _documents(plan: TrainPlan, bad: BadLinePolicy, *, heldout: bool = False) -> Iterable[str]:
    data = plan.data
    if data.dataset is not None and not (heldout and data.heldout):
        split = data.heldout_split if heldout else data.split
        return HubDocuments(
            path=data.dataset, name=data.name, split=split or "", column=data.column, bad_lines=bad
        )
    key = "heldout" if heldout else "train"
    files = find_files(data.heldout if heldout else data.train, key=key)
    return FileDocuments(files=files, column=data.column, separator=data.separator, bad_lines=bad)


def _named_text(plan: TrainPlan, *, heldout: bool = False) -> str:
    """What a message calls a plan's text: by its files, as the plan has them, or its dataset."""
    data, what = plan.data, "held-out text" if heldout else "text"
    if data.dataset is not None and not (heldout and data.heldout):
        return f"the {what} of dataset {data.dataset!r}"
    first, *more = data.heldout if heldout else data.train
    return f"the {what} in {first}" + (f" and {len(more)} more" if more else "")


def tokenizer_of(
    plan: TrainPlan, out: Path, bad: BadLinePolicy, checkpoint: Path | None
) -> PreTrainedTokenizerFast:
    """The plan's tokenizer; one that is trained is kept with the run.

    Args:
        checkpoint: that the run goes on from, whose tokenizer is taken. A run that begins trains
            its own: what lies in its folder may be of another plan, or half of one.

    Raises:
        ValueError: a tokenizer that cannot be loaded.
    """
    if plan.data.tokenizer == "bytes" and plan.model.start is None:
        return byte_tokenizer()
    if checkpoint is not None and (checkpoint / "tokenizer.json").exists():
        return load_tokenizer(str(checkpoint))
    if plan.model.start is not None:
        return load_tokenizer(plan.model.start, key="[model] start")
    if plan.data.tokenizer != "bpe":
        return load_tokenizer(plan.data.tokenizer)
    # Lines are noted when rows are made, once.
    quiet = BadLinePolicy(skip=bad.skip)
    texts = (chunk.text for chunk in iter_chunks(_documents(plan, quiet)))
    trained = train_bpe(texts, plan.data.vocab)
    if not is_first():  # each process trains the same one, and one of them writes it down
        with tempfile.TemporaryDirectory() as aside:
            trained.save_pretrained(aside)
            return load_tokenizer(aside)
    folder = out / "tokenizer"
    trained.save_pretrained(str(folder))
    return load_tokenizer(str(folder))
