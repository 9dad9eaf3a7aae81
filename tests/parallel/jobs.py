"""Jobs of the processes of a test: steps of a model by hand, runs, refused commands."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from tests.lm.runs import Recorder
from tests.parallel import saving
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from recollect.blocks import MemoryAsContext, MemoryAsGate, Sequential
from recollect.lm import RecollectConfig, RecollectForCausalLM, parameter_groups
from recollect.lm.distributed.checkpoints import gather_weights
from recollect.lm.distributed.parallel_dims import ParallelDims
from recollect.lm.distributed.parallelize import Sharding, parallelize
from recollect.lm.distributed.processes import ProcessEnded, init_distributed
from recollect.lm.memory_estimate import flops
from recollect.lm.training.plan import TrainPlan
from recollect.lm.training.train import train
from recollect.lm.training.trainer import RecollectTrainer

ROWS, STEPS, VOCAB, CLIP = 4, 3, 32, 0.5
flops._MATRIX_SIZE = 256  # a small product as the matmul ceiling of runs, as in `tests/conftest.py`
LAYOUTS = {
    "ddp": ParallelDims(dp_replicate=2),
    "fsdp": ParallelDims(dp_shard=2),
    "tensor": ParallelDims(tp=2),
    "both": ParallelDims(dp_shard=2, tp=2),
    "context": ParallelDims(cp=2),
    "data context": ParallelDims(dp_shard=2, cp=2),
    "context tensor": ParallelDims(cp=2, tp=2),
    "all": ParallelDims(dp_shard=2, cp=2, tp=2),
}
NAMES = [
    *("gated_delta_net", "mamba2", "titans", "atlas"),
    *("rls", "softmax_attention", "delta_former", "hybrid"),
]


def eps_of(name: str) -> float:
    """Return AdamW's eps: torch's default for the systems above.

    Other systems have weights whose first gradient is rounding, 1e-9 of a few in ten thousand. With
    1e-8 AdamW moves them by a fraction of lr that depends on rounding, also in one process.
    """
    return 1e-8 if name in NAMES else 1e-5


COMPOSED: dict[str, Any] = {
    "hybrid": ["gated_delta_net", "softmax_attention"],
    # Three segments of a row of twelve, with learned tokens before each.
    "as_context": MemoryAsContext("titans", "softmax_attention", segment=5, persistent=2),
    "chain": Sequential(
        MemoryAsGate("atlas", "softmax_attention", persistent=1), "gated_delta_net", persistent=2
    ),
}


def model(name: str, *, tie: bool = False) -> RecollectForCausalLM:
    torch.manual_seed(0)
    config = RecollectConfig.from_recipes(
        COMPOSED.get(name, name),
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2 if name in ("softmax_attention", "gated_delta_net") else None,
        tie_word_embeddings=tie,
    )
    return RecollectForCausalLM(config)


def steps(
    net: nn.Module,
    index: int,
    groups: int,
    losses: list[float],
    *,
    eps: float = 1e-8,
    norms: list[float] | None = None,
) -> torch.optim.AdamW:
    """Steps of AdamW on the rows of one group; gradients are clipped by their global norm."""
    draw = torch.Generator().manual_seed(1)
    inner = net.module if isinstance(net, DistributedDataParallel) else net
    optimizer = torch.optim.AdamW(parameter_groups(inner), lr=3e-4, betas=(0.9, 0.95), eps=eps)
    for _ in range(STEPS):
        rows = torch.randint(0, VOCAB, (ROWS, 12), generator=draw)
        rows = rows.chunk(groups)[index]
        loss = net(rows, labels=rows).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        total = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        assert losses or total > CLIP
        if norms is not None:
            norms.append(total)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return optimizer


def equality(
    names: list[str], layouts: list[str], types: Sequence[str] = ("float32", "float64")
) -> dict[str, Any]:
    """Return distances of losses and weights of a layout from one process, and a rank's size."""
    state = init_distributed()
    result: dict[str, Any] = {}
    for name in names:
        for dtype in (getattr(torch, kind) for kind in types):
            single, expected, sizes = model(name).to(dtype), list[float](), list[float]()
            steps(single, 0, 1, expected, eps=eps_of(name), norms=sizes)
            weights = dict(single.named_parameters())
            for which in layouts:
                layout, net, losses = LAYOUTS[which], model(name).to(dtype), list[float]()
                sharding, run = _spread(net, layout, state.process_index)
                norms = list[float]()
                optimizer = steps(
                    run, sharding.index, layout.dp, losses, eps=eps_of(name), norms=norms
                )
                mean = torch.tensor(losses, dtype=torch.float64)
                dist.all_reduce(mean)
                mean /= state.num_processes
                gathered = gather_weights(net, sharding.cuts, tp_size=layout.tp, keep=True)
                weight_error = max(
                    float((gathered[n] - weights[n]).detach().abs().max()) for n in gathered
                )
                far_loss = float((mean - torch.tensor(expected, dtype=torch.float64)).abs().max())
                result[f"{name} {which} {str(dtype)[6:]}"] = {
                    "loss": far_loss,
                    "norm": max(abs(a / b - 1) for a, b in zip(norms, sizes, strict=True)),
                    "weights": weight_error if gathered.keys() == weights.keys() else float("inf"),
                    "held": _sizes(net, optimizer),
                    "whole": sum(w.numel() for w in weights.values()),
                    "alike": _alike(net),
                }
    return result


def uneven() -> list[float]:
    """One rank reads documents that are too short for a gate's gradient, the other a long one."""
    state = init_distributed()
    rows = torch.randint(0, VOCAB, (2, 128), generator=torch.Generator().manual_seed(2))
    borders = [torch.arange(0, 129, 8), torch.tensor([0, 128])]
    single = model("atlas").double()
    for row, documents in zip(rows, borders, strict=True):
        (single(row[None], labels=row[None], cu_seqlens=documents).loss / 2).backward()
    net = model("atlas").double()
    index = parallelize(net, LAYOUTS["fsdp"], "cpu").index
    net(rows[index][None], labels=rows[index][None], cu_seqlens=borders[index]).loss.backward()
    gates, error = 0, 0.0
    for (name, one), weight in zip(single.named_parameters(), net.parameters(), strict=True):
        assert isinstance(weight.grad, DTensor) and one.grad is not None
        error = max(error, float((weight.grad.full_tensor() - one.grad).abs().max()))
        gates += "gates" in name and bool(one.grad.any())
    assert state.num_processes == 2
    return [error, gates]


def _spread(
    net: RecollectForCausalLM, layout: ParallelDims, rank: int
) -> tuple[Sharding, nn.Module]:
    sharding = parallelize(net, layout, "cpu")
    if layout.is_sharded:
        return sharding, net
    return Sharding(layout=layout, index=rank, cuts=sharding.cuts), DistributedDataParallel(
        net, find_unused_parameters=True
    )


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _sizes(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the number of weights, and of each of the optimizer's moments, of this process."""
    moments = [(k, v) for state in optimizer.state.values() for k, v in state.items()]
    return {"weights": sum(_local(w.detach()).numel() for w in net.parameters())} | {
        moment: sum(_local(v).numel() for k, v in moments if k == moment)
        for moment in ("exp_avg", "exp_avg_sq")
    }


def _alike(net: nn.Module) -> int:
    """Return the number of weights that all ranks of a tensor-parallel group have."""
    return sum(
        w.numel()
        for w in net.parameters()
        if isinstance(w, DTensor) and all(isinstance(p, Replicate) for p in w.placements)
    )


class Dying(RecollectTrainer):
    """The second process is killed during the sixth step.

    Attributes:
        writing: whether it is writing the checkpoint of the fourth step.
    """

    writing = False

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.state.global_step == 5 and self.args.process_index == 1:
            if not self.writing:
                self.async_save.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(*args, **kwargs)


def killed(tables: dict[str, Any], *, writing: bool = False) -> str:
    """Return the output of the process that survives."""
    Dying.writing = writing
    if writing and init_distributed().process_index == 1:
        saving.before_writing(4, threading.Event().wait)
    try:
        train(TrainPlan.from_dict(tables), trainer_class=Dying)
    except ProcessEnded as error:
        return str(error)
    return "nobody has noticed"


def runs(plans: dict[str, dict[str, Any]], resume: bool = False) -> dict[str, Any]:
    """Run several trainings, and return the output and sizes of each."""
    result: dict[str, Any] = {}
    withheld: list[str] = []
    no_sync = DistributedDataParallel.no_sync

    def counted(self: DistributedDataParallel) -> Any:
        withheld.append("")
        return no_sync(self)

    DistributedDataParallel.no_sync = counted  # type: ignore[method-assign]
    for name, tables in plans.items():
        events = Recorder()
        withheld.clear()
        built = train(
            TrainPlan.from_dict(copy.deepcopy(tables)),
            resume=resume,
            observer=events,
        )
        num_weights = sum(_local(w.detach()).numel() for w in built.model.parameters())
        result[name] = {
            "said": [*events.messages, *(summary["device"] for summary in events.summaries)],
            "loss": built.loss,
            "held": num_weights,
        }
        result[name] |= {"heldout": built.heldout_loss, "tokens": built.tokens}
        replaced = [n for n, module in built.model.named_modules() if "forward" in vars(module)]
        result[name] |= {"withheld": len(withheld), "forwards": replaced}
    return result


def refused(cases: dict[str, list[str]]) -> dict[str, Any]:
    """Return exit code, output and errors of a command per case; process r is in the folder r."""
    from typer.testing import CliRunner

    from recollect.cli import build

    os.chdir(os.environ["RANK"])
    actual: dict[str, Any] = {}
    for name, arguments in cases.items():
        result = CliRunner().invoke(build(), ["train", *arguments])
        actual[name] = [result.exit_code, result.stdout, result.stderr]
    os.chdir("..")
    return actual


def loaded(folder: str) -> dict[str, Any]:
    """Load a model in parts by transformers, with the plans of the model."""
    from transformers.distributed import DistributedConfig

    dist.init_process_group("gloo")
    rows = torch.arange(24).view(2, 12) % VOCAB
    full = RecollectForCausalLM.from_pretrained(folder)
    expected = full(rows).logits
    result: dict[str, Any] = {"whole": sum(w.numel() for w in full.parameters())}
    for name in ("fsdp_size", "tp_size"):
        sizes: Any = {name: 2}
        net = RecollectForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(**sizes)
        )
        with torch.no_grad():
            error = float((net(rows).logits - expected).abs().max())
        result[name] = [error, sum(_local(w.detach()).numel() for w in net.parameters())]
    return result
