"""Layers divided by heads, and errors that several processes raise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")

import torch
from tests.parallel.jobs import model
from tests.parallel.spawned import group, job
from tests.parallel.test_data import COMPOSED, NAMES, check_equal, tables
from tests.processes import paragraphs

import recollect as rc
from recollect.lm.distributed.head_sharding import ShardSpec, keep_local_heads, shard_specs

OTHERS = ["rwkv7", "gla", "retnet", "mesa_net", "moneta"]  # shifts, ties, schedules, other biases


@pytest.mark.slow
def test_compositions_are_divided_by_heads(tmp_path: Path) -> None:
    names = ["titans_mag", "samba", "residual_delta_net", "mixture_of_memories"]
    names += ["gated_slot_attention", "abc", "memory_caching", "tnt"]
    check_equal(job(f"equality({[*COMPOSED, *names]}, ['tensor'])", 2, tmp_path))


@pytest.mark.parametrize(
    ("names", "types"),
    [
        pytest.param(NAMES[:2], ["float32"], id="two systems"),
        pytest.param([*NAMES[2:], COMPOSED[0]], ["float32"], id="more", marks=pytest.mark.slow),
        pytest.param([*NAMES, COMPOSED[0]], ["float64"], id="exactly", marks=pytest.mark.slow),
        pytest.param(OTHERS, ["float32", "float64"], id="others", marks=pytest.mark.slow),
    ],
)
def test_divided_heads_equal_one_process(
    names: list[str], types: list[str], tmp_path: Path
) -> None:
    result = job(f"equality({names}, ['tensor'], {types})", 2, tmp_path)
    check_equal(result)
    for case in result[0]:
        ranks = [rank[case] for rank in result]
        shared = ranks[0]["alike"]  # norms, and the first maps of low ranks
        assert sum(rank["held"]["weights"] for rank in ranks) == ranks[0]["whole"] + shared, case
        assert ranks[0]["held"]["weights"] == ranks[1]["held"]["weights"], case
        assert shared < 0.2 * ranks[0]["whole"], case


@pytest.mark.slow
def test_plans_of_transformers_divide_the_model(tmp_path: Path) -> None:
    model("gated_delta_net").save_pretrained(tmp_path / "saved")
    ranks = job("loaded('saved')", 2, tmp_path)
    full = ranks[0]["whole"]
    for result in ranks:
        error, num_weights = result["fsdp_size"]
        assert (
            error < 1e-5 and num_weights < 0.55 * full
        )  # the head stays gathered after a forward pass
        error, num_weights = result["tp_size"]  # its MLPs and its embedding; layers are not divided
        assert error < 1e-5 and num_weights < full


@pytest.mark.parametrize(
    ("system", "kv_heads"),
    [
        ("gated_delta_net", 4),
        ("gated_delta_net", 2),
        ("comba", 2),  # a tie of queries
        (("kimi_delta_attention", 3), 4),  # an output gate of low rank
        ("mamba3", 4),  # factors and biases of queries and keys
        ("mamba3_mimo", 4),  # factors of inputs and outputs
        ("mamba3_mimo", 2),
        ("erase_then_delta", 4),  # an association without a value
        ("preconditioned_kda", 4),  # gates of a tie
    ],
)
def test_parts_of_a_layer_add_up(system: str | tuple[str, int], kv_heads: int) -> None:
    """Without processes: the outputs of two layers, each with a part of the heads, add up."""
    torch.manual_seed(0)
    options = None
    if isinstance(system, tuple):
        system, rank = system
        options = replace(rc.zoo.get(system).options, output_gate_rank=rank)
    undivided = rc.MemoryLayer(16, 4, system, options, num_kv_heads=kv_heads).double()
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    total = torch.zeros_like(x)
    for index in range(2):
        part = rc.MemoryLayer(16, 4, system, options, num_kv_heads=kv_heads).double()
        for name, weight in undivided.named_parameters():
            spec = shard_specs(undivided).get(name)
            owner, _, attribute = name.rpartition(".")
            value = weight if spec is None else spec.local_shard(weight, index, 2)
            setattr(part.get_submodule(owner), attribute, torch.nn.Parameter(value.detach()))
        keep_local_heads(part, index, 2)
        assert part.qkv.weight.shape[0] == undivided.qkv.weight.shape[0] // 2
        total += part(x)[0]
    torch.testing.assert_close(total, undivided(x)[0], atol=1e-12, rtol=0)


def test_fixed_numbers_of_a_part() -> None:
    layer = rc.zoo.get("retnet").build(16, 4)
    part = rc.zoo.get("retnet").build(16, 4)
    number = next(x for x in layer.params.values() if x.source == "constant")
    place = next(n for n, x in layer.params.items() if x is number)
    keep_local_heads(part, 1, 2)
    part_value = part.params[place](torch.zeros(1, 1, 16))
    assert torch.equal(part_value, number(torch.zeros(1, 1, 16))[2:])
    assert len(set(part_value.flatten().tolist())) > 1


def test_the_order_of_ranks_is_that_of_their_parts() -> None:
    spec, weight = ShardSpec(axis=0, section_sizes=(4, 2, 8)), torch.arange(14.0)
    gathered = torch.cat([spec.local_shard(weight, index, 2) for index in range(2)])
    assert torch.equal(weight.index_select(0, spec.permutation(2)), gathered)
    assert gathered[:7].tolist() == [0, 1, 4, 6, 7, 8, 9]
    assert torch.equal(spec.permutation(1), torch.arange(14))


PLAN = """
[model]
width = 16
depth = 1
heads = {heads}
recipe = {recipe}
[data]
train = ["text.txt"]
context = 16
{more}
[optimizer]
steps = 2
batch = {batch}
lr = {lr}
[run]
out = "{out}"
save_every = 0
parallel = {parallel}
"""


def write(place: Path, name: str, **changes: Any) -> None:
    values: dict[str, Any] = {"heads": 2, "batch": 4, "lr": 0.01, "parallel": '"fsdp"'}
    values |= {"recipe": '"gated_delta_net"', "out": place.parent / name, "more": ""}
    (place / f"{name}.toml").write_text(PLAN.format(**(values | changes)))


@pytest.mark.slow
def test_indivisible_model_ends_all_processes_with_one_sentence(tmp_path: Path) -> None:
    expected = {
        "mesh": "data 3 × tensor 2 = 6 processes, and 2 were started",
        "heads": "tensor = 2 does not divide [model] num_heads = 1 of layer 0 (gated_delta_net)",
        "no heads": "layer 0 (ffn_relu) is a FeedForward, which has none",
        "batch": "[optimizer] batch = 3 counts the sequences of all processes",
        "short": "context = 2 divides the 1 tokens of the shortest of 6 segments",
        "routed": "context = 2: this model routes tokens to memories",
        "size": "needs whole numbers >= 1, and data is 0",
        "config": "process 1 has [optimizer] lr = 0.02, and process 0 0.01",
        "text": "process 1 has text text.txt",
        "missing": "process 1 of 2: there is no file missing.toml",
        "good": "2 processes: fsdp 2",
        "along": "2 processes: context 2",
    }
    for rank in range(2):
        place = tmp_path / str(rank)
        place.mkdir()
        (place / "text.txt").write_text(paragraphs(20))
        write(place, "mesh", parallel="{data = 3, tensor = 2}")
        write(place, "heads", parallel="{tensor = 2}", heads=1)
        write(place, "no heads", parallel="{tensor = 2}", recipe='"ffn_relu"')
        write(place, "batch", batch=3)
        write(place, "short", parallel="{context = 2}", more="segments = 6")
        write(place, "routed", parallel="{context = 2}", recipe='"mixture_of_memories"')
        write(place, "size", parallel="{data = 0}")
        write(place, "config", lr=[0.01, 0.02][rank])
        write(place, "good")
        write(place, "along", parallel="{data = 1, context = 2}")
        if rank == 0:
            write(place, "missing")
    cases = {name: [f"{name}.toml"] for name in expected if name != "text"}
    ranks = job(f"refused({cases!r})", 2, tmp_path)
    for name in cases:
        (status, out, err), (other, out_1, err_1) = (rank[name] for rank in ranks)
        assert (out_1, err_1) == ("", ""), name  # one of them prints it
        if name in ("good", "along"):
            assert status == other == 0, err
            assert expected[name] in out
            continue
        assert status == other == 2, (name, err)
        assert expected[name] in err and err.count("\n") == 1, (name, err)
    (tmp_path / "1/text.txt").write_text(paragraphs(21))
    write(tmp_path / "0", "text")
    write(tmp_path / "1", "text")
    ranks = job("refused({'text': ['text.toml']})", 2, tmp_path)
    assert expected["text"] in ranks[0]["text"][2] and ranks[1]["text"][2] == ""


@pytest.mark.slow
def test_missing_process_is_not_waited_for(tmp_path: Path) -> None:
    code = (
        "import os, time, recollect_command\n"
        "from recollect.lm.distributed.processes import init_distributed\n"
        "init_distributed()\n"
        "if os.environ['RANK'] == '1': time.sleep(300)\n"
        "recollect_command.main()"
    )
    write(tmp_path, "run")
    with group(2, code, tmp_path, arguments=("train", "run.toml"), RECOLLECT_TIMEOUT="3") as both:
        _, err = both[0].communicate(timeout=100)
    assert both[0].returncode == 2
    assert "another process of this run has ended or does not answer" in err
    assert err.count("recollect train") == 1


@pytest.mark.slow
def test_a_checkpoint_of_several_processes_is_exported(tmp_path: Path) -> None:
    from tests.lm.runs import weights, write_text
    from typer.testing import CliRunner

    from recollect.cli import build

    write_text(tmp_path / "text.jsonl")
    plan = tables(tmp_path, "run", run={"parallel": {"tensor": 2}})
    job(f"runs({{'run': {plan!r}}})", 2, tmp_path)
    last, built = tmp_path / "run/checkpoint-8", tmp_path / "exported"
    result = CliRunner().invoke(build(), ["export", str(tmp_path / "run"), str(built)])
    assert result.exit_code == 0, result.output
    assert str(last) in result.output
    one, other = weights(tmp_path / "run/model"), weights(built)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    cards = [(folder / "README.md").read_text() for folder in (tmp_path / "run/model", built)]
    assert cards[0] == cards[1] and "| parameters |" in cards[0]
    assert rc.lm.RecollectForCausalLM.from_pretrained(built).config.num_attention_heads == 2
    repeated = CliRunner().invoke(build(), ["export", str(last), str(built)])
    assert repeated.exit_code == 2 and "exists: name a new folder" in repeated.output
    shards = sorted((last / "shards").iterdir())
    data = bytearray(shards[0].read_bytes())
    data[-1] ^= 1
    shards[0].write_bytes(bytes(data))
    broken = CliRunner().invoke(build(), ["export", str(last), str(tmp_path / "no")])
    assert broken.exit_code == 2 and "was cut short or altered" in broken.output
    assert not (tmp_path / "no").exists()
    assert json.loads((last / "layout.json").read_text()) == {"tensor": 2}
