"""The tasks of `compare`: the tokens models are trained on, and how they are measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from os import PathLike

import torch
from torch import Tensor, nn

from recollect.experiments.comparison.results import Sizes
from recollect.lm.data.sources import FileDocuments, find_files
from recollect.messages import argument_name, renamed_arguments
from recollect.tasks.mqar import IGNORE, MqarConfig, mqar
from recollect.tasks.text import TextCorpus, batches, heldout_windows, split_documents

__all__ = [
    "MEASURED",
    "RECALLS",
    "TASKS",
    "CompareTask",
    "RecallPairs",
    "check_text_is_read",
    "compare_task",
    "measured",
    "read_corpus",
]


@dataclass(frozen=True, kw_only=True)
class RecallPairs:
    """How many key–value pairs a recall task has, and of which tokens.

    Attributes:
        vocab: tokens, the lower half keys and the upper half values.
        trained: pairs of the training examples.
        beyond: pairs that are asked but never trained on: does what was learned hold more?
    """

    vocab: int
    trained: tuple[int, ...]
    beyond: tuple[int, ...]

    @property
    def chance(self) -> float:
        """Accuracy of guessing among the values."""
        return 2 / self.vocab


RECALLS = {
    "mqar": RecallPairs(vocab=64, trained=(4, 8, 12), beyond=(16, 24)),
    "capacity": RecallPairs(vocab=128, trained=(4, 8, 12), beyond=(16, 24, 32, 40, 48)),
}
"""Tasks of recall by name. In ``"capacity"`` keys and values have 32 channels (`DEFAULTS`), so that
more pairs are asked than a matrix memory has dimensions."""

TASKS = ("text", *RECALLS)

MEASURED = {"text": (16_384, 131_072), **dict.fromkeys(RECALLS, (64, 256))}
"""On how much a model is measured on the way, which is often, and at the end, once: bytes of
held-out text at most, evenly spread over it, or examples of each number of pairs."""


@dataclass(frozen=True, kw_only=True)
class CompareTask:
    """A task made ready.

    Attributes:
        examples: inputs and labels aligned with them, to train on.
        evaluate: measures a model on the way. final: measures it well, with accuracy by pairs.
    """

    examples: tuple[Tensor, Tensor]
    evaluate: Callable[[nn.Module], float]
    final: Callable[[nn.Module], tuple[float, dict[int, float]]]


def check_text_is_read(tasks: Sequence[str], **texts: object) -> None:
    """That a text which is given is one that a task reads.

    Args:
        tasks: of the comparison.
        **texts: by the argument that gives it; ``None`` is no text.

    Raises:
        ValueError: no task reads it.
    """
    for name, text in texts.items():
        if text is not None and "text" not in tasks:
            label, others = argument_name(name), ", ".join(dict.fromkeys(tasks))
            raise ValueError(
                f"{label} is read by the task text alone, and {argument_name('tasks')} has only "
                f"{others}: add the task text, compare on it in a run of its own, or leave {label} "
                "out"
            )


@renamed_arguments({"text": "text", "column": "column", "bad_lines": ""})
def read_corpus(
    text: str | PathLike[str] | Sequence[str | PathLike[str]], *, column: str = "text"
) -> TextCorpus:
    r"""Read texts as `recollect train` reads them, and split them for the task text.

    Args:
        text: text files, ``.jsonl`` and ``.parquet``: names, folders and patterns.
        column: field of a JSON line or a Parquet row that holds its text.

    Raises:
        ValueError: no file, a line or row that cannot be read, or texts that are too short.

    Examples:
        >>> import json
        >>> from pathlib import Path
        >>> letters = "abcdefghijklmnop"
        >>> lines = [f"The {a}{b} is near the {b}{a}. It waits." for a in letters for b in letters]
        >>> _ = Path("lines.jsonl").write_text("\n".join(json.dumps({"text": x}) for x in lines))
        >>> rc.experiments.read_corpus("*.jsonl").source
        '*.jsonl'
    """
    patterns = [text] if isinstance(text, str | PathLike) else list(text)
    names = [str(pattern) for pattern in patterns]
    if not names:
        raise ValueError("read_corpus: text is empty; name a file, a folder or a pattern")
    source = FileDocuments(files=find_files(names, key="text"), column=column)
    return split_documents(source, source=", ".join(names))


def compare_task(task: str, size: Sizes, seed: int, corpus: TextCorpus | None) -> CompareTask:
    """The same for every model, and in every process, with the same seed.

    Args:
        task: out of `TASKS`.
        corpus: of the task text.
    """
    if task in RECALLS:
        return _recall_task(task, size, seed)
    assert corpus is not None
    return _text_task(corpus, size, seed)


def measured(task: str, size: Sizes, corpus: TextCorpus | None) -> tuple[int, int]:
    """On how much a model of a task is measured on the way and at the end, as in `MEASURED`.

    Args:
        task: out of `TASKS`.
        size: of its examples.
        corpus: of the task text, which may have less to hold out.
    """
    if corpus is None or task != "text":
        return MEASURED[task]
    glance, whole = (
        sum(
            int((labels != IGNORE).sum())
            for _, labels in heldout_windows(corpus, length=size.length, batch=64, limit=limit)
        )
        for limit in MEASURED["text"]
    )
    return glance, whole


def _joined(batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    inputs, labels = zip(*batches, strict=True)
    return torch.cat(inputs), torch.cat(labels)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _text_task(corpus: TextCorpus, size: Sizes, seed: int) -> CompareTask:
    generator = torch.Generator().manual_seed(seed)
    stream = batches(corpus, length=size.length, batch=size.schedule.batch, generator=generator)
    examples = _joined(next(stream) for _ in range(size.schedule.steps))

    def bits(model: nn.Module, limit: int | None) -> float:
        total, count = 0.0, 0
        for inputs, labels in heldout_windows(
            corpus, length=size.length, batch=4 * size.schedule.batch, limit=limit
        ):
            asked, loss = _asked(model, inputs, labels)
            total, count = total + float(loss.sum()), count + int(asked.sum())
        return total / count / math.log(2)

    glance, whole = MEASURED["text"]
    return CompareTask(
        examples=examples,
        evaluate=lambda model: bits(model, glance),
        final=lambda model: (bits(model, whole), {}),
    )


def _asked(model: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Where a label asks something, and the loss there in nats."""
    device = _device(model)
    logits = model(input_ids=inputs.to(device)).logits.float()
    labels = labels.to(device)
    asked = labels != IGNORE
    loss = nn.functional.cross_entropy(logits[asked], labels[asked], reduction="none")
    return asked, loss


def _recall_task(task: str, size: Sizes, seed: int) -> CompareTask:
    recall, (glance, whole) = RECALLS[task], MEASURED[task]
    generator = torch.Generator().manual_seed(seed)
    configs = [
        MqarConfig(vocab=recall.vocab, pairs=pairs, length=size.length) for pairs in recall.trained
    ]
    count = size.schedule.steps * size.schedule.batch
    share = math.ceil(count / len(configs))
    examples = _joined(mqar(config, share, generator) for config in configs)
    test = torch.Generator().manual_seed(seed + 1_000_003)
    beyond = [
        MqarConfig(vocab=recall.vocab, pairs=pairs, length=max(size.length, 4 * pairs))
        for pairs in recall.beyond
    ]
    held = {config.pairs: mqar(config, whole, test) for config in (*configs, *beyond)}

    def accuracy(model: nn.Module, limit: int) -> dict[int, float]:
        found: dict[int, float] = {}
        for pairs, (inputs, labels) in held.items():
            logits = model(input_ids=inputs[:limit].to(_device(model))).logits
            here = labels[:limit].to(logits.device)
            asked = here != IGNORE
            found[pairs] = float((logits.argmax(-1)[asked] == here[asked]).float().mean())
        return found

    def final(model: nn.Module) -> tuple[float, dict[int, float]]:
        by_pairs = accuracy(model, whole)
        return sum(by_pairs.values()) / len(by_pairs), by_pairs

    def evaluate(model: nn.Module) -> float:
        by_pairs = accuracy(model, glance)
        return sum(by_pairs.values()) / len(by_pairs)

    return CompareTask(examples=examples, evaluate=evaluate, final=final)
