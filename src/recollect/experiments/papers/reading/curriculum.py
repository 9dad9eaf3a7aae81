"""Reading models: small language models, their curriculum and the accuracy of their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from recollect.blocks.compositions import MemoryAsContext
from recollect.blocks.mixers import Mixer
from recollect.experiments.framework import Batch, Budget, Config, fit
from recollect.experiments.framework.fitting import Stage
from recollect.experiments.framework.task_models import with_short_conv
from recollect.tasks.mqar import IGNORE
from recollect.zoo.preset import get

__all__ = [
    "ReadingModel",
    "answer_accuracy",
    "copy_batch",
    "curriculum",
    "get_mixer",
    "measures_by_length",
    "train_and_test",
]

TaskFunction = Callable[[str, int, int, torch.Generator], Batch]
"""Function from the kind of a lesson, the number of tokens, the batch size and a generator."""

WARMUP_STEPS = 20


def get_mixer(name: str, config: Config) -> Mixer:
    """Return a system of the zoo with a short convolution in each memory.

    If the configuration has a ``segment``, memories as context use it without persistent tokens.
    """
    mixer = get(name).mixer
    if isinstance(mixer, MemoryAsContext) and "segment" in config:
        mixer = replace(mixer, segment=config["segment"], persistent=0)
    return with_short_conv(mixer)


class ReadingModel(nn.Module):
    """A small language model with one mixer in every layer, and tied embeddings."""

    def __init__(self, mixer: Mixer, vocab: int, config: Config) -> None:
        # Imported here, because the list of experiments does not need transformers.
        from recollect.lm.model.config import RecollectConfig
        from recollect.lm.model.model import RecollectForCausalLM

        super().__init__()
        model_config = RecollectConfig.from_recipes(
            {"mixer": mixer},
            vocab_size=vocab,
            hidden_size=config["width"],
            num_hidden_layers=config["layers"],
            num_attention_heads=config["heads"],
            tie_word_embeddings=True,
        )
        self.model = RecollectForCausalLM(model_config)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits ``[B, T, vocab]`` of tokens ``[B, T]``."""
        return self.model(tokens, use_cache=False).logits


def copy_batch(vocab: int, length: int, batch: int, generator: torch.Generator) -> Batch:
    """Draw random tokens, a pause of token 0 and the random tokens again, with labels at the copy.

    The parts are a quarter, a half and a quarter of the text. Memories with inner batches can read
    everything before the pause. Inputs and labels are int64 ``[B, length − 1]``. The first token of
    the copy has no label.
    """
    size = length // 4
    tokens = torch.randint(vocab, (batch, size), generator=generator)
    pause = torch.zeros(batch, length - 2 * size, dtype=torch.int64)
    text = torch.cat([tokens, pause, tokens], 1)
    labels = text.clone()
    labels[:, : length - size + 1] = IGNORE
    return text[:, :-1], labels[:, 1:]


def curriculum(config: Config, vocab: int, draw: TaskFunction) -> tuple[list[Stage], Budget]:
    """Return the stages and the budget of a curriculum, which is equal for all models.

    The learning rate is constant after a warm-up and falls to zero in the last lesson. A lesson of
    ``config["lessons"]`` is (kind, tokens of a text, texts of a batch, steps). The kind ``"copy
    N"`` is `copy_batch` with the first N tokens. ``draw`` draws the other kinds.
    """
    stages = []
    for kind, length, batch, steps in config["lessons"]:
        lesson = partial(draw, kind, length, batch)
        if kind.startswith("copy "):
            known = min(vocab, int(kind.removeprefix("copy ")))
            lesson = partial(copy_batch, known, length, batch)
        stages.append(Stage(draw=lesson, steps=steps))
    steps = sum(lesson[-1] for lesson in config["lessons"])
    budget = Budget(
        steps=steps,
        lrs=(config["lr"],),
        warmup=min(1.0, WARMUP_STEPS / steps),
        decay="linear",
        decay_start=1 - config["lessons"][-1][-1] / steps,
    )
    return stages, budget


def train_and_test(
    config: Config,
    name: str,
    vocab: int,
    draw: TaskFunction,
    tests: Iterable[tuple[str, Batch]],
    seed: int,
    device: torch.device,
) -> dict[str, float]:
    """Train a reading model on the curriculum, and return its accuracy in every test.

    The result has the number of skipped steps, and by test the fraction of correct answers and,
    with ``", tokens"`` after its name, of correct tokens.
    """
    mixer = get_mixer(name, config)
    stages, budget = curriculum(config, vocab, draw)
    result = fit(
        lambda: ReadingModel(mixer, vocab, config), stages, None, budget, seed=seed, device=device
    )
    values = {"lost steps": float(result.skipped_steps)}
    for test, batch in tests:
        values[test], values[f"{test}, tokens"] = answer_accuracy(result.model, *batch)
    return values


def measures_by_length(measure: str) -> Callable[[Config], Mapping[float, str]]:
    """Return a function from a configuration to the measure of each tested length.

    The name of the measure has ``{}`` for the length.
    """
    return lambda config: {length: measure.format(length) for length, _ in config["tested"]}


def answer_accuracy(
    model: nn.Module, inputs: Tensor, labels: Tensor, *, max_tokens: int = 8192
) -> tuple[float, float]:
    """Return the fractions of correct answers and of correct tokens of the answers.

    An answer is correct if each of its tokens has the largest logit after the tokens before it.
    Greedy decoding then writes the answer. A forward pass has at least one text, and otherwise at
    most ``max_tokens`` tokens.
    """
    device = next(model.parameters()).device
    rows = max(1, max_tokens // inputs.shape[1])
    num_answers = num_correct = num_tokens = 0
    model.eval()
    with torch.no_grad():
        for x, y in zip(inputs.split(rows), labels.split(rows), strict=True):
            has_label = y != IGNORE
            correct = model(x.to(device)).argmax(-1).cpu() == y
            num_answers += int((correct | ~has_label).all(1).sum())
            num_correct += int((correct & has_label).sum())
            num_tokens += int(has_label.sum())
    return num_answers / len(inputs), num_correct / num_tokens
