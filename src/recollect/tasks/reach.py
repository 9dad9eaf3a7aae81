"""Reachability in a directed acyclic graph: two trees, and the nodes below the first root.

AM section 3.3: n nodes in topological order are divided into two classes of equal size, with a tree
on each. A node's vector contains the node and its parent. The label is whether the first node
reaches the node. Powers of the adjacency matrix A solve the task: reachable = row 1 of
(I − A)⁻¹ > 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.fields import Validated, int_check, integer, validate
from recollect.tasks.mqar import sample_without_replacement

__all__ = ["ReachConfig", "ReachabilityBatch", "reachability"]


@dataclass(frozen=True, kw_only=True)
class ReachConfig(Validated):
    """Two trees over the nodes; AM has 32 nodes.

    The paper leaves open the distribution of trees (here a node's parent is uniform among the
    earlier nodes of its class) and the parent in a root's vector (here none).

    Args:
        nodes: n, even, so that the classes are of equal size.

    Raises:
        ValueError: the number of nodes is odd or below 2.

    Examples:
        >>> config, draw = rc.tasks.ReachConfig(nodes=8), torch.Generator().manual_seed(0)
        >>> rc.tasks.reachability(config, 3, draw).labels.sum(-1)  # half of the nodes
        tensor([4, 4, 4])
    """

    nodes: int = integer(32, at_least=2)

    def validate(self) -> None:
        if self.nodes % 2:
            raise ValueError(
                f"ReachConfig: nodes must be even for two classes of equal size, got {self.nodes}"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class ReachabilityBatch:
    """Graphs, one per batch element.

    Attributes:
        x: ``[B, n, n]``, node i's vector: onehot(i) + onehot(parent of i).
        parent: ``[B, n]``, int64, −1 for the two roots. Parents come before children.
        labels: ``[B, n]``, int64, 1 if node 0 reaches node i or is node i, else 0.

    Examples:
        >>> config, draw = rc.tasks.ReachConfig(nodes=8), torch.Generator().manual_seed(0)
        >>> graphs = rc.tasks.reachability(config, 3, draw)
        >>> graphs.x.shape, (graphs.parent < 0).sum(-1)  # two roots
        (torch.Size([3, 8, 8]), tensor([2, 2, 2]))
    """

    x: Tensor
    parent: Tensor
    labels: Tensor


def reachability(
    config: ReachConfig,
    batch: int,
    generator: torch.Generator,
    *,
    dtype: torch.dtype = torch.float32,
) -> ReachabilityBatch:
    """Draw graphs, O(B n²).

    Args:
        config: sizes.
        batch: batch size B.
        generator: the only source of randomness; the result is on its device.
        dtype: dtype of the node vectors.

    Raises:
        ValueError: ``batch`` is negative.

    Examples:
        >>> draw = torch.Generator().manual_seed(0)
        >>> config = rc.tasks.ReachConfig(nodes=8)
        >>> graphs = rc.tasks.reachability(config, 2, draw)
        >>> graphs.x.shape, graphs.labels.sum(1)
        (torch.Size([2, 8, 8]), tensor([4, 4]))
    """
    validate("reachability: batch", int_check(), batch)
    n, device = config.nodes, generator.device
    # Node 0 is in the first class; n/2 of the other n − 1 are in the second.
    second = torch.zeros(batch, n, dtype=torch.bool, device=device)
    second.scatter_(1, 1 + sample_without_replacement(batch, n - 1, n // 2, generator), True)
    same = (second[:, :, None] == second[:, None, :]).tril(-1)  # earlier nodes of the class
    noise = torch.rand(batch, n, n, generator=generator, device=device, dtype=torch.float64)
    parent = noise.masked_fill(~same, -1).argmax(-1)
    parent = torch.where(same.any(-1), parent, -1)
    eye = torch.eye(n, device=device, dtype=dtype)
    has_parent = (parent >= 0)[..., None]
    x = eye + torch.where(has_parent, eye[parent.clamp_min(0)], 0)
    return ReachabilityBatch(x=x, parent=parent, labels=(~second).long())
