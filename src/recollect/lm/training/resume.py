"""Resuming a training run: from its first step, or from a checkpoint of the same plan and texts.

The current plan may have more steps than the saved one. All other changes that affect the result
are refused.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from recollect.lm.data.sources import find_files
from recollect.lm.model.checkpoint import check_json
from recollect.lm.model.config import RecollectConfig
from recollect.lm.training.atomic_checkpoints import (
    RUN_RECORD_FILE,
    check_resumable,
    last_checkpoint,
    remove_staging,
)
from recollect.lm.training.plan import TrainPlan
from recollect.report.files import write_atomic

__all__ = [
    "MISMATCH_ADVICE",
    "ExtendSchedule",
    "RunStart",
    "check_same_recipes",
    "check_writable",
    "facts_to_compare",
    "file_fingerprint",
    "no_run_message",
    "resolve_start",
    "write_run_record",
]

# Keys that do not affect the result, or only as another device would. `TrainPlan.steps` is compared
# instead of the last two.
_IGNORED_KEYS = (
    *("save_every", "keep", "log_every", "tensorboard", "out", "device"),
    *("parallel", "loss_chunk", "steps", "tokens"),
)
_FULL_HASH_LIMIT, _EDGE_BYTES = 64 * 2**20, 2**20
_OTHER_FOLDER = "or name another folder as out in [run]"

MISMATCH_ADVICE = {
    "[": "start all processes with one file and the same options",
    "text": "all processes must read the same texts",
    "checkpoint": "all processes must see one folder",
}
"""Advice for values that differ between processes, by the beginning of the name."""


def check_writable(out: Path) -> None:
    """Create a run's folder if it does not exist. Raise ValueError if it is not writable."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(
            f"[run] out = {str(out)!r} cannot be written to ({error.strerror}): name another folder"
        ) from None


def no_run_message(out: Path) -> str:
    """Return the message for ``--resume`` with a folder without a run."""
    return (
        f"{out} contains no run to resume: leave out --resume to start one there, or name the "
        "folder of the run as out in [run]"
    )


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """Start of a run."""

    checkpoint: Path | None = None  # checkpoint to resume from; None at the first step
    files: int = 0  # number of its files, all verified
    # number of steps in the plan of the checkpoint, if the current plan has more
    previous_steps: int | None = None
    record: dict[str, Any]  # plan and fingerprints of the texts, which every checkpoint contains


def resolve_start(plan: TrainPlan, out: Path, *, resume: bool) -> RunStart:
    """Return the start of a run: its first step, or the last checkpoint in its folder.

    Changes of a dataset on the hub are not detected.

    Raises:
        ValueError: the folder contains a run and ``resume`` is false, or no run and ``resume`` is
            true; or the checkpoint has another plan or other texts.
        CheckpointError: a file of the checkpoint is missing or has changed.
    """
    remove_staging(out)
    checkpoint, model = last_checkpoint(out), out / "model"
    if resume and checkpoint is None and not (out / "plan.json").exists():
        raise ValueError(no_run_message(out))
    if resume and checkpoint is None and model.exists():
        raise ValueError(
            f"{out} contains a finished run without checkpoints, which cannot be resumed: leave "
            f"out --resume to train it again, {_OTHER_FOLDER}, with {str(model)!r} as [model] start"
        )
    if not resume and checkpoint is not None:
        raise ValueError(
            f"{out} already contains {checkpoint.name}: use --resume to continue that run, "
            f"{_OTHER_FOLDER}"
        )
    if not resume and model.exists() and not _is_same_plan(out, plan):
        raise ValueError(
            f"{out} already contains the model of another run: delete {model} to train this one "
            f"instead, {_OTHER_FOLDER}"
        )
    record = {
        "plan": json.loads(json.dumps(plan.to_dict())),
        "texts": {
            str(path): file_fingerprint(path)
            for key, names in (("train", plan.data.train), ("heldout", plan.data.heldout))
            for path in find_files(names, key=key)
        },
    }
    if checkpoint is None:
        return RunStart(record=record)
    files = check_resumable(checkpoint)
    saved = check_json(checkpoint / RUN_RECORD_FILE)
    previous_steps = _check_plan(out, _read_plan(saved["plan"], plan), plan)
    for name, (old, new) in _diff(saved["texts"], record["texts"]).items():
        change = "is new" if old is None else "is gone" if new is None else "has changed"
        raise ValueError(
            f"{name} {change} since the start of the run in {out}, so its rows would be others: "
            f"restore the text, {_OTHER_FOLDER}"
        )
    return RunStart(
        checkpoint=checkpoint, files=files, previous_steps=previous_steps, record=record
    )


def _check_plan(out: Path, saved: TrainPlan, current: TrainPlan) -> int | None:
    """Refuse changes of the result; return the saved number of steps if the current is larger."""
    for key, (old, new) in _plan_changes(saved, current).items():
        raise ValueError(
            f"{out} was started with {key} = {old!r}, not {new!r}: resume it with the plan of its "
            f"start, {_OTHER_FOLDER}"
        )
    if current.steps < saved.steps:
        raise ValueError(
            f"{out} contains a run of {saved.steps:,} steps, and this plan ends after "
            f"{current.steps:,}: resume it with [optimizer] steps = {saved.steps} or more, "
            f"{_OTHER_FOLDER}"
        )
    return saved.steps if current.steps > saved.steps else None


def _is_same_plan(out: Path, plan: TrainPlan) -> bool:
    """Whether the run in a folder had an equal plan."""
    try:
        saved = _read_plan(check_json(out / "plan.json"), plan)
    except ValueError:
        return False
    return saved.steps == plan.steps and not _plan_changes(saved, plan)


def _read_plan(data: Mapping[str, Any], current: TrainPlan) -> TrainPlan:
    """Return a saved plan, with default values and without the keys of other versions."""
    known = current.to_dict()
    tables = {name: x for name, x in data.items() if name in known and isinstance(x, dict)}
    return TrainPlan.from_dict(
        {name: {k: x for k, x in t.items() if k in known[name]} for name, t in tables.items()}
    )


def _plan_changes(saved: TrainPlan, current: TrainPlan) -> dict[str, tuple[Any, Any]]:
    """Return the keys that change the result, except the number of steps, with both values."""
    plans = [json.loads(json.dumps(plan.to_dict())) for plan in (saved, current)]  # without tuples
    changes = _diff(*map(_flatten, plans))
    return {key: x for key, x in changes.items() if key.split()[-1] not in _IGNORED_KEYS}


def _flatten(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan's values by ``[table] key``."""
    tables = {name: table for name, table in plan.items() if isinstance(table, dict)}
    return {f"[{name}] {key}": x for name, table in tables.items() for key, x in table.items()}


def _diff(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys whose values differ, with both values."""
    pairs = {key: (saved.get(key), current.get(key)) for key in {**saved, **current}}
    return {key: (old, new) for key, (old, new) in pairs.items() if old != new}


def write_run_record(out: Path, record: Mapping[str, Any]) -> None:
    """Write ``plan.json`` and ``texts.json`` to a run's folder, after all checks have passed."""
    for name in ("plan", "texts"):
        write_atomic(out / f"{name}.json", json.dumps(record[name], indent=2) + "\n")


def facts_to_compare(record: Mapping[str, Any], checkpoint: Path | None) -> dict[str, Any]:
    """Return the values that must be equal in all processes of a run, by name."""
    texts = {f"text {name}": file["sha256"] for name, file in record["texts"].items()}
    return _flatten(record["plan"]) | texts | {"checkpoint": checkpoint and checkpoint.name}


class ExtendSchedule(TrainerCallback):
    """Sets the learning rate of the longer schedule when a run of ``steps`` is extended.

    A checkpoint contains the learning rate of the next step under the schedule that it was written
    with: 0 at the end of a run. ``log`` receives a message with both learning rates.
    """

    def __init__(self, steps: int, log: Callable[[str], None]) -> None:
        self.steps, self.log = steps, log

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **kwargs: Any,
    ) -> None:
        previous_lr = optimizer.param_groups[0]["lr"]
        schedules = zip(lr_scheduler.base_lrs, lr_scheduler.lr_lambdas, strict=True)
        lrs = [peak * factor(lr_scheduler.last_epoch) for peak, factor in schedules]
        for group, lr in zip(optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr
        lr_scheduler._last_lr = lrs
        self.log(
            f"extended from {self.steps:,} to {state.max_steps:,} steps: the learning rate is "
            f"{lrs[0]:.3g}, as in a run of {state.max_steps:,}, instead of {previous_lr:.3g}"
        )


def check_same_recipes(checkpoint: Path, config: RecollectConfig) -> None:
    """Refuse a checkpoint with other recipes, such as those of a recipe file that has changed."""
    if not (checkpoint / "config.json").exists():
        return
    saved = RecollectConfig.from_pretrained(checkpoint)
    for name, saved_name in zip(config.layer_names, saved.layer_names, strict=False):
        if config.mixer(name) != saved.mixer(saved_name):
            raise ValueError(
                f"the recipe {name!r} has changed since {checkpoint} was written: restore it, "
                f"{_OTHER_FOLDER}"
            )


def file_fingerprint(path: Path) -> dict[str, Any]:
    """Return size in bytes and SHA-256 of a file, above 64 MiB of its first and last MiB only.

    A run on many large files thus starts soon. Changes in the middle of a large file that keep its
    size are not detected.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _FULL_HASH_LIMIT:
            digest = hashlib.file_digest(file, "sha256")
        else:
            digest = hashlib.sha256(file.read(_EDGE_BYTES))
            file.seek(-_EDGE_BYTES, 2)
            digest.update(file.read())
    return {"bytes": size, "sha256": digest.hexdigest()}
