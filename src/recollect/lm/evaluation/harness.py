"""Models under lm-eval: smaller batches if memory ends, counts of truncated texts, fixed seeds.

Only this module and `names` import lm-eval.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate.utils import find_executable_batch_size, patch_environment
from transformers import LogitsProcessorList

from recollect.choices.runtime import seeded_generators

_EXTRA = (
    'evaluation needs lm-eval, which is not installed: pip install -e ".[lm,eval]" in its checkout'
)

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the many packages that it imports
        import lm_eval
        from lm_eval.evaluator import evaluate as run_tasks
        from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import normalize_gen_kwargs
except ImportError as error:
    raise ImportError(_EXTRA) from error

__all__ = ["SEED", "RecollectHFLM", "fixed_seed", "hidden_output", "max_batch_size", "run_task"]

VERSION = str(lm_eval.__version__)

SEED = 1234
"""Seed of all random numbers of a task, as in lm-eval."""

BOOTSTRAPS = 100
"""Number of resamples for the standard error of a metric without a formula for it."""

MAX_BATCH_SIZE = 64
_LOGIT_BYTES = 8  # a logit and its log-softmax, in float32
_MEMORY_FRACTION = 1 / 4  # of the free memory of a CPU, for logits

T = TypeVar("T")

_HFLM: Any = HFLM  # lm-eval's registry hides its type


class RecollectHFLM(_HFLM):
    """Causal language model of transformers as an lm-eval model.

    Log-likelihoods are computed in float32. lm-eval runs the longest texts first, so batches that
    do not fit are found at the beginning; with ``batch_size=None`` the requests then start again
    with smaller batches, from `max_batch_size` down.
    """

    def __init__(self, model: Any, tokenizer: Any, *, batch_size: int | None, context: int) -> None:
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            backend="causal",
            batch_size=batch_size or max_batch_size(model, context),
            max_length=context,
            softmax_dtype=torch.float32,
        )
        self._auto_batch = batch_size is None
        self.reset_counters()

    def reset_counters(self) -> None:
        """Reset the number of truncated requests and whether all logits were finite."""
        self.num_truncated, self.all_finite = 0, True

    def notes(self) -> tuple[str, ...]:
        """Return restrictions on the meaning of the values since `reset_counters`."""
        notes: list[str] = []
        if not self.all_finite:
            notes.append("the model's logits are not finite, so these are no measurements")
        if self.num_truncated:
            times = "once" if self.num_truncated == 1 else f"{self.num_truncated:,} times"
            notes.append(
                f"texts longer than the context of {self.max_length:,} tokens lost their "
                f"beginning {times}"
            )
        return tuple(notes)

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        # The model predicts the last token but does not read it.
        self.num_truncated += sum(len(a) + len(b) > self.max_length + 1 for _, a, b in requests)
        results = self._with_smaller_batches(
            super()._loglikelihood_tokens, requests, disable_tqdm or not _is_interactive()
        )
        self.all_finite = self.all_finite and all(value < math.inf for value, _ in results)
        return results

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        for request in requests:
            text, options = request.args
            new = normalize_gen_kwargs(options, self.max_gen_toks).get("max_gen_toks", 0)
            num_tokens = self.tok_batch_encode([text])[0].shape[1]
            self.num_truncated += num_tokens > self.max_length - new
        return self._with_smaller_batches(
            super().generate_until, requests, disable_tqdm or not _is_interactive()
        )

    def _model_generate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        check = LogitsProcessorList([self._check_logits])
        return super()._model_generate(*args, logits_processor=check, **kwargs)

    def _check_logits(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Record whether logits are finite or −∞, which forbids a token, and return them."""
        self.all_finite = self.all_finite and bool((logits < math.inf).all())
        return logits

    def _with_smaller_batches(self, run: Callable[..., T], *args: Any) -> T:
        """Return ``run(*args)`` with the largest batch that fits, halved after each failure."""
        if not self._auto_batch:
            return run(*args)

        def halve() -> int:
            return self.batch_size_per_gpu // 2

        def attempt(batch_size: int) -> T:
            self.batch_size_per_gpu = batch_size
            return run(*args)

        size = self.batch_size_per_gpu
        search: Any = find_executable_batch_size(attempt, size, reduce_batch_size_fn=halve)
        return search()


def max_batch_size(model: Any, context: int) -> int:
    """Return the largest batch size to try.

    A GPU raises an error if its memory is full. The operating system of a CPU ends the process
    instead, so the logits of a batch may take a part of the free memory there.
    """
    if model.device.type == "cuda":
        return MAX_BATCH_SIZE
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not a POSIX system
        return 1
    text_bytes = _LOGIT_BYTES * context * model.config.get_text_config().vocab_size
    return max(1, min(MAX_BATCH_SIZE, int(free * _MEMORY_FRACTION) // text_bytes))


def run_task(model: RecollectHFLM, task: Any, limit: int | None) -> dict[str, Any]:
    """Return lm-eval's ``results``, ``n-samples`` and more of a loaded task, by task."""
    tasks: Any = {"tasks": {task.task_name: task}}
    with patch_environment(disable_multiproc=1):  # lm-eval resamples in this process then
        results: Any = run_tasks(
            model, tasks, limit=limit, bootstrap_iters=BOOTSTRAPS, log_samples=False
        )
    return results


@contextlib.contextmanager
def hidden_output() -> Iterator[None]:
    """Context manager that hides the output of lm-eval and its tasks, but no bar on a terminal."""
    logger, handler = logging.getLogger("lm_eval"), logging.NullHandler()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            if not _is_interactive():
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def _is_interactive() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def fixed_seed(devices: Iterable[torch.device] | None = None) -> Iterator[None]:
    """Context manager that seeds Python, NumPy and torch, and restores their states on exit.

    Torch is seeded on the CPU and on ``devices``, by default the current accelerator.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    if devices is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        devices = [] if accelerator is None else [accelerator]
    with seeded_generators(SEED, devices):
        random.seed(SEED)
        np.random.seed(SEED)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002
