"""Training runs: resumed after a kill they end where they would have, and nothing half is kept."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from recollect.lm import CheckpointError
from recollect.lm.data.sources import BadLines
from recollect.lm.data.tokenizers import byte_tokenizer, train_bpe
from recollect.lm.training import Progress, train
from recollect.lm.training.atomic_checkpoints import last_checkpoint
from recollect.lm.training.plan import TrainPlan
from recollect.lm.training.prepare import rows_of
from recollect.lm.training.progress import Keeper
from recollect.lm.training.resume import fingerprint
from recollect.lm.training.train import RecollectTrainer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:datasets.*")

STEPS = 6


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "mine.jsonl"
    draw = random.Random(0)
    words = ["memory", "writes", "key", "value", "reads", "query", "token", "state", "again", "the"]
    lines = (" ".join(draw.choices(words, k=draw.randint(1, 20))) for _ in range(80))
    path.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    return path


def plan(text: Path, out: Path, **changes: dict[str, Any]) -> TrainPlan:
    tables: dict[str, dict[str, Any]] = {
        "model": {"recipe": "gated_delta_net", "width": 16, "depth": 1, "heads": 2, "mlp": 16},
        "data": {"train": [str(text)], "context": 32},
        "optimizer": {"steps": STEPS, "batch": 2, "lr": 0.01},
        "run": {"out": str(out), "save_every": 2, "keep": 2, "log_every": 1, "seed": 3},
    }
    for table, values in changes.items():
        tables[table] |= values
    return TrainPlan.from_dict(tables)


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same(first: Path, second: Path) -> None:
    one, two = weights(first), weights(second)
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-6, rtol=0, msg=name)


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of a run that nothing stopped."""
    torch.manual_seed(11)  # a run does not depend on what was drawn before it
    return train(plan(text, tmp_path_factory.mktemp("whole"))).folder


KILLED = """
import json, os, signal, sys
from recollect.lm.training.plan import TrainPlan
from recollect.lm.training.train import RecollectTrainer, train

where = sys.argv[2]

class Killed(RecollectTrainer):
    def training_step(self, *args, **kwargs):
        if where == "step" and self.state.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(*args, **kwargs)

    def _save_rng_state(self, output_dir):
        if where == "save" and self.state.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_rng_state(output_dir)

train(TrainPlan.from_dict(json.loads(sys.argv[1])), trainer_class=Killed)
"""


@pytest.mark.parametrize(
    "where", [pytest.param("step", marks=pytest.mark.slow), "save"], ids=["between", "in a save"]
)
def test_killed_and_resumed_ends_where_the_whole_run_does(
    where: str, text: Path, tmp_path: Path, whole: Path
) -> None:
    run = plan(text, tmp_path)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, json.dumps(run.to_dict()), where],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -9, killed.stderr
    assert (tmp_path / ".saving" / "checkpoint-4").exists() == (where == "save")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    result = train(run, resume=True)
    assert result.steps == STEPS - 2
    assert_same(result.folder, whole)
    assert not (tmp_path / ".saving").exists()


def stopped(after: int) -> Callable[[Progress], None]:
    def watch(progress: Progress) -> None:
        if progress.step == after:
            raise KeyboardInterrupt

    return watch


@pytest.mark.parametrize(
    "data",
    [
        {"stream": True, "shuffle": 5},
        {"packing": "stream"},
    ],
    ids=["streaming", "without resets"],
)
def test_interrupted_and_resumed_in_other_ways(
    data: dict[str, Any], text: Path, tmp_path: Path
) -> None:
    first = train(plan(text, tmp_path / "whole", data=data))
    run = plan(text, tmp_path / "cut", data=data)
    with pytest.raises(KeyboardInterrupt):
        train(run, watch=stopped(after=5))
    second = train(run, resume=True)
    assert second.steps == 2
    assert_same(first.folder, second.folder)


class Full(RecollectTrainer):
    """From step 4 on, the optimizer's file is on a device that is full."""

    file = "optimizer.pt"

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.state.global_step >= 4:
            os.symlink("/dev/full", os.path.join(output_dir, self.file))
        super()._save_optimizer_and_scheduler(output_dir)


class FullAtScheduler(Full):
    file = "scheduler.pt"


class FullAtState(Full):
    file = "trainer_state.json"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
@pytest.mark.parametrize("kind", [Full, FullAtScheduler, FullAtState], ids=lambda kind: kind.file)
def test_a_full_disk_is_one_sentence_and_keeps_the_last_checkpoint(
    kind: type[Full], text: Path, tmp_path: Path, whole: Path
) -> None:
    run = plan(text, tmp_path)
    with pytest.raises(CheckpointError) as caught:
        train(run, trainer_class=kind)
    message = str(caught.value)
    assert "\n" not in message
    for part in ("checkpoint-4 could not be written", "disk is full", "checkpoint-2 is whole"):
        assert part in message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-2", "plan.json", "texts.json"]
    if kind is Full:
        assert_same(train(run, resume=True).folder, whole)


def test_another_error_is_not_called_a_full_disk(text: Path, tmp_path: Path) -> None:
    class Broken(RecollectTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        train(plan(text, tmp_path), trainer_class=Broken)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_batch_that_does_not_fit_is_one_sentence(
    error: Exception, text: Path, tmp_path: Path
) -> None:
    class Large(RecollectTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            raise error

    with pytest.raises(ValueError, match=r"batch = 2, of rows of 32 tokens, does not fit.*accum"):
        train(plan(text, tmp_path), trainer_class=Large)


def test_what_a_run_leaves(text: Path, tmp_path: Path, whole: Path) -> None:
    run = whole.parent
    # The two newest checkpoints, and a model that anybody loads without code of its own.
    names = {p.name for p in run.iterdir()}
    assert names == {"checkpoint-4", "checkpoint-6", "model", "plan.json", "texts.json"}
    assert not list((run / "model").glob("*.bin"))
    assert not list((run / "model").glob("*.pt"))
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    ids = tokenizer("memory", return_tensors="pt").input_ids
    assert ids.tolist() == [list(b"memory")]
    assert model(input_ids=ids).logits.shape[-1] == 264
    assert TrainPlan.from_dict(json.loads((run / "plan.json").read_text())).steps == STEPS


def test_a_folder_with_a_run_is_not_trained_over(text: Path, whole: Path) -> None:
    run = plan(text, whole.parent)
    with pytest.raises(ValueError, match=r"already holds checkpoint-6.*--resume"):
        train(run)
    other = replace(run, optimizer=replace(run.optimizer, lr=0.5))
    with pytest.raises(ValueError, match=r"\[optimizer\] lr = 0.01, not 0.5"):
        train(other, resume=True)


def test_a_folder_that_cannot_be_written_is_named(text: Path) -> None:
    with pytest.raises(ValueError, match=r"\[run\] out = .*mine.jsonl' cannot be written to"):
        train(plan(text, text))


def test_a_checkpoint_that_lost_a_file_is_refused(text: Path, tmp_path: Path) -> None:
    run = plan(text, tmp_path, optimizer={"steps": 2})
    train(run)
    (tmp_path / "checkpoint-2" / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match=r"checkpoint-2 lacks optimizer.pt"):
        train(run, resume=True)


def test_a_checkpoint_that_was_cut_is_refused(text: Path, tmp_path: Path) -> None:
    run = plan(text, tmp_path, optimizer={"steps": 2})
    train(run)
    path = tmp_path / "checkpoint-2" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"checkpoint-2/model.safetensors was cut short"):
        train(run, resume=True)


@pytest.fixture(scope="module")
def two_steps(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    train(plan(text, folder, optimizer={"steps": 2}))
    return folder


def resumed(
    text: Path, tmp_path: Path, two_steps: Path, name: str, harm: Callable[..., Any]
) -> None:
    """A run of two steps with one of its files harmed, resumed."""
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
    """Of the largest tensor: after a local header of 30 bytes, its name, and torch's padding."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
    data[largest.header_offset + 30 + len(largest.filename) + 64 + 8] ^= 1
    return bytes(data)


def encrypted(data: bytearray, path: Path) -> bytes:
    """The flag alone, in the directory at the end."""
    data[data.index(b"PK\x01\x02") + 8] |= 1
    return bytes(data)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
@pytest.mark.parametrize("harm", [cut, other_format, one_byte, encrypted])
def test_a_checkpoint_whose_optimizer_was_harmed_is_refused(
    name: str, harm: Callable[..., Any], text: Path, tmp_path: Path, two_steps: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"checkpoint-2/{name} was cut short or altered"):
        resumed(text, tmp_path, two_steps, f"checkpoint-2/{name}", harm)


def zeroed(data: bytearray, path: Path) -> bytes:
    """All weights 0: a file that every format takes for whole."""
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
    with pytest.raises(CheckpointError, match="holds step 2, which its name denies"):
        train(plan(text, run, optimizer={"steps": 2}), resume=True)


def test_a_plan_that_was_deleted_is_still_known(
    text: Path, tmp_path: Path, two_steps: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(two_steps, run)
    (run / "plan.json").unlink()
    (run / "texts.json").write_text("junk")
    other = plan(text, run, optimizer={"steps": 2, "lr": 0.02})
    with pytest.raises(ValueError, match=r"begun with \[optimizer\] lr = 0.01, not 0.02"):
        train(other, resume=True)
    said: list[str] = []
    same = plan(text, run, optimizer={"steps": 2}, run={"out": str(run)})
    assert train(same, resume=True, say=said.append).steps == 0
    count = len(list((run / "checkpoint-2").iterdir())) - 1
    assert said == [
        f"going on from {run / 'checkpoint-2'}: its {count} files are as they were written, plan "
        "and texts those that the run was begun with"
    ]
    assert json.loads((run / "plan.json").read_text())["optimizer"]["lr"] == 0.01


def test_resuming_without_a_checkpoint_says_so(text: Path, tmp_path: Path) -> None:
    said: list[str] = []
    run = plan(text, tmp_path / "run", optimizer={"steps": 1}, run={"save_every": 0})
    train(run, resume=True, say=said.append)
    assert said == [
        f"there is no checkpoint in {tmp_path / 'run'}, so the run begins at its first step"
    ]


def test_a_run_goes_on_with_its_own_tokenizer(text: Path, tmp_path: Path) -> None:
    tables = {"data": {"tokenizer": "bpe", "vocab": 300}, "optimizer": {"steps": 2}}
    run = plan(text, tmp_path, **tables)
    train(run)
    kept = (tmp_path / "tokenizer" / "tokenizer.json").read_text()
    shutil.rmtree(tmp_path / "tokenizer")
    byte_tokenizer().save_pretrained(str(tmp_path / "tokenizer"))
    train(run, resume=True)
    assert (tmp_path / "model" / "tokenizer.json").read_text() == kept


def test_a_recipe_file_that_changed_is_not_resumed_with(text: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[retention]\nmember = "Decay"\n')
    tables = {"model": {"recipe": str(file)}, "optimizer": {"steps": 2}}
    run = plan(text, tmp_path / "run", **tables)
    train(run)
    assert train(run, resume=True).steps == 0
    file.write_text('[retention]\nmember = "Decay"\nwhen = "before"\n')  # of the same shapes
    with pytest.raises(ValueError, match=r"with another recipe than 'mine' is now"):
        train(run, resume=True)


def test_a_text_that_changed_is_not_resumed_on(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    kept = {name: f"{name} says what it says. " * 30 for name in ("a.txt", "b.txt")}
    for name, words in kept.items():
        (folder / name).write_text(words)
    run = plan(folder, tmp_path / "run", optimizer={"steps": 2})
    train(run)
    (folder / "b.txt").write_text(kept["b.txt"].replace("says", "sags", 1))  # of the same size
    with pytest.raises(ValueError, match=r"b.txt has changed since .*run was begun"):
        train(run, resume=True)
    (folder / "b.txt").write_text(kept["b.txt"])
    (folder / "c.txt").write_text("another")
    with pytest.raises(ValueError, match=r"c.txt is new since"):
        train(run, resume=True)
    (folder / "c.txt").unlink()
    (folder / "a.txt").rename(tmp_path / "a.txt")
    with pytest.raises(ValueError, match=r"a.txt is gone since"):
        train(run, resume=True)
    (tmp_path / "a.txt").rename(folder / "a.txt")
    assert train(run, resume=True).steps == 0


def test_a_large_file_is_known_by_its_size_and_both_ends(tmp_path: Path) -> None:
    """Sparse: 65 MiB that are never written."""
    path, size = tmp_path / "shard.jsonl", 65 * 2**20
    seen = []
    for place in (None, 0, size - 1, size // 2):
        with path.open("wb") as file:
            file.truncate(size)
            if place is not None:
                file.seek(place)
                file.write(b"x")
        seen.append(fingerprint(path)["sha256"])
    plain, first, last, middle = seen
    assert len({plain, first, last}) == 3
    assert middle == plain  # as its docstring says
    assert fingerprint(path)["bytes"] == size


def test_it_learns_measures_and_tells(text: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []
    run = plan(
        text,
        tmp_path,
        data={"heldout_share": 0.2},
        optimizer={"steps": 25, "batch": 4},
        run={"eval_every": 5, "save_every": 0, "log_every": 5},
    )
    result = train(run, watch=seen.append)
    assert result.heldout is not None
    assert result.loss is not None
    measured = [p.heldout for p in seen if p.heldout is not None]
    assert measured[-1] < measured[0] - 0.5
    assert 0 < result.heldout < 8
    assert result.tokens == 25 * 4 * 32
    assert all(p.tokens_per_second > 0 and 0 < p.ceiling_share < 2 for p in seen if p.step > 0)
    assert not list(tmp_path.glob("checkpoint-*"))


def test_held_out_rows_are_not_trained_on_and_weighted_by_tokens(
    text: Path, tmp_path: Path
) -> None:
    """The measurement against a plain sum over rows, one at a time."""
    from recollect.lm.data import collate, read_rows
    from recollect.lm.data.sources import Source
    from recollect.lm.data.tokenizers import byte_tokenizer

    run = plan(text, tmp_path, data={"heldout_share": 0.2}, optimizer={"steps": 1})
    result = train(run)
    rows, tally = read_rows(Source(files=(text,)), byte_tokenizer(), context=32)
    held = rows[4::5]
    total, count = 0.0, 0
    model = result.model.eval()
    with torch.no_grad():
        for row in held:
            batch = collate([row], reset=True)
            asked = int((batch["labels"][:, 1:] != -100).sum())
            total += float(model(**batch).loss) * asked
            count += asked
    bits = total / count / math.log(2) / tally.bytes_per_token
    assert result.heldout == pytest.approx(bits, rel=1e-5)


def test_variants_take_the_same_steps(text: Path, tmp_path: Path) -> None:
    """Recomputed activations change nothing; halves of a batch accumulate to the whole."""
    base = {"steps": 2, "batch": 4}
    plain = train(plan(text, tmp_path / "a", optimizer=base))
    again = train(plan(text, tmp_path / "b", optimizer=base, run={"checkpointing": True}))
    assert_same(plain.folder, again.folder)
    halves = {"steps": 2, "batch": 2, "accumulate": 2}
    both = train(plan(text, tmp_path / "c", optimizer=halves))
    one, two = weights(plain.folder), weights(both.folder)
    for name in one:  # sums in another order, through AdamW's quotients
        torch.testing.assert_close(one[name], two[name], atol=2e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compiled_mlps_take_the_same_steps(text: Path, tmp_path: Path) -> None:
    base = {"steps": 2, "batch": 2}
    plain = train(plan(text, tmp_path / "a", optimizer=base))
    fused = train(plan(text, tmp_path / "b", optimizer=base, run={"compile": True}))
    assert any("MLPs" in note for note in fused.notes)
    one, two = weights(plain.folder), weights(fused.folder)
    assert one.keys() == two.keys()
    for name in one:  # fused sums in another order, through AdamW's quotients
        torch.testing.assert_close(one[name], two[name], atol=2e-4, rtol=0)


def test_bfloat16_keeps_float32_weights(text: Path, tmp_path: Path) -> None:
    result = train(plan(text, tmp_path, optimizer={"steps": 2}, run={"bf16": True}))
    assert {w.dtype for w in weights(result.folder).values()} == {torch.float32}
    assert result.loss is not None
    assert math.isfinite(result.loss)


def test_training_goes_on_from_a_saved_model(text: Path, tmp_path: Path, whole: Path) -> None:
    start = {"model": {"start": str(whole)}}
    run = TrainPlan.from_dict({**plan(text, tmp_path).to_dict(), **start})
    run = replace(run, optimizer=replace(run.optimizer, steps=1, lr=1e-12))
    assert_same(train(run).folder, whole)  # a step of next to nothing from where it was


def test_a_bpe_of_ones_own_is_trained_kept_and_used(text: Path, tmp_path: Path) -> None:
    run = plan(
        text, tmp_path, data={"tokenizer": "bpe", "vocab": 300}, optimizer={"steps": 2, "batch": 1}
    )
    result = train(run)
    tokenizer = AutoTokenizer.from_pretrained(result.folder)
    assert len(tokenizer) == 300
    ids = tokenizer("memory writes the key").input_ids
    assert len(ids) < len("memory writes the key") / 2
    assert tokenizer.decode(ids) == "memory writes the key"
    assert result.model.config.vocab_size == 304


def test_tensorboard_is_asked_for_by_name(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if "tensorboard" in n else find(n, *a)
    )
    with pytest.raises(ValueError, match="pip install tensorboard"):
        train(plan(text, tmp_path, run={"tensorboard": True}))


def test_a_finished_run_is_resumed_without_another_step(text: Path, tmp_path: Path) -> None:
    """Also where the rate ends above 0, so that a step too many would show."""
    run = plan(
        text, tmp_path, data={"stream": True, "shuffle": 5}, optimizer={"steps": 2, "floor": 0.5}
    )
    before = weights(train(run).folder)
    again = train(run, resume=True)
    assert again.steps == 0
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert all(torch.equal(before[name], x) for name, x in weights(again.folder).items())


def test_the_loss_of_a_step_is_the_mean_over_what_is_predicted(text: Path, tmp_path: Path) -> None:
    """Of the first step, against a plain sum over its rows; two passes of other counts make it."""
    for packing in ("documents", "stream"):
        run = plan(
            text,
            tmp_path / packing,
            data={"packing": packing},
            optimizer={"steps": 1, "accumulate": 2, "lr": 1e-12},
        )
        result = train(run)
        stock = rows_of(run, byte_tokenizer(), BadLines())
        total, count = 0.0, 0
        for index in range(4):
            row = stock.train[index]
            starts = [*row.starts, 32] if packing == "documents" else [0, 32]
            for start, stop in itertools.pairwise(starts):
                ids = torch.from_numpy(row.tokens[start:stop]).long()[None]
                with torch.no_grad():
                    logits = result.model(input_ids=ids).logits[0, :-1]
                total += float(functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
                count += stop - start - 1
        assert result.loss == pytest.approx(total / count, rel=1e-5), packing


def test_a_run_that_begins_trains_its_own_bpe(text: Path, tmp_path: Path) -> None:
    """What another run left in the folder before its first checkpoint is not taken for it."""
    train_bpe(["something else"], 280).save_pretrained(tmp_path / "tokenizer")
    run = plan(text, tmp_path, data={"tokenizer": "bpe", "vocab": 300}, optimizer={"steps": 1})
    assert len(AutoTokenizer.from_pretrained(train(run).folder)) == 300


def test_speed_counts_the_time_that_steps_wait_for_rows(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = Keeper(plan(text, tmp_path), 1, 1.0, 1.0)
    clock = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: clock)
    state = SimpleNamespace(global_step=1)

    def step(begins: float, ends: float) -> float:
        nonlocal clock
        clock = begins
        keeper.on_step_begin(None, state, None)
        clock = ends
        keeper.on_step_end(None, state, None)
        return keeper.progress.tokens_per_second

    assert step(10, 11) == pytest.approx(64 / 1)
    assert step(14, 15) == pytest.approx(2 * 64 / 5)  # three seconds of waiting are of the run
    keeper.on_save(None, state, None)
    assert step(90, 91) == pytest.approx(3 * 64 / 6)  # those of a checkpoint are not
    keeper.on_evaluate(None, state, None)
    assert step(190, 192) == pytest.approx(4 * 64 / 8)


def test_log_lines_say_how_fast_it_goes(whole: Path) -> None:
    state = json.loads((whole.parent / "checkpoint-6" / "trainer_state.json").read_text())
    lines = [line for line in state["log_history"] if "loss" in line]
    assert len(lines) == STEPS
    assert all(line["tokens_per_second"] > 0 and line["ceiling_share"] > 0 for line in lines)


def test_a_corrupt_line_stops_or_is_skipped_and_counted(text: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    lines = text.read_text().splitlines()
    broken.write_text("\n".join([*lines[:5], '{"text": "half', *lines[5:]]))
    with pytest.raises(ValueError, match=r"broken.jsonl:6: not JSON.*bad_lines"):
        train(plan(broken, tmp_path / "a"))
    said: list[str] = []
    run = plan(broken, tmp_path / "b", data={"bad_lines": "skip"}, optimizer={"steps": 1})
    result = train(run, say=said.append)
    assert result.skipped == 1
    assert any("broken.jsonl:6" in sentence for sentence in said)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_loss_of_a_run_is_that_of_its_last_steps(
    accumulate: int, text: Path, tmp_path: Path
) -> None:
    optimizer = {"steps": 12, "batch": 2, "accumulate": accumulate}
    found = {}
    for every in (1, 5, 100):
        heard: list[Progress] = []
        run = {"log_every": every, "save_every": 0, "out": str(tmp_path / str(every))}
        result = train(plan(text, tmp_path, optimizer=optimizer, run=run), watch=heard.append)
        assert heard[-1].loss == result.loss
        found[every] = result.loss
        if every == 1:
            lines = {p.step: p.loss for p in heard[:-1] if p.loss is not None}
            assert sorted(lines) == list(range(1, 13))
            last = [lines[step] for step in range(3, 13)]
            assert result.loss == pytest.approx(sum(last) / 10, rel=1e-4)
            assert result.loss != pytest.approx(lines[1], rel=1e-3)
    assert len(set(found.values())) == 1  # whatever the interval
