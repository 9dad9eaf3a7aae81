"""`evaluate`: a language model on tasks of lm-eval and on local tasks."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import transformers

from recollect.fields import int_check, validate
from recollect.lm.evaluation.documents import CONTEXT
from recollect.lm.evaluation.local_tasks import local_tasks
from recollect.lm.evaluation.results import (
    Evaluation,
    TaskResult,
    load_finished_groups,
    load_finished_tasks,
    save_task,
)
from recollect.lm.loading import load_model_and_tokenizer
from recollect.lm.prompt import model_fingerprint
from recollect.messages import argument_name, short_repr
from recollect.report.environment import describe_environment
from recollect.report.lock import folder_lock
from recollect.tasks.text import default_source

if TYPE_CHECKING:
    from recollect.lm.evaluation.harness import RecollectHFLM
    from recollect.lm.evaluation.names import LoadedTasks

__all__ = ["EvaluationWatcher", "evaluate"]


class EvaluationWatcher(Protocol):
    """Callbacks of `evaluate`.

    Examples:
        >>> class Printer(rc.lm.EvaluationWatcher):  # rc.lm.evaluate(..., watcher=Printer())
        ...     def begin(self, task, index, count):
        ...         print(f"{task}, {index} of {count}")
        >>> Printer().begin("piqa", 1, 2)
        piqa, 1 of 2
    """

    def begin(self, task: str, index: int, count: int) -> None:
        """Called before a task is measured.

        Args:
            task: name of the task.
            index: position of the task, from 1.
            count: number of tasks, without those that an earlier run measured.
        """
        ...

    def end(self, result: TaskResult, *, loaded: bool) -> None:
        """Called after a task is measured.

        Args:
            result: result of the task.
            loaded: whether the result is that of an earlier run in the folder.
        """
        ...

    def fail(self, task: str, reason: str) -> None:
        """Called if a task cannot be run or raises an error; the other tasks are measured.

        Args:
            task: name of the task.
            reason: a sentence.
        """
        ...


def evaluate(
    model: Any,
    tasks: str | Sequence[str],
    *,
    tokenizer: Any = None,
    out: str | PathLike[str] | None = None,
    batch: int | str = "auto",
    limit: int | None = None,
    context: int | None = None,
    text: str | PathLike[str] | None = None,
    device: str | None = None,
    watcher: EvaluationWatcher | None = None,
) -> Evaluation:
    """Measure a causal language model on tasks of lm-eval, and on local ones that need no network.

    Log-likelihoods are sums over tokens of log p(token | tokens before it), in nats. A text without
    a context begins after the tokenizer's first token, or after its end of a document.

    Args:
        model: folder that ``save_pretrained`` wrote, folder of a run, name on the hub, or a model
            of transformers. Code that comes with a model is not run.
        tasks: names of tasks, groups or tags, or patterns such as ``"local_niah_*"``.
        tokenizer: tokenizer of a model that is not a folder.
        out: folder for the results, with a file per finished task. With equal settings a later run
            continues after the finished tasks.
        batch: batch size, or ``"auto"``: halved from the largest until it fits into memory.
        limit: largest number of documents of a task.
        context: length in tokens of the model's input, and of the local tasks that fill a context.
            Longer texts are truncated at the beginning. By default the length in the configuration,
            at most 2,048; and 2,048 without one, as for recurrent models.
        text: file in place of the text in which local tasks hide their answers.
        device: device to run on; by default the model's, or the CPU.
        watcher: is called when tasks begin, end and fail.

    Returns:
        The results. A task that cannot be run is in `Evaluation.failures`, and the others are
        measured.

    Raises:
        ValueError: a task that does not exist; no task that can be run; a model that cannot
            generate, or without a tokenizer; a number out of range; a folder of other settings.
        ImportError: lm-eval is not installed.

    Examples:
        >>> from recollect.lm.data.tokenizers import byte_tokenizer
        >>> config = rc.lm.RecollectConfig.from_recipes(
        ...     "gated_delta_net", vocab_size=257, hidden_size=16, num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> result = rc.lm.evaluate(
        ...     rc.lm.RecollectForCausalLM(config), "local_babi_1", tokenizer=byte_tokenizer(),
        ...     limit=3, context=600,
        ... )
        >>> list(result["local_babi_1"].metrics), result["local_babi_1"].documents
        (['acc'], 3)
    """
    from recollect.lm.evaluation import harness  # needs lm-eval
    from recollect.lm.evaluation.names import find_tasks, load_tasks

    if limit is not None:
        validate(argument_name("limit"), int_check(1), limit)
    if context is not None:
        validate(argument_name("context"), int_check(2), context)
    batch_size = _parse_batch(batch)
    # Unknown tasks raise before the model is loaded.
    manager, names = find_tasks([tasks] if isinstance(tasks, str) else tasks, {})
    model_name = str(model) if isinstance(model, str | PathLike) else type(model).__name__
    if isinstance(model, str | PathLike):
        if tokenizer is not None:
            raise ValueError("tokenizer: a folder has its own; give one with a model alone")
        model, tokenizer = load_model_and_tokenizer(str(model), any_decoder=True)
    _check_model(model, tokenizer)
    if device is not None:
        model = model.to(device)
    _check_positions(model, context)
    context = context or min(_num_positions(model) or CONTEXT, CONTEXT)
    text = None if text is None else str(text)
    with contextlib.ExitStack() as stack:
        tokenizer_folder, tokenizer_digest = stack.enter_context(_temporary_tokenizer(tokenizer))
        stack.enter_context(_eval_mode(model))
        if out is not None:
            stack.enter_context(folder_lock(out))
        folder = None if out is None else Path(out)
        digests = model_fingerprint(model)
        settings = {
            "model": _sha256("".join(digests[name] for name in sorted(digests)).encode()),
            "tokenizer": tokenizer_digest,
            "context": context,
            "limit": limit,
            "seed": harness.SEED,
            "lm_eval": harness.VERSION,
        }
        local_settings = {**settings, "text": _text_digest(text)}
        manager.metadata.update(
            tokenizer=tokenizer_folder,
            pretrained=tokenizer_folder,
            max_seq_lengths=[context],
            context=context,
            limit=limit,
            text=text,
        )
        results: dict[str, TaskResult] = {}
        groups: dict[str, TaskResult] = {}
        if folder is not None:  # a folder of another command raises before anything is measured
            results = load_finished_tasks(folder, local_settings)
            saved_groups = load_finished_groups(folder, settings, results)
            groups = {group.task: group for group in saved_groups}
        loaded = load_tasks(manager, names, context=context, finished=list(results))
        remaining = [name for name in loaded.tasks if name not in results]
        requested = [*(name for name in names if name in results), *loaded.tasks]
        failures = dict(loaded.failures)
        if not loaded.tasks and not results:
            raise ValueError("; ".join(failures.values()))
        if watcher is not None:
            for name in requested:
                if name in results:
                    watcher.end(results[name], loaded=True)
            for name, reason in failures.items():
                watcher.fail(name, reason)
        with harness.hidden_output():
            lm = harness.RecollectHFLM(model, tokenizer, batch_size=batch_size, context=context)
        for index, name in enumerate(remaining, 1):
            if watcher is not None:
                watcher.begin(name, index, len(remaining))
            task_settings = local_settings if name in local_tasks() else settings
            try:
                results[name] = _measure(lm, name, loaded.tasks[name], task_settings)
            except Exception as error:  # of the task's own code, or of the model on its documents
                failures[name] = _failure_reason(name, error)
                if index == len(remaining) and not results:
                    raise ValueError("; ".join(failures.values())) from error
                if watcher is not None:
                    watcher.fail(name, failures[name])
                continue
            if folder is not None and results[name].finite:
                save_task(folder, results[name])  # other tasks are measured again
            if watcher is not None:
                watcher.end(results[name], loaded=False)
        groups |= {group.task: group for group in _group_results(loaded, results, settings)}
        evaluation = Evaluation(
            model=model_name,
            tasks=tuple(results[x] for x in dict.fromkeys([*requested, *results]) if x in results),
            groups=tuple(groups.values()),
            failures=failures,
            environment={
                **describe_environment(model.device).to_dict(),
                "transformers": transformers.__version__,
            },
        )
        if folder is not None:
            evaluation.save(folder)
    return evaluation


def _measure(lm: RecollectHFLM, name: str, task: Any, settings: Mapping[str, Any]) -> TaskResult:
    """Measure one task; a note has the reason if metrics are missing or not finite."""
    from recollect.lm.evaluation import harness

    raw: dict[str, Any] = {
        "results": {name: {}},
        "higher_is_better": {},
        "n-samples": {name: {"effective": 0}},
        "versions": {name: task.VERSION},
    }
    notes: list[str] = []
    start = time.perf_counter()
    lm.reset_counters()
    try:
        with harness.hidden_output(), harness.fixed_seed({x.device for x in lm.model.parameters()}):
            raw = harness.run_task(lm, task, settings["limit"])
    except ArithmeticError as error:  # of the aggregation of its metrics
        notes.append(f"its numbers cannot be computed ({error})")
    result = TaskResult.from_harness(
        raw["results"][name],
        raw["higher_is_better"].get(name) or {},
        task=name,
        documents=raw["n-samples"][name]["effective"],
        version=str(raw["versions"].get(name)),
        settings=settings,
        batch=lm.batch_size_per_gpu,
        seconds=time.perf_counter() - start,
        notes=(*notes, *lm.notes()),
    )
    if not lm.all_finite:  # values from such logits, such as an accuracy, mean nothing
        metrics = dict.fromkeys(result.metrics, math.nan)
        return dataclasses.replace(result, metrics=metrics, errors={})
    infinite = [metric for metric, value in result.metrics.items() if not math.isfinite(value)]
    notes = [*(f"{metric} is not finite" for metric in infinite), *result.notes]
    return dataclasses.replace(result, notes=tuple(notes))


def _failure_reason(name: str, error: Exception) -> str:
    """Return a sentence on why a task was not measured."""
    from recollect.lm.evaluation.names import describe_error

    if isinstance(error, AssertionError):  # lm-eval's, for requests that a model does not take
        return f"task {name} cannot be run on this model: {str(error).strip() or 'no reason given'}"
    return f"task {name} failed: {describe_error(error)}"


def _group_results(
    loaded: LoadedTasks, results: Mapping[str, TaskResult], settings: Mapping[str, Any]
) -> Iterator[TaskResult]:
    """Yield the groups that lm-eval aggregates and all of whose members have finite metrics."""
    raw: dict[str, Any] = {name: result.to_harness() for name, result in results.items()}
    for name, group in loaded.groups.items():
        members = tuple(task.task_name for task in group.get_all_tasks())
        is_complete = all(member in results and results[member].finite for member in members)
        if not group.has_aggregation or not is_complete:
            continue
        lower = {metric for member in members for metric in results[member].lower_is_better}
        yield TaskResult.from_harness(
            group.aggregate(raw),
            dict.fromkeys(lower, False),
            task=name,
            documents=sum(results[member].documents for member in members),
            version=str(group.version),
            settings=settings,
            members=members,
        )


def _parse_batch(batch: int | str) -> int | None:
    """Return a batch size, or ``None`` for ``"auto"``."""
    if batch == "auto":
        return None
    name = argument_name("batch")
    if isinstance(batch, str):
        if not batch.isdecimal():
            raise ValueError(f'{name} must be "auto" or a number, not {short_repr(batch)}')
        batch = int(batch)
    validate(name, int_check(1), batch)
    return batch


def _check_model(model: Any, tokenizer: Any) -> None:
    """Raise a ValueError unless a model can generate and has a tokenizer that fits."""
    if not callable(getattr(model, "can_generate", None)) or not model.can_generate():
        raise ValueError(
            f"evaluate takes a causal language model, and {type(model).__name__} cannot generate: "
            "give one such as RecollectForCausalLM"
        )
    if tokenizer is None:
        raise ValueError(
            "a model alone has no tokenizer: give tokenizer=, or the folder where both were saved"
        )
    if tokenizer.eos_token_id is None and tokenizer.bos_token_id is None:
        raise ValueError(
            "the tokenizer has neither bos_token nor eos_token, and a text without a context "
            "begins after one of them: set one"
        )
    largest = max(tokenizer.get_vocab().values())
    size = model.config.get_text_config().vocab_size
    if largest >= size:
        raise ValueError(
            f"the tokenizer has a token {largest} and the model {size} tokens: this is another "
            "model's tokenizer"
        )


def _num_positions(model: Any) -> int | None:
    """Return the number of positions in a configuration, if there is one."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "n_ctx"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _check_positions(model: Any, context: int | None) -> None:
    """Raise a ValueError if a model has learned fewer position vectors than the context has tokens.

    Rotary positions and recurrences continue beyond their training length.
    """
    num_positions = _num_positions(model)
    if context is None or num_positions is None or context <= num_positions:
        return
    for name, module in model.named_modules():
        is_table = isinstance(module, torch.nn.Embedding) and module.num_embeddings >= num_positions
        if is_table and any(part in name.rpartition(".")[2] for part in ("wpe", "pos")):
            raise ValueError(
                f"{argument_name('context')} {context:,} is more than the {num_positions:,} "
                f"positions that {type(model).__name__} has learned: give {num_positions:,} at most"
            )


_TOKENIZER_ATTRIBUTES = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "all_special_ids",
    "add_bos_token",
    "add_eos_token",
    "clean_up_tokenization_spaces",
)
"""Attributes that change texts and are not in ``tokenizer.json``."""


@contextlib.contextmanager
def _temporary_tokenizer(tokenizer: Any) -> Iterator[tuple[str, str]]:
    """Context manager that saves a tokenizer for the tasks; yields the folder and a digest.

    The model's folder could have code, which lm-eval's RULER tasks would run.
    """
    with tempfile.TemporaryDirectory(prefix="recollect-") as folder:
        tokenizer.save_pretrained(folder)
        main = Path(folder, "tokenizer.json")  # the other files name where it was loaded from
        files = [main] if main.exists() else sorted(Path(folder).iterdir())
        attributes = {name: getattr(tokenizer, name, None) for name in _TOKENIZER_ATTRIBUTES}
        data = [path.read_bytes() for path in files]
        data.append(json.dumps(attributes, sort_keys=True, default=str).encode())
        yield folder, _sha256(b"".join(data))


@contextlib.contextmanager
def _eval_mode(model: Any) -> Iterator[None]:
    """Context manager for evaluation mode, which restores the mode of each module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _text_digest(path: str | None) -> str:
    """Return the digest of a local text, or raise a ValueError if it cannot be read."""
    if path is None:
        return default_source()
    try:
        return _sha256(Path(path).read_bytes())
    except OSError as error:
        raise ValueError(f"{argument_name('text')} {path}: {error.strerror}") from None


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
