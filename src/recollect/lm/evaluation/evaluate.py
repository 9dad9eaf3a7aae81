"""`evaluate`: a language model on tasks of lm-eval and on local ones."""

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
from typing import TYPE_CHECKING, Any

import torch
import transformers

from recollect.fields import int_check, validate
from recollect.lm.evaluation.documents import CONTEXT
from recollect.lm.evaluation.folder import earlier_groups, finished, keep
from recollect.lm.evaluation.local_tasks import local_tasks
from recollect.lm.evaluation.results import Evaluation, TaskResult
from recollect.lm.evaluation.watching import EvaluationWatcher, Nobody
from recollect.lm.loading import load_saved
from recollect.lm.prompt import fingerprint
from recollect.messages import argument_name, short_repr
from recollect.report.environment import describe_environment
from recollect.report.ownership import owned_folder
from recollect.tasks.text import default_source

if TYPE_CHECKING:
    from recollect.lm.evaluation.harness import HarnessModel
    from recollect.lm.evaluation.names import Loaded

__all__ = ["evaluate"]


_TOKENIZER = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "all_special_ids",
    "add_bos_token",
    "add_eos_token",
    "clean_up_tokenization_spaces",
)
"""What a tokenizer does with texts that its file does not say."""


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

    Log-likelihoods are sums over tokens of log p(token | tokens before it), in nats; a text without
    a context begins after the tokenizer's first token, or its end of a document where it has none.

    Args:
        model: a folder that ``save_pretrained`` wrote, or that of a run; a name on the hub; or a
            model of transformers, which may be ours. No code that comes with it is run.
        tasks: names of tasks, groups or tags, or patterns such as ``"local_niah_*"``.
        tokenizer: of a model that is no folder.
        out: folder, in which each finished task stands in a file of its own. A run that was
            interrupted loses the task at which it was; with equal settings it goes on after those
            that are there.
        batch: texts at once, or ``"auto"``: halved from the largest until memory holds them.
        limit: documents of a task at most.
        context: tokens that the model sees at once, longer texts losing their beginning, and the
            length of the local tasks that fill a context. By default what its configuration says,
            at most 2,048; and 2,048 where it says nothing, as for recurrent models.
        text: file in place of the text from which local tasks take what they hide things in.
        device: where to run; where the model is when omitted, or the CPU.
        watcher: is called as tasks begin, end and fail.

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
    from recollect.lm.evaluation import harness  # which needs the extra
    from recollect.lm.evaluation.names import index_of, load

    if limit is not None:
        validate(argument_name("limit"), int_check(1), limit)
    if context is not None:
        validate(argument_name("context"), int_check(2), context)
    size = _batch(batch)
    names = [tasks] if isinstance(tasks, str) else list(tasks)
    manager, found = index_of(names, {})  # refused before a model is read
    called = str(model) if isinstance(model, str | PathLike) else type(model).__name__
    if isinstance(model, str | PathLike):
        if tokenizer is not None:
            raise ValueError("tokenizer: a folder has its own; give one with a model alone")
        model, tokenizer = load_saved(str(model), others=True)
    _check_model(model, tokenizer)
    if device is not None:
        model = model.to(device)
    _check_positions(model, context)
    context = context or _context(model)
    path = None if text is None else str(text)
    watcher = watcher or Nobody()
    with _saved(tokenizer) as (place, digest), _evaluating(model), _owned(out) as folder:
        settings = {
            "model": _digest(fingerprint(model)),
            "tokenizer": digest,
            "context": context,
            "limit": limit,
            "seed": harness.SEED,
            "lm_eval": harness.harness_version(),
        }
        local = {**settings, "text": _text(path)}  # tasks of lm-eval do not read it
        manager.metadata.update(
            tokenizer=place,
            pretrained=place,
            max_seq_lengths=[context],
            context=context,
            limit=limit,
            text=path,
        )
        before = {} if folder is None else finished(folder, local)
        # Asked before minutes are spent: it refuses a folder that holds another command's results.
        earlier = () if folder is None else earlier_groups(folder, settings, before)
        loaded = load(manager, found, context=context, done=list(before))
        asked = [*(name for name in found if name in before), *loaded.tasks]
        for name in asked:
            if name in before:
                watcher.end(before[name], before=True)
        failures = dict(loaded.failures)
        if not loaded.tasks and not before:
            raise ValueError("; ".join(failures.values()))
        for name, reason in failures.items():
            watcher.fail(name, reason)
        todo = [name for name in loaded.tasks if name not in before]
        with harness.quiet():
            here = harness.HarnessModel(model, tokenizer, batch=size, context=context)
        results = dict(before)
        for index, name in enumerate(todo, 1):
            watcher.begin(name, index, len(todo))
            terms = local if name in local_tasks() else settings
            try:
                results[name] = _measure(here, name, loaded.tasks[name], terms)
            except Exception as error:  # of the task's own code, or of the model on its documents
                failures[name] = _reason(name, error)
                if index == len(todo) and not results:
                    raise ValueError("; ".join(failures.values())) from error
                watcher.fail(name, failures[name])
                continue
            if folder is not None and results[name].finite:
                keep(folder, results[name])  # what is no number is measured anew
            watcher.end(results[name], before=False)
        groups = {one.task: one for one in _groups(loaded, results, settings)}
        groups = {one.task: one for one in earlier} | groups
        evaluation = Evaluation(
            model=called,
            tasks=tuple(
                results[name] for name in dict.fromkeys([*asked, *results]) if name in results
            ),
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


def _measure(model: HarnessModel, name: str, task: Any, settings: Mapping[str, Any]) -> TaskResult:
    """Measure one task; a note gives the reason if metrics are missing or not finite."""
    from recollect.lm.evaluation import harness

    found: dict[str, Any] = {}
    start, failed = time.perf_counter(), list[str]()
    model.begin()
    try:
        with harness.quiet(), harness.seeded():
            found = harness.run_task(model, task, settings["limit"])
    except ArithmeticError as error:  # of its aggregation; other tasks may have numbers
        failed.append(f"its numbers cannot be computed ({error})")
    result = TaskResult.of(
        found["results"][name] if found else {},
        (found["higher_is_better"].get(name) or {}) if found else {},
        task=name,
        documents=found["n-samples"][name]["effective"] if found else 0,
        version=str(found["versions"].get(name) if found else task.VERSION),
        settings=settings,
        batch=model.batch_size_per_gpu,
        seconds=time.perf_counter() - start,
        notes=(*failed, *model.notes()),
    )
    if model.finite:
        strange = [metric for metric, value in result.metrics.items() if not math.isfinite(value)]
        notes = (*(f"{metric} is not finite" for metric in strange), *result.notes)
        return dataclasses.replace(result, notes=notes)
    # Scores that logits of no value happen to give, such as an accuracy, are no measurements.
    return dataclasses.replace(result, metrics=dict.fromkeys(result.metrics, math.nan), errors={})


def _reason(name: str, error: Exception) -> str:
    """Return a sentence on why a task was not measured."""
    from recollect.lm.evaluation.names import described

    if isinstance(error, AssertionError):  # lm-eval's, for requests that a model does not take
        return f"task {name} cannot be run on this model: {str(error).strip() or 'no reason given'}"
    return f"task {name} failed: {described(error)}"


def _groups(
    loaded: Loaded, results: Mapping[str, TaskResult], settings: Mapping[str, Any]
) -> tuple[TaskResult, ...]:
    """Return the groups that lm-eval aggregates and all of whose members have numbers."""
    raw: dict[str, Any] = {name: one.to_harness() for name, one in results.items()}
    found: list[TaskResult] = []
    for name, group in loaded.groups.items():
        members = tuple(task.task_name for task in group.get_all_tasks())
        complete = all(one in results and results[one].finite for one in members)
        if not group.has_aggregation or not complete:
            continue
        lower = {x for one in members for x in results[one].lower_is_better}
        found.append(
            TaskResult.of(
                group.aggregate(raw),
                dict.fromkeys(lower, False),
                task=name,
                documents=sum(results[one].documents for one in members),
                version=str(group.version),
                settings=settings,
                members=members,
            )
        )
    return tuple(found)


def _batch(batch: int | str) -> int | None:
    """The number of a batch; ``None`` for one that is found by trying."""
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
    """That a model writes texts and has a tokenizer.

    Raises:
        ValueError: it does not.
    """
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


def _positions(model: Any) -> int | None:
    """What a configuration says that a model sees at once, where it says so."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "n_ctx"):
        said = getattr(config, name, None)
        if isinstance(said, int) and said > 0:
            return said
    return None


def _context(model: Any) -> int:
    return min(_positions(model) or CONTEXT, CONTEXT)


def _check_positions(model: Any, context: int | None) -> None:
    """That a model which learned a vector per position has one for each.

    Raises:
        ValueError: it has fewer; rotations and recurrences go on, if badly, and are let through.
    """
    said = _positions(model)
    if context is None or said is None or context <= said:
        return
    for name, module in model.named_modules():
        own = name.rpartition(".")[2]
        table = isinstance(module, torch.nn.Embedding) and module.num_embeddings >= said
        if table and ("wpe" in own or "pos" in own):
            raise ValueError(
                f"{argument_name('context')} {context:,} is more than the {said:,} positions that "
                f"{type(model).__name__} has learned: give {said:,} at most"
            )


@contextlib.contextmanager
def _saved(tokenizer: Any) -> Iterator[tuple[str, str]]:
    """The tokenizer in a folder of its own, from which tasks load it, and a digest of it.

    A folder of the model's could hold code, which lm-eval's RULER tasks would run.
    """
    with tempfile.TemporaryDirectory(prefix="recollect-") as place:
        tokenizer.save_pretrained(place)
        whole = Path(place, "tokenizer.json")  # the others say where it was loaded from
        files = [whole] if whole.exists() else sorted(Path(place).iterdir())
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in files))
        # Where texts begin, end and are cleaned, tokenizer.json does not say.
        rest = {name: getattr(tokenizer, name, None) for name in _TOKENIZER}
        digest.update(json.dumps(rest, sort_keys=True, default=str).encode())
        yield place, digest.hexdigest()


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """The model in evaluation mode, and afterwards each of its modules as it was."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextlib.contextmanager
def _owned(out: str | PathLike[str] | None) -> Iterator[Path | None]:
    """The folder, which no other run may write to for the while."""
    if out is None:
        yield None
        return
    with owned_folder(out):
        yield Path(out)


def _text(path: str | None) -> str:
    """What tells a local text from another.

    Raises:
        ValueError: it cannot be read.
    """
    if path is None:
        return default_source()
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(f"{argument_name('text')} {path}: {error.strerror}") from None


def _digest(parts: Mapping[str, str]) -> str:
    return hashlib.sha256("".join(parts[name] for name in sorted(parts)).encode()).hexdigest()
