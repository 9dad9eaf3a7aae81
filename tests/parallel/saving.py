"""Jobs of the processes of a test on checkpoints that are written during steps."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

from recollect.lm.model.checkpoint import CheckpointError
from recollect.lm.training import atomic_checkpoints
from recollect.lm.training.interrupts import TrainingInterrupted
from recollect.lm.training.plan import TrainPlan
from recollect.lm.training.train import train
from recollect.lm.training.trainer import RecollectTrainer

SECONDS = 60
_write = HuggingFaceStorageWriter.write_data
_place = atomic_checkpoints.commit_folder


def before_writing(step: int, do: Callable[[], Any]) -> None:
    """Make the thread that writes this process's shards of a step do something first."""

    def write_data(self: HuggingFaceStorageWriter, *args: Any) -> Any:
        if f"checkpoint-{step}/" in f"{self.path}/":
            do()
        return _write(self, *args)

    HuggingFaceStorageWriter.write_data = write_data  # type: ignore[method-assign]


def own_tensors(trainer: RecollectTrainer) -> dict[str, Tensor]:
    """Return copies of this process's weights and moments, by their names in a checkpoint."""
    model, optimizer = trainer.model, trainer._unwrap_optimizer()
    assert model is not None
    result: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        result[f"model.{name}"] = weight.detach()
        for key, value in optimizer.state[weight].items():
            result[f"optimizer.{name}.{key}"] = value
    local = {n: x.to_local() if isinstance(x, DTensor) else x for n, x in result.items()}
    return {name: x.clone().reshape(x.shape or (1,)) for name, x in local.items()}


class Slow(RecollectTrainer):
    """The checkpoint of step 4 is written after two more steps.

    Attributes:
        went_on: set after those steps. expected, later: tensors of this process at steps 4 and 6.
        early: whether the checkpoint has its name by then.
    """

    went_on: threading.Event
    expected: dict[str, Tensor]
    later: dict[str, Tensor]
    early = False

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.state.global_step == 6 and not Slow.went_on.is_set():
            Slow.later = own_tensors(self)
            Slow.early = (Path(str(self.args.output_dir)) / "checkpoint-4").exists()
            Slow.went_on.set()
        return super().training_step(*args, **kwargs)

    def _save_checkpoint(self, *args: Any) -> None:
        if self.state.global_step == 4:
            Slow.expected = own_tensors(self)
        super()._save_checkpoint(*args)


def slow(tables: dict[str, Any]) -> dict[str, Any]:
    """Run a training, and compare the checkpoint of step 4 with the tensors at step 4."""
    Slow.went_on, waited = threading.Event(), list[bool]()
    before_writing(4, lambda: waited.append(Slow.went_on.wait(SECONDS)))
    out = Path(train(TrainPlan.from_dict(tables), trainer_class=Slow).folder).parent
    place = int(os.environ["RANK"]) + 1
    (shard,) = (out / "checkpoint-4/shards").glob(f"shard-{place:05}-*")
    saved = load_file(shard)
    return {
        "waited": waited,
        "early": Slow.early,
        "last": (out / "checkpoint-8").is_dir(),  # by now
        "names": sorted(saved),
        "all": sorted(Slow.expected),
        "other": [n for n, x in saved.items() if not x.equal(Slow.expected[n])],
        "moved": sum(not x.equal(Slow.later[n]) for n, x in saved.items()),
    }


class Failing(RecollectTrainer):
    """The checkpoint of step 4 cannot be written; the sixth step starts after this is known.

    Attributes:
        fault: part that fails. taken: steps.
    """

    fault = ""
    taken = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        Failing.taken = self.state.global_step + 1
        last = time.monotonic() + SECONDS
        while (
            self.state.global_step == 5 and not self.async_save.failed and time.monotonic() < last
        ):
            time.sleep(0.01)
        return super().training_step(*args, **kwargs)

    def _save_rng_state(self, output_dir: str) -> None:
        if Failing.fault == "beside" and self.args.process_index == 1:
            fill(4 if output_dir.endswith("checkpoint-4") else 0)
        super()._save_rng_state(output_dir)


def fill(step: int) -> None:
    """Fill the disk at a step."""
    if step == 4:
        raise OSError(errno.ENOSPC, "No space left on device")


def full(plans: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the messages of runs whose disk is full at step 4, and their number of steps."""
    result: dict[str, Any] = {}
    for fault, tables in plans.items():
        Failing.fault = fault
        single = fault == "shards" and os.environ["RANK"] == "1"
        before_writing(4, (lambda: fill(4)) if single else bool)

        def place(folder: Path, name: Path, fault: str = fault) -> None:
            fill(4 if fault == "manifest" and name.name == "checkpoint-4" else 0)
            _place(folder, name)

        atomic_checkpoints.commit_folder = place
        try:
            train(TrainPlan.from_dict(tables), trainer_class=Failing)
            message = "it was written"
        except CheckpointError as error:
            message = str(error)
        remaining = sorted(x.name for x in Path(tables["run"]["out"]).glob("[c.]*"))
        result[fault] = {
            "said": re.sub(r"\(.* free\)", "", message),
            "taken": Failing.taken,
            "left": [name for name in remaining if name != ".run.lock"],
        }
    return result


class Interrupting(RecollectTrainer):
    """The first process is signalled during the fourth step."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.state.global_step == 3 and self.args.process_index == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(*args, **kwargs)


def interrupted(tables: dict[str, Any]) -> list[Any]:
    """Return the message of a signalled run, and whether its files exist when it appears."""
    before_writing(4, lambda: time.sleep(0.3))
    try:
        train(TrainPlan.from_dict(tables), trainer_class=Interrupting)
    except TrainingInterrupted as error:
        return [error.checkpoint.name, error.checkpoint.is_dir()]
    return ["it went on"]


def both(run: dict[str, Any], signalled: dict[str, Any]) -> list[Any]:
    """Run `slow`, then `interrupted`."""
    return [slow(run), interrupted(signalled)]
