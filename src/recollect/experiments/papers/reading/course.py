"""How a reader is made, taught in one course for all models, and asked afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from recollect.blocks.compositions import MemoryAsContext
from recollect.blocks.mixers import Mixer, RecipeMixer
from recollect.experiments.framework.experiment import Config
from recollect.experiments.framework.fitting import LOST, training_steps
from recollect.tasks.mqar import IGNORE
from recollect.zoo.preset import get

__all__ = ["Answers", "Course", "Reader", "answered", "copies", "mixer_named", "taught"]

Draw = Callable[[str, int, int, torch.Generator], tuple[Tensor, Tensor]]
"""Inputs and labels of a kind of lesson, of so many tokens and texts."""

CONV = 4


def _with_conv(leaf: RecipeMixer) -> RecipeMixer:
    if leaf.options.conv_size:
        return leaf
    return replace(leaf, options=replace(leaf.options, conv_size=CONV))


def mixer_named(name: str, config: Config) -> Mixer:
    """A system of the zoo with a short convolution around each of its memories.

    Args:
        name: of the zoo.
        config: of the experiment; its ``segment``, if any, is that of memories as context, which
            then have no persistent tokens.
    """
    mixer = get(name).mixer
    if isinstance(mixer, MemoryAsContext) and "segment" in config:
        mixer = replace(mixer, segment=config["segment"], persistent=0)
    return mixer.map_leaves(_with_conv) if not isinstance(mixer, RecipeMixer) else _with_conv(mixer)


class Reader(nn.Module):
    """A small language model of one mixer, whose read-out is its embedding.

    Args:
        mixer: of every layer.
        vocab: tokens.
        config: of the experiment, with ``width``, ``heads`` and ``layers``.
    """

    def __init__(self, mixer: Mixer, vocab: int, config: Config) -> None:
        # Here, because the list of experiments needs no transformers.
        from recollect.lm.model.config import RecollectConfig
        from recollect.lm.model.model import RecollectForCausalLM

        super().__init__()
        sizes = RecollectConfig.from_recipes(
            {"mixer": mixer},
            vocab_size=vocab,
            hidden_size=config["width"],
            num_hidden_layers=config["layers"],
            num_attention_heads=config["heads"],
            tie_word_embeddings=True,
        )
        self.model = RecollectForCausalLM(sizes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, T, vocab]`` of tokens ``[B, T]``."""
        return self.model(tokens, use_cache=False).logits


def copies(
    vocab: int, length: int, batch: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random tokens, a pause, and the same tokens again, of which the second time is asked.

    A quarter of the text, a half and a quarter. Memories that are written in inner batches, and
    read as they stood when one began, have what was before the pause.

    Args:
        vocab: tokens to draw from; the pause is the first of all.
        length: of all.
        batch: B.
        generator: the only source of randomness.

    Returns:
        ``(inputs, labels)``, int64 ``[B, length − 1]``; the first of the second time is not asked.
    """
    size = length // 4
    said = torch.randint(vocab, (batch, size), generator=generator)
    whole = torch.cat([said, torch.zeros(batch, length - 2 * size, dtype=torch.int64), said], 1)
    labels = whole.clone()
    labels[:, : length - size + 1] = IGNORE
    return whole[:, :-1], labels[:, 1:]


@dataclass(frozen=True, kw_only=True)
class Course:
    """Lessons one after the other, the same for every model.

    Attributes:
        lessons: (kind, tokens of a text, texts of a batch, steps) each; the kind is ``"copy N"``,
            `copies` of the first N tokens, or one that the task knows.
        lr: the largest rate; after a warm-up it stays, and falls to zero over the last lesson.
    """

    lessons: tuple[tuple[str, int, int, int], ...]
    lr: float

    @classmethod
    def of(cls, config: Config) -> Course:
        """The course of a configuration: its ``lessons`` and ``lr``."""
        lessons = tuple((kind, length, batch, n) for kind, length, batch, n in config["lessons"])
        return cls(lessons=lessons, lr=config["lr"])

    @property
    def steps(self) -> int:
        """Of all lessons."""
        return sum(steps for *_, steps in self.lessons)

    def rate(self, step: int) -> float:
        """The learning rate at a step, from 0."""
        last = self.lessons[-1][-1]
        begun = step - (self.steps - last)
        if begun > 0:
            return self.lr * (1 - begun / last)
        return self.lr * min(1.0, (step + 1) / 20)

    def batches(
        self, vocab: int, draw: Draw, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of all steps."""
        for kind, length, batch, steps in self.lessons:
            for _ in range(steps):
                if kind.startswith("copy "):
                    known = min(vocab, int(kind.removeprefix("copy ")))
                    yield copies(known, length, batch, generator)
                else:
                    yield draw(kind, length, batch, generator)


def taught(
    config: Config, mixer: Mixer, vocab: int, draw: Draw, seed: int, device: torch.device
) -> tuple[Reader, int]:
    """A reader after its course, and how many steps had no finite gradient and were not taken.

    AdamW, gradients of length 1 at most. Weights and batches follow the seed; `LOST` such steps in
    a row end the course.

    Args:
        config: of the experiment.
        mixer: of every layer.
        vocab: tokens.
        draw: the task.
        seed: of weights and batches.
        device: where the model lives.
    """
    course = Course.of(config)
    torch.manual_seed(seed)
    reader = Reader(mixer, vocab, config).to(device)
    batches = course.batches(vocab, draw, torch.Generator().manual_seed(seed))
    optimizer = torch.optim.AdamW(reader.parameters(), lr=course.lr, weight_decay=0.01)
    lost = row = 0
    for step in training_steps(reader, batches, optimizer, course.rate, clip=1.0):
        row = 0 if step.finite else row + 1
        lost += not step.finite
        if row == LOST:
            break
    return reader, lost


@dataclass(frozen=True, kw_only=True)
class Answers:
    """How a reader answered.

    Attributes:
        right: the share of texts of whose answer it names every token, each after those before it.
            What it writes greedily is then the answer.
        tokens: the share of the answers' tokens that it names so.
    """

    right: float
    tokens: float


def answered(model: nn.Module, inputs: Tensor, labels: Tensor, *, at_once: int = 8192) -> Answers:
    """Read texts and score the answers.

    Args:
        model: logits of inputs.
        inputs, labels: int64 ``[B, T]``, with labels at the answers alone.
        at_once: tokens of one forward pass, one text at least.
    """
    device = next(model.parameters()).device
    rows = max(1, at_once // inputs.shape[1])
    whole, named, asked = 0, 0, 0
    model.eval()
    with torch.no_grad():
        for some, wanted in zip(inputs.split(rows), labels.split(rows), strict=True):
            here = wanted != IGNORE
            said = model(some.to(device)).argmax(-1).cpu() == wanted
            whole += int((said | ~here).all(1).sum())
            named += int((said & here).sum())
            asked += int(here.sum())
    return Answers(right=whole / len(inputs), tokens=named / asked)
