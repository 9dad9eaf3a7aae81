"""Steps of `gpu_run.py` that compare a device with the CPU or with a reference, and their context.

Times of these steps are not published: several of them run next to each other.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu_tables import strip_folders
from tests.gpu.parity import Waits
from tests.gpu.passes import Unwatched, decode, distance, length, passes, pieces
from tests.gpu.recurrence_cases import (
    CASES,
    TITANS,
    Case,
    errors_of,
    expected_of,
    inputs_of,
    results_of,
)
from tests.gpu.recurrence_cases import recipe as deep_recipe
from torch import Tensor
from torch.utils.benchmark import Timer

import recollect as rc
from recollect.benchmarks.cases.recall import (
    Shape,
    differentiable,
    forward_backward,
    initial_arguments,
    recall_case,
)
from recollect.choices.matmul_precision import matmul_precision
from recollect.engines.deep.recurrence import trial
from recollect.engines.fla.operators import function, gated_backward_raises
from recollect.report.environment import describe_environment

__all__ = [
    "OPERATORS",
    "StepContext",
    "adoption",
    "backend",
    "device",
    "free_memory",
    "has_backend",
    "presets",
    "recurrence",
    "recurrence_call",
    "recurrence_shape",
]


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """Device, deadline and output file of one step.

    Attributes:
        step: name of the step in the lines.
        part: index of this process among those that share the step.
        num_parts: number of these processes.
        device: ``"cuda"``, or ``"cpu"`` for tiny sizes.
        warm_up: whether the step only compiles kernels, without times.
        deadline: `time.time()` at which the process is ended.
        path: file of the lines.
        start: `time.time()` at the start of the run.
        commit: commit of the source tree if git does not know it.
    """

    step: str
    part: int = 0
    num_parts: int = 1
    device: str
    warm_up: bool = False
    deadline: float
    path: Path
    start: float
    commit: str = "unknown"

    @property
    def tiny(self) -> bool:
        """Whether sizes only test the script."""
        return self.device == "cpu"

    def write(self, what: str, **data: Any) -> None:
        """Append a line to the file."""
        data = {k: strip_folders(v) if isinstance(v, str) else v for k, v in data.items()}
        line = {"step": self.step, "what": what, "t": round(time.time() - self.start, 1), **data}
        text = json.dumps(line, default=str) + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        print(text, end="", flush=True)

    def write_warning(self, message: Warning | str, *_: Any, **__: Any) -> None:
        """Append a line for a warning, in place of `warnings.showwarning`."""
        self.write("warning", message=str(message)[:1500])

    def seconds_left(self) -> float:
        """Return the seconds until the deadline."""
        return self.deadline - time.time()

    @contextlib.contextmanager
    def guard(self, case: str, **data: Any) -> Iterator[None]:
        """Write a line for an exception, and continue with the next case."""
        try:
            yield
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self.write(
                "failed",
                of=case,
                error=f"{type(error).__name__}: {error}"[:1500],
                at=f"{Path(frame.filename).name}:{frame.lineno}",
                **data,
            )
            free_memory(self.device)


def free_memory(device: str) -> None:
    """Release tensors in cycles, and the allocator's cache."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


# -- device --------------------------------------------------------------------------------------

PACKAGES = (
    *("torch", "triton", "transformers", "accelerate", "numpy", "safetensors", "tokenizers"),
    *("flash-linear-attention", "fla-core", "titans-pytorch", "tilelang", "pytest"),
)
TOOLS = ("nvcc", "ncu", "gcc")


def device(context: StepContext) -> None:
    """Write versions, properties of the device, and the rates of its simplest operations."""
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    commit = describe_environment("cpu").commit
    context.write(
        "versions",
        python=platform.python_version(),
        cpus=os.cpu_count(),
        cuda=torch.version.cuda,
        commit=context.commit if commit == "unknown" else commit,
        tools=[name for name in TOOLS if shutil.which(name)],
        packages=versions,
    )
    if context.device == "cuda":
        card = torch.cuda.get_device_properties(0)
        context.write(
            "device",
            name=card.name,
            capability=[card.major, card.minor],
            multiprocessors=card.multi_processor_count,
            memory_gib=round(card.total_memory / 2**30, 1),
            l2_mib=round(card.L2_cache_size / 2**20),
        )
    with context.guard("ceilings"):
        context.write("ceilings", **_ceilings(context))


def _ceilings(context: StepContext) -> dict[str, Any]:
    """Measure products by type, a copy, and the launch of a small operation.

    Numbers are random: products of equal numbers are faster on a GPU.
    """

    def seconds(call: Callable[[], object]) -> float:
        call()
        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        return timer.blocked_autorange(min_run_time=0.02 if context.tiny else 0.1).median

    side, num_bytes = (256, 2**22) if context.tiny else (8192, 2**32)
    lhs, rhs = torch.randn(2, side, side, device=context.device)
    rates: dict[str, float] = {}
    for name, precision, dtype in (
        ("bfloat16", None, torch.bfloat16),
        ("TF32", "tf32", torch.float32),
        ("float32", "float32", torch.float32),
    ):
        a, b = lhs.to(dtype), rhs.to(dtype)
        with matmul_precision(precision, context.device):
            rates[name] = 2.0 * side**3 / seconds(lambda: a @ b)  # noqa: B023
    source = torch.ones(num_bytes, dtype=torch.uint8, device=context.device)
    target, small = torch.empty_like(source), torch.zeros(1, device=context.device)
    return {
        "matmul": rates,
        "side": side,
        "copy": 2.0 * num_bytes / seconds(lambda: target.copy_(source)),
        "copied": num_bytes,
        "launch": seconds(lambda: small.add_(1.0)),
    }


# -- presets -------------------------------------------------------------------------------------

FIRST = ("softmax_attention", "gated_delta_net", "titans")
SLOW = (
    *("atlas_plus_plus", "moneta_exact", "memora_per_token", "local_quadratic_attention"),
    *("atlas_per_token", "f_divergence"),
)
BOUNDS = {"float32": (3e-5, 1e-4), "tf32": (5e-3, 1e-2)}
"""Largest relative errors of outputs and of all gradients together; a larger one is marked."""
CANCELLATION = {"local_quadratic_attention": 1e-3}


def presets(context: StepContext) -> None:
    """Compare every preset with the CPU in float64: outputs, gradients and decoded tokens.

    The presets run without flash-linear-attention, which the step ``backend`` checks.
    """
    others = [name for name in rc.zoo.names() if name not in FIRST + SLOW]
    names = FIRST if context.tiny else (*FIRST, *others, *SLOW)
    names = names[context.part :: context.num_parts]
    choose = importlib.import_module("recollect.engines.fla.choose")
    with patch.object(choose, "installed", lambda: False):
        for index, name in enumerate(names):
            if context.seconds_left() < 3:
                context.write("left out", presets=names[index:])
                return
            with context.guard(name):
                _compare_preset(context, name)


def _compare_preset(context: StepContext, name: str) -> None:
    preset, start = rc.zoo.get(name), time.time()
    torch.manual_seed(0)
    layer = preset.build(d_model=32, num_heads=2)
    x = torch.randn(2, length(preset), 32)
    exact, unwatched = copy.deepcopy(layer).double(), Unwatched()
    y, gradients = passes(exact, x.double(), unwatched)
    decodes = isinstance(layer, rc.MemoryLayer)
    tokens = decode(exact, pieces(x.double()), unwatched) if decodes else None
    slow = name in SLOW or (time.time() - start > 6 and not context.tiny)
    for precision, bounds in BOUNDS.items():
        if context.seconds_left() < 2 or (slow and precision != "float32"):
            return
        start = time.time()
        on_device = copy.deepcopy(layer).to(context.device)
        if hasattr(on_device, "precision"):
            on_device.precision = precision
        # The first pass creates constants, loads libraries and compiles kernels.
        passes(on_device, x.to(context.device, copy=True), unwatched)
        on_device.zero_grad()
        waits = Waits()
        y_device, gradients_device = passes(on_device, x.to(context.device, copy=True), waits)
        total, worst, worst_name = _gradient_errors(gradients_device, gradients)
        errors = {"y": distance(y_device, y), "gradient": total, "worst": worst}
        if tokens is not None:
            parts = pieces(x.to(context.device))
            decode(on_device, parts, unwatched)
            errors["decoded"] = distance(decode(on_device, parts, waits), tokens)
        y_bound, gradient_bound = (max(bound, CANCELLATION.get(name, 0.0)) for bound in bounds)
        good = errors["y"] <= y_bound and total <= gradient_bound
        context.write(
            "preset",
            name=name,
            precision=precision,
            good=good and errors.get("decoded", 0.0) <= 2 * y_bound,
            **{key: float(f"{error:.2e}") for key, error in errors.items()},
            whose=worst_name,
            waits={part: sites for part, sites in waits.lines.items() if sites},
            seconds=round(time.time() - start, 2),
        )


def _gradient_errors(
    gradients: Mapping[str, Tensor | None], reference: Mapping[str, Tensor | None]
) -> tuple[float, float, str]:
    """Return the error of all gradients together, and the largest error with its parameter.

    A gradient of less than a thousandth of the total norm counts with that norm.
    """
    norms = {key: float(g.norm()) for key, g in reference.items() if g is not None}
    total = max(math.hypot(*norms.values()), 1e-30)
    errors = {
        key: distance(gradients[key], g) * norms.get(key, 1.0) for key, g in reference.items()
    }
    relative = {key: e / max(norms.get(key, 1.0), 1e-3 * total) for key, e in errors.items()}
    worst_name = max(relative, key=lambda key: relative[key])
    return math.hypot(*errors.values()) / total, relative[worst_name], worst_name


# -- flash-linear-attention ----------------------------------------------------------------------

OPERATORS: dict[str, tuple[str, str, dict[str, str]]] = {
    "gated_delta_net": (
        "fla.ops.gated_delta_rule",
        "chunk_gated_delta_rule",
        {"log_decay": "g", "lr": "beta"},
    ),
    "mamba2": ("fla.ops.simple_gla", "chunk_simple_gla", {"log_decay": "g"}),
    "gla": ("fla.ops.gla", "chunk_gla", {"log_decay": "g"}),
    "delta_net": ("fla.ops.delta_rule", "chunk_delta_rule", {"lr": "beta"}),
}
"""Module and name of a preset's operator, and its names of the preset's gates."""

CHANNEL_OPERATORS: dict[str, tuple[str, str, dict[str, str]]] = {
    "gated_delta_net": ("fla.ops.kda", "chunk_kda", {"log_decay": "g", "lr": "beta"}),
    "mamba2": ("fla.ops.gla", "chunk_gla", {"log_decay": "g"}),
}
"""Operators with a decay per channel, for devices on which `gated_backward_raises`."""

UNTIMED = ("kimi_delta_attention", "comba", "erase_then_delta", "gated_delta_net_2", "rwkv7")
"""More presets with an operator, whose times are not measured."""


def has_backend(device: str) -> bool:
    """Return whether flash-linear-attention can run on a device."""
    names = ("fla", "triton")
    return device == "cuda" and all(importlib.util.find_spec(name) for name in names)


def recurrence_shape(context: StepContext, T: int, tokens: int, H: int = 16, D: int = 64) -> Shape:
    """Return the sizes of a call in bfloat16: sequences of T tokens, ``tokens`` in total."""
    if context.tiny:
        T, tokens, H, D = 64, 64, 2, 16
    B = max(1, tokens // T)
    return Shape(B=B, T=T, H=H, K=D, V=D, dtype=torch.bfloat16, device=context.device)


def recurrence_call(
    name: str, shape: Shape, method: str, *, backward: bool
) -> tuple[Callable[[], Any], str | None]:
    """Return a call of a preset, and the name of its operator for ``method="operator"``.

    Args:
        name: name of the preset.
        shape: sizes of the call.
        method: an engine, or ``"operator"`` for flash-linear-attention's function alone.
        backward: whether the call computes the gradients of all inputs.
    """
    if method != "operator":
        case = recall_case(name, shape, name=name, backward=backward, engine=method)
        return case.make(), None
    per_channel = backward and name in CHANNEL_OPERATORS and gated_backward_raises()
    module, operator, names = (CHANNEL_OPERATORS if per_channel else OPERATORS)[name]
    inputs = initial_arguments(rc.zoo.get(name).recipe, shape, requires_grad=backward)
    q, k, v, gates = (inputs[key] for key in ("q", "k", "v", "gates"))
    operate = function(module, operator)

    def forward() -> Any:
        arguments = {names[gate]: x for gate, x in gates.items() if gate in names}
        if per_channel:
            arguments["g"] = arguments["g"].unsqueeze(-1).expand(q.shape)
        in_values = "lr" in gates and "lr" not in names
        value = v * gates["lr"].unsqueeze(-1).to(v.dtype) if in_values else v
        return operate(q, k, value, scale=1.0, **arguments)[0]

    call = forward_backward(forward, differentiable(inputs)) if backward else forward
    return call, operator


def backend(context: StepContext) -> None:
    """Compare outputs and gradients through flash-linear-attention with PyTorch in float32."""
    if not has_backend(context.device):
        context.write("not run", why="flash-linear-attention with Triton on CUDA is missing")
        return
    if context.part == 0:
        context.write("guard", refuses_gated_backward=gated_backward_raises())
    names = [*OPERATORS, *UNTIMED][context.part :: context.num_parts]
    cases = [
        (name, D, backward)
        for backward in (False, True)
        for name in names
        for D in ((64, 128) if name == "gated_delta_net" else (64,))
    ]
    for name, D, backward in cases:
        with context.guard(name, D=D, backward=backward):
            shape = recurrence_shape(context, 1024, 1024, H=4, D=D)
            exact = replace(shape, dtype=torch.float32)
            call, _ = recurrence_call(name, shape, "fla", backward=backward)
            reference, _ = recurrence_call(name, exact, "torch", backward=backward)
            outputs, expected = call(), reference()
            pairs = zip(outputs, expected, strict=True) if backward else [(outputs, expected)]
            errors = [float(f"{distance(a, b):.2e}") for a, b in pairs]
            context.write("equal", name=name, method="fla", D=D, backward=backward, far=errors)


# -- kernels of deep memories --------------------------------------------------------------------

RECURRENCES = {
    "titans": {75: TITANS, 150: TITANS},
    "titans without its norm": {75: deep_recipe(), 150: deep_recipe()},
    "rows that end early": {40: CASES["rows that end early"].recipe},
    "without momentum": {40: CASES["without momentum"].recipe},
    "another affine error": {24: CASES["another affine error"].recipe},
    "no decay, no residual": {24: CASES["no decay, no residual"].recipe},
    "a window of 17 tokens": {40: CASES["a window of 17 tokens"].recipe},
}


def recurrence(context: StepContext) -> None:
    """Compare the Triton kernels of deep memories with the definition in float64."""
    cases = [
        (name, T, recipe, precision)
        for name, recipes in RECURRENCES.items()
        for T, recipe in recipes.items()
        for precision in ("float32", "tf32")
    ]
    cases = cases[:1] if context.tiny else cases[context.part :: context.num_parts]
    engine = importlib.import_module("recollect.engines.deep.chain.engine")
    for name, T, recipe, precision in cases:
        trials: list[bool] = []

        def agrees(*args: Any, _trials: list[bool] = trials, **options: Any) -> bool:
            _trials.append(trial.agrees(*args, **options))
            return _trials[-1]

        with context.guard(name, T=T, precision=precision):
            padded = name in CASES and CASES[name].padded
            case = Case(recipe, T=T, B=2, padded=padded, dtype=torch.float32)
            inputs, expected = inputs_of(case), expected_of(case)

            def errors(case: Case, inputs: Any = inputs) -> dict[str, Tensor]:
                return results_of(case, inputs, case.engine, lambda x: x.to(context.device))

            with matmul_precision(precision, context.device):
                with patch.object(engine, "agrees", agrees):
                    first, second = errors(case), errors(case)
                plain = errors(replace(case, engine="torch"))
            context.write(
                "equal",
                name=name,
                T=T,
                precision=precision,
                kernels=bool(trials) and all(trials),
                worst=max(errors_of(first, expected).values()),
                torch_worst=max(errors_of(plain, expected).values()),
                alike=all(torch.equal(first[key], second[key]) for key in first),
            )


# -- adopted models ------------------------------------------------------------------------------


def adoption(context: StepContext) -> None:
    """Compare adopted models of transformers with the originals on the device, in every mode."""
    if importlib.util.find_spec("transformers") is None:
        context.write("not run", why="transformers is missing")
        return
    from tests.lm.adoption.models import FAMILIES, IGNORE_DOCUMENTS, make_model
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    families = {family.name: family for family in rc.lm.families()}
    kinds = [kind for group in FAMILIES.values() for kind in group if kind in CONFIG_MAPPING_NAMES]
    kinds = ["mamba"] if context.tiny else kinds[context.part :: context.num_parts]
    for kind in kinds:
        with context.guard(kind):
            name = rc.lm.adopt(make_model(kind)).adopted[0].family
            start = time.time()
            report = rc.testing.check_family(
                families[name],
                lambda kind=kind: make_model(kind).to(context.device),  # type: ignore[misc]
                knows_documents=kind not in IGNORE_DOCUMENTS,
            )
            errors = {check: pair[0] for check, pair in report.errors.items()}
            context.write(
                "equal",
                name=type(report.adoption.model).__name__,
                checks=len(errors),
                worst=float(f"{max(errors.values()):.2e}"),
                check=max(errors, key=lambda check: errors[check]),
                seconds=round(time.time() - start, 1),
            )
