"""Degrees of parallelism of a run, and the meshes of its processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["ParallelDims", "parse_parallel"]


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Degrees of parallelism, named as in torchtitan."""

    dp_replicate: int = 1  # ranks with all weights, which read different rows (DDP)
    dp_shard: int = 1  # groups that shard the weights and read different rows (FSDP2)
    cp: int = 1  # ranks of a group: they read segments of the same rows, and shard weights, too
    tp: int = 1  # ranks that read the same tokens and divide layers by heads

    def __post_init__(self) -> None:
        assert self.dp_replicate == 1 or not self.is_sharded, "replicas have all weights"

    @property
    def dp(self) -> int:
        """Number of groups that read different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Number of ranks that FSDP2 shards the weights over."""
        return self.dp_shard * self.cp

    @property
    def dp_cp_size(self) -> int:
        """Number of ranks that read different tokens."""
        return self.dp * self.cp

    @property
    def weight_shards(self) -> int:
        """Number of ranks that the weights are divided among."""
        return self.fsdp * self.tp

    @property
    def is_sharded(self) -> bool:
        """Whether a rank has only a part of the weights."""
        return self.weight_shards > 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp_cp_size * self.tp

    def local_batch_size(self, batch_size: int) -> int:
        """Return the rows per rank. Raise ValueError if the groups cannot share them equally."""
        if batch_size % self.dp:
            raise ValueError(
                f"[optimizer] batch = {batch_size} counts the sequences of all processes, and "
                f"{self.dp} groups of processes need a multiple of {self.dp}"
            )
        return batch_size // self.dp

    def token_mesh(self, device_type: str) -> DeviceMesh:
        """Return the ranks by the tokens that they read, with the axes ``dp``, ``cp``, ``tp``."""
        sizes = (self.dp, self.cp, self.tp)
        return init_device_mesh(device_type, sizes, mesh_dim_names=("dp", "cp", "tp"))

    def weight_mesh(self, device_type: str) -> DeviceMesh:
        """Return the ranks by the weights that they have, with the axes ``fsdp`` and ``tp``."""
        return init_device_mesh(device_type, (self.fsdp, self.tp), mesh_dim_names=("fsdp", "tp"))

    @property
    def setting(self) -> str:
        """Value of ``[run] parallel`` in TOML."""
        if self.cp == self.tp == 1:
            return '"fsdp"' if self.dp_shard > 1 else '"ddp"'
        sizes = {"data": self.dp_shard, "tensor": self.tp, "context": self.cp}
        return f"{{{', '.join(f'{name} = {size}' for name, size in sizes.items() if size > 1)}}}"

    @property
    def degrees(self) -> str:
        """Degrees above 1, such as ``"fsdp 4 × tensor 2"``."""
        sizes = {"ddp": self.dp_replicate, "fsdp": self.dp_shard, "tensor": self.tp}
        sizes["context"] = self.cp
        return " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)

    def __str__(self) -> str:
        count = self.world_size
        return "1 process" if count == 1 else f"{count} processes: {self.degrees}"


def parse_parallel(parallel: str | Mapping[str, int], world_size: int) -> ParallelDims:
    """Return the degrees that ``[run] parallel`` requests: ``"ddp"``, ``"fsdp"`` or sizes."""
    if isinstance(parallel, str):
        return ParallelDims(**{"dp_shard" if parallel == "fsdp" else "dp_replicate": world_size})
    names = {"data": "dp_shard", "context": "cp", "tensor": "tp"}
    dims = ParallelDims(**{names[name]: size for name, size in parallel.items()})
    if dims.world_size != world_size:
        sizes = " × ".join(f"{name} {size}" for name, size in parallel.items())
        raise ValueError(
            f"[run] parallel requests {sizes} = {dims.world_size} processes, and {world_size} "
            f"{'was' if world_size == 1 else 'were'} started: start {dims.world_size} (torchrun "
            f"--nproc-per-node {dims.world_size}), or change the sizes"
        )
    return dims
