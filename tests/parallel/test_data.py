"""Replicas, shards, and both with tensor parallelism: steps and weights of one process."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("transformers")

import torch
from tests.lm.runs import Recorder, gathers, weights, write_text
from tests.parallel.jobs import NAMES, ROWS, VOCAB, model, steps
from tests.parallel.spawned import job, survivors
from torch import Tensor, nn

import recollect as rc
from recollect.lm.data.tokenizers import byte_tokenizer
from recollect.lm.distributed.parallel_dims import ParallelDims
from recollect.lm.distributed.parallelize import check_divisible
from recollect.lm.distributed.processes import TIMEOUT_ENV, init_distributed
from recollect.lm.training.interrupts import stop_after_step
from recollect.lm.training.plan import TrainPlan
from recollect.lm.training.train import train

ALONG = ["gated_delta_net", "titans", "hybrid"]  # affine, handed over, gathered
COMPOSED = ["as_context", "chain", "titans_mal"]


def check_equal(results: list[dict[str, Any]]) -> None:
    """Compare losses and weights with one process: to 1e-5, and to rounding in float64."""
    for case, numbers in results[0].items():
        limit = 1e-5 if case.endswith("float32") else 1e-9
        # Logits are summed in float32. Under an attention over outputs of a memory, the norm of a
        # near-zero output amplifies differences between sums.
        maximum = 3e-5 if case == "as_context tensor float32" else 1e-5
        assert numbers["loss"] < maximum, (case, numbers)
        # AdamW divides gradients by their size; in float32 delta rules lose two digits.
        assert numbers["norm"] < (1e-4 if case.endswith("float32") else 1e-9), (case, numbers)
        assert numbers["weights"] < limit, (case, numbers)


@pytest.mark.parametrize(
    ("names", "along", "types"),
    [
        pytest.param(NAMES[:1], ALONG[:1], ["float32"], id="one system"),
        pytest.param(NAMES[1:], ALONG[1:], ["float32"], id="others", marks=pytest.mark.slow),
        pytest.param(NAMES, ALONG, ["float64"], id="float64", marks=pytest.mark.slow),
    ],
)
def test_two_processes_equal_one_and_divide_memory(
    names: list[str], along: list[str], types: list[str], tmp_path: Path
) -> None:
    more = f"jobs.equality({along}, ['context'], {types})"
    result = job(f"equality({names}, ['ddp', 'fsdp'], {types}) | {more}", 2, tmp_path)
    check_equal(result)
    for case in result[0]:
        ranks = [rank[case] for rank in result]
        for what in ("weights", "exp_avg", "exp_avg_sq"):
            sizes = [rank["held"][what] for rank in ranks]
            if " ddp " in case:
                assert what != "weights" or sizes == [ranks[0]["whole"]] * 2, case
            else:  # no duplicates, and the halves differ by a row of the few weights of odd length
                assert sum(sizes) == ranks[0]["whole"], case
                assert max(sizes) <= 0.51 * ranks[0]["whole"], case


@pytest.mark.slow
def test_rows_along_two_processes_equal_one(tmp_path: Path) -> None:
    names = [*(name for name in NAMES if name not in ALONG), *COMPOSED]
    check_equal(job(f"equality({names}, ['context'])", 2, tmp_path))


@gathers
@pytest.mark.parametrize(
    ("names", "kinds", "types"),
    [
        # Two processes divide data, rows and heads of fast tests, each separately.
        pytest.param(
            NAMES[:1],
            ["data context", "both"],
            ("float32",),
            id="one system",
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(NAMES, [kind], ("float32", "float64"), id=kind, marks=pytest.mark.slow)
            for kind in ("both", "data context", "context tensor")
        ),
    ],
)
def test_four_processes_divide_data_rows_and_heads(
    names: list[str], kinds: list[str], types: tuple[str, ...], tmp_path: Path
) -> None:
    """Two of the three, on four processes."""
    result = job(f"equality({names}, {kinds}, {types})", 4, tmp_path)
    check_equal(result)
    for case, numbers in result[0].items():
        assert max(rank[case]["held"]["weights"] for rank in result) < 0.29 * numbers["whole"], case


@gathers
@pytest.mark.slow
def test_eight_processes_divide_data_rows_and_heads(tmp_path: Path) -> None:
    """All three at once."""
    result = job(f"equality({ALONG}, ['all'])", 8, tmp_path)
    check_equal(result)
    for case, numbers in result[0].items():
        assert max(rank[case]["held"]["weights"] for rank in result) < 0.16 * numbers["whole"], case


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPOSED)
def test_weights_that_rounding_moves_have_no_gradient(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process against itself, with every product summed in four parts.

    In float32 with AdamW's default eps a few of some 50,000 weights differ by more than 1e-5. The
    first gradients of these weights are rounding; in float64, or with a larger eps, there are none.
    The comparisons above, which also sum in parts, use the larger eps for these systems.
    """
    full = nn.functional.linear

    def in_parts(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.dim() != 2 or weight.shape[1] % 4:
            return full(x, weight, bias)
        y = sum(full(a, b) for a, b in zip(x.chunk(4, -1), weight.chunk(4, 1), strict=True))
        assert isinstance(y, Tensor)
        return y if bias is None else y + bias

    def trained(dtype: torch.dtype, eps: float) -> list[dict[str, Tensor]]:
        snapshots: list[dict[str, Tensor]] = []
        for product in (full, in_parts):
            monkeypatch.setattr(nn.functional, "linear", product)
            net = model(name).to(dtype)
            steps(net, 0, 1, [], eps=eps)
            snapshots.append({n: w.detach() for n, w in net.named_parameters()})
        return snapshots

    def beyond(snapshots: list[dict[str, Tensor]], limit: float) -> dict[str, Tensor]:
        one, two = snapshots
        return {n: (one[n] - two[n]).abs() > limit for n in one}

    first = model(name).double()  # its gradients, to more digits than float32 has
    rows = torch.randint(0, VOCAB, (ROWS, 12), generator=torch.Generator().manual_seed(1))
    first(rows, labels=rows).loss.backward()
    gradients = {n: w.grad for n, w in first.named_parameters()}
    differing = beyond(trained(torch.float32, 1e-8), 1e-5)
    assert sum(int(mask.sum()) for mask in differing.values()) <= 10
    for n in (n for n, mask in differing.items() if mask.any()):
        gradient = gradients[n]
        assert gradient is not None
        assert bool((gradient[differing[n]].abs() < 1e-5 * gradient.abs().max()).all()), n
    assert not any(bool(mask.any()) for mask in beyond(trained(torch.float64, 1e-8), 1e-9).values())
    assert not any(bool(mask.any()) for mask in beyond(trained(torch.float32, 1e-5), 1e-5).values())


def test_ranks_whose_rows_use_other_weights_agree(tmp_path: Path) -> None:
    for error, gates in job("uneven()", 2, tmp_path):
        assert error < 1e-7 and gates > 0  # a loss is summed in float32


def tables(place: Path, out: str, **changes: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "model": {"recipe": "gated_delta_net", "width": 16, "depth": 2, "heads": 2, "mlp": 16},
        "data": {"train": [str(place / "text.jsonl")], "context": 32, "heldout_share": 0.2},
        "optimizer": {"steps": 8, "batch": 4, "accumulate": 2, "lr": 1e-3, "clip": 0.3},
        "run": {"out": str(place / out), "save_every": 2, "log_every": 1, "seed": 3},
    }
    for table, values in changes.items():
        result[table] |= values
    return result


def largest_difference(one: Path, other: Path) -> float:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.slow
def test_padded_parts_of_two_processes_equal_one(tmp_path: Path) -> None:
    """Documents of another library's decoder: processes have other numbers of parts."""
    from tests.lm.test_distill import llama

    lines = [f"{'x' * n}{i}" for i, n in enumerate(12 * (3, 30, 2, 1, 7, 50, 4, 4, 12, 2, 2, 20))]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": x}) for x in lines))
    student = llama()
    rc.lm.replace_attention(student, "gated_delta_net", layers=[0])
    student.save_pretrained(tmp_path / "start")
    byte_tokenizer().save_pretrained(tmp_path / "start")

    def plan(out: str, **run: object) -> dict[str, Any]:
        result = tables(tmp_path, out, run={"save_every": 0, **run})
        return {**result, "model": {"start": str(tmp_path / "start")}}

    single = train(TrainPlan.from_dict(plan("one")))
    ranks = job(f"runs({ {'ddp': plan('ddp', parallel='ddp')}!r})", 2, tmp_path)
    assert largest_difference(tmp_path / "one/model", tmp_path / "ddp/model") < 1e-5
    assert ranks[0]["ddp"]["loss"] == pytest.approx(single.loss, abs=1e-5)
    assert ranks[0]["ddp"]["heldout"] == pytest.approx(single.heldout_loss, abs=1e-5)
    with pytest.raises(ValueError, match=r"models of recollect, and LlamaForCausalLM is another"):
        check_divisible(student, ParallelDims(dp_shard=2))


@pytest.mark.slow
def test_runs_of_two_processes_equal_one(tmp_path: Path) -> None:
    write_text(tmp_path / "text.jsonl")
    tie, save = {"tie": True}, {"save_every": 0}
    plans = {
        "ddp": tables(tmp_path, "ddp", run={"parallel": "ddp", "checkpointing": True} | save),
        "fsdp": tables(tmp_path, "fsdp", run={"parallel": "fsdp", "checkpointing": True} | save),
        "tensor": tables(
            tmp_path, "tensor", run={"parallel": {"tensor": 2}, "checkpointing": True} | save
        ),
        "tied": tables(tmp_path, "tied", model=tie, run={"parallel": {"tensor": 2}} | save),
        "bf16": tables(tmp_path, "bf16", run={"parallel": "fsdp", "bf16": True} | save),
    }
    single = train(TrainPlan.from_dict(tables(tmp_path, "one", run=save)))
    tied = train(TrainPlan.from_dict(tables(tmp_path, "one_tied", model=tie, run=save)))
    ranks = job(f"runs({plans!r})", 2, tmp_path)
    for name in ("ddp", "fsdp", "tensor"):
        result = ranks[0][name]
        assert largest_difference(tmp_path / "one/model", tmp_path / name / "model") < 1e-5, name
        assert result["loss"] == pytest.approx(single.loss, abs=1e-5)
        assert result["heldout"] == pytest.approx(single.heldout_loss, abs=1e-5)
        assert result["tokens"] == single.tokens == 8 * 4 * 2 * 32  # batch is that of all processes
        assert "2 processes" in result["said"][0] and not ranks[1][name]["said"]
    assert largest_difference(tmp_path / "one_tied/model", tmp_path / "tied/model") < 1e-5
    assert ranks[0]["tied"]["loss"] == pytest.approx(tied.loss, abs=1e-5)
    # bfloat16 has 8 bits: the loss of about 5 equals that of float32 to a few in a thousand.
    assert ranks[0]["bf16"]["loss"] == pytest.approx(single.loss, abs=0.05)
    saved = weights(tmp_path / "bf16/model")
    assert all(weight.dtype == torch.float32 for weight in saved.values())
    full = sum(weight.numel() for weight in single.model.parameters())
    assert all(rank["fsdp"]["held"] < 0.51 * full for rank in ranks)


@pytest.mark.slow
def test_rules_for_width_with_sharded_weights(tmp_path: Path) -> None:
    write_text(tmp_path / "text.jsonl")
    rules = {"parametrization": "mup", "base_width": 8}
    modes = {"ddp": "ddp", "fsdp": "fsdp", "tensor": {"tensor": 2}}
    plans = {
        name: tables(tmp_path, name, optimizer=rules, run={"parallel": method, "save_every": 0})
        for name, method in modes.items()
    }
    plans["tied"] = tables(
        tmp_path, "tied", model={"tie": True}, optimizer=rules, run={"parallel": {"tensor": 2}}
    )
    options = {"save_every": 0}
    train(TrainPlan.from_dict(tables(tmp_path, "one", optimizer=rules, run=options)))
    model = {"tie": True}
    train(TrainPlan.from_dict(tables(tmp_path, "alone", model=model, optimizer=rules)))
    plain = train(TrainPlan.from_dict(tables(tmp_path, "plain", run=options))).folder
    job(f"runs({plans!r})", 2, tmp_path)
    for name in modes:
        assert largest_difference(tmp_path / "one/model", tmp_path / name / "model") < 1e-5, name
    assert largest_difference(tmp_path / "alone/model", tmp_path / "tied/model") < 1e-5
    assert largest_difference(tmp_path / "one/model", plain) > 1e-3
    # One process continues from the shards of two, with the same rates.
    for name in ("tied", "alone"):
        longer = tables(tmp_path, name, model=model, optimizer={**rules, "steps": 10})
        longer["run"]["parallel"] = "ddp"
        assert train(TrainPlan.from_dict(longer), resume=True).steps == 2
    assert largest_difference(tmp_path / "alone/model", tmp_path / "tied/model") < 1e-5


@pytest.mark.slow  # `tests/lm/test_training.py` kills and resumes a run of one process
@pytest.mark.parametrize("at_four", [False, True])
def test_killed_run_resumes_with_another_number_of_processes(tmp_path: Path, at_four: bool) -> None:
    write_text(tmp_path / "text.jsonl")
    train(TrainPlan.from_dict(tables(tmp_path, "unbroken")))
    broken = tables(tmp_path, "broken", run={"parallel": "fsdp"})
    last = 4 if at_four else 2  # the fourth step leaves no files in its final folder
    call = f"killed({broken!r}, writing={not at_four})"
    (message,) = survivors(call, 2, tmp_path, killed=1)
    assert "another process of this run has ended" in message
    assert f"{tmp_path / f'broken/checkpoint-{last}'} is complete" in message
    assert (tmp_path / f"broken/checkpoint-{last}/shards").is_dir()
    assert (tmp_path / "broken/checkpoint-4").exists() == at_four
    shutil.copytree(tmp_path / "broken", tmp_path / "more")
    events = Recorder()
    broken["run"]["parallel"] = "ddp"
    train(TrainPlan.from_dict(broken), resume=True, observer=events)
    assert "resuming from" in events.messages[0] and f"checkpoint-{last}" in events.messages[0]
    assert largest_difference(tmp_path / "unbroken/model", tmp_path / "broken/model") < 1e-5
    if not at_four:
        return
    four = {"parallel": {"data": 2, "tensor": 2}, "save_every": 0}
    job(f"runs({{'more': {tables(tmp_path, 'more', run=four)!r}}}, resume=True)", 4, tmp_path)
    assert largest_difference(tmp_path / "unbroken/model", tmp_path / "more/model") < 1e-5


def test_forwarded_interrupt_counts_once() -> None:
    """A terminal interrupts all processes, and a launcher forwards the interrupt."""
    state = SimpleNamespace(global_step=3, max_steps=3)
    trainer = SimpleNamespace(args=SimpleNamespace(world_size=2), state=state)
    trainer.add_callback = lambda callback: None
    trainer.request_stop = lambda: None

    def interrupted_twice() -> None:
        with stop_after_step(cast(Any, trainer)):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    interrupted_twice()
    trainer.args.world_size = 1
    with pytest.raises(KeyboardInterrupt):
        interrupted_twice()


@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_launcher_that_divides_models_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "true")
    with pytest.raises(ValueError, match=rf"{name}.*\[run\] parallel"):
        init_distributed()
    monkeypatch.delenv(name)
    monkeypatch.setenv(TIMEOUT_ENV, "soon")
    with pytest.raises(ValueError, match="must be a number of seconds, not 'soon'"):
        init_distributed()
