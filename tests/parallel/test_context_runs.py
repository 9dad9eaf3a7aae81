"""Runs with rows along several processes, or in segments, equal the run of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from tests.lm.runs import write_text
from tests.parallel.jobs import model
from tests.parallel.spawned import group, job, wait_for_exit
from tests.parallel.test_data import largest_difference, tables

import recollect as rc
from recollect.lm.distributed.parallel_dims import ParallelDims
from recollect.lm.distributed.parallelize import check_divisible
from recollect.lm.training.arguments import make_layout
from recollect.lm.training.export import export_model
from recollect.lm.training.plan import TrainPlan
from recollect.lm.training.train import train

STREAM = {"packing": "stream"}


# For each run the equivalent run of one process, and the difference between them.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "along": ("documents", {"parallel": {"context": 2}, "checkpointing": True}),
    "deep": ("stream", {"parallel": {"data": 1, "context": 2}}),
    "pieces": ("segments", {"parallel": {"context": 2}}),
    "shards": ("segments", {"parallel": "fsdp"}),
    "replicas": ("packed segments", {"parallel": "ddp"}),
    "bf16": ("documents", {"parallel": {"context": 2}, "bf16": True}),
}
DATA: dict[str, dict[str, Any]] = {
    "documents": {},
    "stream": STREAM,
    "segments": STREAM | {"segments": 4},
    "packed segments": {"segments": 4},
}
TITANS = {"recipe": "titans"}  # only the first piece of a row uses its initial memory


@pytest.mark.slow
def test_rows_along_processes_and_in_segments_equal_one_process(tmp_path: Path) -> None:
    write_text(tmp_path / "text.jsonl")

    def of(out: str, like: str, run: dict[str, Any]) -> dict[str, Any]:
        recipe = {} if like == "documents" else TITANS
        return tables(
            tmp_path, out, model=recipe, data=DATA[like], run={"save_every": 0, "keep": 1} | run
        )

    single = {like: train(TrainPlan.from_dict(of(f"one {like}", like, {}))) for like in DATA}
    several = {name: of(name, like, run) for name, (like, run) in RUNS.items()}
    ranks = job(f"runs({several!r})", 2, tmp_path)
    for name, (like, _) in RUNS.items():
        result, one = ranks[0][name], single[like]
        near = 0.05 if name == "bf16" else 1e-5  # bfloat16 has 8 bits, of a loss of about 5
        assert result["loss"] == pytest.approx(one.loss, abs=near), name
        assert result["heldout"] == pytest.approx(one.heldout_loss, abs=near), name
        assert result["tokens"] == one.tokens == 8 * 4 * 2 * 32  # batch is that of all processes
        assert ranks[1][name]["loss"] == result["loss"] and not ranks[1][name]["said"]
        if name != "bf16":
            assert (
                largest_difference(tmp_path / f"one {like}/model", tmp_path / name / "model") < 1e-5
            ), name
        if name != "replicas":
            full = sum(weight.numel() for weight in one.model.parameters())
            assert all(rank[name]["held"] < 0.52 * full for rank in ranks), name
    assert "2 processes: context 2" in ranks[0]["along"]["said"][0]
    # A step of two batches in four pieces each averages gradients once, after the eighth.
    withheld = {name: ranks[0][name]["withheld"] for name in RUNS}
    assert withheld["replicas"] == 8 * (1 + 3 + 3) and withheld["shards"] == 0
    assert ranks[0]["along"]["forwards"] == []  # the model reads outside the run


@pytest.mark.slow
def test_killed_run_along_processes_resumes_with_others(tmp_path: Path) -> None:
    write_text(tmp_path / "text.jsonl")
    train(TrainPlan.from_dict(tables(tmp_path, "unbroken")))
    broken = tables(tmp_path, "broken", run={"parallel": {"context": 2}})
    code = f"import tests.parallel.jobs as jobs; print(jobs.killed({broken!r}))"
    with group(2, code, tmp_path) as processes:
        (_, stdout, err), (status, _, _) = wait_for_exit(processes)
    assert status == -9 and "checkpoint-4 is complete" in stdout, err
    exported = tmp_path / "exported"
    assert export_model(tmp_path / "broken", exported).name == "checkpoint-4"
    assert rc.lm.RecollectForCausalLM.from_pretrained(exported).config.num_hidden_layers == 2
    four = {"parallel": {"data": 2, "context": 2}}
    job(f"runs({{'four': {tables(tmp_path, 'broken', run=four)!r}}}, resume=True)", 4, tmp_path)
    assert largest_difference(tmp_path / "unbroken/model", tmp_path / "broken/model") < 1e-5


def refusals() -> dict[str, tuple[dict[str, dict[str, Any]], str]]:
    along = {"run": {"parallel": {"context": 2}}}
    return {
        "short rows": (
            {"run": {"parallel": {"context": 8}}, "data": {"context": 7}},
            r"context = 8 divides the 7 tokens of a row among as many processes",
        ),
        "short segments": (
            {**along, "data": {"context": 10, "segments": 4, "packing": "stream"}},
            r"context = 2 divides the 1 tokens of the shortest of 4 segments",
        ),
        "documents in segments": (
            {**along, "data": {"segments": 2}},
            r'take packing = "stream"',
        ),
        "kept": (
            {**along, "data": {"segments": 2, "segment_gradient": "kept"}},
            r'take "cut", or one process',
        ),
        "batch": (
            {"run": {"parallel": {"data": 4, "context": 2}}, "optimizer": {"batch": 6}},
            r"4 groups of processes need a multiple of 4",
        ),
    }


@pytest.mark.parametrize("name", refusals())
def test_indivisible_runs_are_refused_before_they_start(tmp_path: Path, name: str) -> None:
    changes, message = refusals()[name]
    plan = TrainPlan.from_dict(tables(tmp_path, "run", **changes))
    parallel = plan.run.parallel
    assert isinstance(parallel, dict)
    processes = torch.tensor([*parallel.values()]).prod()
    with pytest.raises(ValueError, match=message):
        make_layout(plan, int(processes))


def test_unsupported_runs_are_refused_by_all_processes() -> None:
    along = ParallelDims(cp=2)
    check_divisible(model("titans"), along)
    with pytest.raises(ValueError, match=r"context = 2: this model routes tokens to memories"):
        check_divisible(model("mixture_of_memories"), along)
