"""Checkpoints that are written atomically, with a clear error when the disk is full.

The Trainer writes the files of a checkpoint one by one under its final name, so an interrupted
write leaves an incomplete folder. Here it writes into a staging folder, which is renamed when all
files are on disk. Processes that share a model take steps while their checkpoint is written.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

from recollect.lm.distributed.checkpoints import SHARDS_DIR, reraise_first_failure
from recollect.lm.model.checkpoint import CheckpointError, check_json, check_regular_files
from recollect.lm.model.manifest import MANIFEST, check_manifest, write_manifest

__all__ = [
    "RUN_RECORD_FILE",
    "STAGING_DIR",
    "check_moments",
    "check_resumable",
    "commit_checkpoint",
    "commit_folder",
    "last_checkpoint",
    "remove_staging",
    "restoring",
    "translate_sharded_write_errors",
    "translate_write_errors",
]

RUN_RECORD_FILE = "run.json"
"""File of a checkpoint with the plan and the fingerprints of the texts of its run."""

STAGING_DIR = ".saving"
_REPLACED_DIR = ".replaced"
_TORCH_FILES = ("optimizer.pt", "scheduler.pt", "rng_state")  # prefixes of names


def commit_checkpoint(run: Path, name: str, record: Mapping[str, Any], *, keep: int | None) -> None:
    """Add record and manifest to a staged checkpoint, rename it, and delete older checkpoints."""
    staged = run / STAGING_DIR / name
    (staged / RUN_RECORD_FILE).write_text(json.dumps(dict(record)), encoding="utf-8")
    write_manifest(staged)
    commit_folder(staged, run / name)
    remove_staging(run)
    rotate_checkpoints(str(run), keep)


def commit_folder(staged: Path, target: Path) -> None:
    """Write all files of a folder to disk, then rename it; an existing target is replaced."""
    paths = sorted(staged.rglob("*"), reverse=True)  # files before their folders
    for path in (*(p for p in paths if p.is_file() or p.is_dir()), staged):
        _fsync(path)
    if target.exists():
        replaced = target.parent / _REPLACED_DIR
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(target, replaced)
    os.replace(staged, target)
    _fsync(target.parent)
    shutil.rmtree(target.parent / _REPLACED_DIR, ignore_errors=True)


def remove_staging(run: Path) -> None:
    """Delete the files of an interrupted save."""
    shutil.rmtree(run / STAGING_DIR, ignore_errors=True)


def last_checkpoint(run: Path) -> Path | None:
    """Return the newest checkpoint of a run; ``None`` without one."""
    folder = get_last_checkpoint(str(run)) if run.is_dir() else None
    return None if folder is None else Path(folder)


def check_resumable(checkpoint: Path) -> int:
    """Check every file of a checkpoint by its manifest, and return the number of files.

    Files of torch must contain tensors and plain values only, and the name must match the step.
    """
    advice = (
        f"{checkpoint.name} cannot be resumed; delete that folder to resume from the checkpoint "
        "before it, or to restart"
    )
    if not (checkpoint / MANIFEST).exists():
        raise CheckpointError(f"{checkpoint} lacks {MANIFEST}, its checksums: {advice}")
    for folder in (checkpoint, checkpoint / SHARDS_DIR):
        if folder.is_dir():
            check_regular_files(folder)
    count = check_manifest(checkpoint, advice=advice)
    for path in sorted(checkpoint.iterdir()):
        if path.name.startswith(_TORCH_FILES):
            _check_pickle(path, advice)
    # The log in this file grows with the run.
    step = check_json(checkpoint / "trainer_state.json", limit=None).get("global_step")
    if checkpoint.name != f"checkpoint-{step}":
        raise CheckpointError(
            f"{checkpoint} contains step {step}, which does not match its name: {advice}"
        )
    return count


def _check_pickle(path: Path, advice: str) -> None:
    """Check that a file of torch contains a mapping of tensors and plain values; runs no code."""
    try:
        with safe_globals():
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(state, dict):
            raise TypeError("not a mapping")
    except Exception as error:  # arbitrary bytes can raise any exception
        reason = f"{path} does not contain the state of a run ({type(error).__name__})"
        raise CheckpointError(f"{reason}: {advice}") from None


def check_moments(optimizer: torch.optim.Optimizer) -> None:
    """Check that the moments of an optimizer have the shapes of its weights.

    Neither `load_state_dict` nor a fused step checks them, and a step writes past their end.
    """
    for weight, state in optimizer.state.items():
        for name, value in state.items():
            expected = torch.Size() if name == "step" else weight.shape
            if torch.as_tensor(value).shape != expected:
                raise ValueError(f"{name} of a weight of shape {tuple(weight.shape)} has another")


@contextlib.contextmanager
def restoring(checkpoint: str | None) -> Iterator[None]:
    """Turn errors of torch and the Trainer while a state is restored into a CheckpointError."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError | torch.OutOfMemoryError):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(
            f"{checkpoint} contains the optimizer, schedule or random states of another run "
            f"({reason}): delete the folder to resume from the checkpoint before it"
        ) from error


@contextlib.contextmanager
def translate_write_errors(run: Path, name: str, *, clean_up: bool = True) -> Iterator[None]:
    """Turn errors while ``name`` is written to a run's folder into a CheckpointError.

    On a full disk, torch and tokenizers raise exceptions of various types, so every exception
    counts as an error of writing then. ``clean_up`` deletes the staged files.
    """
    try:
        yield
    except Exception as error:
        disk = shutil.disk_usage(next(p for p in (run, *run.absolute().parents) if p.exists()))
        is_full = disk.free < disk.total / 100
        for code in (errno.ENOSPC, errno.EDQUOT):  # safetensors has the number only in its text
            is_full |= getattr(error, "errno", None) == code or f"(os error {code})" in str(error)
        if not is_full and not isinstance(error, OSError | SafetensorError):
            raise
        if clean_up:
            remove_staging(run)
        checkpoint = last_checkpoint(run)
        advice = "no earlier checkpoint exists"
        if checkpoint is not None:
            advice = f"{checkpoint.name} is complete, and --resume continues from it"
        reason = "the disk is full" if is_full else " ".join(str(error).split())
        raise CheckpointError(
            f"{name} could not be written to {run}: {reason} ({disk.free / 2**20:,.0f} MiB free); "
            f"{advice}"
        ) from error


@contextlib.contextmanager
def translate_sharded_write_errors(run: Path, name: str) -> Iterator[None]:
    """`translate_write_errors` for several processes, which clean up when all have finished."""
    with translate_write_errors(run, name, clean_up=False), reraise_first_failure():
        yield


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
