"""How processes share a model and its rows: so many read other rows, so many divide each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["Layout", "layout_of"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Processes in a grid: data × tensor.

    Attributes:
        data: groups that read different rows of a step.
        tensor: processes of a group, among which layers are divided by heads.
        shards: whether the groups share the weights too (FSDP2), or each holds them (DDP).
    """

    data: int = 1
    tensor: int = 1
    shards: bool = False

    @property
    def processes(self) -> int:
        """All of them."""
        return self.data * self.tensor

    @property
    def divides(self) -> bool:
        """Whether a process holds a part of the weights only."""
        return self.tensor > 1 or (self.shards and self.data > 1)

    @property
    def holders(self) -> int:
        """Processes that the weights are shared among."""
        return self.tensor * (self.data if self.shards else 1)

    def rows(self, batch: int) -> int:
        """Rows of a batch that one process reads.

        Raises:
            ValueError: the batch cannot be shared equally.
        """
        if batch % self.data:
            raise ValueError(
                f"[optimizer] batch = {batch} is what all processes read together, and {self.data} "
                f"groups of them cannot share it equally: take a multiple of {self.data}"
            )
        return batch // self.data

    def mesh(self, device_type: str) -> DeviceMesh:
        """The grid as torch has it, with the dimensions ``"data"`` and ``"tensor"``.

        Args:
            device_type: ``"cpu"`` or ``"cuda"``.
        """
        names = ("data", "tensor")
        return init_device_mesh(device_type, (self.data, self.tensor), mesh_dim_names=names)

    def __str__(self) -> str:
        """In words, as a run says it."""
        if self.processes == 1:
            return "1 process"
        how = "FSDP2, data" if self.shards else "DDP, data"
        parts = [f"{how} {self.data}"] if self.data > 1 else []
        parts += [f"tensor {self.tensor}"] if self.tensor > 1 else []
        return f"{self.processes} processes: {' × '.join(parts)}"


def layout_of(parallel: str | Mapping[str, int], processes: int) -> Layout:
    """The layout that ``[run] parallel`` asks for, of processes that are there.

    Args:
        parallel: ``"ddp"``, ``"fsdp"``, or the sizes of a mesh.
        processes: that a launcher started.

    Raises:
        ValueError: sizes that do not multiply up to them.
    """
    if isinstance(parallel, str):
        return Layout(data=processes, shards=parallel == "fsdp")
    found = Layout(data=parallel.get("data", 1), tensor=parallel.get("tensor", 1), shards=True)
    if found.processes != processes:
        sizes = " × ".join(f"{name} {size}" for name, size in parallel.items())
        raise ValueError(
            f"[run] parallel asks for {sizes} = {found.processes} processes, and {processes} "
            f"{'was' if processes == 1 else 'were'} started: start {found.processes} (torchrun "
            f"--nproc-per-node {found.processes}), or change the sizes"
        )
    return found
