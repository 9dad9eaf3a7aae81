"""The tasks of `compare`: their training tokens, and the evaluation of models."""

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
    "EVAL_SIZES",
    "RECALL_TASKS",
    "TASKS",
    "CompareTask",
    "RecallPairs",
    "check_text_used",
    "compare_task",
    "eval_sizes",
    "read_corpus",
]


@dataclass(frozen=True, kw_only=True)
class RecallPairs:
    """Key–value pairs of a recall task."""

    vocab: int  # number of tokens; the lower half are keys, the upper half values
    train_pairs: tuple[int, ...]  # numbers of pairs in training examples
    test_pairs: tuple[int, ...]  # numbers of pairs that are only evaluated

    @property
    def chance(self) -> float:
        """Accuracy of guessing among the values."""
        return 2 / self.vocab


RECALL_TASKS = {
    "mqar": RecallPairs(vocab=64, train_pairs=(4, 8, 12), test_pairs=(16, 24)),
    "capacity": RecallPairs(vocab=128, train_pairs=(4, 8, 12), test_pairs=(16, 24, 32, 40, 48)),
}
"""Recall tasks by name. In ``"capacity"`` keys and values have 32 channels (`DEFAULTS`), fewer than
the largest number of pairs."""

TASKS = ("text", *RECALL_TASKS)

EVAL_SIZES = {"text": (16_384, 131_072), **dict.fromkeys(RECALL_TASKS, (64, 256))}
"""Size of the evaluation during training and after it: largest number of bytes of held-out text,
evenly spread over it, or examples of each number of pairs."""


@dataclass(frozen=True, kw_only=True)
class CompareTask:
    """Data of a task."""

    examples: tuple[Tensor, Tensor]  # inputs and labels of training
    evaluate: Callable[[nn.Module], float]  # measures a model during training
    # measures a model after training; returns also the accuracy by pairs
    evaluate_full: Callable[[nn.Module], tuple[float, dict[int, float]]]


def check_text_used(tasks: Sequence[str], **texts: object) -> None:
    """Raise ValueError if a text is given but no task uses it."""
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
    r"""Read texts as `recollect train` does, and split them for the task text.

    Args:
        text: Files, folders and patterns of text files, ``.jsonl`` and ``.parquet``.
        column: Field with the text of a JSON line or a Parquet row.

    Raises:
        ValueError: no file, a line or row that cannot be read, or too little text.

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
    """Return the data of a task, which depends on the arguments alone."""
    if task in RECALL_TASKS:
        return _recall_task(task, size, seed)
    assert corpus is not None
    return _text_task(corpus, size, seed)


def eval_sizes(task: str, size: Sizes, corpus: TextCorpus | None) -> tuple[int, int]:
    """Return the size of the evaluation during training and after it; see `EVAL_SIZES`."""
    if corpus is None or task != "text":
        return EVAL_SIZES[task]
    quick, full = (
        sum(
            int((labels != IGNORE).sum())
            for _, labels in heldout_windows(corpus, length=size.length, batch=64, limit=limit)
        )
        for limit in EVAL_SIZES["text"]
    )
    return quick, full


def _concatenate(batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    inputs, labels = zip(*batches, strict=True)
    return torch.cat(inputs), torch.cat(labels)


def _labeled_logits(model: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits and the labels at the labeled positions."""
    device = next(model.parameters()).device
    logits, labels = model(input_ids=inputs.to(device)).logits, labels.to(device)
    has_label = labels != IGNORE
    return logits[has_label], labels[has_label]


def _text_task(corpus: TextCorpus, size: Sizes, seed: int) -> CompareTask:
    generator = torch.Generator().manual_seed(seed)
    stream = batches(corpus, length=size.length, batch=size.schedule.batch, generator=generator)

    def bits(model: nn.Module, limit: int) -> float:
        total, count = 0.0, 0
        for inputs, labels in heldout_windows(
            corpus, length=size.length, batch=4 * size.schedule.batch, limit=limit
        ):
            logits, targets = _labeled_logits(model, inputs, labels)
            loss = nn.functional.cross_entropy(logits.float(), targets, reduction="none")
            total, count = total + float(loss.sum()), count + targets.numel()
        return total / count / math.log(2)

    quick, full = EVAL_SIZES["text"]
    return CompareTask(
        examples=_concatenate(next(stream) for _ in range(size.schedule.steps)),
        evaluate=lambda model: bits(model, quick),
        evaluate_full=lambda model: (bits(model, full), {}),
    )


def _recall_task(task: str, size: Sizes, seed: int) -> CompareTask:
    recall, (quick, full) = RECALL_TASKS[task], EVAL_SIZES[task]
    train_set, test_set = (torch.Generator().manual_seed(seed + x) for x in (0, 1_000_003))
    configs = {
        pairs: MqarConfig(
            vocab=recall.vocab,
            pairs=pairs,
            length=size.length if pairs in recall.train_pairs else max(size.length, 4 * pairs),
        )
        for pairs in (*recall.train_pairs, *recall.test_pairs)
    }
    count = math.ceil(size.schedule.steps * size.schedule.batch / len(recall.train_pairs))
    examples = _concatenate(mqar(configs[pairs], count, train_set) for pairs in recall.train_pairs)
    test_data = {pairs: mqar(config, full, test_set) for pairs, config in configs.items()}

    def accuracies(model: nn.Module, limit: int) -> dict[int, float]:
        values: dict[int, float] = {}
        for pairs, (inputs, labels) in test_data.items():
            logits, targets = _labeled_logits(model, inputs[:limit], labels[:limit])
            values[pairs] = float((logits.argmax(-1) == targets).float().mean())
        return values

    def evaluate_full(model: nn.Module) -> tuple[float, dict[int, float]]:
        by_pairs = accuracies(model, full)
        return _mean(by_pairs), by_pairs

    return CompareTask(
        examples=examples,
        evaluate=lambda model: _mean(accuracies(model, quick)),
        evaluate_full=evaluate_full,
    )


def _mean(values: dict[int, float]) -> float:
    return sum(values.values()) / len(values)
