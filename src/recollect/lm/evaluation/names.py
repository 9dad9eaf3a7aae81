"""Names of tasks: found in lm-eval's index and among the local ones, checked, loaded."""

from __future__ import annotations

import contextlib
import functools
import glob
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recollect.lm.evaluation import harness
from recollect.lm.evaluation.local_tasks import local_folder, local_tasks
from recollect.lm.hub import hub_answers, offline, replaced
from recollect.messages import suggestion

__all__ = ["Loaded", "described", "index_of", "load"]

LONGEST_ANSWER = 256
"""Tokens that lm-eval lets a model write where a task does not say."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Tasks that can be run, and groups of them.

    Attributes:
        tasks: lm-eval's, by name, in the requested order.
        groups: lm-eval's, by name.
        failures: why the others cannot be run: a sentence by the name of a task or group.
    """

    tasks: Mapping[str, Any]
    groups: Mapping[str, Any]
    failures: Mapping[str, str] = field(default_factory=dict)


def index_of(tasks: Sequence[str], metadata: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """lm-eval's manager of tasks, which knows all names, and the names without patterns and tags.

    Its own index takes ten seconds to read. It is left alone where all names are local, and read
    once by a process.

    Args:
        tasks: names of tasks, groups or tags, or patterns such as ``local_niah_*``.
        metadata: what tasks that make their own documents are told, in place of what they were told
            before; ``manager.metadata`` may be updated until they are loaded.

    Raises:
        ValueError: no name, or one that does not exist, with the nearest.
    """
    asked = list(dict.fromkeys(name.strip() for name in tasks if name.strip()))
    if not asked:
        raise ValueError("tasks: name at least one, such as local_text (recollect eval --list)")
    for everything in (False, True):
        manager = _manager(everything)
        found = {name: _matching(name, manager) for name in asked}
        unknown = next((name for name, names in found.items() if not names), None)
        if unknown is None:
            manager.metadata.clear()
            manager.metadata.update(metadata)
            return manager, list(dict.fromkeys(x for names in found.values() for x in names))
        if unknown.startswith(("local_", "fixture_")):
            break
    near = suggestion(unknown, manager.all_tasks)
    hint = f"; {near}" if near.startswith("did you mean") else ""
    raise ValueError(
        f"there is no task {unknown!r}{hint} (`recollect eval --list` names the local ones, "
        "`lm-eval ls tasks` the others)"
    )


@functools.cache
def _manager(everything: bool) -> Any:
    """lm-eval's manager of the local tasks, or of all.

    It hands its metadata, this very mapping, to each task that it loads.
    """
    from lm_eval import tasks

    with harness.quiet():
        told: dict[str, Any] = {"context": 0}  # an empty mapping it would replace
        return tasks.TaskManager(
            include_path=str(local_folder()), include_defaults=everything, metadata=told
        )


def _matching(name: str, manager: Any) -> list[str]:
    """The names that one stands for: a pattern's, a tag's tasks, itself."""
    if glob.has_magic(name):
        return [x for x in manager.match_tasks([name]) if x not in manager.all_tags]
    if name in manager.all_tags:
        return sorted(manager.task_index[name].tags)
    return [name] if name in manager.all_tasks else []


def load(manager: Any, names: Sequence[str], *, context: int, done: Sequence[str] = ()) -> Loaded:
    """Load tasks with their documents, which do not depend on the other tasks.

    `Loaded.failures` names a task whose data the hub has and that the hub does not answer for, that
    raises an error of its own, that runs code, that has pictures, or whose answers are too long for
    the context.

    Args:
        manager: of `index_of`.
        names: of tasks, groups or tags.
        context: tokens that the model sees at once.
        done: names that need not be loaded.
    """
    tasks: dict[str, Any] = {}
    failures: dict[str, str] = {}
    groups: dict[str, Any] = {}
    hub: bool | None = None  # asked once, and only where a task may need it
    for name in names:
        if name in done:
            continue
        if hub is None and name not in local_tasks():
            hub = hub_answers()
        try:
            loaded = _load(manager, name, hub=hub is not False)
        except ValueError as error:
            failures[name] = str(error)
            continue
        tasks |= loaded["tasks"]
        groups |= loaded.get("groups") or {}
    for name, task in list(tasks.items()):
        try:
            _check(name, task, context)
        except ValueError as error:
            failures[name] = str(error)
            del tasks[name]
            continue
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=harness.SEED)
    return Loaded(tasks=tasks, groups=groups, failures=failures)


def _load(manager: Any, name: str, *, hub: bool) -> dict[str, Any]:
    """Return the tasks and groups of one name.

    Raises:
        ValueError: they cannot be loaded.
    """
    try:
        quietly = contextlib.nullcontext() if hub else offline()
        with quietly, _no_code(), harness.quiet(), harness.seeded():
            return manager.load([name])
    except ImportError as error:
        raise ValueError(
            f"task {name} needs {error.name or 'packages'}, which is not installed "
            f'({_first(error)}): pip install -e ".[lm,eval]" in its checkout'
        ) from None
    except Exception as error:  # of datasets, of the hub's client, and of the task's own code
        if name in local_tasks() and isinstance(error, ValueError):
            raise ValueError(f"{name}: {error}") from None
        if not hub and _is_of_hub(error):
            raise ValueError(
                f"task {name} needs data of the hub, which does not answer: connect and run it "
                "once (what was fetched is found again), or take a local task "
                "(recollect eval --list)"
            ) from None
        raise ValueError(f"task {name} cannot be loaded: {described(error)}") from None


def _is_of_hub(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, is of a connection or of data not in the cache."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    kinds = (ConnectionError, TimeoutError, socket.gaierror, LocalEntryNotFoundError)
    while error is not None:
        if isinstance(error, kinds):
            return True
        error = error.__cause__ or error.__context__
    return False


def _check(name: str, task: Any, context: int) -> None:
    """That a task can be run here.

    Raises:
        ValueError: it runs code, asks for pictures or sound, or for longer answers than fit.
    """
    if getattr(task, "UNSAFE_CODE", False):
        raise ValueError(f"task {name} runs code that the model writes, which evaluate does not do")
    if getattr(task, "MULTIMODAL", False):
        raise ValueError(f"task {name} asks about pictures or sound: take one of text")
    measures = getattr(task, "_metric_fn_list", {})
    if task.get_config("process_results") is None and None in measures.values():
        which = next(metric for metric, function in measures.items() if function is None)
        raise ValueError(f"task {name} takes the metric {which} as code of the hub: none is run")
    if task.OUTPUT_TYPE == "generate_until":
        said = task.get_config("generation_kwargs") or {}
        longest = said.get("max_gen_toks") or said.get("max_new_tokens") or LONGEST_ANSWER
        if longest >= context:
            raise ValueError(
                f"task {name} lets a model write {longest} tokens, and a context of {context} "
                "leaves none to read: give a longer context"
            )


@contextlib.contextmanager
def _no_code() -> Iterator[None]:
    """Metrics that are code on the hub are not fetched; lm-eval then has none of that name."""
    import evaluate as hub_metrics

    def refuse(*args: Any, **options: Any) -> Any:
        raise ValueError("a metric of it is code of the hub, and none is run")

    with replaced(hub_metrics, "load", refuse):
        yield


def described(error: BaseException) -> str:
    """Return the type of an error and the first line of its message that has a letter or digit.

    Args:
        error: of a task or of a package that it uses.
    """
    message = _first(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _first(error: BaseException) -> str:
    lines = map(str.strip, str(error).splitlines())
    return next((line for line in lines if any(map(str.isalnum, line))), "")
