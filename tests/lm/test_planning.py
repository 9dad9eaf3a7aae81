"""Estimates of runs: memory against real steps, parts of ranks, and refusals."""

from __future__ import annotations

import io
import json
import math
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("typer")

import typer.main
from rich.console import Console
from tests.lm.runs import gathers
from torch.distributed.run import get_args_parser, parse_min_max_nnodes
from typer.testing import CliRunner

from recollect import plugins as modules
from recollect.benchmarks.cases.memory import CASES, measure, measure_peak, num_ranks, plan_peak
from recollect.choices import member
from recollect.cli import plan as plan_command
from recollect.cli.app import build
from recollect.lm import RecollectConfig, parameter_count
from recollect.lm.distributed.parallel_dims import ParallelDims
from recollect.lm.memory_estimate.estimate import RankEstimator, RankMemory, build_config, estimate
from recollect.lm.memory_estimate.flops import memory_costs
from recollect.lm.memory_estimate.live_memory import LiveMemory
from recollect.lm.memory_estimate.step_memory import MemoryModel, fit_memory_model
from recollect.lm.model.counts import meta_model
from recollect.lm.model.model import RecollectForCausalLM
from recollect.lm.training.arguments import make_layout
from recollect.lm.training.plan import TrainPlan
from recollect.report.formatting import format_si

SMALL: dict[str, Any] = {"width": 32, "depth": 2, "heads": 2, "mlp": 64}

LOOKING = '''
import recollect as rc


@rc.member
class Looking(rc.bias.Bias):
    """Stops where an error is large."""

    def error(self, prediction, value, gates):
        error = prediction - value
        return 0 * error if {looked} else error
'''


def plan(**changes: dict[str, Any]) -> TrainPlan:
    tables: dict[str, dict[str, Any]] = {
        "model": {"recipe": "gated_delta_net", **SMALL},
        "data": {"train": ["text.txt"], "context": 128},
        "optimizer": {"steps": 10, "batch": 8},
    }
    for table, values in changes.items():
        tables[table] = {**tables.get(table, {}), **values}
    return TrainPlan.from_dict(tables)


def rank_of(run: TrainPlan, config: RecollectConfig, dims: ParallelDims) -> RankMemory:
    return RankEstimator(run, config).rank(dims)


@pytest.fixture(scope="module", autouse=True)
def counted_once() -> Iterator[None]:
    """Measure a model once for all tests of this file, because it takes seconds."""
    known: dict[Any, MemoryModel] = {}

    def remembered(config: RecollectConfig, **sizes: Any) -> MemoryModel:
        key = (config.to_json_string(use_diff=False), *sorted(sizes.items()))
        if key not in known:
            known[key] = fit_memory_model(config, **sizes)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recollect.lm.memory_estimate.estimate.fit_memory_model", remembered)
        yield


# Attention and a layer without an MLP, exact least squares, and products in bfloat16.
@pytest.mark.parametrize(
    ("model", "bf16"),
    [
        ({"recipe": "gated_delta_net"}, False),
        ({"recipes": {"a": "softmax_attention", "b": "rls"}, "layers": ["a", "b", "mlp"]}, False),
        ({"recipe": "softmax_attention"}, True),
    ],
)
def test_memory_of_a_step_is_counted(model: dict[str, Any], bf16: bool) -> None:
    config = build_config(plan(model=model))
    memory_model = fit_memory_model(config, tokens=128, bf16=bf16)
    net = RecollectForCausalLM(config).train()
    assert memory_model.weights == 4 * parameter_count(config)
    ids = torch.randint(0, 200, (2, 128))
    with LiveMemory(net.parameters()) as memory:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = net(ids, labels=ids).loss
        loss.backward()
    peak, _ = memory_model.peak(2, 128)
    assert peak + memory_model.weights == pytest.approx(memory.peak, rel=0.15)


@pytest.mark.slow
def test_larger_rows_and_lengths_are_counted() -> None:
    config = build_config(plan(model={"recipe": "rls"}))
    net = RecollectForCausalLM(config).train()
    ids = torch.randint(0, 200, (3, 1536))
    with LiveMemory(net.parameters()) as memory:
        net(ids, labels=ids).loss.backward()
    peak, _ = fit_memory_model(config, tokens=1536).peak(3, 1536)
    assert peak == pytest.approx(memory.peak, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["gated_delta_net, recomputed", "softmax_attention, bfloat16", "mamba2, bfloat16", "titans"],
)
def test_plans_agree_with_runs(name: str) -> None:
    assert plan_peak(CASES[name]) == pytest.approx(measure_peak(CASES[name]).live, rel=0.15)


@pytest.mark.slow
def test_plans_agree_with_ranks_of_a_row() -> None:
    """Keys gathered, decays gathered, associations gathered, and a state handed over."""
    names = [name for name in CASES if num_ranks(CASES[name]) > 1]
    ratios = measure(names)["ratios"]
    assert len(ratios) == 4
    for name, ratio in ratios.items():
        assert ratio == pytest.approx(1, abs=0.15), name


@pytest.mark.slow
def test_ranks_of_a_row_store_gathered_tokens() -> None:
    """In addition to the memory of a rank with this number of tokens of its rows."""

    def stored_bytes(recipe: str, ranks: int) -> float:
        config = build_config(plan(model={"recipe": recipe, "depth": 1}))
        return fit_memory_model(config, tokens=64, context=ranks).blocks[0].predict(2, 64).saved

    H, K = SMALL["heads"], SMALL["width"] // SMALL["heads"]
    associations = 4 * 2 * 64 * H * (K + K)  # float32, of 2 rows of 64 tokens: keys and values
    for ranks in (2, 4):
        more = stored_bytes("softmax_attention", ranks) - stored_bytes("softmax_attention", 1)
        assert more >= ranks * associations  # the last rank reads all of them
    # Transitions do not grow with the tokens of other ranks, and their gather does.
    transitions = 4 * 2 * H * 2 * K * K
    more = stored_bytes("gated_delta_net", 4) - stored_bytes("gated_delta_net", 2)
    assert 2 * transitions <= more <= 8 * transitions


def test_a_feed_forward_memory_has_neither_state_nor_heads() -> None:
    run = plan(model={"recipe": "ffn_relu"})
    config = build_config(run)
    assert memory_costs(meta_model(config), tokens=64) == (0, 0)
    assert "is a FeedForward, which has none" in str(rank_of(run, config, ParallelDims(tp=2)).error)


@pytest.mark.slow
@gathers
def test_memory_of_ranks() -> None:
    run = plan()
    config = build_config(run)
    one = rank_of(run, config, ParallelDims())
    weights = 4 * parameter_count(config)
    assert one.parts["parameters"] == weights and one.parts["optimizer"] == 2 * weights
    ddp, fsdp = (
        rank_of(run, config, dims)
        for dims in (ParallelDims(dp_replicate=4), ParallelDims(dp_shard=4))
    )
    assert ddp.parts["parameters"] == ddp.parts["communicated"] == weights
    assert fsdp.parts["parameters"] == weights // 4
    assert fsdp.parts["optimizer"] == 2 * (weights // 4)
    assert ddp.rows == fsdp.rows == 2
    assert one.parts["activations"] > 3 * ddp.parts["activations"]
    both = rank_of(run, config, ParallelDims(dp_shard=2, tp=2))
    # Nearly half is divided by heads; norms and the residual stream are not.
    assert 0.25 * weights <= both.parts["parameters"] < 0.3 * weights
    heads = rank_of(run, config, ParallelDims(tp=2))
    assert 0.5 < heads.parts["activations"] / one.parts["activations"] < 0.9
    context = rank_of(run, config, ParallelDims(cp=2))
    # Half of the tokens, with K more channels than the V of each memory, for its transition.
    assert 0.5 < context.parts["activations"] / one.parts["activations"] < 0.7


@pytest.mark.slow
def test_options_that_save_memory() -> None:
    def parts(**changes: dict[str, Any]) -> dict[str, int]:
        run = plan(**{"data": {"context": 256}, "model": {"recipe": "rls"}, **changes})
        return dict(rank_of(run, build_config(run), ParallelDims()).parts)

    full = parts()["activations"]
    assert parts(run={"checkpointing": True})["activations"] < 0.8 * full
    pieces = parts(data={"context": 256, "segments": 4, "segment_gradient": "kept"})
    assert pieces["activations"] < 0.5 * full and pieces["states"] > 0
    assert parts(run={"loss_chunk": 100})["logits"] == 3 * 4 * 100 * 264


def test_the_smallest_mesh_fits_and_one_device_fewer_does_not() -> None:
    run = plan(optimizer={"batch": 12})
    config = build_config(run)
    three = rank_of(run, config, ParallelDims(dp_replicate=3)).total
    result = estimate(run, config, devices=4, memory=int(three / 0.9) + 1, peak_flops=1e12, mfu=0.5)
    assert result.smallest is not None and result.smallest.dims == ParallelDims(dp_replicate=3)
    assert result.largest is not None and result.largest.dims == ParallelDims(dp_replicate=4)
    fewer = (
        ParallelDims(dp_replicate=1),
        ParallelDims(dp_replicate=2),
        ParallelDims(dp_shard=2),
        ParallelDims(tp=2),
    )
    assert not any(rank_of(run, config, dims).fits_in(result.memory) for dims in fewer)
    assert result.tokens == 10 * 12 * 128
    assert result.seconds == pytest.approx(result.tokens * result.flops / (4 * 0.5e12))
    none = estimate(run, config, devices=4, memory=1000)
    assert none.smallest is none.largest is none.launch is None
    single = estimate(run, config, devices=1, memory=2**40)
    assert single.launch == ("", "recollect train run.toml")
    five = rank_of(run, config, ParallelDims(dp_replicate=5))
    assert "5 groups of processes need a multiple of 5" in str(five.error)
    assert "tensor = 4 does not divide [model] num_heads = 2" in str(
        rank_of(run, config, ParallelDims(tp=4)).error
    )


@gathers
@pytest.mark.parametrize("batch", [3, 6])
def test_meshes_include_one_that_fits(batch: int) -> None:
    run = plan(optimizer={"batch": batch})
    config = build_config(run)
    both = rank_of(run, config, ParallelDims(dp_shard=3, tp=2))
    result = estimate(run, config, devices=6, memory=int(both.total / 0.9) + 1)
    assert both in result.ranks and both.fits_in(result.memory)
    assert result.smallest is not None and result.smallest.dims.world_size == 6


@pytest.mark.slow
@gathers
def test_one_row_is_planned_along_devices_as_train_divides_it() -> None:
    """`train` reads the printed line, and candidates that it refuses are not proposed."""
    run = plan(model={"heads": 1}, optimizer={"batch": 1}, run={"checkpointing": True})
    config = build_config(run)
    along = rank_of(run, config, ParallelDims(cp=4))
    result = estimate(run, config, devices=4, memory=int(along.total / 0.9) + 1)
    assert result.smallest is not None and result.launch is not None
    assert result.smallest.dims == ParallelDims(cp=4)
    line, command = result.launch
    assert line == "parallel = {context = 4}" and "--nproc-per-node 4" in command
    for dims in (*(rank.dims for rank in result.ranks), ParallelDims(dp_shard=2, cp=4)):
        if dims.world_size == 1:
            continue
        tables = run.to_dict()
        tables["run"] |= tomllib.loads(f"parallel = {dims.setting}")
        tables["optimizer"]["batch"] = dims.dp
        assert make_layout(TrainPlan.from_dict(tables), dims.world_size) == dims
    short = plan(data={"context": 16, "segments": 8, "packing": "stream"})
    refused = rank_of(short, build_config(short), ParallelDims(cp=4)).error
    assert refused is not None and "the 2 tokens of the shortest of 8 segments" in refused
    planned = plan(data={"segments": 4, "segment_gradient": "kept"})
    assert '"cut"' in str(
        rank_of(planned, build_config(planned), ParallelDims(dp_replicate=2)).error
    )
    routed = plan(model={"recipe": "mixture_of_memories"})
    message = rank_of(routed, build_config(routed), ParallelDims(cp=2)).error
    assert message is not None and "routes tokens to memories" in message


@pytest.mark.parametrize(
    ("devices", "per_node", "nodes", "each"),
    [
        (7, 4, 7, 1),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in ((8, 6, 2, 4), (12, 8, 2, 6), (6, 8, 1, 6))
        ),
        pytest.param(16, 8, 2, 8, marks=pytest.mark.slow),
    ],
)
def test_the_launch_starts_as_many_processes_as_the_mesh_has(
    devices: int, per_node: int, nodes: int, each: int
) -> None:
    run = plan(optimizer={"batch": devices})
    config = build_config(run)
    smallest = min(
        rank_of(run, config, ParallelDims(**{name: devices})).total
        for name in ("dp_replicate", "dp_shard")
    )
    options: dict[str, Any] = {"devices": devices, "memory": int(smallest / 0.9) + 1}
    result = estimate(run, config, per_node=per_node, **options)
    assert result.smallest is not None and result.launch is not None
    assert result.smallest.dims.world_size == devices
    location = "--standalone" if nodes == 1 else f"--nnodes {nodes}"
    assert f"torchrun {location} --nproc-per-node {each} " in result.launch[1]


def parsed(command: str) -> tuple[int, int, dict[str, Any]]:
    """Nodes, processes of each, and the arguments of `recollect train`, by the real parsers."""
    program, *words = shlex.split(command)
    nodes = processes = 1
    if program == "torchrun":
        launcher = get_args_parser().parse_args(words)
        assert launcher.module and launcher.training_script == "recollect.cli"
        assert launcher.standalone or launcher.rdzv_endpoint
        nodes, processes = parse_min_max_nnodes(launcher.nnodes)[1], int(launcher.nproc_per_node)
        words = launcher.training_script_args
    else:
        assert program == "recollect"
    commands: Any = typer.main.get_command(build())
    name, train, rest = commands.resolve_command(typer.Context(commands), words)
    assert name == "train"
    return nodes, processes, train.make_context("train", rest).params


@pytest.mark.parametrize(
    ("devices", "per_node", "nodes", "processes"),
    [
        (1, 8, 1, 1),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in [(8, 8, 1, 8), (12, 8, 2, 6)]),
        (16, 8, 2, 8),
    ],
)
def test_launch_uses_all_devices(
    tmp_path: Path, devices: int, per_node: int, nodes: int, processes: int
) -> None:
    """The printed line parses with torchrun and `train`, and `train` divides the run as planned."""
    file = tmp_path / "my run.toml"
    # Rows of two tokens and one head leave few meshes to count.
    run = plan(model={"heads": 1}, data={"context": 2}, optimizer={"batch": 48})
    options: dict[str, Any] = {"devices": devices, "per_node": per_node, "file": str(file)}
    estimated = estimate(run, build_config(run), memory=2**40, **options)
    assert estimated.smallest is not None and estimated.smallest.dims.world_size == 1
    assert estimated.launch is not None
    line, command = estimated.launch
    assert parsed(command)[:2] == (nodes, processes)
    assert parsed(command)[2]["config"] == file
    tables = run.to_dict()
    tables["run"] |= tomllib.loads(line)
    assert make_layout(TrainPlan.from_dict(tables), nodes * processes).world_size == devices


def test_a_launch_of_fewer_devices_is_explained(tmp_path: Path) -> None:
    """A batch of 4 rows is shared by 4 devices and not by 5, and a named device by one."""
    file = tmp_path / "run.toml"
    lines = ["[model]", "width = 32", "depth = 1", "heads = 1", "[data]", 'train = ["text.txt"]']
    lines += ["context = 2", "[optimizer]", "steps = 5", "batch = 4"]
    file.write_text("\n".join(lines))
    page = CliRunner().invoke(build(), ["plan", str(file), "--devices", "5"]).output
    assert "largest     ddp 4: " in page and "no more of the 5 devices can share this run" in page
    assert "--nproc-per-node 4 " in page
    file.write_text("\n".join([*lines, "[run]", 'device = "cuda:1"']))
    page = CliRunner().invoke(build(), ["plan", str(file), "--devices", "2"]).output
    assert "device 'cuda:1' is one device, and each of these 2 processes takes its own" in page
    assert f"launch      recollect train {file}" in page


def test_the_assumptions_of_the_time_are_marked(tmp_path: Path) -> None:
    """The assumed fraction of the peak is not a measurement, and a CPU has no stated peak."""
    file = tmp_path / "run.toml"
    lines = ["[model]", "width = 32", "depth = 1", "heads = 2", "[data]", 'train = ["text.txt"]']
    lines += ["context = 64", "[optimizer]", "steps = 5", "batch = 4"]
    file.write_text("\n".join(lines))
    page = CliRunner().invoke(build(), ["plan", str(file)]).output
    assert "0.4 of it (--share), an assumption that no run has confirmed" in page
    page = CliRunner().invoke(build(), ["plan", str(file), "--share", "0.3"]).output
    assert "0.3 of it (--share)\n" in page
    file.write_text("\n".join([*lines, "[run]", 'device = "cpu"']))
    page = CliRunner().invoke(build(), ["plan", str(file)]).output
    assert "time        no estimate, because [run] device is a CPU" in page
    assert "TFLOP/s" not in page and "no run has confirmed" not in page
    data = CliRunner().invoke(build(), ["plan", str(file), "--json"]).output
    assert json.loads(data)["seconds"] is None


def test_mesh_that_an_old_torch_gathers_wrongly_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the check, torch 2.9.0 is off by 6, for a tolerance of 1e-5."""
    both, tensor = ({"parallel": {"tensor": 2, **more}} for more in ({"data": 2}, {}))
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    assert make_layout(plan(run=both), 4).tp == 2
    monkeypatch.setattr(torch, "__version__", "2.9.0+cpu")
    with pytest.raises(ValueError, match=r"torch 2\.9\.0\+cpu gathers weights wrongly"):
        make_layout(plan(run=both), 4)
    assert make_layout(plan(run=tensor), 2).tp == 2


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_invalid_peak_is_refused(number: float) -> None:
    run = plan()
    with pytest.raises(ValueError, match="peak_flops must be at least 1, and finite, not"):
        estimate(run, build_config(run), peak_flops=number)


# A condition on a number, and a shape that depends on numbers.
@pytest.mark.parametrize("looked", ["(error > 9).any()", "len(error[error > 9])"])
def test_member_that_reads_values_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked: str
) -> None:
    monkeypatch.setattr(member, "_REGISTRY", dict(member._REGISTRY))
    monkeypatch.setattr(modules, "_imported", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "looking_biases", raising=False)
    (tmp_path / "looking_biases.py").write_text(LOOKING.format(looked=looked))
    (tmp_path / "mine.toml").write_text('[bias]\nmember = "Looking"\n')
    file = tmp_path / "run.toml"
    lines = ['import = ["looking_biases"]', "[model]", f'recipe = "{tmp_path / "mine.toml"}"']
    lines += ["width = 32", "depth = 1", "heads = 2", "[data]", 'train = ["text.txt"]']
    file.write_text("\n".join([*lines, "context = 8", "[optimizer]", "steps = 5", "batch = 16"]))
    refused = CliRunner().invoke(build(), ["plan", str(file)])
    assert refused.exit_code == 2, refused.output
    assert "cannot be estimated: a member of it reads values" in refused.output
    assert "recipe 'mine'" in refused.output


@pytest.mark.parametrize(
    ("code", "stderr", "words"),
    [(-9, "", "-9: no error message"), (1, "a\nOSError: full\n", "1: OSError: full")],
)
def test_case_whose_process_dies_is_reported(
    monkeypatch: pytest.MonkeyPatch, code: int, stderr: str, words: str
) -> None:
    def dies(*args: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], code, stdout="", stderr=stderr)

    monkeypatch.setattr(subprocess, "run", dies)
    with pytest.raises(ValueError, match=f"^titans: its process ended with {words}$"):
        measure(["titans"])


@pytest.mark.parametrize("width", [60, 80, 120])
def test_table_cells_are_not_truncated(width: int) -> None:
    names = ("parameters", "gradients", "optimizer", "activations", "logits", "communicated")
    candidates = [ParallelDims(dp_replicate=64), ParallelDims(dp_shard=64)]
    candidates += [ParallelDims(dp_shard=64 // n, tp=n) for n in (2, 4, 8)]
    candidates += [ParallelDims(dp_shard=64 // n, cp=n) for n in (2, 4, 8)]
    ranks = [
        RankMemory(dims=dims, rows=i, parts=dict.fromkeys(names, 1023 * 2**30 + 7 * i))
        for i, dims in enumerate(candidates)
    ]
    page = Console(width=width, file=io.StringIO())
    for table in plan_command._tables(ranks, 80 * 10**9, width):
        table.print(page)
    text = page.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    rows = [line.split() for line in text.splitlines()]
    totals = [
        " ".join(pair) for row in rows if row[:2] == ["in", "all"] for pair in _pairs(row[2:])
    ]
    assert totals == [format_si(rank.total, "B") for rank in ranks]
    assert text.count("1023 GiB") == len(names) * len(ranks)
    for word in (word for dims in candidates for word in dims.degrees.split(" × ")):
        assert word in text
    assert all(name in text for name in names)


def _pairs(words: list[str]) -> list[list[str]]:
    return [words[i : i + 2] for i in range(0, len(words), 2)]


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    lines = ["[model]", "width = 32", "depth = 1", "heads = 2", "[data]", 'train = ["text.txt"]']
    file.write_text("\n".join([*lines, "context = 64", "[optimizer]", "steps = 5", "batch = 16"]))
    result = CliRunner().invoke(build(), ["plan", str(file), "--devices", "2", "--memory", "1GB"])
    assert result.exit_code == 0, result.output
    for word in ("parameters", "FLOP per token", "each of 2 devices", "smallest", "launch"):
        assert word in result.output
    for word in ("an H100's in dense bfloat16 (--peak for another", "multiplies in float32"):
        assert word in result.output
    other = CliRunner().invoke(build(), ["plan", str(file), "--peak", "60"]).output
    assert "60 TFLOP/s (--peak)" in other and "H100" not in other
    command = ["plan", str(file), "--devices", "2", "--memory", "6MiB", "--json"]
    data = json.loads(CliRunner().invoke(build(), command).output)
    assert data["memory"] == 6 * 2**20 and data["smallest"]["fits"]
    assert data["launch"][1].endswith(f"--module recollect.cli train {file}")
    for options, words in (
        (["--memory", "80XB"], "--memory must be a size with its unit, such as 80GB"),
        (["--memory", "8"], "--memory must be a size with its unit, such as 8GB or 8GiB, not '8'"),
        (["--devices", "0"], "Invalid value for '--devices'"),
        (["--share", "1.5"], "must be above 0 and at most 1"),
        (["--peak", "inf"], "must be above 0 and at most 1e+09"),
    ):
        refused = CliRunner().invoke(build(), ["plan", str(file), *options])
        assert refused.exit_code == 2 and words in refused.output
