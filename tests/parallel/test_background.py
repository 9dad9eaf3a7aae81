"""Checkpoints that are written while steps go on: of their step, whole, or with one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.lm.runs import write_text
from tests.parallel.spawned import job
from tests.parallel.test_data import apart, tables

from recollect.lm.training.plan import TrainPlan
from recollect.lm.training.train import train

SHARED = {"parallel": "fsdp", "save_every": 4}


def test_a_checkpoint_is_that_of_its_step_while_steps_go_on(tmp_path: Path) -> None:
    write_text(tmp_path / "text.jsonl")
    run = tables(tmp_path, "run", run=SHARED)
    finished = tables(tmp_path, "ended", run=SHARED)
    ranks = job(f"saving.both({run!r}, {finished!r})", 2, tmp_path)
    written = set[str]()
    for slow, interrupted in ranks:
        assert slow["waited"] == [True] and not slow["early"]  # two steps were taken meanwhile
        assert slow["other"] == []  # bit for bit
        assert slow["moved"] > 0.9 * len(slow["names"])  # as they would not be two steps later
        assert slow["last"]
        written |= set(slow["names"])
        assert interrupted == ["checkpoint-4", True]
    assert written == set(ranks[0][0]["all"]) and any("exp_avg_sq" in name for name in written)
    # Schedule, data, steps and random numbers beside the shards are of that step as well.
    (tmp_path / "run/checkpoint-8").rename(tmp_path / "checkpoint-8")
    (tmp_path / "run/model").rename(tmp_path / "whole")
    run["run"]["parallel"] = "ddp"
    assert train(TrainPlan.from_dict(run), resume=True).steps == 4
    assert apart(tmp_path / "run/model", tmp_path / "whole") < 1e-5


@pytest.mark.slow
def test_a_full_disk_ends_all_processes_with_one_sentence(tmp_path: Path) -> None:
    """On another process, in the first one's last files, or beside the shards."""
    write_text(tmp_path / "text.jsonl")
    plans = {
        where: tables(tmp_path, where, run=SHARED | {"save_every": 2})
        for where in ("shards", "manifest", "beside")
    }
    for result in job(f"saving.full({plans!r})", 2, tmp_path):
        for where, run in result.items():
            said = (
                f"checkpoint-4 could not be written to {tmp_path / where}: the disk is full ; "
                "checkpoint-2 is complete, and --resume continues from it"
            )
            assert run["said"] == said, where
            assert run["left"] == ["checkpoint-2"], where
            assert run["taken"] in (5, 6), where  # and not when the next one would be saved
