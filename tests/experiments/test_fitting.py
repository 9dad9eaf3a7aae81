"""The training loop of task models: it learns, stops, searches rates and lengthens the task."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import count, pairwise

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import recollect as rc
from recollect.experiments.framework.fitting import (
    MAX_SKIPPED_STEPS,
    Budget,
    Stage,
    accuracy,
    fit,
    training_steps,
)
from recollect.experiments.framework.task_models import TaskModel
from recollect.tasks import IGNORE

SIZES = 4


def copying(generator: torch.Generator, length: int = 2) -> tuple[Tensor, Tensor]:
    """Repeat the current token; the first position has no label."""
    tokens = torch.randint(SIZES, (8, length), generator=generator)
    labels = tokens.clone()
    labels[:, 0] = IGNORE
    return tokens, labels


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(SIZES, 8), nn.Linear(8, SIZES))


def measure(trained: nn.Module) -> float:
    return accuracy(trained, *copying(torch.Generator().manual_seed(99), 16))


def test_training_stops_when_the_task_is_solved() -> None:
    budget = Budget(steps=400, lrs=(0.05,), evaluations=20)
    result = fit(model, copying, measure, budget, seed=0)
    assert result.value == 1.0
    assert result.steps < 400
    assert result.curve[-1] == (result.steps, 1.0)
    assert measure(result.model) == 1.0


def test_search_ends_at_the_best_rate() -> None:
    budget = Budget(steps=60, lrs=(1e-7, 0.1, 0.2), evaluations=6)
    models: list[nn.Module] = []

    def make() -> nn.Module:
        models.append(model())
        return models[-1]

    result = fit(make, copying, measure, budget, seed=0)
    assert result.lr == 0.1
    assert result.value == 1.0
    assert len(models) == 2, "0.2 was not tried"


def infinite(at: set[int]) -> Callable[[Tensor], Tensor]:
    """The identity with an infinite gradient at these calls."""
    calls = count()

    def hooked(x: Tensor) -> Tensor:
        if next(calls) in at:
            x.register_hook(lambda gradient: gradient * math.inf)
        return x

    return hooked


class Hooked(nn.Module):
    def __init__(self, at: set[int]) -> None:
        super().__init__()
        self.inner, self.hook = model(), infinite(at)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.inner(tokens)
        return self.hook(logits) if self.training else logits


def test_a_rate_that_diverges_is_survived() -> None:
    budget = Budget(steps=2 * MAX_SKIPPED_STEPS + 20, lrs=(0.1, 0.2), evaluations=2)
    result = fit(lambda: Hooked(set(range(100))), copying, measure, budget, seed=0)
    assert math.isnan(result.value)
    assert (result.lr, result.steps, result.skipped_steps) == (0.1, *[MAX_SKIPPED_STEPS] * 2)


def test_a_step_without_a_finite_gradient_is_not_taken() -> None:
    budget = Budget(steps=100, lrs=(0.05,), evaluations=2)
    result = fit(lambda: Hooked({3, 4, 30}), copying, measure, budget, seed=0)
    assert result.skipped_steps == 3
    assert result.value == 1.0
    assert all(bool(weight.isfinite().all()) for weight in result.model.parameters())


def test_lengths_grow_when_the_last_batches_were_right() -> None:
    recorded: list[int] = []

    def stage(length: int, steps: int | None = None) -> Stage:
        def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
            recorded.append(length)
            return copying(generator, length)

        return Stage(draw=draw, steps=steps)

    budget = Budget(steps=300, lrs=(0.05,), evaluations=10)
    result = fit(model, [stage(2), stage(4), stage(8)], measure, budget, seed=0)
    assert recorded[0] == 2
    assert recorded == sorted(recorded)
    first, second = result.stage_starts
    assert (recorded[first - 1], recorded[first], recorded[second - 1], recorded[second]) == (
        2,
        4,
        4,
        8,
    )
    assert result.value == 1.0
    recorded.clear()
    budget = Budget(steps=9, lrs=(0.05,))
    result = fit(model, [stage(2, 2), stage(4, 3), stage(8, 4)], None, budget, seed=0)
    assert recorded == [2] * 2 + [4] * 3 + [8] * 4
    assert result.stage_starts == [2, 5]
    assert (result.curve, math.isnan(result.value)) == ([], True)


def test_the_same_seed_trains_the_same_model() -> None:
    budget = Budget(steps=20, lrs=(0.01,), evaluations=2)
    first, repeated = (fit(model, copying, measure, budget, seed=1) for _ in range(2))
    assert first.curve == repeated.curve
    other = fit(model, copying, measure, budget, seed=2)
    weights = [next(f.model.parameters()) for f in (first, repeated, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("decay", ["cosine", "linear", "none"])
def test_the_rate_warms_up_and_falls(decay: str) -> None:
    budget = Budget(steps=100, lrs=(1.0,), warmup=0.1, decay=decay)
    rates = [budget.rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert all(a >= b for a, b in pairwise(rates[10:]))
    assert rates[-1] == 1.0 if decay == "none" else rates[-1] < 0.02


def test_the_decay_begins_after_a_constant_rate() -> None:
    budget = Budget(steps=100, lrs=(1.0,), warmup=0.1, decay="linear", decay_start=0.75)
    rates = [budget.rate(step) for step in (0, 9, 10, 75, 80, 99)]
    assert rates == pytest.approx([0.1, 1, 1, 1, 0.8, 0.04])


def test_a_budget_reads_a_configuration() -> None:
    config = {"steps": 7, "lrs": [0.1, 0.2], "width": 3, "solved": 0.9}
    assert Budget.from_config(config, solved=0.5) == Budget(steps=7, lrs=(0.1, 0.2), solved=0.5)


def test_accuracy_counts_labelled_positions() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, tokens: Tensor) -> Tensor:
            return nn.functional.one_hot(tokens, 3).float()

    tokens = torch.tensor([[0, 1, 2], [2, 2, 2]])
    labels = torch.tensor([[0, 2, IGNORE], [2, IGNORE, IGNORE]])
    assert accuracy(Fixed(), tokens, labels) == pytest.approx(2 / 3)
    assert accuracy(Fixed(), tokens, torch.full_like(labels, IGNORE)) == 0.0


@pytest.mark.parametrize("broken", [{"steps": 0}, {"lrs": ()}, {"decay": "sudden"}])
def test_a_budget_refuses_nonsense(broken: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="Budget"):
        Budget(**{"steps": 1, "lrs": (0.1,), **broken})  # type: ignore[arg-type]


def test_decompression_reads_the_last_output_only() -> None:
    """Compression: only the last token's output may be read, or the task would be copying."""
    task = TaskModel(SIZES, SIZES, 8, [], unpacked=6)
    tokens = torch.randint(SIZES, (3, 6), generator=torch.Generator().manual_seed(0))
    other = torch.cat([(tokens[:, :-1] + 1) % SIZES, tokens[:, -1:]], dim=1)
    assert task(tokens).shape == (3, 6, SIZES)
    assert torch.equal(task(tokens), task(other)), "without a memory the last token knows no other"
    assert not torch.equal(task(tokens)[:, 0], task(tokens)[:, 1]), "positions are told apart"


def test_balance_loss_equals_that_of_the_model() -> None:
    """One step of plain descent equals that of the language model's training loss."""
    config = rc.lm.RecollectConfig.from_recipes(
        rc.blocks.MixtureOfMemories(["gla", "gla"], top=1),
        vocab_size=11,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        router_aux_loss_coef=3.0,
    )
    torch.manual_seed(0)
    model = rc.lm.RecollectForCausalLM(config).train()
    single = copy.deepcopy(model)
    ids = torch.randint(11, (2, 9))
    labels = torch.cat([ids[:, 1:], torch.full((2, 1), IGNORE)], 1)
    out = single(ids, labels=ids)
    out.loss.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    steps = training_steps(
        model,
        [(ids, labels)],
        optimizer,
        lambda _: 1.0,
        clip=1e9,
        predict=lambda x: model(x).logits,
    )
    (step,) = steps
    assert step.loss == pytest.approx(float((out.loss - 3.0 * out.aux_loss).detach()), abs=1e-5)
    for later, initial in zip(model.parameters(), single.parameters(), strict=True):
        expected = initial if initial.grad is None else initial - initial.grad
        torch.testing.assert_close(later, expected)
