"""A run on devices that nobody has rented yet: memory per rank, operations, time, and the launch.

With P weights, of which the embedding, the head and the last norm are the root's P₀ and a block has
P_b, a rank of R = data × tensor holds, in float32 (4 bytes) but for what is gathered:

=============  ===================================  =============================================
               ddp                                  fsdp, data × tensor
=============  ===================================  =============================================
parameters     P                                    P / R
gradients      P                                    P / R
optimizer      2 P (AdamW's two moments)            2 P / R
communicated   P, the buckets that are all-reduced  P₀ twice and three of the largest P_b, of
                                                    their 1 / tensor: gathered weights (one block
                                                    ahead) and gradients that are not shared yet
activations    of its rows, as `footprint` counts   the same, of 1 / tensor of the heads
=============  ===================================  =============================================

Under tensor parallelism a rank has 1 / tensor of the heads, of the MLP's channels and of the
vocabulary, and the stream between layers whole: its activations are those of a model of so many
heads. ``context`` divides the tokens of a row: each rank then holds what ``fsdp`` does, and among
activations what its layers gather or hand over (`along`). A batch is what all processes read.
"""

from __future__ import annotations

import copy
import itertools
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from recollect.blocks.compositions import MixtureOfMemories
from recollect.blocks.cost import cost
from recollect.blocks.mixers import Mixer, RecipeMixer
from recollect.lm.data.tokenizers import byte_tokenizer, load_tokenizer
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.counts import parameter_count
from recollect.lm.planning.flops import model_flops
from recollect.lm.planning.footprint import SHORT, Counts, count
from recollect.lm.sharding.layout import Layout
from recollect.lm.training.arguments import check_layout, device_of
from recollect.lm.training.plan import TrainPlan
from recollect.lm.training.prepare import model_config

__all__ = ["MARGIN", "SHARE", "Estimate", "Rank", "Way", "config_of", "estimate", "rank_of"]

MARGIN = 0.9
"""Share of a device's memory that may be filled: the rest is its driver's, and its allocator's."""

SHARE = 0.4
"""Assumed share of a device's stated FLOP/s that a run reaches; no run has confirmed it."""

_PER_NODE = 8
_PARTS = (2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How ranks share a run.

    Attributes:
        data: groups that read other rows. tensor: ranks that divide the heads of a group.
        context: ranks that divide the tokens of a row. shards: whether groups share the weights.
    """

    data: int = 1
    tensor: int = 1
    context: int = 1
    shards: bool = False

    @property
    def devices(self) -> int:
        """All of them."""
        return self.data * self.tensor * self.context

    @property
    def parallel(self) -> str:
        """What ``[run] parallel`` says."""
        if self.tensor == self.context == 1:
            return '"fsdp"' if self.shards else '"ddp"'
        sizes = {"data": self.data, "tensor": self.tensor, "context": self.context}
        said = ", ".join(f"{name} = {n}" for name, n in sizes.items() if n > 1)
        return f"{{{said}}}"

    def __str__(self) -> str:
        if self.devices == 1:
            return "one device"
        names = {"fsdp" if self.shards else "ddp": self.data, "tensor": self.tensor}
        names["context"] = self.context
        return " × ".join(f"{name} {n}" for name, n in names.items() if n > 1)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Bytes that one rank holds at its fullest moment.

    Attributes:
        way: how ranks share the run. rows: that it reads at once. parts: bytes by what they are.
        refused: why the run cannot be shared so; there are no parts then.
    """

    way: Way
    rows: int = 0
    parts: Mapping[str, int] = field(default_factory=dict)
    refused: str | None = None

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.parts.values())

    def fits(self, memory: int) -> bool:
        """Whether a device of so many bytes holds them."""
        return self.refused is None and self.total <= MARGIN * memory


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A run on paper.

    Attributes:
        parameters: trained numbers. state: bytes of all layers' states, of one row.
        flops: of training on one token. tokens: of the whole run; seconds: that it takes on
            ``devices``, at ``share`` of ``peak``; ``None`` for a run on a CPU.
        devices, memory, peak, share: what it is planned for: how many, bytes of each, FLOP/s of
            each, and the share of them that is reached.
        ranks: the ways to share it. smallest: the fewest devices that hold it, if any do.
        largest: the most devices, up to ``devices``, that can share it. launch: a line of
            ``run.toml`` and the command that starts as many processes as ``largest`` has devices.
    """

    parameters: int
    state: int
    flops: float
    tokens: int
    seconds: float | None
    devices: int
    memory: int
    peak: float
    share: float
    ranks: tuple[Rank, ...]
    smallest: Rank | None
    largest: Rank | None
    launch: tuple[str, str] | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""

        def plain(rank: Rank) -> dict[str, Any]:
            way = rank.way
            return {
                "way": str(way),
                "mesh": {"data": way.data, "tensor": way.tensor, "context": way.context},
                "shards": way.shards,
                "rows": rank.rows,
                "bytes": dict(rank.parts),
                "total": rank.total,
                "fits": rank.fits(self.memory),
                "refused": rank.refused,
            }

        numbers = ("parameters", "state", "flops", "tokens", "seconds", "devices", "memory")
        return {
            **{name: getattr(self, name) for name in (*numbers, "peak", "share")},
            "ranks": [plain(rank) for rank in self.ranks],
            "smallest": None if self.smallest is None else plain(self.smallest),
            "largest": None if self.largest is None else plain(self.largest),
            "launch": None if self.launch is None else list(self.launch),
        }


def config_of(plan: TrainPlan) -> RecollectConfig:
    """The configuration of a run's model; of its texts nothing is read.

    Args:
        plan: of the run. A tokenizer that is to be trained counts with the tokens it may have.

    Raises:
        ValueError: a recipe, sizes or a tokenizer that cannot be.
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
    peak: float = 989e12,
    share: float = SHARE,
    file: str = "run.toml",
    per_node: int = _PER_NODE,
) -> Estimate:
    """Return the memory, operations, time and launch of a run; nothing is allocated or started.

    Args:
        plan: of the run. config: of its model.
        devices: how many there are, ≥ 1. memory: bytes of each.
        peak: FLOP/s of each; 989e12 is what an H100 states for dense bfloat16.
        share: of ``peak`` that a run reaches, in (0, 1]; the default is an assumption.
        file: the plan's file, for the launch. per_node: devices of a machine.

    Raises:
        ValueError: a number out of range; a recipe that cannot be counted.
    """
    given = {"devices": devices, "memory": memory, "peak": peak, "per_node": per_node}
    for name, number in given.items():
        if not 1 <= number < math.inf:
            raise ValueError(f"{name} must be at least 1, and finite, not {number}")
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, not {share}")
    counted: dict[Any, Counts] = {}
    ranks = [rank_of(plan, config, way, counted=counted) for way in _ways(devices)]

    def first(sizes: Iterable[int]) -> Rank | None:
        layouts = itertools.chain.from_iterable(map(_ways, sizes))
        estimates = (rank_of(plan, config, layout, counted=counted) for layout in layouts)
        return next((rank for rank in estimates if rank.fits(memory)), None)

    sizes = _sizes(plan.optimizer.batch, devices)
    smallest, largest = first(sizes), first(reversed(sizes))
    flops = model_flops(config, context=plan.data.context)
    tokens = plan.steps * plan.tokens_per_step
    return Estimate(
        parameters=parameter_count(config),
        state=_state(config, plan.data.context, rows=1),
        flops=flops,
        tokens=tokens,
        seconds=None if _on_cpu(plan) else tokens * flops / (devices * peak * share),
        devices=devices,
        memory=memory,
        peak=peak,
        share=share,
        ranks=tuple(ranks),
        smallest=smallest,
        largest=largest,
        launch=None if largest is None else _launch(largest.way, file, per_node),
    )


def _on_cpu(plan: TrainPlan) -> bool:
    """Whether a plan names a CPU as its device."""
    return plan.run.device is not None and plan.run.device.partition(":")[0] == "cpu"


def _ways(devices: int) -> Iterator[Way]:
    """One of each kind, over all devices, the plainest first."""
    yield Way(data=devices)
    if devices > 1:
        yield Way(data=devices, shards=True)
        for parts in _PARTS:
            if devices % parts == 0:
                yield Way(data=devices // parts, tensor=parts, shards=True)
        for parts in _PARTS:
            if devices % parts == 0:
                yield Way(data=devices // parts, context=parts, shards=True)


def _sizes(batch: int, devices: int) -> list[int]:
    """Every number of devices, in order, whose groups can share a batch in some way."""
    groups = [n for n in range(1, min(batch, devices) + 1) if batch % n == 0]
    return sorted({n * parts for n in groups for parts in (1, *_PARTS) if n * parts <= devices})


def rank_of(
    plan: TrainPlan,
    config: RecollectConfig,
    way: Way,
    *,
    counted: dict[Any, Counts] | None = None,
) -> Rank:
    """What one rank holds at its fullest moment.

    Args:
        plan: of the run. config: of its model. way: how ranks share it.
        counted: what was counted before, which is added to.

    Raises:
        ValueError: a recipe that cannot be counted.
    """
    batch, tokens = plan.optimizer.batch, -(-plan.data.piece // way.context)
    if batch % way.data:
        reason = f"batch = {batch} is not a multiple of the {way.data} groups that read it"
        return Rank(way=way, refused=reason)
    rows = batch // way.data
    try:
        _check(plan, config, way)
        part = _divided(config, way.tensor)
    except ValueError as error:
        return Rank(way=way, refused=str(error))
    counted = {} if counted is None else counted
    short = min(tokens, SHORT)
    key = (way.tensor, way.context, short, tokens if plan.run.loss_chunk == 0 else 0)
    if key not in counted:
        bf16, chunk = plan.run.bf16, plan.run.loss_chunk
        counted[key] = count(part, tokens=tokens, bf16=bf16, loss_chunk=chunk, context=way.context)
    found = counted[key].at(rows, tokens)
    most, within = found.most(checkpointing=plan.run.checkpointing)
    shared = way.data * way.context if way.shards else 1
    weights = found.weights // shared
    chunk = min(plan.run.loss_chunk or rows * tokens, rows * tokens)
    logits = 3 * 4 * chunk * -(-config.vocab_size // way.tensor)
    logits = min(logits, most)
    gradients = found.weights if plan.optimizer.accumulate > 1 else within
    parts = {
        "parameters": weights,
        "gradients": gradients // shared,
        "optimizer": 2 * weights,
        "activations": max(0, most - within - logits),
        "logits": logits,
    }
    if way.devices > 1:
        item = 2 if plan.run.bf16 else 4
        largest = max(found.block_weights)
        gathered = (2 * found.root_weights + 3 * largest) * item // 4
        parts["communicated"] = gathered if way.shards and shared > 1 else found.weights
    if plan.data.segments > 1:
        kept = plan.data.segments if plan.data.segment_gradient == "kept" else 2
        parts["states"] = kept * _state(part, plan.data.piece, rows=rows)
    return Rank(way=way, rows=rows, parts=parts)


def _check(plan: TrainPlan, config: RecollectConfig, way: Way) -> None:
    """That `recollect train` runs a plan so.

    Raises:
        ValueError: it does not.
    """
    if way.devices > 1:
        device_of(plan, way.devices)
    shards = way.shards or way.context > 1
    check_layout(plan, Layout(data=way.data, context=way.context, tensor=way.tensor, shards=shards))
    every = [mixer for outermost, _ in config.mixed for mixer in _within(outermost)]
    if way.context > 1 and any(isinstance(mixer, MixtureOfMemories) for mixer in every):
        raise ValueError(
            "tokens that are routed to memories are balanced over whole rows, which context divides"
        )
    if way.tensor > 1 and any(
        isinstance(mixer, RecipeMixer) and mixer.options.persistent for mixer in every
    ):
        raise ValueError("a feed-forward memory has no heads that tensor could divide")


def _within(mixer: Mixer) -> Iterator[Mixer]:
    """A mixer and all that it is composed of."""
    yield mixer
    for child in mixer.children.values():
        yield from _within(child)


def _divided(config: RecollectConfig, tensor: int) -> RecollectConfig:
    """The model of one rank among those that divide the heads.

    Raises:
        ValueError: heads or channels that cannot be divided so.
    """
    if tensor == 1:
        return config
    sizes = {
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "mlp": config.intermediate_size,
    }
    for name, size in sizes.items():
        if size % tensor:
            raise ValueError(f"{name} = {size} is not a multiple of tensor = {tensor}")
    own = {leaf.options.key_dim for mixer, _ in config.mixed for leaf in mixer.leaves.values()}
    if config.head_dim is None and len(own) > 1:
        raise ValueError("recipes of several key sizes are not counted under tensor parallelism")
    part = copy.deepcopy(config)
    each = config.hidden_size // config.num_attention_heads
    part.value_dim = config.value_dim or config.head_dim or each
    part.head_dim = config.head_dim or own.pop() or each
    part.num_attention_heads //= tensor
    part.num_key_value_heads //= tensor
    part.intermediate_size //= tensor
    part.vocab_size = -(-config.vocab_size // tensor)
    part.pad_token_id = part.bos_token_id = part.eos_token_id = None
    return part


def _state(config: RecollectConfig, tokens: int, *, rows: int) -> int:
    """Bytes of the states of all layers."""
    heads, memories = config.num_attention_heads, config.num_key_value_heads
    each = config.hidden_size // heads
    total = 0
    for mixer, _ in config.mixed:
        key = next(iter(mixer.leaves.values())).options.key_dim
        sizes: dict[str, Any] = {"K": config.head_dim or key or each, "H": memories}
        sizes["V"] = config.value_dim or config.head_dim or each
        sizes |= {"G": max(1, heads // memories), "engine": config.engine}
        total += cost(mixer, T=tokens, B=rows, **sizes).state_bytes
    return total


def _launch(way: Way, file: str, per_node: int) -> tuple[str, str]:
    """Return a line of ``[run]`` and the command; every machine starts equally many processes."""
    train = f"train {shlex.quote(file)}"
    if way.devices == 1:
        return "", f"recollect {train}"
    most = min(way.devices, per_node)
    each = next(n for n in range(most, 0, -1) if way.devices % n == 0)
    nodes = way.devices // each
    where = f"--nproc-per-node {each}"
    if nodes > 1:
        where = f"--nnodes {nodes} {where} --rdzv-backend c10d --rdzv-endpoint $HOST:29500"
    else:
        where = f"--standalone {where}"
    return f"parallel = {way.parallel}", f"torchrun {where} --module recollect.cli {train}"
