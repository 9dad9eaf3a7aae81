"""Checkpoints written atomically, with a clear error when the disk is full.

The Trainer writes a checkpoint file by file under its name, so a kill leaves a folder that looks
like a checkpoint and is none. Here it writes into a folder aside, which takes its name only when
everything in it is on disk. Where processes share a model, they take steps while it is written.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import rotate_checkpoints

from recollect.lm.model.checkpoint import CheckpointError, check_json, check_regular_files
from recollect.lm.model.manifest import MANIFEST, check_manifest, write_manifest
from recollect.lm.publishing.card import carry_over
from recollect.lm.sharding.background import Background
from recollect.lm.sharding.checkpoints import SHARDS, unwrapped

__all__ = [
    "RECORD",
    "AtomicTrainer",
    "check_moments",
    "check_resumable",
    "clear_aside",
    "last_checkpoint",
    "place_folder",
    "restoring",
]

RECORD = "run.json"
"""Of a checkpoint: the plan and the fingerprints of the texts that its run was begun with."""

_ASIDE = ".saving"
_GONE = ".replaced"
# What every checkpoint has; the Trainer writes its own state last.
_NEEDED = ("model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json")
_OF_TORCH = ("optimizer.pt", "scheduler.pt", "rng_state")
_SHARED = ("layout.json", "scheduler.pt", "trainer_state.json")  # beside the shards of processes


class AtomicTrainer(Trainer):
    """A Trainer whose checkpoints appear whole under their names, or not at all.

    Attributes:
        begun_with: what a checkpoint says of its run, in ``run.json``.
        background: writes checkpoints while steps go on, where processes share a model.
    """

    begun_with: Mapping[str, Any] = MappingProxyType({})
    background: Background | None = None
    _aside = False

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; when it ends, however it ends, no checkpoint is under way.

        Raises:
            CheckpointError: one could not be written.
        """
        try:
            found = super().train(*args, **kwargs)
            self.finish_saving()
        finally:
            self.settle_saving()
        return found

    @property
    def saving_failed(self) -> bool:
        """Whether a checkpoint is over that could not be written, of which nobody has heard."""
        return self.background is not None and self.background.failed

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is under way.

        Raises:
            CheckpointError: it could not be written.
        """
        if self.background is not None:
            self.background.finish()

    def settle_saving(self) -> None:
        """Wait for the checkpoint that is under way, and keep its failure to itself."""
        if self.background is not None:
            self.background.settle()

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, _ASIDE) if self._aside else folder

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with restoring(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            if checkpoint is not None:
                check_moments(cast(torch.optim.Optimizer, self.optimizer))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with restoring(checkpoint):
            super()._load_rng_state(checkpoint)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.finish_saving()
        run = Path(super()._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            clear_aside(run)
        self.accelerator.wait_for_everyone()
        self._aside, failed = True, None
        try:
            with explained(run, name, alone=self.background is None):
                super()._save_checkpoint(model, trial)
        except CheckpointError as error:
            if self.background is None or not self.background.begun:
                raise
            failed = error  # which the others have to hear of
        finally:
            self._aside = False
        if self.background is not None and self.background.begun:
            place, drop = partial(self._place, run, name), partial(clear_aside, run)
            self.background.complete(place, drop, partial(_writing, run, name), failed)
            return
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            with explained(run, name):
                self._place(run, name)

    def _place(self, run: Path, name: str) -> None:
        """Give a checkpoint that is written its manifest and its name, and drop older ones."""
        made = run / _ASIDE / name
        _check_ends(made)
        (made / RECORD).write_text(json.dumps(dict(self.begun_with)), encoding="utf-8")
        write_manifest(made)
        place_folder(made, run / name)
        clear_aside(run)
        rotate_checkpoints(str(run), self.args.save_total_limit)

    def save_whole(self, folder: Path) -> None:
        """The model (and its tokenizer) into a folder that appears whole."""
        aside = folder.parent / _ASIDE / folder.name
        if self.args.should_save:
            clear_aside(folder.parent)
        self.accelerator.wait_for_everyone()
        with explained(folder.parent, folder.name):
            self.save_model(str(aside), _internal_call=True)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                # A pickle, which nothing reads back: a saved model is JSON and safetensors.
                (aside / "training_args.bin").unlink(missing_ok=True)
                carry_over(folder, aside)
                write_manifest(aside)
                place_folder(aside, folder)
        if self.args.should_save:
            clear_aside(folder.parent)
        self.accelerator.wait_for_everyone()


def place_folder(made: Path, name: Path) -> None:
    """Give a finished folder its name, with all its files on disk first.

    A folder that has the name already gives way only then.
    """
    for path in sorted(made.rglob("*")):
        if path.is_file():
            _sync(path)
    for path in [made, *(p for p in made.rglob("*") if p.is_dir())]:
        _sync(path)
    if name.exists():
        gone = name.parent / _GONE
        shutil.rmtree(gone, ignore_errors=True)
        os.replace(name, gone)
    os.replace(made, name)
    _sync(name.parent)
    shutil.rmtree(name.parent / _GONE, ignore_errors=True)


def _check_ends(made: Path) -> None:
    """That torch's files are whole: torch 2.9 says nothing where a small one has no end."""
    for path in sorted(made.iterdir()):
        if not path.name.startswith(_OF_TORCH):
            continue
        if not path.stat().st_size or not zipfile.is_zipfile(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def clear_aside(run: Path) -> None:
    """Drop what a kill left behind."""
    shutil.rmtree(run / _ASIDE, ignore_errors=True)


def last_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint of a run, ``None`` where it has none.

    Raises:
        ValueError: it lacks a file. Ours appear whole, so somebody took it away.
    """
    numbered = [
        (int(match[1]), path)
        for path in (run.iterdir() if run.is_dir() else ())
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and path.is_dir()
    ]
    if not numbered:
        return None
    path = max(numbered)[1]
    several = (path / "model.safetensors.index.json").exists()
    for name in _SHARED if (path / SHARDS).exists() else _NEEDED:
        if not (path / name).exists() and not (several and name == "model.safetensors"):
            raise ValueError(
                f"{path} lacks {name}, so it cannot be resumed: delete the folder to go on from "
                "the checkpoint before it, or from the beginning"
            )
    return path


def check_resumable(checkpoint: Path) -> int:
    """Check that every file of a checkpoint is as it was written, by its manifest.

    Returns:
        Number of files.

    Raises:
        CheckpointError: naming the file that is gone, was cut short or altered, or is no regular
            file; a file of torch that holds other objects than tensors and plain values; a folder
            whose name is not that of its step.
    """
    advice = (
        f"{checkpoint.name} cannot be resumed; delete that folder to go on from the checkpoint "
        "before it, or from the beginning"
    )
    if not (checkpoint / MANIFEST).exists():
        raise CheckpointError(
            f"{checkpoint} lacks {MANIFEST}, which says how its files were written: {advice}"
        )
    for folder in (checkpoint, checkpoint / SHARDS):
        if folder.is_dir():
            check_regular_files(folder)
    count = check_manifest(checkpoint, advice=advice)
    for path in sorted(checkpoint.iterdir()):
        if path.name.startswith(_OF_TORCH):
            _check_pickle(path, advice)
    # It grows with the run: a line for each step that is logged.
    step = check_json(checkpoint / "trainer_state.json", limit=None).get("global_step")
    if checkpoint.name != f"checkpoint-{step}":
        raise CheckpointError(f"{checkpoint} holds step {step}, which its name denies: {advice}")
    return count


def _check_pickle(path: Path, advice: str) -> None:
    """Check that a file of torch holds a mapping of tensors and plain values; no code of it runs.

    The tensors are mapped from the disk, and their numbers are not read.
    """
    try:
        with safe_globals():
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # bytes that are no pickle raise anything
        raise CheckpointError(
            f"{path} holds no state of a run ({type(error).__name__}): {advice}"
        ) from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds no state of a run: {advice}")


def check_moments(optimizer: torch.optim.Optimizer) -> None:
    """Check that the moments of an optimizer have the shapes of its weights.

    Neither `load_state_dict` nor a fused step checks them, and a step writes past their end.

    Raises:
        ValueError: a moment of another shape.
    """
    for weight, state in optimizer.state.items():
        for name, value in state.items():
            expected = torch.Size() if name == "step" else weight.shape
            if torch.as_tensor(value).shape != expected:
                raise ValueError(f"{name} of a weight of shape {tuple(weight.shape)} has another")


@contextlib.contextmanager
def restoring(checkpoint: str | None) -> Iterator[None]:
    """Explain a state that a run cannot continue from.

    Raises:
        CheckpointError: in place of an error of torch or the Trainer.
    """
    try:
        yield
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError | torch.OutOfMemoryError):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(
            f"{checkpoint} holds the optimizer, schedule or random numbers of another run "
            f"({reason}): delete the folder to go on from the checkpoint before it"
        ) from error


@contextlib.contextmanager
def explained(run: Path, name: str, *, alone: bool = True) -> Iterator[None]:
    """What goes wrong while writing, in one sentence, with the space given back.

    Args:
        run: its folder. name: of what is written there.
        alone: whether nobody else writes; otherwise the space is left to who knows when all are
            done.

    Raises:
        CheckpointError: the disk is full, or the folder cannot be written.
    """
    try:
        yield
    except Exception as error:  # tokenizers raise a bare one where the disk is full
        if not _of_writing(error, run):
            raise
        if alone:
            clear_aside(run)
        checkpoint = None
        with contextlib.suppress(ValueError):
            checkpoint = last_checkpoint(run)
        left = "no checkpoint was written before"
        if checkpoint is not None:
            left = f"{checkpoint.name} is whole, and --resume goes on from it"
        reason = "the disk is full" if _full(error, run) else str(error)
        there = next(folder for folder in (run, *run.absolute().parents) if folder.exists())
        free = shutil.disk_usage(there).free / 2**20
        raise CheckpointError(
            f"{name} could not be written to {run}: {reason} ({free:,.0f} MiB free); {left}"
        ) from error


@contextlib.contextmanager
def _writing(run: Path, name: str) -> Iterator[None]:
    """`explained`, of what several processes write."""
    with explained(run, name, alone=False), unwrapped():
        yield


_SAID = ("no space left", "enospc", "os error 28", "disk quota")
# Of a write cut short torch says only where it found itself; without room there is no other cause.
_FULL = (*_SAID, "unexpected pos", "failed writing", "iostream error")
_WRITING = (*_FULL, "pytorchstreamwriter", "inline_container", "i/o error", "iostream")


def _of_writing(error: BaseException, run: Path) -> bool:
    if isinstance(error, OSError):
        return True
    # torch and safetensors say it in words only.
    return any(word in str(error).lower() for word in _WRITING) or _full(error, run)


def _full(error: BaseException, run: Path) -> bool:
    chain: list[BaseException] = []
    step: BaseException | None = error
    while step is not None and step not in chain:
        chain.append(step)
        step = step.__cause__ or step.__context__
    codes = {getattr(step, "errno", None) for step in chain}
    if codes & {errno.ENOSPC, errno.EDQUOT}:
        return True
    return any(word in str(step).lower() for step in chain for word in _FULL)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
