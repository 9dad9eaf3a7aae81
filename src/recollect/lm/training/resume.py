"""Resuming a training run: from nothing, or from a checkpoint of the same plan and texts.

A plan may have more steps than the run was begun with; everything else that makes another result is
refused.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from recollect.lm.data.sources import find_files
from recollect.lm.model.checkpoint import CheckpointError, check_json
from recollect.lm.model.config import RecollectConfig
from recollect.lm.training.atomic_checkpoints import (
    RECORD,
    check_resumable,
    clear_aside,
    last_checkpoint,
)
from recollect.lm.training.plan import TrainPlan, default_of
from recollect.report.files import write_atomic

__all__ = [
    "OTHERWISE",
    "Begun",
    "LongerSchedule",
    "begin",
    "check_writable",
    "fingerprint",
    "given",
    "note_begun",
    "nothing_to_resume",
    "same_model",
]

# Without another result, or with one that differs as devices do.
_MAY_CHANGE = (
    *("save_every", "keep", "log_every", "tensorboard", "out", "device"),
    *("parallel", "loss_chunk"),
)
_LENGTH = ("[optimizer] steps", "[optimizer] tokens")
_WHOLE, _END = 64 * 2**20, 2**20


def check_writable(out: Path) -> None:
    """That a run's folder can be written to; it is made where it is missing.

    Raises:
        ValueError: it cannot.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(
            f"[run] out = {str(out)!r} cannot be written to ({error.strerror}): name another folder"
        ) from None


def nothing_to_resume(out: Path) -> str:
    """What to say of a folder that nobody has begun a run in."""
    return (
        f"{out} holds no run to go on with: leave out --resume to begin one there, or name the "
        "folder of the run as out in [run]"
    )


@dataclass(frozen=True, kw_only=True)
class Begun:
    """How a run begins.

    Attributes:
        checkpoint: to go on from, ``None`` at the beginning.
        files: of it, that are as they were written.
        record: plan and texts, which every checkpoint keeps.
        extends: the steps that the checkpoint's run was to take, if the plan has more.
    """

    checkpoint: Path | None
    files: int
    extends: int | None
    record: dict[str, Any]


def begin(plan: TrainPlan, out: Path, *, resume: bool) -> Begun:
    """Where a run begins: at the beginning, or at a checkpoint of the same plan and texts.

    Every checkpoint keeps the plan and the `fingerprint` of every file of text that it names; for
    whoever looks, ``plan.json`` and ``texts.json`` have them too (`note_begun`). Whether a dataset
    changed is not seen.

    Raises:
        ValueError: the folder holds a run, and nobody asked to go on with it, or none, and somebody
            did; or it is another plan's, or of other texts.
        CheckpointError: the checkpoint lacks a file, or one was cut short or altered.
    """
    clear_aside(out)
    checkpoint = last_checkpoint(out)
    if checkpoint is not None and not resume:
        raise ValueError(
            f"{out} already holds {checkpoint.name}: give --resume to go on with that run, or "
            "another folder as out in [run]"
        )
    mine = json.loads(json.dumps(plan.to_dict()))
    if resume and checkpoint is None and not (out / "plan.json").exists():
        raise ValueError(nothing_to_resume(out))
    if checkpoint is None and (out / "model").exists() and not _same(out, mine):
        if resume and _same(out, mine, but=_LENGTH):
            raise ValueError(
                f"{out} holds a finished run and no checkpoint that more steps could go on from: "
                f"give another folder as out in [run], with {str(out / 'model')!r} as [model] start"
            )
        raise ValueError(
            f"{out} already holds the model of another run: give another folder as out in [run], "
            f"or delete {out / 'model'} to train this one in its place"
        )
    if resume and checkpoint is None and (out / "model").exists():
        raise ValueError(
            f"{out} holds the finished run of this plan, and no checkpoint: there is nothing to go "
            "on with; leave out --resume to train it anew"
        )
    files = 0 if checkpoint is None else check_resumable(checkpoint)
    before: dict[str, Any] = {} if checkpoint is None else check_json(checkpoint / RECORD)
    extends = None
    if checkpoint is not None:
        extends = _extended(before["plan"], plan)
        _same_plan(out, before["plan"], mine, longer=extends is not None)
    texts = _texts(plan)
    if checkpoint is not None:
        _same_texts(out, before["texts"], texts)
    record = {"plan": mine, "texts": texts}
    return Begun(checkpoint=checkpoint, files=files, record=record, extends=extends)


def note_begun(out: Path, record: dict[str, Any]) -> None:
    """Write plan and texts for whoever looks, once nothing is left that could refuse the run.

    Args:
        out: folder of the run.
        record: of `Begun`.
    """
    for name in ("plan", "texts"):
        write_atomic(out / f"{name}.json", json.dumps(record[name], indent=2) + "\n")


OTHERWISE = {
    "[": "start all processes with one file and the same options",
    "text": "all processes must read the same texts",
    "checkpoint": "all processes must see one folder",
}
"""What to do where processes of one run were given something else each."""


def given(record: dict[str, Any], checkpoint: Path | None) -> dict[str, Any]:
    """What all processes of a run must have alike, by name.

    Args:
        record: plan and texts of `Begun`.
        checkpoint: that the run goes on from.
    """
    tables = ((t, v) for t, v in record["plan"].items() if isinstance(v, dict))
    keys = {f"[{table}] {key}": v for table, values in tables for key, v in values.items()}
    texts = {f"text {name}": known["sha256"] for name, known in record["texts"].items()}
    return keys | texts | {"checkpoint": checkpoint and checkpoint.name}


class LongerSchedule(TrainerCallback):
    """Lets a run that is extended go on at the learning rate of its longer schedule.

    A checkpoint holds the rate of the step after it, by the schedule that it was written under:
    0 at the end of a run.

    Args:
        steps: that the run was to take.
        say: told the two rates.
    """

    def __init__(self, steps: int, say: Callable[[str], None]) -> None:
        self.steps, self.say = steps, say

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **kwargs: Any,
    ) -> None:
        was = optimizer.param_groups[0]["lr"]
        places = zip(lr_scheduler.base_lrs, lr_scheduler.lr_lambdas, strict=True)
        rates = [peak * share(lr_scheduler.last_epoch) for peak, share in places]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        lr_scheduler._last_lr = rates
        self.say(
            f"extended from {self.steps:,} to {state.max_steps:,} steps: the learning rate goes on "
            f"as in a run of {state.max_steps:,}, at {rates[0]:.3g} in place of {was:.3g}"
        )


def same_model(checkpoint: Path, config: RecollectConfig) -> None:
    """That a checkpoint's layers are those that the plan builds: its recipe may be a file.

    Sizes need no look here: weights of other shapes are refused.

    Raises:
        ValueError: naming the recipe that differs.
    """
    if not (checkpoint / "config.json").exists():
        return  # a checkpoint that many devices share has none
    before = RecollectConfig.from_pretrained(checkpoint)
    for now, saved in zip(config.pattern, before.pattern, strict=False):
        if config.mixer(now) != before.mixer(saved):
            raise ValueError(
                f"{checkpoint} was trained with another recipe than {now!r} is now: put it back "
                "as it was, or give another folder as out in [run]"
            )


def fingerprint(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file: of all of it, or of both ends of a large one.

    Beyond 64 MiB only the first and the last MiB are read, so that a run on many large shards
    begins soon; an edit in between that keeps the size is not seen.
    """
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(_WHOLE if size <= _WHOLE else _END))
        if size > _WHOLE:
            file.seek(-_END, 2)
            digest.update(file.read())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _texts(plan: TrainPlan) -> dict[str, dict[str, Any]]:
    files = find_files(plan.data.train, key="train") + find_files(plan.data.heldout, key="heldout")
    return {str(path): fingerprint(path) for path in files}


def _differences(before: dict[str, Any], mine: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What of a plan is another and makes another result: the key, how it was, how it is."""
    for table, values in mine.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            old = before.get(table, {}).get(name, default_of(table, name))
            if old != value and name not in _MAY_CHANGE:
                yield f"[{table}] {name}", old, value


def _same(out: Path, mine: dict[str, Any], *, but: tuple[str, ...] = ()) -> bool:
    """Whether a run that left no checkpoint was of this plan, as far as it says."""
    try:
        before = check_json(out / "plan.json")
    except CheckpointError:
        return False
    return all(key in but for key, _, _ in _differences(before, mine))


def _extended(before: dict[str, Any], plan: TrainPlan) -> int | None:
    """The steps of the plan of a checkpoint, if this one has more."""
    steps = _steps(before)
    return steps if steps is not None and plan.steps > steps else None


def _steps(plan: dict[str, Any]) -> int | None:
    """Steps of a plan as it was written; ``None`` of one that another version wrote."""
    try:
        return TrainPlan.from_dict(plan).steps
    except ValueError:
        return None


def _same_plan(out: Path, before: dict[str, Any], mine: dict[str, Any], *, longer: bool) -> None:
    was, now = _steps(before), _steps(mine)
    for key, old, value in _differences(before, mine):
        if longer and key in _LENGTH:
            continue
        if key in _LENGTH and was is not None and now is not None and was > now:
            raise ValueError(
                f"{out} holds a run of {was:,} steps by now, as it was begun or last extended, and "
                f"this plan ends after {now:,}: resume it with [optimizer] steps = {was} or more, "
                "or give another folder as out in [run]"
            )
        more = " or with more steps" if key in _LENGTH else ""
        raise ValueError(
            f"{out} was begun with {key} = {old!r}, not {value!r}: resume it as it was{more}, or "
            "give another folder as out in [run]"
        )


def _same_texts(out: Path, before: dict[str, Any], texts: dict[str, Any]) -> None:
    for name in {**before, **texts}:
        if name not in before:
            what = "is new"
        elif name not in texts:
            what = "is gone"
        elif before[name] != texts[name]:
            what = "has changed"
        else:
            continue
        raise ValueError(
            f"{name} {what} since {out} was begun, so its rows would not be those of the run: put "
            "the text back as it was, or give another folder as out in [run]"
        )
