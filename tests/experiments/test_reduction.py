"""The steps of `ttt-reduction`, one part each, end at the recipe of linear attention."""

from __future__ import annotations

from itertools import pairwise

import torch

import recollect as rc
from recollect.experiments.papers.reduction import STEPS, reduced_layer
from recollect.recipe.recipe import CHOICES


def recipe(name: str) -> rc.Recipe:
    _, recipe, _ = reduced_layer(name)
    return recipe


def test_each_step_changes_one_choice_and_the_last_is_linear_attention() -> None:
    for step, simpler in pairwise(STEPS):
        changed = [x for x in CHOICES if getattr(recipe(step), x) != getattr(recipe(simpler), x)]
        assert changed == list(STEPS[simpler])
    assert recipe("linear attention") == rc.zoo.get("linear_attention").recipe


def test_the_reduced_layers_are_linear_attention_of_a_masked_product() -> None:
    """y_t = Σ_(s ≤ t) η_s (k_s · q_t) v_s, with inner batches and without (float64)."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 37, 2, 4, dtype=torch.float64)
    rates = torch.rand(1, 37, 2, dtype=torch.float64)
    scores = torch.einsum("bthk,bshk->bhts", q, k).tril()
    for name, eta in (("no depth", rates), ("no inner batch", rates), ("linear attention", None)):
        expected = torch.einsum("bhts,bshv->bthv", scores, v if eta is None else eta[..., None] * v)
        gates = {} if eta is None else {"lr": eta}
        y, _ = rc.recall(recipe(name), q, k, v, gates=gates)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)


def test_the_deep_memory_without_a_batch_is_not_the_batched_one() -> None:
    """For a deep memory the inner batch matters, so the claim on the matrix is not trivial."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 37, 2, 4, dtype=torch.float64)
    rates = torch.rand(1, 37, 2, dtype=torch.float64)
    deep = recipe("no momentum")
    online = deep.replace(algorithm=rc.algorithm.GradientDescent())
    weights = tuple(torch.randn(2, *shape).double() for shape in deep.memory.shapes(4, 4))
    outputs = [
        rc.recall(x, q, k, v, gates={"lr": rates}, initial_memory=weights)[0]
        for x in (deep, online)
    ]
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3
