"""Checks and refusals of resumed runs."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from tests.lm.runs import Recorder, assert_same, plan, write_text
from tests.misuse.sentences import digests, refuses
from transformers.trainer_pt_utils import safe_globals

from recollect.lm import CheckpointError
from recollect.lm.data.tokenizers import byte_tokenizer
from recollect.lm.model.manifest import write_manifest
from recollect.lm.training import train
from recollect.lm.training.plan import TrainPlan
from recollect.lm.training.resume import file_fingerprint

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:datasets.*")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "mine.jsonl")


@pytest.fixture(scope="module")
def two_steps(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    train(plan(text, folder, optimizer={"steps": 2}))
    return folder


def test_checkpoint_without_a_file_is_refused(text: Path, tmp_path: Path, two_steps: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(two_steps, run)
    (run / "checkpoint-2" / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match=r"checkpoint-2 lacks optimizer.pt"):
        train(plan(text, run, optimizer={"steps": 2}), resume=True)


def test_truncated_checkpoint_is_refused(text: Path, tmp_path: Path, two_steps: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint-2/model.safetensors was cut short"):
        resumed(text, tmp_path, two_steps, "checkpoint-2/model.safetensors", cut)


def resumed(
    text: Path, tmp_path: Path, two_steps: Path, name: str, harm: Callable[..., Any]
) -> None:
    """Resume a run of two steps with one damaged file."""
    run = tmp_path / "run"
    shutil.copytree(two_steps, run)
    path = run / name
    path.write_bytes(harm(bytearray(path.read_bytes()), path))
    train(plan(text, run, optimizer={"steps": 2}), resume=True)


def cut(data: bytearray, path: Path) -> bytes:
    return bytes(data[:-9])


def other_format(data: bytearray, path: Path) -> bytes:
    return b"cos\nsystem"


def one_byte(data: bytearray, path: Path) -> bytes:
    """Change the largest tensor, after a header of 30 bytes, its name, and torch's padding."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
    data[largest.header_offset + 30 + len(largest.filename) + 64 + 8] ^= 1
    return bytes(data)


def encrypted(data: bytearray, path: Path) -> bytes:
    """Only the flag, in the directory at the end."""
    data[data.index(b"PK\x01\x02") + 8] |= 1
    return bytes(data)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
@pytest.mark.parametrize("harm", [cut, other_format, one_byte, encrypted])
def test_a_checkpoint_whose_optimizer_was_harmed_is_refused(
    name: str, harm: Callable[..., Any], text: Path, tmp_path: Path, two_steps: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"checkpoint-2/{name} was cut short or altered"):
        resumed(text, tmp_path, two_steps, f"checkpoint-2/{name}", harm)


NAMES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")


class Foreign:
    """Its pickle creates a folder when it is loaded without restrictions."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.place),)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(
            kind, name, marks=[pytest.mark.slow] * (kind == "other state" and name != NAMES[0])
        )
        for kind in ("pickle", "archive", "list", "other state")
        for name in NAMES
    ],
)
def test_a_state_of_others_with_its_checksum_is_refused(
    name: str, kind: str, text: Path, tmp_path: Path, two_steps: Path
) -> None:
    run, trace = tmp_path / "run", tmp_path / "trace"
    shutil.copytree(two_steps, run)
    path = run / "checkpoint-2" / name
    if kind == "pickle":
        path.write_bytes(pickle.dumps({"state": Foreign(trace)}))
    else:
        states = {"archive": {"state": Foreign(trace)}, "list": [1], "other state": {"state": {}}}
        torch.save(states[kind], path)
    write_manifest(path.parent)
    stored = digests(path.parent)
    refuses(
        lambda: train(plan(text, run, optimizer={"steps": 4}), resume=True),
        "checkpoint-2 contains the optimizer"
        if kind == "other state"
        else f"{name} does not contain the state of a run",
        "resume from the checkpoint before it",
        error=CheckpointError,
    )
    assert not trace.exists() and digests(path.parent) == stored


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth"])
def test_a_state_of_another_shape_is_refused(
    name: str, text: Path, tmp_path: Path, two_steps: Path
) -> None:
    """A fused step with moments that are too small writes beyond their end."""
    run = tmp_path / "run"
    shutil.copytree(two_steps, run)
    path = run / "checkpoint-2" / name
    with safe_globals():
        state = torch.load(path, weights_only=True)
    if name == "optimizer.pt":
        state["state"][0]["exp_avg"] = torch.zeros(3)
    else:
        state["cpu"] = state["cpu"][:3]
    torch.save(state, path)
    write_manifest(path.parent)
    refuses(
        lambda: train(plan(text, run, optimizer={"steps": 4}), resume=True),
        "checkpoint-2 contains the optimizer",
        "exp_avg of a weight of shape" if name == "optimizer.pt" else "RNG state",
        error=CheckpointError,
    )


def test_a_pipe_in_a_checkpoint_is_refused(text: Path, tmp_path: Path, two_steps: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(two_steps, run)
    os.mkfifo(run / "checkpoint-2" / "adapter_config.json")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json cannot be read: it is a pipe"):
        train(plan(text, run, optimizer={"steps": 4}), resume=True)


def zeroed(data: bytearray, path: Path) -> bytes:
    """All weights are 0, which every format accepts."""
    header = 8 + int.from_bytes(data[:8], "little")
    return bytes(data[:header]) + bytes(len(data) - header)


def flipped(data: bytearray, path: Path) -> bytes:
    """The sign of one weight."""
    data[-1] ^= 0x80
    return bytes(data)


def later(data: bytearray, path: Path) -> bytes:
    return json.dumps({**json.loads(data), "global_step": 1}).encode()


def other_rate(data: bytearray, path: Path) -> bytes:
    return data.replace(b'"lr": 0.01', b'"lr": 0.02')


def no_files(data: bytearray, path: Path) -> bytes:
    return b'{"schema": 1, "files": {}}'


def climbing(data: bytearray, path: Path) -> bytes:
    return data.replace(b"scheduler.pt", b"../../../x")


@pytest.mark.parametrize(
    ("name", "harm", "says"),
    [
        ("trainer_state.json", cut, "trainer_state.json was cut short or altered since"),
        ("trainer_state.json", later, "trainer_state.json was cut short or altered since"),
        ("config.json", cut, "config.json was cut short or altered since"),
        ("model.safetensors", zeroed, "model.safetensors was cut short or altered since"),
        ("model.safetensors", flipped, "model.safetensors was cut short or altered since"),
        ("run.json", cut, "run.json was cut short or altered since"),
        ("run.json", other_rate, "run.json was cut short or altered since"),
        ("manifest.json", cut, "manifest.json is not JSON"),
        ("manifest.json", no_files, "manifest.json lists no files"),
        ("manifest.json", climbing, "names '../../../x', which is outside"),
    ],
)
def test_a_checkpoint_that_was_altered_is_refused(
    name: str, harm: Callable[..., Any], says: str, text: Path, tmp_path: Path, two_steps: Path
) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        resumed(text, tmp_path, two_steps, f"checkpoint-2/{name}", harm)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["rng_state.pth", "run.json", "config.json", "manifest.json"])
def test_a_checkpoint_that_lacks_any_file_is_refused(
    name: str, text: Path, tmp_path: Path, two_steps: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(two_steps, run)
    (run / "checkpoint-2" / name).unlink()
    with pytest.raises(CheckpointError, match=f"lacks {name}"):
        train(plan(text, run, optimizer={"steps": 2}), resume=True)


def test_a_checkpoint_of_another_name_is_refused(
    text: Path, tmp_path: Path, two_steps: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(two_steps, run)
    (run / "checkpoint-2").rename(run / "checkpoint-1")
    with pytest.raises(CheckpointError, match="contains step 2, which does not match its name"):
        train(plan(text, run, optimizer={"steps": 2}), resume=True)


def test_a_plan_that_was_deleted_is_still_known(
    text: Path, tmp_path: Path, two_steps: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(two_steps, run)
    (run / "plan.json").unlink()
    (run / "texts.json").write_text("junk")
    other = plan(text, run, optimizer={"steps": 2, "lr": 0.02})
    with pytest.raises(ValueError, match=r"started with \[optimizer\] lr = 0.01, not 0.02"):
        train(other, resume=True)
    events = Recorder()
    same = plan(text, run, optimizer={"steps": 2}, run={"out": str(run)})
    assert train(same, resume=True, observer=events).steps == 0
    count = len(list((run / "checkpoint-2").iterdir())) - 2  # the manifest and the model card
    assert events.messages == [
        f"the run is finished, and more steps in its plan extend it; {run / 'checkpoint-2'}: its "
        f"{count} files are unchanged, and plan and texts are those of the start of the run"
    ]
    assert json.loads((run / "plan.json").read_text())["optimizer"]["lr"] == 0.01


def test_a_plan_with_tuples_is_resumed(text: Path, tmp_path: Path) -> None:
    """A checkpoint stores the plan as JSON, which has lists only."""
    options: dict[str, Any] = {"ties": ()}
    run = plan(text, tmp_path, model={"options": options}, optimizer={"steps": 2})
    train(run)
    assert train(run, resume=True).steps == 0


def test_only_a_folder_of_a_run_is_resumed(text: Path, tmp_path: Path) -> None:
    """A mistyped folder is refused and not created; a run without a checkpoint starts again."""
    run = plan(text, tmp_path / "run", optimizer={"steps": 1}, run={"save_every": 0})
    sentence = f"{tmp_path / 'run'} contains no run to resume: leave out --resume to start one"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        train(run, resume=True)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.md").write_text("mine")
    with pytest.raises(ValueError, match=re.escape(sentence)):
        train(run, resume=True)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.md"]
    train(run)
    shutil.rmtree(tmp_path / "run" / "model")
    events = Recorder()
    train(run, resume=True, observer=events)
    assert events.messages == [
        f"{tmp_path / 'run'} contains no checkpoint of this run yet, so it starts at its first step"
    ]


def test_plan_before_an_extension_is_refused(text: Path, tmp_path: Path, two_steps: Path) -> None:
    short = plan(text, tmp_path / "run", optimizer={"steps": 2})
    shutil.copytree(two_steps, tmp_path / "run")
    train(plan(text, tmp_path / "run", optimizer={"steps": 4}), resume=True)
    with pytest.raises(
        ValueError, match=r"contains a run of 4 steps, and this plan ends after 2"
    ) as refused:
        train(short, resume=True)
    assert "steps = 4 or more" in str(refused.value)
    assert (tmp_path / "run" / "checkpoint-4").exists()


def test_run_resumes_with_its_tokenizer(text: Path, tmp_path: Path) -> None:
    tables = {"data": {"tokenizer": "bpe", "vocab": 300}, "optimizer": {"steps": 2}}
    run = plan(text, tmp_path, **tables)
    train(run)
    stored = (tmp_path / "tokenizer" / "tokenizer.json").read_text()
    shutil.rmtree(tmp_path / "tokenizer")
    byte_tokenizer().save_pretrained(str(tmp_path / "tokenizer"))
    train(run, resume=True)
    assert (tmp_path / "model" / "tokenizer.json").read_text() == stored


def test_changed_recipe_file_is_refused(text: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[retention]\nmember = "Decay"\n')
    tables = {"model": {"recipe": str(file)}, "optimizer": {"steps": 2}}
    run = plan(text, tmp_path / "run", **tables)
    train(run)
    assert train(run, resume=True).steps == 0
    file.write_text('[retention]\nmember = "Decay"\nwhen = "before"\n')  # of equal shapes
    with pytest.raises(ValueError, match=r"the recipe 'mine' has changed since"):
        train(run, resume=True)


def test_changed_text_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = {name: f"{name} says what it says. " * 30 for name in ("a.txt", "b.txt")}
    for name, words in texts.items():
        (folder / name).write_text(words)
    run = plan(folder, tmp_path / "run", optimizer={"steps": 2})
    train(run)
    (folder / "b.txt").write_text(texts["b.txt"].replace("says", "sags", 1))  # of equal size
    with pytest.raises(ValueError, match=r"b.txt has changed since the start of the run"):
        train(run, resume=True)
    (folder / "b.txt").write_text(texts["b.txt"])
    (folder / "c.txt").write_text("another")
    with pytest.raises(ValueError, match=r"c.txt is new since"):
        train(run, resume=True)
    (folder / "c.txt").unlink()
    (folder / "a.txt").rename(tmp_path / "a.txt")
    with pytest.raises(ValueError, match=r"a.txt is gone since"):
        train(run, resume=True)
    (tmp_path / "a.txt").rename(folder / "a.txt")
    assert train(run, resume=True).steps == 0


def test_large_file_is_identified_by_size_and_ends(tmp_path: Path) -> None:
    """A sparse file of 65 MiB that is never written."""
    path, size = tmp_path / "shard.jsonl", 65 * 2**20
    recorded = []
    for place in (None, 0, size - 1, size // 2):
        with path.open("wb") as file:
            file.truncate(size)
            if place is not None:
                file.seek(place)
                file.write(b"x")
        recorded.append(file_fingerprint(path)["sha256"])
    plain, first, last, middle = recorded
    assert len({plain, first, last}) == 3
    assert middle == plain  # as in its docstring
    assert file_fingerprint(path)["bytes"] == size


def rates(folder: Path) -> dict[int, float]:
    """Return the learning rate of every logged step."""
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["learning_rate"] for entry in log if "learning_rate" in entry}


def test_more_steps_extend_a_run_along_the_longer_schedule(text: Path, tmp_path: Path) -> None:
    """A warm-up of one step and a cosine, written out, of four steps and then of eight."""
    train(plan(text, tmp_path, optimizer={"steps": 4}))
    events = Recorder()
    longer = plan(text, tmp_path, optimizer={"steps": 8})
    assert train(longer, resume=True, observer=events).steps == 4
    taken = rates(tmp_path / "checkpoint-8")
    for step in range(1, 9):
        last = 3 if step <= 4 else 7
        share = 0.5 * (1 + math.cos(math.pi * (step - 2) / last)) if step > 1 else 0.0
        assert taken[step] == pytest.approx(0.01 * share, abs=1e-9), step
    assert events.messages[1] == (
        f"extended from 4 to 8 steps: the learning rate is {taken[5]:.3g}, as in a run of 8, "
        "instead of 0"
    )
    assert json.loads((tmp_path / "plan.json").read_text())["optimizer"]["steps"] == 8


@pytest.mark.slow
def test_stopped_extension_equals_an_uninterrupted_one(
    text: Path, tmp_path: Path, two_steps: Path
) -> None:
    for out in ("one", "two"):
        shutil.copytree(two_steps, tmp_path / out)
    one, two = (plan(text, tmp_path / out, optimizer={"steps": 6}) for out in ("one", "two"))
    train(one, resume=True)

    with pytest.raises(KeyboardInterrupt):
        train(two, resume=True, observer=Recorder(stop_after=4))
    train(two, resume=True)
    files = [tmp_path / out / "model" / "model.safetensors" for out in ("one", "two")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("key", ["steps", pytest.param("tokens", marks=pytest.mark.slow)])
def test_extended_run_at_a_constant_rate_equals_the_longer_run(
    key: str, text: Path, tmp_path: Path
) -> None:
    """Rows, moments and random numbers continue; without a schedule nothing else differs."""
    one = 1 if key == "steps" else 64
    flat = {"warmup": 0, "floor": 1 - 1e-9, "steps": None}

    def run(out: str, steps: int) -> TrainPlan:
        return plan(text, tmp_path / out, optimizer={**flat, key: steps * one})

    full = train(run("whole", 6)).folder
    train(run("parts", 3))
    assert_same(train(run("parts", 6), resume=True).folder, full)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"steps": 1}, r"a run of 2 steps, .* ends after 1: resume it with .* = 2 or more"),
        (
            {"steps": 4, "lr": 0.02},
            r"lr = 0.01, not 0.02: resume it with the plan of its start, or name",
        ),
        ({"steps": 4, "warmup": 0.5}, r"warmup = 0.05, not 0.5"),
    ],
)
def test_only_more_steps_are_another_plan_of_the_same_run(
    change: dict[str, Any], says: str, text: Path, two_steps: Path
) -> None:
    initial = digests(two_steps)
    with pytest.raises(ValueError, match=says):
        train(plan(text, two_steps, optimizer=change), resume=True)
    assert digests(two_steps) == initial


def test_a_finished_run_without_a_checkpoint_is_not_extended(text: Path, tmp_path: Path) -> None:
    tables: dict[str, Any] = {"run": {"save_every": 0}}
    train(plan(text, tmp_path, optimizer={"steps": 1}, **tables))
    longer = plan(text, tmp_path, optimizer={"steps": 2}, **tables)
    sentence = r"contains a finished run without checkpoints, which cannot be resumed"
    with pytest.raises(ValueError, match=sentence):
        train(longer, resume=True)
    initial = digests(tmp_path)
    with pytest.raises(ValueError, match=sentence):
        train(plan(text, tmp_path, optimizer={"steps": 1}, **tables), resume=True)
    assert digests(tmp_path) == initial
