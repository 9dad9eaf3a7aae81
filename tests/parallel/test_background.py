"""Checkpoints that are written during steps contain one step, or give one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.lm.runs import write_text
from tests.parallel.spawned import job
from tests.parallel.test_data import largest_difference, tables

from recollect.lm.training.plan import TrainPlan
from recollect.lm.training.train import train

SHARED = {"parallel": "fsdp", "save_every": 4}


def test_checkpoint_contains_its_step(tmp_path: Path) -> None:
    write_text(tmp_path / "text.jsonl")
    run = tables(tmp_path, "run", run=SHARED)
    finished = tables(tmp_path, "ended", run=SHARED)
    ranks = job(f"saving.both({run!r}, {finished!r})", 2, tmp_path)
    names = set[str]()
    for slow, interrupted in ranks:
        assert slow["waited"] == [True] and not slow["early"]  # two steps run meanwhile
        assert slow["other"] == []  # bit for bit
        assert slow["moved"] > 0.9 * len(slow["names"])  # two steps later these differ
        assert slow["last"]
        names |= set(slow["names"])
        assert interrupted == ["checkpoint-4", True]
    assert names == set(ranks[0][0]["all"]) and any("exp_avg_sq" in name for name in names)
    # Schedule, data, steps and random numbers next to the shards are of that step as well.
    (tmp_path / "run/checkpoint-8").rename(tmp_path / "checkpoint-8")
    (tmp_path / "run/model").rename(tmp_path / "whole")
    run["run"]["parallel"] = "ddp"
    assert train(TrainPlan.from_dict(run), resume=True).steps == 4
    assert largest_difference(tmp_path / "run/model", tmp_path / "whole") < 1e-5


@pytest.mark.slow
def test_a_full_disk_ends_all_processes_with_one_sentence(tmp_path: Path) -> None:
    """In another process, in the last files of the first, or next to the shards."""
    write_text(tmp_path / "text.jsonl")
    plans = {
        fault: tables(tmp_path, fault, run=SHARED | {"save_every": 2})
        for fault in ("shards", "manifest", "beside")
    }
    for result in job(f"saving.full({plans!r})", 2, tmp_path):
        for fault, run in result.items():
            message = (
                f"checkpoint-4 could not be written to {tmp_path / fault}: the disk is full ; "
                "checkpoint-2 is complete, and --resume continues from it"
            )
            assert run["said"] == message, fault
            assert run["left"] == ["checkpoint-2"], fault
            assert run["taken"] in (5, 6), fault  # and not when the next one would be saved
