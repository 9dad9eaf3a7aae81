"""Setup of a run: tokenizer, training and held-out rows, and the initial model."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size
from transformers import PreTrainedTokenizerFast

from recollect.blocks.compositions import KINDS, LIST_FIELDS, load_recipe_mixer, read_mixer
from recollect.blocks.mixers import Mixer, RecipeMixer, as_mixer
from recollect.layer.options import LayerOptions
from recollect.lm.data.rows import PackedDataset, PackedRow, PackedStream, read_rows
from recollect.lm.data.sources import (
    BadLinePolicy,
    FileDocuments,
    HubDocuments,
    find_files,
    iter_chunks,
)
from recollect.lm.data.tokenizers import byte_tokenizer, load_tokenizer, train_bpe
from recollect.lm.distributed.parallel_dims import ParallelDims
from recollect.lm.loading import load_start
from recollect.lm.model.config import RecipeLike, RecollectConfig
from recollect.lm.model.counts import match_parameters, parameter_count
from recollect.lm.model.model import RecollectForCausalLM
from recollect.lm.model.paper_sizes import PAPER_SIZES
from recollect.lm.mup.rules import check_logit_scale, scale_for_width
from recollect.lm.training.plan import ModelPlan, TrainPlan
from recollect.messages import renamed_arguments, short_repr
from recollect.report.formatting import format_si
from recollect.report.ranks import is_main_process

__all__ = [
    "TextData",
    "build_model",
    "build_tokenizer",
    "check_memory",
    "explain_out_of_memory",
    "heldout_overlap_warning",
    "load_text_data",
    "model_config",
]

SINGLE_PROCESS = ParallelDims()
_BYTES_PER_PARAMETER = 16  # a float32 weight, its gradient, and the two moments of AdamW
_CONFIG_KEY_NAMES = {
    "hidden_size": "[model] width",
    "num_hidden_layers": "[model] depth",
    "num_attention_heads": "[model] heads",
    "num_key_value_heads": "[model] kv_heads",
    "head_dim": "[model] key_dim",
    "value_dim": "[model] value_dim",
    "intermediate_size": "[model] mlp",
    "target": "[model] parameters",
}
"""Keys of a plan by the name of the configuration's argument."""


def build_model(plan: TrainPlan, tokenizer: PreTrainedTokenizerFast) -> RecollectForCausalLM:
    """Return the initial model of a plan: new or saved; a ValueError explains invalid sizes."""
    base_width = plan.optimizer.mup_base_width
    if plan.model.start is not None:
        model = load_start(plan.model.start).float()
        if base_width is not None and isinstance(model.config, RecollectConfig):
            check_logit_scale(model.config, base_width)
    else:
        with renamed_arguments(_CONFIG_KEY_NAMES):
            model = RecollectForCausalLM(model_config(plan.model, tokenizer))
        if base_width is not None:
            scale_for_width(model, base_width)
    if isinstance(model.config, RecollectConfig):
        model.config.loss_chunk_size = plan.run.loss_chunk
    return model


@contextlib.contextmanager
def explain_out_of_memory(plan: TrainPlan) -> Iterator[None]:
    """Turn errors of memory that is too small for a batch into a ValueError with advice."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        is_full = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not is_full and not should_reduce_batch_size(error):
            raise
        raise ValueError(
            f"[optimizer] batch = {plan.optimizer.batch}, of rows of {plan.data.context} tokens, "
            f"does not fit into memory: {_SMALLER_BATCH}, or set checkpointing = true in [run]"
        ) from error


_SMALLER_BATCH = (
    "use fewer rows and set accumulate instead, a shorter context, or more segments in [data]"
)


@renamed_arguments(_CONFIG_KEY_NAMES)
def check_memory(
    plan: TrainPlan,
    config: RecollectConfig,
    *,
    device: torch.device,
    layout: ParallelDims = SINGLE_PROCESS,
) -> None:
    """Refuse a run that needs more than the device's memory for weights and block inputs alone."""
    weights = parameter_count(config) * _BYTES_PER_PARAMETER // layout.weight_shards
    tokens = plan.optimizer.batch * plan.data.segment_length // layout.dp_cp_size
    inputs = tokens * config.hidden_size * config.num_hidden_layers * (2 if plan.run.bf16 else 4)
    memory = _device_memory(device)
    if memory is None or weights + inputs <= memory:
        return
    if weights > memory:
        cause = f"[model] has {parameter_count(config):,} parameters and"
        needed, advice = weights, "use a smaller width, depth, mlp or parameters"
    else:
        cause = f"[optimizer] batch = {plan.optimizer.batch:,} of {plan.data.context:,} tokens"
        needed, advice = inputs, _SMALLER_BATCH
    raise ValueError(
        f"{cause} needs at least {format_si(needed, 'B')} for training, and {device.type} has "
        f"{format_si(memory, 'B')}: {advice}"
    )


def _device_memory(device: torch.device) -> int | None:
    """Return a device's memory in bytes; ``None`` if it is unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type != "cpu":
        return None
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not a POSIX system
        return None


@renamed_arguments(_CONFIG_KEY_NAMES)
def model_config(plan: ModelPlan, tokenizer: PreTrainedTokenizerFast) -> RecollectConfig:
    """Return the configuration of ``[model]``; a ValueError explains invalid recipes and sizes."""
    size = None if plan.size is None else PAPER_SIZES[plan.size]
    width, depth, heads = (256, 4, 4) if size is None else (size.width, size.depth, size.heads)
    recipes: RecipeLike | dict[str, RecipeLike]
    if plan.recipes:
        recipes = {name: _mixer(value, None) for name, value in plan.recipes.items()}
    elif isinstance(plan.recipe, str) and plan.options is None and not _is_file(plan.recipe):
        recipes = plan.recipe
    else:
        mixer = _mixer(plan.recipe, plan.options)
        name = Path(plan.recipe).stem if isinstance(plan.recipe, str) else "memory"
        recipes = {name if isinstance(mixer, RecipeMixer) else mixer.kind: mixer}
    config = RecollectConfig.from_recipes(
        recipes,
        layers=plan.layers or None,
        vocab_size=-(-len(tokenizer) // 8) * 8,  # products are faster at multiples of 8
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


def _mixer(value: Any, options: dict[str, Any] | None) -> Mixer:
    """Return the mixer of a name, a file or a table, whose parts may be names and files, too."""
    if isinstance(value, str):
        mixer = load_recipe_mixer(Path(value)) if _is_file(value) else as_mixer(value)
    elif "mixer" in value:
        mixer = read_mixer(_with_parts(value))
    else:
        mixer = read_mixer(value if set(value) == {"recipe", "options"} else {"recipe": value})
    if options is None:
        return mixer
    if not isinstance(mixer, RecipeMixer):
        raise ValueError(
            "[model] options are those of one recipe: set the options of each part of a "
            "composition in the part, {recipe = ..., options = ...}"
        )
    return replace(mixer, options=LayerOptions.from_dict(options))


def _is_file(name: str) -> bool:
    return name.endswith((".json", ".toml"))


def _with_parts(table: dict[str, Any]) -> dict[str, Any]:
    """Replace names, files and recipes among the parts of a composition by tables of mixers."""

    def part(value: Any) -> Any:
        if not isinstance(value, str | dict):
            raise ValueError(
                "[model] a part of a composition is a name, a file or a table, not "
                f"{short_repr(value)}"
            )
        return _mixer(value, None).to_dict()

    result, kind = dict(table), table.get("mixer")
    for name in KINDS[kind].mixer_fields if isinstance(kind, str) and kind in KINDS else ():
        value = result.get(name)
        if isinstance(value, list):
            result[name] = [part(item) for item in value]
        elif name in result and name not in LIST_FIELDS:
            result[name] = part(value)
    return result


@dataclass
class TextData:
    """Rows of a run, with the bytes per token of the held-out text (else of the training text)."""

    train: PackedDataset | PackedStream
    heldout: list[PackedRow] = field(default_factory=list)
    bytes_per_token: float = 1.0


def load_text_data(
    plan: TrainPlan, tokenizer: PreTrainedTokenizerFast, bad_lines: BadLinePolicy
) -> TextData:
    """Return the rows of a plan's texts; a ValueError names texts that are unreadable or short."""
    data, run = plan.data, plan.run
    length = plan.steps * plan.optimizer.batch * plan.optimizer.accumulate
    read = partial(read_rows, tokenizer=tokenizer, context=data.context)
    heldout, stats = [], None
    if data.heldout or data.heldout_split is not None:
        documents = _open_documents(plan, bad_lines, heldout=True)
        heldout, stats = read(documents, source_name=_describe_source(plan, heldout=True))
    if data.is_streaming:
        train = PackedStream(
            _open_documents(plan, bad_lines),
            tokenizer,
            context=data.context,
            length=length,
            shuffle=data.shuffle,
            seed=run.seed,
            source_name=_describe_source(plan),
        )
    else:
        rows, train_stats = read(
            _open_documents(plan, bad_lines), source_name=_describe_source(plan)
        )
        stats = stats or train_stats
        if data.heldout_share:
            period = round(1 / data.heldout_share)
            heldout = rows[period - 1 :: period]
            rows = [row for i, row in enumerate(rows) if i % period != period - 1]
            if not heldout or not rows:
                raise ValueError(
                    f"[data] heldout_share = {data.heldout_share:g} of {len(rows) + len(heldout)} "
                    "rows leaves no row for one of both parts: use more text, or a shorter context"
                )
        train = PackedDataset(rows, length=length, seed=run.seed)
    count = min(run.heldout_rows, len(heldout))
    return TextData(
        train,
        [heldout[i * len(heldout) // count] for i in range(count)],  # evenly spaced
        1.0 if stats is None else stats.bytes_per_token,
    )


def heldout_overlap_warning(plan: TrainPlan, texts: Mapping[str, Any]) -> str | None:
    """Return a warning if a held-out file is also a training file; texts are fingerprints."""
    if not plan.data.heldout or not plan.data.train:
        return None
    trained = {repr(texts[str(p)]): p for p in find_files(plan.data.train, key="train")}
    heldout = find_files(plan.data.heldout, key="heldout")
    both = [(p, trained[repr(texts[str(p)])]) for p in heldout if repr(texts[str(p)]) in trained]
    if not both:
        return None
    more = f" and {len(both) - 1} more" if len(both) > 1 else ""
    path, original = both[0]
    copied = "" if path.resolve() == original.resolve() else f" (a copy of {original})"
    return (
        f"{path}{copied}{more} is held out and trained on, so the evaluation does not measure new "
        "text: remove it from [data] train or heldout, or set heldout_share instead"
    )


def _open_documents(
    plan: TrainPlan, bad_lines: BadLinePolicy, *, heldout: bool = False
) -> Iterable[str]:
    data = plan.data
    if data.dataset is not None and not (heldout and data.heldout):
        split = data.heldout_split if heldout else data.split
        return HubDocuments(
            path=data.dataset,
            name=data.name,
            split=split or "",
            column=data.column,
            bad_lines=bad_lines,
        )
    key = "heldout" if heldout else "train"
    files = find_files(data.heldout if heldout else data.train, key=key)
    return FileDocuments(
        files=files, column=data.column, separator=data.separator, bad_lines=bad_lines
    )


def _describe_source(plan: TrainPlan, *, heldout: bool = False) -> str:
    """Return the name of a text in messages: its files as in the plan, or its dataset."""
    data, text = plan.data, "held-out text" if heldout else "text"
    if data.dataset is not None and not (heldout and data.heldout):
        return f"the {text} of dataset {data.dataset!r}"
    first, *more = data.heldout if heldout else data.train
    return f"the {text} in {first}" + (f" and {len(more)} more" if more else "")


def build_tokenizer(
    plan: TrainPlan, out: Path, bad_lines: BadLinePolicy, checkpoint: Path | None
) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a checkpoint, of a saved model or by name, or train a BPE.

    A trained BPE is saved in the run's folder. A new run trains its own: the files in its folder
    may be incomplete, or of another plan.
    """
    if plan.data.tokenizer == "bytes" and plan.model.start is None:
        return byte_tokenizer()
    if checkpoint is not None and (checkpoint / "tokenizer.json").exists():
        return load_tokenizer(str(checkpoint))
    if plan.model.start is not None:
        return load_tokenizer(plan.model.start, key="[model] start")
    if plan.data.tokenizer != "bpe":
        return load_tokenizer(plan.data.tokenizer)
    documents = _open_documents(plan, BadLinePolicy(skip=bad_lines.skip))  # counted later, once
    trained = train_bpe((chunk.text for chunk in iter_chunks(documents)), plan.data.vocab)
    with tempfile.TemporaryDirectory() as tmpdir:
        # Every process trains an equal tokenizer.
        folder = str(out / "tokenizer") if is_main_process() else tmpdir
        trained.save_pretrained(folder)
        return load_tokenizer(folder)
