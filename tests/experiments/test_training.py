"""Training of a comparison's models, against `transformers.Trainer`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.lm.runs import make_ill
from torch import Tensor, nn
from torch.utils.data import Dataset

pytest.importorskip("transformers")

from transformers import Trainer, TrainingArguments

from recollect.experiments import Schedule
from recollect.experiments.comparison.results import History
from recollect.experiments.comparison.training import train
from recollect.experiments.framework.fitting import training_steps
from recollect.lm import RecollectConfig, RecollectForCausalLM
from recollect.lm.training.divergence import Diverged
from recollect.lm.training.weight_decay import decay_parameter_names
from recollect.tasks import IGNORE, MqarConfig, mqar


def language_model() -> RecollectForCausalLM:
    torch.manual_seed(5)
    return RecollectForCausalLM(
        RecollectConfig.from_recipes(
            "gated_delta_net",
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.inputs[index], "labels": self.labels[index]}


class ByGroups(Trainer):
    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return decay_parameter_names(model)


def entropy(outputs: object, labels: Tensor, num_items_in_batch: object = None) -> Tensor:
    logits: Tensor = outputs.logits  # type: ignore[attr-defined]
    return nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE
    )


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the Trainer would use all devices")
def test_weights_are_those_of_the_trainer(tmp_path: Path) -> None:
    """Order of examples, groups, schedule, clipping and rounding give equal bits."""
    config = MqarConfig(vocab=32, pairs=3, length=16)
    examples = mqar(config, 50, torch.Generator().manual_seed(0))
    schedule = Schedule(steps=12, batch=4, lr=0.02, clip=0.5, evaluations=3)
    ours, theirs = language_model(), language_model()
    history, recorded = History(), list[int]()
    train(
        ours,
        examples,
        schedule,
        evaluate=lambda module: float(module.training),
        seed=7,
        history=history,
        on_step=lambda step, loss, so_far: recorded.append(step),
    )
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=schedule.steps,
        per_device_train_batch_size=schedule.batch,
        learning_rate=schedule.lr,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, round(schedule.warmup * schedule.steps)),
        weight_decay=schedule.weight_decay,
        max_grad_norm=schedule.clip,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=7,
        data_seed=7,
        dataloader_pin_memory=False,
    )
    ByGroups(
        model=theirs, args=arguments, train_dataset=Rows(*examples), compute_loss_func=entropy
    ).train()
    assert not torch.equal(ours.lm_head.weight, language_model().lm_head.weight)
    for name, weight in theirs.named_parameters():
        assert torch.equal(weight, ours.get_parameter(name)), name
    assert history.finished
    assert history.tokens == 12 * 4 * 16
    assert history.curve == [(step * 4 * 16, 0.0) for step in (4, 8, 12)]  # in evaluation mode
    assert [step for step, _ in history.losses] == [10]
    assert recorded == list(range(1, 13))


def test_a_step_without_a_finite_gradient_is_not_taken() -> None:
    weight = nn.Parameter(torch.ones(1, 2))
    model = nn.Module()
    model.weight = weight
    scale: list[float] = [1.0, torch.inf, 1.0]
    predict: Callable[[Tensor], Tensor] = lambda x: x[..., None] * weight * scale.pop(0)  # noqa: E731
    batch = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.long)
    steps = training_steps(
        model,
        [batch] * 3,
        torch.optim.SGD([weight], lr=0.0),
        lambda step: 0.1 / (step + 1),
        clip=1.0,
        predict=predict,
    )
    taken = list(steps)
    assert [step.finite for step in taken] == [True, False, True]
    assert bool(weight.isfinite().all())


@pytest.mark.parametrize("backward", [False, True])
def test_a_model_that_diverges_names_the_step_the_rate_and_the_layer(backward: bool) -> None:
    """On the third step; the oracle is the position of the fault."""
    examples = mqar(MqarConfig(vocab=32, pairs=3, length=16), 24, torch.Generator().manual_seed(0))
    schedule = Schedule(steps=6, batch=4, lr=0.02, warmup=0.5)
    model, history = language_model(), History()
    make_ill(model.get_submodule("model.blocks.0.mlp.down"), 2, backward=backward)
    with pytest.raises(Diverged) as caught:
        train(model, examples, schedule, evaluate=lambda _: 0.0, seed=7, history=history)
    error = caught.value
    assert (error.step, error.checkpoint) == (3, None)
    assert error.lr == pytest.approx(0.02 * 2 / 3)  # the third of a warm-up of three, from 0
    cause = "the output of layer 0, in model.blocks.0.mlp.down, is not finite"
    assert error.origin == (None if backward else cause)
    assert str(error).startswith(
        "training diverged at step 3 (learning rate 0.0133): "
        + ("a loss or a gradient is not finite" if backward else cause)
    )
    assert all(bool(weight.isfinite().all()) for weight in model.parameters())
    assert history.tokens == 2 * 4 * 16 and not history.finished
