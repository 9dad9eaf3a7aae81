"""A model under lm-eval: batches halved where memory ends, cut texts counted, no code of the hub.

This module and `names` are the only ones that import lm-eval.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import LogitsProcessorList

_EXTRA = (
    'evaluation needs lm-eval, which is not installed: pip install -e ".[lm,eval]" in its checkout'
)

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the many packages that it imports
        import lm_eval
        from lm_eval.evaluator import evaluate as run_tasks
        from lm_eval.models.huggingface import HFLM as Harness
    from lm_eval.models.utils import normalize_gen_kwargs
except ImportError as error:
    raise ImportError(_EXTRA) from error

__all__ = [
    "SEED",
    "HarnessModel",
    "first_batch",
    "harness_version",
    "quiet",
    "run_task",
    "seeded",
]

SEED = 1234
"""Of everything that a task draws, as lm-eval has it."""

BOOTSTRAPS = 100
"""Resamples behind the standard error of a measure that has no formula for it."""

LARGEST_BATCH = 64
_BYTES = 8  # of a logit: itself and its log-softmax, in float32
_ALONE = "DISABLE_MULTIPROC"  # of the environment, read by lm-eval
_SHARE = 4  # of the free memory, what logits may take on a CPU, is one such part
_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)

Made = TypeVar("Made")


_Harness: Any = Harness  # its type does not come through lm-eval's registry


class HarnessModel(_Harness):
    """A causal language model of transformers as lm-eval asks it; ours honour its padding.

    Log-likelihoods are of a softmax in float32 whatever the model's type. Texts are read from the
    longest to the shortest; where memory ends, the batch is halved and the requests begin again,
    which costs little, because that happens with the longest.

    Args:
        model: with ``generate``.
        tokenizer: of it, with an end of the text.
        batch: texts at once; tried from `first_batch` down when ``None``.
        context: tokens that it sees at once.

    Attributes:
        cut: requests since `begin` whose text was longer than the context.
        finite: whether all logits since `begin`, of which numbers were made, were below infinity.
    """

    def __init__(self, model: Any, tokenizer: Any, *, batch: int | None, context: int) -> None:
        fixed = first_batch(model, context) if batch is None else batch
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            backend="causal",
            batch_size=fixed,
            max_length=context,
            softmax_dtype=torch.float32,
        )
        self._halves = batch is None
        self.begin()

    def begin(self) -> None:
        """Count anew, for another task."""
        self.cut, self.finite = 0, True

    def notes(self) -> tuple[str, ...]:
        """What a reader of the numbers since `begin` must know."""
        found: list[str] = []
        if not self.finite:
            found.append("the model's logits are not finite, so these are no measurements")
        if self.cut:
            times = "once" if self.cut == 1 else f"{self.cut:,} times"
            found.append(
                f"texts longer than the context of {self.max_length:,} tokens lost their "
                f"beginning {times}"
            )
        return tuple(found)

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        # The last token is not read, only predicted.
        self.cut += sum(len(a) + len(b) > self.max_length + 1 for _, a, b in requests)
        bar = disable_tqdm or not _shows()
        found = self._fitting(
            lambda: super(HarnessModel, self)._loglikelihood_tokens(requests, disable_tqdm=bar)
        )
        self.finite = self.finite and all(value < math.inf for value, _ in found)
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        for one in requests:
            text, how = one.args
            new = normalize_gen_kwargs(how, self.max_gen_toks).get("max_gen_toks", 0)
            self.cut += self.tok_batch_encode([text])[0].shape[1] > self.max_length - new
        bar = disable_tqdm or not _shows()
        return self._fitting(
            lambda: super(HarnessModel, self).generate_until(requests, disable_tqdm=bar)
        )

    def _model_generate(self, *given: Any, **options: Any) -> torch.Tensor:
        watch = LogitsProcessorList([self._watch])
        return super()._model_generate(*given, logits_processor=watch, **options)

    def _watch(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The logits of the next tokens as they are; −∞ forbids a token and is none's fault."""
        self.finite = self.finite and bool((logits < math.inf).all())
        return logits

    def _fitting(self, run: Callable[[], Made]) -> Made:
        """What a run gives, with the largest batch that memory holds."""
        while True:
            try:
                return run()
            except (RuntimeError, MemoryError) as error:
                if not self._halves or self.batch_size_per_gpu == 1 or not _no_memory(error):
                    raise
            # Outside of the except clause, whose error holds the tensors of the call that failed.
            self.batch_size_per_gpu = max(1, self.batch_size_per_gpu // 2)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def _no_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or bool(
        _MEMORY.search(str(error))
    )


def first_batch(model: Any, context: int) -> int:
    """The batch that trying begins with.

    A GPU says when memory is out. A CPU's system ends the process instead, so there it begins with
    what the logits of the longest texts leave of the memory that is free.

    Args:
        model: whose vocabulary and device count.
        context: tokens of a text at most.
    """
    if model.device.type == "cuda":
        return LARGEST_BATCH
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # a system that does not say
        return 1
    fits = free // _SHARE // (_BYTES * context * model.config.get_text_config().vocab_size)
    return max(1, min(LARGEST_BATCH, int(fits)))


def run_task(model: HarnessModel, task: Any, limit: int | None) -> dict[str, Any]:
    """What lm-eval measures of one loaded task: ``results``, ``n-samples`` and more, by task.

    Args:
        model: to be measured.
        task: which it loaded.
        limit: documents at most.
    """
    tasks: Any = {"tasks": {task.task_name: task}}
    with _one_process():
        found: Any = run_tasks(
            model, tasks, limit=limit, bootstrap_iters=BOOTSTRAPS, log_samples=False
        )
    return found


def harness_version() -> str:
    """Version of lm-eval."""
    return str(lm_eval.__version__)


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Let lm-eval bootstrap in this process."""
    before = os.environ.get(_ALONE)
    os.environ[_ALONE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ALONE]
        else:
            os.environ[_ALONE] = before


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep from the outputs what lm-eval and its tasks print; bars stay on a terminal."""
    logger, handler = logging.getLogger("lm_eval"), logging.NullHandler()
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            if not _shows():
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated


def _shows() -> bool:
    """Whether somebody looks at a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def seeded(seed: int = SEED) -> Iterator[None]:
    """Draw from one seed, whatever ran before; generators of the process are as before afterwards.

    Args:
        seed: of Python's, numpy's and torch's generators, which tasks of lm-eval read.
    """
    python, numbers = random.getstate(), np.random.get_state()  # noqa: NPY002
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)  # noqa: NPY002
