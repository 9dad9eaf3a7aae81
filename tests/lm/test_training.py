"""A killed and resumed run ends like an uninterrupted one, and leaves no partial files."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from tests.lm.runs import STEPS, Recorder, assert_same, plan, weights, write_text
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations import integration_utils

from recollect.lm import CheckpointError, RecollectConfig, count_parameters
from recollect.lm.data.rows import collate
from recollect.lm.data.sources import BadLinePolicy
from recollect.lm.data.tokenizers import byte_tokenizer, train_bpe
from recollect.lm.training import arguments, train
from recollect.lm.training.atomic_checkpoints import last_checkpoint
from recollect.lm.training.plan import TrainPlan
from recollect.lm.training.progress import ThroughputCallback
from recollect.lm.training.setup import load_text_data
from recollect.lm.training.trainer import RecollectTrainer
from recollect.report.devices import resolve_device

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:datasets.*")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "mine.jsonl")


@pytest.fixture(scope="module")
def uninterrupted(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of an uninterrupted run."""
    torch.manual_seed(11)  # a run does not depend on earlier random numbers
    return train(plan(text, tmp_path_factory.mktemp("whole"))).folder


KILLED = """
import json, os, signal, sys
from recollect.lm.training.plan import TrainPlan
from recollect.lm.training.train import train
from recollect.lm.training.trainer import RecollectTrainer

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
    "kind", [pytest.param("step", marks=pytest.mark.slow), "save"], ids=["between", "in a save"]
)
def test_killed_and_resumed_run_equals_the_uninterrupted_one(
    kind: str, text: Path, tmp_path: Path, uninterrupted: Path
) -> None:
    run = plan(text, tmp_path)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, json.dumps(run.to_dict()), kind],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -9, killed.stderr
    assert (tmp_path / ".saving" / "checkpoint-4").exists() == (kind == "save")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    result = train(run, resume=True)
    assert result.steps == STEPS - 2
    assert_same(result.folder, uninterrupted)
    assert not (tmp_path / ".saving").exists()


@pytest.mark.parametrize(
    "data",
    [
        {"stream": True, "shuffle": 5},
        pytest.param({"packing": "stream"}, marks=pytest.mark.slow),
    ],
    ids=["streaming", "without resets"],
)
def test_interrupted_and_resumed_in_other_ways(
    data: dict[str, Any], text: Path, tmp_path: Path
) -> None:
    first = train(plan(text, tmp_path / "whole", data=data))
    run = plan(text, tmp_path / "cut", data=data)
    with pytest.raises(KeyboardInterrupt):
        train(run, observer=Recorder(stop_after=5))
    second = train(run, resume=True)
    assert second.steps == 2
    assert_same(first.folder, second.folder)


class Full(RecollectTrainer):
    """From step 4 on, the optimizer's file is on a full device."""

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
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(x, id=x.file, marks=[pytest.mark.slow] * (x is not Full))
        for x in (Full, FullAtScheduler, FullAtState)
    ],
)
def test_full_disk_gives_one_sentence_and_keeps_the_last_checkpoint(
    kind: type[Full],
    text: Path,
    tmp_path: Path,
    uninterrupted: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = plan(text, tmp_path)
    usage = SimpleNamespace(total=2**40, used=2**40, free=2**20)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError) as caught:
        train(run, trainer_class=kind)
    message = str(caught.value)
    assert "\n" not in message
    for part in ("checkpoint-4 could not be written", "disk is full", "checkpoint-2 is complete"):
        assert part in message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-2", "plan.json", "texts.json"]
    if kind is Full:
        assert_same(train(run, resume=True).folder, uninterrupted)


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


def test_files_of_a_run(text: Path, tmp_path: Path, uninterrupted: Path) -> None:
    run = uninterrupted.parent
    # The two newest checkpoints, and a model that loads without recollect's code.
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


PROMPTS = ["the memory reads", "a", "state again"]
GENERATES = """
import json, sys
import recollect.lm
from transformers import AutoModelForCausalLM, AutoTokenizer

options, outputs = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}, []
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.use_cache is True
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = json.loads(sys.argv[1])
    for texts in (prompts, *([prompt] for prompt in prompts)):
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        outputs += model.generate(**batch, **options)[:, -8:].tolist()
    output = model(batch["input_ids"], attention_mask=batch["attention_mask"])
    assert recollect.lm.cache_of(output) is not None
print(json.dumps(outputs))
"""


@pytest.mark.slow
def test_a_saved_tokenizer_pads_on_the_left(
    uninterrupted: Path, text: Path, tmp_path: Path
) -> None:
    """In a new process, greedy outputs of a batch equal those of single prompts."""
    vocabulary = train_bpe([text.read_text()], 300).backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, eos_token="<|end|>")
    tokenizer.save_pretrained(tmp_path / "unset")  # the side is not in its tokenizer_config.json
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, eos_token="<|end|>", pad_token="!", padding_side="right"
    )
    tokenizer.save_pretrained(tmp_path / "right")
    folders = [uninterrupted]  # bytes
    for name, data in {
        "bpe": {"tokenizer": "bpe", "vocab": 300},
        "unset": {"tokenizer": str(tmp_path / "unset")},
        "right": {"tokenizer": str(tmp_path / "right")},
    }.items():
        changes = {"data": data, "optimizer": {"steps": 1}, "run": {"save_every": 0}}
        run = plan(text, tmp_path / f"run-{name}", **changes)
        folders.append(train(run).folder)
    process = subprocess.run(
        [sys.executable, "-c", GENERATES, json.dumps(PROMPTS), *map(str, folders)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    outputs = json.loads(process.stdout)
    for index, folder in enumerate(folders):
        rows = outputs[6 * index : 6 * index + 6]
        assert rows[:3] == rows[3:], folder


def test_folder_of_a_run_is_not_overwritten(text: Path, uninterrupted: Path) -> None:
    run = plan(text, uninterrupted.parent)
    with pytest.raises(ValueError, match=r"already contains checkpoint-6.*--resume"):
        train(run)
    other = replace(run, optimizer=replace(run.optimizer, lr=0.5))
    with pytest.raises(ValueError, match=r"\[optimizer\] lr = 0.01, not 0.5"):
        train(other, resume=True)


def test_error_names_an_unwritable_folder(text: Path) -> None:
    with pytest.raises(ValueError, match=r"\[run\] out = .*mine.jsonl' cannot be written to"):
        train(plan(text, text))


def test_run_learns_measures_and_reports(text: Path, tmp_path: Path) -> None:
    events = Recorder()
    run = plan(
        text,
        tmp_path,
        data={"heldout_share": 0.2},
        optimizer={"steps": 25, "batch": 4},
        run={"eval_every": 5, "save_every": 0, "log_every": 5},
    )
    result = train(run, observer=events)
    assert result.heldout is not None
    assert result.loss is not None
    measured = [p.heldout for p in events.progress if p.heldout is not None]
    assert measured[-1] < measured[0] - 0.5
    assert 0 < result.heldout < 8
    assert result.tokens == 25 * 4 * 32
    assert all(
        p.tokens_per_second > 0 and 0 < p.ceiling_share < 2 for p in events.progress if p.step > 0
    )
    assert not list(tmp_path.glob("checkpoint-*"))


def test_held_out_rows_are_not_trained_on_and_weighted_by_tokens(
    text: Path, tmp_path: Path
) -> None:
    """The measurement equals a plain sum over single rows."""
    from recollect.lm.data.rows import collate, read_rows
    from recollect.lm.data.sources import FileDocuments
    from recollect.lm.data.tokenizers import byte_tokenizer

    run = plan(text, tmp_path, data={"heldout_share": 0.2}, optimizer={"steps": 1})
    result = train(run)
    rows, tally = read_rows(FileDocuments(files=(text,)), byte_tokenizer(), context=32)
    heldout = rows[4::5]
    total, count = 0.0, 0
    model = result.model.eval()
    with torch.no_grad():
        for row in heldout:
            batch = collate([row], reset_memory=True)
            requested = int((batch["labels"][:, 1:] != -100).sum())
            total += float(model(**batch).loss) * requested
            count += requested
    bits = total / count / math.log(2) / tally.bytes_per_token
    assert result.heldout == pytest.approx(bits, rel=1e-5)


@pytest.mark.slow
def test_variants_take_the_same_steps(text: Path, tmp_path: Path) -> None:
    """Recomputed activations change nothing, and halves of a batch accumulate to the batch."""
    base = {"steps": 2, "batch": 4}
    plain = train(plan(text, tmp_path / "a", optimizer=base))
    repeated = train(plan(text, tmp_path / "b", optimizer=base, run={"checkpointing": True}))
    assert_same(plain.folder, repeated.folder)
    accumulated = {"steps": 2, "batch": 2, "accumulate": 2}
    both = train(plan(text, tmp_path / "c", optimizer=accumulated))
    one, two = weights(plain.folder), weights(both.folder)
    for name in one:  # sums in another order, through AdamW's quotients
        torch.testing.assert_close(one[name], two[name], atol=2e-4, rtol=0)


def test_bfloat16_keeps_float32_weights(text: Path, tmp_path: Path) -> None:
    result = train(plan(text, tmp_path, optimizer={"steps": 2}, run={"bf16": True}))
    assert {w.dtype for w in weights(result.folder).values()} == {torch.float32}
    assert result.loss is not None
    assert math.isfinite(result.loss)


def test_training_starts_from_a_saved_model(
    text: Path, tmp_path: Path, uninterrupted: Path
) -> None:
    start = {"model": {"start": str(uninterrupted)}}
    run = TrainPlan.from_dict({**plan(text, tmp_path).to_dict(), **start})
    run = replace(run, optimizer=replace(run.optimizer, steps=1, lr=1e-12))
    assert_same(train(run).folder, uninterrupted)  # a minimal step from the saved weights


def test_trained_bpe_is_stored_and_used(text: Path, tmp_path: Path) -> None:
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


def test_tensorboard_has_to_be_installed(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "is_tensorboard_available", lambda: False)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        train(plan(text, tmp_path, run={"tensorboard": True}))


def test_runs_of_a_process_have_separate_tensorboard_folders(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a replacement for tensorboard's writer."""
    folders: list[str] = []

    class SummaryWriter:
        def __init__(self, log_dir: str) -> None:
            folders.append(log_dir)

        def ignore(self, *args: Any) -> None: ...

        add_text = add_scalar = flush = close = ignore

    module = ModuleType("torch.utils.tensorboard")
    module.__dict__["SummaryWriter"] = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(arguments, "is_tensorboard_available", lambda: True)
    monkeypatch.setattr(integration_utils, "is_tensorboard_available", lambda: True)
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    for name in ("one", "two"):
        run = {"tensorboard": True, "save_every": 0}
        train(plan(text, tmp_path / name, optimizer={"steps": 1}, run=run))
    assert folders == [str(tmp_path / name / "logs") for name in ("one", "two")]


def test_evaluate_takes_other_rows_and_a_prefix(text: Path, tmp_path: Path) -> None:
    """The rows of training, compared with the run's held-out rows."""
    run = plan(text, tmp_path, data={"heldout_share": 0.2}, optimizer={"steps": 1})
    data = load_text_data(run, byte_tokenizer(), BadLinePolicy())
    model = train(run).model
    trainer = RecollectTrainer(run, model, arguments.trainer_arguments(run), data=data)
    rows = [data.train[index] for index in range(2)]
    measured = trainer.evaluate(eval_dataset=rows, metric_key_prefix="train")
    heldout = trainer.evaluate()
    assert "train_bits_per_byte" in measured and "eval_bits_per_byte" not in measured
    batch = collate(rows, reset_memory=True)
    with torch.no_grad():
        expected = float(model.eval()(**batch).loss)
    assert measured["train_loss"] == pytest.approx(expected, rel=1e-5)
    assert measured["train_loss"] != pytest.approx(heldout["eval_loss"], rel=1e-4)


def test_finished_run_takes_no_more_steps(text: Path, tmp_path: Path) -> None:
    """Also if the final rate is above 0, which would show another step."""
    run = plan(
        text, tmp_path, data={"stream": True, "shuffle": 5}, optimizer={"steps": 2, "floor": 0.5}
    )
    initial = weights(train(run).folder)
    repeated = train(run, resume=True)
    assert repeated.steps == 0
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert all(torch.equal(initial[name], x) for name, x in weights(repeated.folder).items())


def test_loss_of_a_step_is_the_mean_over_targets(text: Path, tmp_path: Path) -> None:
    """The first step equals a plain sum over its rows; its two passes have different counts."""
    for packing in ("documents", "stream"):
        run = plan(
            text,
            tmp_path / packing,
            data={"packing": packing},
            optimizer={"steps": 1, "accumulate": 2, "lr": 1e-12},
        )
        result = train(run)
        stock = load_text_data(run, byte_tokenizer(), BadLinePolicy())
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


def test_new_run_trains_its_bpe(text: Path, tmp_path: Path) -> None:
    """Files of another run from before its first checkpoint are ignored."""
    train_bpe(["something else"], 280).save_pretrained(tmp_path / "tokenizer")
    run = plan(text, tmp_path, data={"tokenizer": "bpe", "vocab": 300}, optimizer={"steps": 1})
    assert len(AutoTokenizer.from_pretrained(train(run).folder)) == 300


def test_speed_counts_the_time_that_steps_wait_for_rows(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = ThroughputCallback(
        plan(text, tmp_path), flops_per_token=1.0, peak_flops=1.0, observer=Recorder()
    )
    clock = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: clock)
    state = SimpleNamespace(global_step=1)

    def step(start: float, ends: float) -> float:
        nonlocal clock
        clock = start
        callback.on_step_begin(None, state, None)
        clock = ends
        callback.on_step_end(None, state, None)
        return callback.progress.tokens_per_second

    assert step(10, 11) == pytest.approx(64 / 1)
    assert step(14, 15) == pytest.approx(2 * 64 / 5)  # the run includes three seconds of waiting
    callback.on_save(None, state, None)
    assert step(90, 91) == pytest.approx(3 * 64 / 6)  # and not those of a checkpoint
    callback.on_evaluate(None, state, None)
    assert step(190, 192) == pytest.approx(4 * 64 / 8)


def test_log_lines_include_the_speed(uninterrupted: Path) -> None:
    state = json.loads((uninterrupted.parent / "checkpoint-6" / "trainer_state.json").read_text())
    lines = [line for line in state["log_history"] if "loss" in line]
    assert len(lines) == STEPS
    assert all(line["tokens_per_second"] > 0 and line["ceiling_share"] > 0 for line in lines)


def test_a_corrupt_line_stops_or_is_skipped_and_counted(text: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    lines = text.read_text().splitlines()
    broken.write_text("\n".join([*lines[:5], '{"text": "half', *lines[5:]]))
    with pytest.raises(ValueError, match=r"broken.jsonl:6: not JSON.*bad_lines"):
        train(plan(broken, tmp_path / "a"))
    events = Recorder()
    run = plan(broken, tmp_path / "b", data={"bad_lines": "skip"}, optimizer={"steps": 1})
    result = train(run, observer=events)
    assert result.skipped == 1
    assert any("broken.jsonl:6" in sentence for sentence in events.messages)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_loss_of_a_run_is_the_mean_of_its_last_steps(
    accumulate: int, text: Path, tmp_path: Path
) -> None:
    optimizer = {"steps": 12, "batch": 2, "accumulate": accumulate}
    actual = {}
    for interval in (1, 5, 100):
        events = Recorder()
        run = {"log_every": interval, "save_every": 0, "out": str(tmp_path / str(interval))}
        result = train(plan(text, tmp_path, optimizer=optimizer, run=run), observer=events)
        assert events.progress[-1].loss == result.loss
        actual[interval] = result.loss
        if interval == 1:
            lines = {p.step: p.loss for p in events.progress[:-1] if p.loss is not None}
            assert sorted(lines) == list(range(1, 13))
            last = [lines[step] for step in range(3, 13)]
            assert result.loss == pytest.approx(sum(last) / 10, rel=1e-4)
            assert result.loss != pytest.approx(lines[1], rel=1e-3)
    assert len(set(actual.values())) == 1  # for any interval


def test_run_reports_parameters_and_tokens_at_its_start(text: Path, tmp_path: Path) -> None:
    """Parameters by part against the closed form, and tokens counted by hand."""
    events = Recorder()
    run = plan(
        text,
        tmp_path,
        model={"recipes": {"gla": "gla", "retnet": "retnet"}, "depth": 3},
        optimizer={"accumulate": 3},
    )
    model = train(run, observer=events).model
    (summary,) = events.summaries
    counted = count_parameters(cast(RecollectConfig, model.config))
    per_layer = sum(n for part, n in counted.items() if part not in ("embedding", "norms", "mlp"))
    half = counted["embedding"] // 2
    assert summary == {
        "model": "layers: 2 × gla, 1 × retnet; width 16",
        "parameters": (
            f"{sum(p.numel() for p in model.parameters()):,}: embedding {half:,}, memory layers "
            f"{per_layer:,}, MLPs {counted['mlp']:,}, head {half:,}, norms {counted['norms']:,}"
        ),
        "step": "6 × 32 = 192 tokens",
        "run": "6 steps, 1,152 tokens",
        "device": "cpu, float32",
        "out": f"{tmp_path}: a checkpoint every 2 steps (the last 2 stay), and at the end "
        f"{tmp_path / 'model'}",
    }
    train(run, resume=True, observer=events)
    assert events.summaries[1]["run"] == "6 steps, 1,152 tokens, from step 7 on"


def test_tied_head_has_no_parameters(text: Path, tmp_path: Path) -> None:
    events = Recorder()
    run = plan(text, tmp_path, model={"tie": True}, optimizer={"steps": 1}, run={"bf16": True})
    model = train(run, observer=events).model
    (summary,) = events.summaries
    assert "head" not in summary["parameters"]
    assert summary["parameters"].startswith(f"{sum(p.numel() for p in model.parameters()):,}: ")
    assert summary["device"] == "cpu, float32, matrix products in bfloat16"


@pytest.mark.parametrize("name", ["cuda:99", "gpu", "cuda:-1", "meta"])
def test_missing_device_gives_one_sentence(name: str, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(ValueError, match=r"^\[run\] device '.*' is not here: torch sees cpu"):
        train(plan(text, out, run={"device": name}))
    assert not out.exists()


def test_requested_cpu_is_used(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if torch has an accelerator, which is the default."""
    gpu = torch.device("cuda:0")
    with monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda **_: gpu)
        assert resolve_device(None, argument_name="") == gpu
        assert resolve_device("cpu", argument_name="").type == "cpu"
    args = arguments.trainer_arguments(plan(text, tmp_path), torch.device("cpu"))
    assert args.device.type == "cpu" and args.use_cpu
    assert train(plan(text, tmp_path / "run", run={"device": "cpu"})).steps == STEPS


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_one_of_several_gpus_is_used(text: Path, tmp_path: Path) -> None:
    trained = train(plan(text, tmp_path, run={"device": "cuda:1"}))
    assert trained.model.device == torch.device("cuda:1")
    assert torch.cuda.max_memory_allocated(0) == 0
