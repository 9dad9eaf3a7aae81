"""Tasks by name: found in lm-eval's index and among the local ones, loaded and checked."""

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
from recollect.lm.hub import is_hub_reachable, offline, patched_attribute
from recollect.messages import suggestion

__all__ = ["LoadedTasks", "describe_error", "find_tasks", "load_tasks"]

DEFAULT_ANSWER_TOKENS = 256
"""Tokens that lm-eval lets a model write if a task does not state a number."""


@dataclass(frozen=True, kw_only=True)
class LoadedTasks:
    """Tasks and groups of lm-eval that can be run, by name."""

    tasks: Mapping[str, Any]  # tasks by name, in the requested order
    groups: Mapping[str, Any]
    failures: Mapping[str, str] = field(default_factory=dict)  # reasons of the other tasks


def find_tasks(tasks: Sequence[str], metadata: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Return lm-eval's task manager and the names of tasks, without patterns and tags.

    lm-eval's own index takes ten seconds to read. It is read once, and only if a name is not local.
    ``manager.metadata`` may be updated until the tasks are loaded.
    """
    requested = list(dict.fromkeys(name.strip() for name in tasks if name.strip()))
    if not requested:
        raise ValueError("tasks: name at least one, such as local_text (recollect eval --list)")
    for everything in (False, True):
        manager = _task_manager(everything)
        matches = {name: _expand_name(name, manager) for name in requested}
        unknown = next((name for name, names in matches.items() if not names), None)
        if unknown is None:
            manager.metadata.clear()
            manager.metadata.update(metadata)
            return manager, list(dict.fromkeys(x for names in matches.values() for x in names))
        if unknown.startswith(("local_", "fixture_")):
            break
    nearest = suggestion(unknown, manager.all_tasks)
    hint = f"; {nearest}" if nearest.startswith("did you mean") else ""
    raise ValueError(
        f"there is no task {unknown!r}{hint} (`recollect eval --list` names the local ones, "
        "`lm-eval ls tasks` the others)"
    )


@functools.cache
def _task_manager(everything: bool) -> Any:
    """Return lm-eval's manager of the local tasks, or of all; its tasks share its metadata."""
    from lm_eval import tasks

    metadata: dict[str, Any] = {"context": 0}  # the manager replaces an empty mapping
    with harness.hidden_output():
        return tasks.TaskManager(
            include_path=str(local_folder()), include_defaults=everything, metadata=metadata
        )


def _expand_name(name: str, manager: Any) -> list[str]:
    """Return the tasks of a pattern or tag, or the name itself if it exists."""
    if glob.has_magic(name):
        return [x for x in manager.match_tasks([name]) if x not in manager.all_tags]
    if name in manager.all_tags:
        return sorted(manager.task_index[name].tags)
    return [name] if name in manager.all_tasks else []


def load_tasks(
    manager: Any, names: Sequence[str], *, context: int, finished: Sequence[str] = ()
) -> LoadedTasks:
    """Load tasks with their documents, except those that are finished.

    `LoadedTasks.failures` has the tasks whose data cannot be downloaded, that raise an error, run
    code, have pictures, or allow answers too long for the context.
    """
    tasks: dict[str, Any] = {}
    failures: dict[str, str] = {}
    groups: dict[str, Any] = {}
    names = [name for name in names if name not in finished]
    is_online = all(name in local_tasks() for name in names) or is_hub_reachable()
    for name in names:
        try:
            loaded = _load(manager, name, is_online=is_online)
        except ValueError as error:
            failures[name] = str(error)
            continue
        tasks |= loaded["tasks"]
        groups |= loaded.get("groups") or {}
    for name, task in list(tasks.items()):
        try:
            _check_task(name, task, context)
        except ValueError as error:
            failures[name] = str(error)
            del tasks[name]
            continue
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=harness.SEED)
    return LoadedTasks(tasks=tasks, groups=groups, failures=failures)


def _load(manager: Any, name: str, *, is_online: bool) -> dict[str, Any]:
    """Return the tasks and groups of one name, or raise a ValueError with the reason."""
    try:
        network = contextlib.nullcontext() if is_online else offline()
        with network, _forbid_hub_metrics(), harness.hidden_output(), harness.fixed_seed():
            return manager.load([name])
    except ImportError as error:
        raise ValueError(
            f"task {name} needs {error.name or 'packages'}, which is not installed "
            f'({_first_line(error)}): pip install -e ".[lm,eval]" in its checkout'
        ) from None
    except Exception as error:  # of datasets, of the client of the hub, and of the task's own code
        if name in local_tasks() and isinstance(error, ValueError):
            raise ValueError(f"{name}: {error}") from None
        if not is_online and _is_download_error(error):
            raise ValueError(
                f"task {name} needs data of the hub, which does not answer: connect and run it "
                "once (what was fetched is found again), or take a local task "
                "(recollect eval --list)"
            ) from None
        raise ValueError(f"task {name} cannot be loaded: {describe_error(error)}") from None


def _is_download_error(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, is of a connection or of data not in the cache."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    types = (ConnectionError, TimeoutError, socket.gaierror, LocalEntryNotFoundError)
    while error is not None and not isinstance(error, types):
        error = error.__cause__ or error.__context__
    return error is not None


def _check_task(name: str, task: Any, context: int) -> None:
    """Raise a ValueError if a task runs code, is not of text, or has too long answers."""
    if getattr(task, "UNSAFE_CODE", False):
        raise ValueError(f"task {name} runs code that the model writes, which evaluate does not do")
    if getattr(task, "MULTIMODAL", False):
        raise ValueError(f"task {name} asks about pictures or sound: take one of text")
    functions = getattr(task, "_metric_fn_list", {})
    if task.get_config("process_results") is None and None in functions.values():
        metric = next(metric for metric, function in functions.items() if function is None)
        raise ValueError(f"task {name} takes the metric {metric} as code of the hub: none is run")
    if task.OUTPUT_TYPE == "generate_until":
        options = task.get_config("generation_kwargs") or {}
        length = options.get("max_gen_toks") or options.get("max_new_tokens")
        length = length or DEFAULT_ANSWER_TOKENS
        if length >= context:
            raise ValueError(
                f"task {name} lets a model write {length} tokens, and a context of {context} "
                "leaves none to read: give a longer context"
            )


@contextlib.contextmanager
def _forbid_hub_metrics() -> Iterator[None]:
    """Context manager that keeps lm-eval from downloading metrics, which are code."""
    import evaluate as hub_metrics

    def refuse(*args: Any, **options: Any) -> Any:
        raise ValueError("a metric of it is code of the hub, and none is run")

    with patched_attribute(hub_metrics, "load", refuse):
        yield


def describe_error(error: BaseException) -> str:
    """Return the type of an error and the first line of its message with a letter or digit."""
    message = _first_line(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _first_line(error: BaseException) -> str:
    lines = map(str.strip, str(error).splitlines())
    return next((line for line in lines if any(map(str.isalnum, line))), "")
