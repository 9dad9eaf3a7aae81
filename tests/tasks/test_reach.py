"""Reachability: labels by following the parents, and by AM's matrix inverse."""

from __future__ import annotations

import pytest
import torch

from recollect.tasks import ReachConfig, reachability


@pytest.mark.parametrize("nodes", [2, 6, 32])
def test_following_the_parents_finds_the_root(nodes: int) -> None:
    result = reachability(ReachConfig(nodes=nodes), 7, torch.Generator().manual_seed(nodes))
    assert result.x.shape == (7, nodes, nodes)
    for parents, labels, x in zip(
        result.parent.tolist(), result.labels.tolist(), result.x.tolist(), strict=True
    ):
        assert parents.count(-1) == 2, "two roots"
        for node in range(nodes):
            at = node
            while parents[at] >= 0:
                assert parents[at] < at, "topological order"
                at = parents[at]
            assert labels[node] == (at == 0)
            named = {node} | ({parents[node]} - {-1})
            assert {i for i, entry in enumerate(x[node]) if entry == 1.0} == named
            assert sum(x[node]) == len(named)
        assert sum(labels) == nodes // 2, "classes of equal size"


def test_the_inverse_of_i_minus_a_solves_it() -> None:
    result = reachability(
        ReachConfig(nodes=16), 5, torch.Generator().manual_seed(1), dtype=torch.float64
    )
    child_of = result.x - torch.eye(16).double()  # row i names its parent
    paths = torch.linalg.inv(torch.eye(16).double() - child_of)
    assert torch.equal((paths[..., 0] > 0.5).long(), result.labels)


def test_parents_are_uniform_among_earlier_nodes_of_the_class() -> None:
    result = reachability(ReachConfig(nodes=6), 20_000, torch.Generator().manual_seed(0))
    chain = result.labels[:, 1].bool() & result.labels[:, 5].bool()  # class one is {0, 1, 5}
    parents = result.parent[chain, 5]
    share = float((parents == 0).double().mean())
    assert abs(share - 0.5) < 5 * (0.25 / parents.numel()) ** 0.5
    assert set(parents.tolist()) == {0, 1}


def test_an_odd_number_of_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match="nodes must be even"):
        ReachConfig(nodes=31)
