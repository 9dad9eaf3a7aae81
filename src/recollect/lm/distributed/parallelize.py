"""Division of a model among the processes of a run.

The model is divided before the Trainer receives it. Sharding by the Trainer and Accelerate needs a
separate configuration and falls back to replicas on a CPU. See docs/design/training.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recollect.lm.distributed.fsdp import apply_fsdp
from recollect.lm.distributed.head_sharding import ShardSpec, model_shard_specs
from recollect.lm.distributed.parallel_dims import ParallelDims
from recollect.lm.distributed.tensor_parallel import apply_tensor_parallel, check_heads
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.model import RecollectForCausalLM
from recollect.parallel.context_parallel import ContextParallel, context
from recollect.parallel.models import check_model

__all__ = ["Sharding", "check_divisible", "parallelize"]


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a model is divided among processes."""

    layout: ParallelDims
    index: int  # data group of this process
    cuts: Mapping[str, ShardSpec]  # weights that tensor parallelism divides, by name
    # Processes that read parts of the same rows. The model is still called with whole rows.
    context_parallel: ContextParallel | None = None


def check_divisible(model: RecollectForCausalLM, layout: ParallelDims) -> None:
    """Raise `ValueError` if a layout cannot divide the heads, channels or rows of a model."""
    if layout.is_sharded and not isinstance(model.config, RecollectConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"[run] parallel divides models of recollect, and {type(model).__name__} is another "
            "decoder: use parallel = 'ddp'"
        )
    if layout.tp > 1:
        check_heads(model, layout.tp)
    if layout.cp > 1:
        try:
            check_model(model)
        except ValueError as error:
            raise ValueError(f"[run] parallel: context = {layout.cp}: {error}") from error


def parallelize(
    model: RecollectForCausalLM,  # equal on all processes
    layout: ParallelDims,
    device_type: str,
    *,
    bf16: bool = False,  # as in `apply_fsdp`
) -> Sharding:
    """Divide a model in place as a layout describes; replicas (DDP) are left to the Trainer."""
    cuts = model_shard_specs(model)
    if not layout.is_sharded:
        return Sharding(layout=layout, index=0, cuts=cuts)
    weight_mesh, token_mesh = layout.weight_mesh(device_type), layout.token_mesh(device_type)
    if layout.tp > 1:
        apply_tensor_parallel(model, weight_mesh["tp"])
    if layout.fsdp > 1:
        apply_fsdp(model, weight_mesh["fsdp"], bf16=bf16)
    context_parallel = None
    if layout.cp > 1:
        context_parallel = context(
            model, token_mesh["cp"], gradient_reduction="mean", shard_inputs=True
        )
    return Sharding(
        layout=layout,
        index=token_mesh.get_local_rank("dp"),
        cuts=cuts,
        context_parallel=context_parallel,
    )
