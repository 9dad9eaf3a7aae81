"""How processes share a model and its rows: so many groups, columns of a row, parts of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["Layout", "layout_of"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Processes in a grid: data × context × tensor.

    Attributes:
        data: groups that read different rows of a step.
        context: processes of a group, each of which reads a segment of these rows.
        tensor: processes that read the same tokens, and divide layers by heads.
        shards: whether all that read other tokens share the weights too (FSDP2), or each holds them
            (DDP).
    """

    data: int = 1
    context: int = 1
    tensor: int = 1
    shards: bool = False

    def __post_init__(self) -> None:
        assert self.shards or self.context == 1, "segments of a row are read with shared weights"

    @property
    def processes(self) -> int:
        """All of them."""
        return self.readers * self.tensor

    @property
    def readers(self) -> int:
        """Those that read different tokens."""
        return self.data * self.context

    @property
    def divides(self) -> bool:
        """Whether a process holds a part of the weights only."""
        return self.tensor > 1 or (self.shards and self.readers > 1)

    @property
    def holders(self) -> int:
        """Processes that the weights are shared among."""
        return self.tensor * (self.readers if self.shards else 1)

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
        """The grid of tokens, with the dimensions ``"data"``, ``"context"`` and ``"tensor"``.

        Args:
            device_type: ``"cpu"`` or ``"cuda"``.
        """
        sizes = (self.data, self.context, self.tensor)
        return init_device_mesh(device_type, sizes, mesh_dim_names=("data", "context", "tensor"))

    def weights(self, device_type: str) -> DeviceMesh:
        """The same processes as they share weights: the dimensions ``"readers"`` and ``"tensor"``.

        Args:
            device_type: ``"cpu"`` or ``"cuda"``.
        """
        sizes = (self.readers, self.tensor)
        return init_device_mesh(device_type, sizes, mesh_dim_names=("readers", "tensor"))

    def __str__(self) -> str:
        """In words, as a run says it."""
        if self.processes == 1:
            return "1 process"
        sizes = {"data": self.data, "context": self.context, "tensor": self.tensor}
        parts = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        how = "" if self.readers == 1 else "FSDP2, " if self.shards else "DDP, "
        return f"{self.processes} processes: {how}{parts}"


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
    found = Layout(**parallel, shards=True)
    if found.processes != processes:
        sizes = " × ".join(f"{name} {size}" for name, size in parallel.items())
        raise ValueError(
            f"[run] parallel asks for {sizes} = {found.processes} processes, and {processes} "
            f"{'was' if processes == 1 else 'were'} started: start {found.processes} (torchrun "
            f"--nproc-per-node {found.processes}), or change the sizes"
        )
    return found
