"""Estimate of a run before it starts: memory per rank, FLOPs, time, and the launch command.

With P weights, of which embedding, head and last norm have P₀ and a block P_b, a rank of
R = data × tensor holds, in float32 (4 bytes) except for gathered weights:

=============  ===================================  =============================================
               ddp                                  fsdp, data × tensor
=============  ===================================  =============================================
parameters     P                                    P / R
gradients      P                                    P / R
optimizer      2 P (AdamW's two moments)            2 P / R
communicated   P, the buckets of the all-reduce     P₀ twice and three of the largest P_b, of
                                                    their 1 / tensor: gathered weights (one block
                                                    ahead) and gradients before they are reduced
activations    of its rows, by `footprint`          of its rows, with 1 / tensor of the heads
=============  ===================================  =============================================

Under tensor parallelism a rank has 1 / tensor of the heads, MLP channels and vocabulary. Its
activations are those of a model with so many heads and the full residual stream. ``context``
divides the tokens of a row. Weights are sharded as by ``fsdp``, and activations include the tensors
that layers gather or send (`along`). A batch is shared by all processes.
"""

from __future__ import annotations

import copy
import itertools
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from recollect.blocks.layers import layer_spec, memory_layers
from recollect.lm.data.tokenizers import byte_tokenizer, load_tokenizer
from recollect.lm.distributed.parallel_dims import ParallelDims
from recollect.lm.distributed.tensor_parallel import check_heads
from recollect.lm.memory_estimate.flops import memory_costs, model_flops
from recollect.lm.memory_estimate.step_memory import MemoryModel, fit_memory_model
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.counts import meta_model, parameter_count
from recollect.lm.training.arguments import check_layout, resolve_device
from recollect.lm.training.plan import TrainPlan
from recollect.lm.training.setup import model_config
from recollect.parallel.models import check_model

__all__ = [
    "DEFAULT_MFU",
    "USABLE_FRACTION",
    "Estimate",
    "RankEstimator",
    "RankMemory",
    "build_config",
    "estimate",
]

USABLE_FRACTION = 0.9
"""Fraction of a device's memory that a run may fill. Driver and allocator need the rest."""

DEFAULT_MFU = 0.4
"""Assumed fraction of a device's stated FLOP/s that a run reaches. No run has confirmed it."""

_DEGREES = (2, 4, 8)  # of tensor and context parallelism


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank at the peak of a step.

    Attributes:
        dims: degrees of parallelism of the run.
        rows: number of sequences that the rank reads at once.
        parts: bytes by purpose; empty if the run cannot be shared with these degrees.
        error: reason why the run cannot be shared with these degrees.
    """

    dims: ParallelDims
    rows: int = 0
    parts: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    def fits_in(self, memory: int) -> bool:
        """Return whether a device with ``memory`` bytes holds the rank."""
        return self.error is None and self.total <= USABLE_FRACTION * memory


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimate of a run.

    Attributes:
        parameters: number of trained parameters.
        state: bytes of the states of all layers, for one sequence.
        flops: FLOPs of training on one token.
        tokens: number of tokens of the run.
        seconds: duration of the run on ``devices`` devices, or ``None`` on a CPU.
        devices: number of devices.
        memory: bytes per device.
        peak_flops: FLOP/s per device.
        mfu: fraction of ``peak_flops`` that the run reaches.
        ranks: memory per rank for each candidate of the degrees of parallelism.
        smallest: candidate with the fewest devices that fits, or ``None``.
        largest: candidate with the most devices that fits, or ``None``.
        launch: line of ``run.toml`` and command that start the run on the devices of ``largest``.
    """

    parameters: int
    state: int
    flops: float
    tokens: int
    seconds: float | None
    devices: int
    memory: int
    peak_flops: float
    mfu: float
    ranks: tuple[RankMemory, ...]
    smallest: RankMemory | None
    largest: RankMemory | None
    launch: tuple[str, str] | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""

        def plain(rank: RankMemory | None) -> dict[str, Any] | None:
            if rank is None:
                return None
            return asdict(rank) | {"total": rank.total, "fits": rank.fits_in(self.memory)}

        return asdict(self) | {
            "ranks": [plain(rank) for rank in self.ranks],
            "smallest": plain(self.smallest),
            "largest": plain(self.largest),
        }


def build_config(plan: TrainPlan) -> RecollectConfig:
    """Return the configuration of a run's model, without reading its texts.

    Args:
        plan: the run. A tokenizer that has yet to be trained counts with its largest vocabulary.

    Raises:
        ValueError: an invalid recipe, size or tokenizer.
    """
    if plan.model.start is not None:
        return RecollectConfig.from_pretrained(plan.model.start)
    if plan.data.tokenizer in ("bytes", "bpe"):
        tokenizer = byte_tokenizer()
        if plan.data.tokenizer == "bpe":
            tokenizer.add_tokens([f"<{i}>" for i in range(plan.data.vocab - len(tokenizer))])
    else:
        tokenizer = load_tokenizer(plan.data.tokenizer)
    return model_config(plan.model, tokenizer)


def estimate(
    plan: TrainPlan,
    config: RecollectConfig,
    *,
    devices: int = 1,
    memory: int = 80 * 2**30,
    peak_flops: float = 989e12,
    mfu: float = DEFAULT_MFU,
    file: str = "run.toml",
    per_node: int = 8,
) -> Estimate:
    """Estimate memory, FLOPs, time and launch of a run. Nothing is allocated or started.

    Args:
        plan: the run.
        config: configuration of its model.
        devices: number of devices, ≥ 1.
        memory: bytes per device.
        peak_flops: FLOP/s per device; 989e12 is an H100's for dense bfloat16, by its data sheet.
        mfu: fraction of ``peak_flops`` that the run reaches, in (0, 1]; an assumption by default.
        file: file of the plan, for the launch command.
        per_node: number of devices per node.

    Raises:
        ValueError: a number out of range, or a recipe whose memory cannot be measured.
    """
    numbers = {"devices": devices, "memory": memory, "peak_flops": peak_flops, "per_node": per_node}
    for name, number in numbers.items():
        if not 1 <= number < math.inf:
            raise ValueError(f"{name} must be at least 1, and finite, not {number}")
    if not 0 < mfu <= 1:
        raise ValueError(f"mfu must be above 0 and at most 1, not {mfu}")
    estimator = RankEstimator(plan, config)

    def first_fit(sizes: Iterable[int]) -> RankMemory | None:
        ranks = map(estimator.rank, itertools.chain.from_iterable(map(_candidate_dims, sizes)))
        return next((rank for rank in ranks if rank.fits_in(memory)), None)

    sizes = _candidate_sizes(plan.optimizer.batch, devices)
    smallest, largest = first_fit(sizes), first_fit(reversed(sizes))
    flops = model_flops(config, context=plan.data.context)
    tokens = plan.steps * plan.tokens_per_step
    on_cpu = plan.run.device is not None and plan.run.device.partition(":")[0] == "cpu"
    return Estimate(
        parameters=parameter_count(config),
        state=memory_costs(estimator.model, tokens=plan.data.context)[1],
        flops=flops,
        tokens=tokens,
        seconds=None if on_cpu else tokens * flops / (devices * peak_flops * mfu),
        devices=devices,
        memory=memory,
        peak_flops=peak_flops,
        mfu=mfu,
        ranks=tuple(map(estimator.rank, _candidate_dims(devices))),
        smallest=smallest,
        largest=largest,
        launch=None if largest is None else _launch_command(largest.dims, file, per_node),
    )


def _candidate_dims(devices: int) -> Iterator[ParallelDims]:
    """Yield degrees of parallelism for all devices, the simplest first."""
    yield ParallelDims(dp_replicate=devices)
    if devices > 1:
        yield ParallelDims(dp_shard=devices)
        for name in ("tp", "cp"):
            for degree in _DEGREES:
                if devices % degree == 0:
                    yield ParallelDims(dp_shard=devices // degree, **{name: degree})


def _candidate_sizes(batch_size: int, devices: int) -> list[int]:
    """Return every number of devices, in order, whose groups can share a batch equally."""
    groups = [n for n in range(1, min(batch_size, devices) + 1) if batch_size % n == 0]
    sizes = {n * degree for n in groups for degree in (1, *_DEGREES)}
    return sorted(size for size in sizes if size <= devices)


class RankEstimator:
    """Memory per rank of a run."""

    def __init__(self, plan: TrainPlan, config: RecollectConfig) -> None:
        self.plan, self.config, self.model = plan, config, meta_model(config)
        self._memory_models: dict[tuple[int, int], MemoryModel] = {}

    def rank(self, dims: ParallelDims) -> RankMemory:
        """Return the memory at the peak of a step. Raise ValueError if it cannot be measured."""
        plan, run = self.plan, self.plan.run
        try:
            rows = self._check(dims)
            config = self._rank_config(dims.tp)
        except ValueError as error:
            return RankMemory(dims=dims, error=str(error))
        tokens = -(-plan.data.segment_length // dims.cp)
        if (dims.tp, dims.cp) not in self._memory_models:
            self._memory_models[dims.tp, dims.cp] = fit_memory_model(
                config, tokens=tokens, bf16=run.bf16, loss_chunk=run.loss_chunk, context=dims.cp
            )
        model = self._memory_models[dims.tp, dims.cp]
        peak, gradients = model.peak(rows, tokens, checkpointing=run.checkpointing)
        chunk = min(run.loss_chunk or rows * tokens, rows * tokens)
        logits = min(3 * 4 * chunk * config.vocab_size, peak)
        activations, weights = max(0, peak - gradients - logits), model.weights // dims.fsdp
        if plan.optimizer.accumulate > 1:
            gradients = model.weights
        parts = {
            "parameters": weights,
            "gradients": gradients // dims.fsdp,
            "optimizer": 2 * weights,
            "activations": activations,
            "logits": logits,
        }
        if dims.world_size > 1:
            gathered = 2 * model.root_weights + 3 * max(model.block_weights)
            gathered = gathered // 2 if run.bf16 else gathered
            parts["communicated"] = gathered if dims.fsdp > 1 else model.weights
        if plan.data.segments > 1:
            count = plan.data.segments if plan.data.segment_gradient == "kept" else 2
            state = memory_costs(meta_model(config), tokens=plan.data.segment_length, rows=rows)[1]
            parts["states"] = count * state
        return RankMemory(dims=dims, rows=rows, parts=parts)

    def _check(self, dims: ParallelDims) -> int:
        """Return the rows per rank. Raise ValueError if `recollect train` refuses the degrees."""
        if dims.world_size > 1:
            resolve_device(self.plan, dims.world_size)
        rows = dims.local_batch_size(self.plan.optimizer.batch)
        check_layout(self.plan, dims)
        if dims.tp > 1:
            check_heads(self.model, dims.tp)
        if dims.cp > 1:
            check_model(self.model)
        return rows

    def _rank_config(self, tp: int) -> RecollectConfig:
        """Return the model of one tensor-parallel rank."""
        if tp == 1:
            return self.config
        layers = memory_layers(self.model, "estimate").values()
        head_sizes = {(layer_spec(x).head_dim, layer_spec(x).value_dim) for x in layers}
        if len(head_sizes) > 1:
            raise ValueError("layers with different head sizes are not estimated under tensor")
        config = copy.deepcopy(self.config)
        ((config.head_dim, config.value_dim),) = head_sizes
        for sizes in (vars(config), *config.recipe_sizes.values()):
            for name in sizes.keys() & {"num_attention_heads", "num_key_value_heads"}:
                sizes[name] //= tp
        config.intermediate_size //= tp
        config.vocab_size = -(-config.vocab_size // tp)
        config.pad_token_id = config.bos_token_id = config.eos_token_id = None
        return config


def _launch_command(dims: ParallelDims, file: str, per_node: int) -> tuple[str, str]:
    """Return a line of ``[run]`` and the command. Every node starts equally many processes."""
    train = f"train {shlex.quote(file)}"
    if dims.world_size == 1:
        return "", f"recollect {train}"
    limit = min(dims.world_size, per_node)
    processes = next(n for n in range(limit, 0, -1) if dims.world_size % n == 0)
    nodes = dims.world_size // processes
    options = "--standalone" if nodes == 1 else f"--nnodes {nodes}"
    options += f" --nproc-per-node {processes}"
    if nodes > 1:
        options += " --rdzv-backend c10d --rdzv-endpoint $HOST:29500"
    return f"parallel = {dims.setting}", f"torchrun {options} --module recollect.cli {train}"
