"""The recurrence over inner batches as Triton kernels, against the definition.

Without a GPU the kernels run in Triton's interpreter (`tests.gpu.recurrence`).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.gpu.parity import MISSING
from tests.gpu.printed import interprets, printed
from tests.gpu.recurrence_cases import (
    CASES,
    MUTANTS,
    bound,
    errors_of,
    expected_of,
    inputs_of,
    results_of,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import recollect as rc
from recollect.engines.deep import recurrence
from recollect.engines.deep.chain import engine
from recollect.engines.deep.chain.chain import ACTIVATIONS, ChainSpec, OutputHead
from recollect.engines.deep.recurrence import launch, trial

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
needs_triton = pytest.mark.skipif(not interprets(), reason="no triton >= 3.6 to run kernels with")
pretended = pytest.mark.skipif(
    VERSION < (2, 10), reason="torch before 2.10 has no backend that is written in Python"
)


QUICK = ("titans", "rows that end early", "several groups", "a window of 17 tokens", "one batch")


@needs_triton
@pretended
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK[:3], id="quick"),
        pytest.param(QUICK[3:], id="window, one batch", marks=pytest.mark.slow),
        pytest.param([x for x in CASES if x not in QUICK], id="rest", marks=pytest.mark.slow),
    ],
)
def test_results_equal_the_definition(names: Sequence[str]) -> None:
    """Compare in float64, so that only the last bits are rounded."""
    results = printed("recurrence", "parity", *names)
    assert [one["name"] for one in results] == [*names]
    for one in results:
        case = CASES[one["name"]]
        ran = {"forward": 1, "backward": 1} if case.runs_kernels else {}
        if case.chunk is not None:  # the backward pass reruns three groups
            ran = {"forward": 6, "backward": 3}
        assert one["ran"] == ran, one["name"]
        wrong = {part: x for part, x in one["errors"].items() if not x <= bound(case, part)}
        assert not wrong, (one["name"], wrong)


@pytest.mark.slow
@needs_triton
@pretended
def test_factors_of_products_follow_the_requested_precision() -> None:
    errors = {one["precision"]: one["error"] for one in printed("recurrence", "factors")}
    assert errors["float32"] < 1e-5
    assert 1e-4 < errors["tf32"] < 1e-2


@pytest.mark.slow
@needs_triton
@pretended
def test_launches_do_not_depend_on_tokens() -> None:
    few, many, groups = printed("recurrence", "launches")
    assert many[1] <= few[1] <= 305 and groups[1] <= many[1] + 115
    assert few[2] == many[2] == groups[2] == 0


@needs_triton
@pretended
@pytest.mark.slow
@pytest.mark.parametrize("count", [1, pytest.param(len(MUTANTS), id="all")])
def test_a_trial_refuses_wrong_kernels_once(count: int) -> None:
    correct, *wrong = printed("recurrence", "trial", str(count))
    assert correct["warned"] == [] and correct["ran"] == {"forward": 3, "backward": 3}
    assert len(wrong) == count
    for one in wrong:
        (message,) = one["warned"]
        assert "differ by" in message and "PyTorch operations replace them" in message
        assert one["ran"] == {"forward": 1, "backward": 1}, one["wrong"]


@needs_triton
def test_the_interpreter_rounds_casts_to_nearest() -> None:
    assert printed("casts") == [0]


# -- selection -------------------------------------------------------------------------------------


def selected(
    A: tuple[int, int] = (64, 16), R: int = 16, Q: int = 16, N: int = 2, **more: Any
) -> bool:
    """Whether the kernels are selected for this number of hidden units and channels."""
    (W, D), dtype, keys = A, more.pop("dtype", torch.float32), more.pop("keys", None)
    bias = more.pop("bias", rc.bias.L2())
    target = 1.0 if more.pop("share", True) else None
    output_head = OutputHead(memory=rc.memory.MLP(**more), bias=bias, heads=1, target=target)
    maps = [torch.zeros(2, W, D, dtype=dtype), torch.zeros(2, D, W, dtype=dtype)]
    keys = torch.zeros(N, 2, R, D, dtype=dtype) if keys is None else keys
    return recurrence.select_runner(maps, output_head, keys, Q) is not None


def test_cpu_runs_the_loop() -> None:
    assert not selected()


def test_structure_and_sizes_select(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(recurrence.LAUNCHERS, "cpu", lambda *_: None)
    assert selected() and selected(norm="layer") and selected((512, 128)) and selected(R=32, Q=32)
    assert selected((96, 32)) and selected(share=False, bias=rc.bias.DotProduct())
    assert selected((192, 48)) and selected((320, 80)) and not selected((72, 24))
    assert not selected(norm="rms") and not selected(bias=rc.bias.DotProduct())
    assert not selected(bias=rc.bias.Huber())
    assert not selected(R=18) and not selected(Q=48) and not selected(R=64) and not selected(N=1)
    assert not selected((32, 8)) and not selected((512, 256)) and not selected((16, 32))
    assert not selected(dtype=torch.float64) and not selected(dtype=torch.bfloat16)


CUDA = SimpleNamespace(
    shape=(2, 2, 16, 16), device=torch.device("cuda", 0), dtype=torch.float32, is_meta=False
)


def test_a_device_needs_triton_and_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda _: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert selected(keys=CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert not selected(keys=CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(launch, "find_spec", lambda _: None)
    assert not selected(keys=CUDA)


@pytest.mark.parametrize("device", ["fake", "meta"])
def test_meta_tensors_launch_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("cpu", "meta"):
        monkeypatch.setitem(recurrence.LAUNCHERS, kind, lambda *_: None)
    with FakeTensorMode() if device == "fake" else torch.device("meta"):
        assert not selected()


# -- the trial -------------------------------------------------------------------------------------

CPU = torch.device("cpu")


@pytest.fixture
def agrees(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The trial without earlier results, with operations of PyTorch in place of the kernels."""
    monkeypatch.setattr(trial, "_RESULTS", {})
    spec = ChainSpec(
        activation=ACTIVATIONS["gelu"],
        output_head=OutputHead(memory=rc.memory.MLP(), bias=rc.bias.L2(), heads=1, target=1.0),
        transposed=(True, False),
        save_for_backward=True,
        runner=object(),
    )

    def call(run: trial.Run = without_kernels, device: torch.device = CPU, **memory: bool) -> bool:
        head = replace(spec.output_head, memory=rc.memory.MLP(**memory))
        return trial.agrees(run, replace(spec, output_head=head), (16, 16, 16, 32, 2), device)

    return call


def without_kernels(
    spec: ChainSpec, inputs: Mapping[str, Tensor], start: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    assert {(x.dtype, x.device) for x in (*inputs.values(), *start)} == {(torch.float32, CPU)}
    return engine._run_flat(replace(spec, runner=None), inputs, start)


def test_a_trial_of_a_memory_without_a_residual(agrees: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert agrees(residual=False)


def test_a_trial_sees_nan_after_equal_results(agrees: Any) -> None:
    def nan_in_the_last(spec: ChainSpec, *inputs: Any) -> tuple[Tensor, ...]:
        *first, last = without_kernels(spec, *inputs)
        return *first, last * float("nan") if spec.runner is not None else last

    with pytest.warns(UserWarning, match="differ by nan"):
        assert not agrees(nan_in_the_last)


def test_kernels_that_do_not_compile_are_reported_once(agrees: Any) -> None:
    def failing(spec: ChainSpec, *inputs: Any) -> tuple[Tensor, ...]:
        raise RuntimeError("Failed to find C compiler")

    with pytest.warns(UserWarning, match="do not run.*Failed to find C compiler"):
        assert not agrees(failing)
    assert not agrees(failing)


def test_a_trial_does_not_depend_on_defaults(agrees: Any) -> None:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert agrees()
    finally:
        torch.set_default_dtype(default)


def test_a_trial_inside_a_checkpoint(agrees: Any) -> None:
    """The checkpoint runs its function again for its gradient, not for those of the trial."""
    x, calls, results = torch.linspace(-1.0, 1.0, 5).requires_grad_(), list[int](), list[bool]()

    def function(x: Tensor) -> Tensor:
        calls.append(1)
        results.append(agrees())
        return x.sin().exp()

    (gradient,) = torch.autograd.grad(checkpoint(function, x, use_reentrant=False).sum(), x)
    assert torch.allclose(gradient, (x.cos() * x.sin().exp()).detach())
    assert len(calls) == 2 and results == [True, True]


def test_a_trial_inside_a_selective_checkpoint(agrees: Any) -> None:
    """Results of the trial's products are not taken for those of the checkpointed function."""
    x = torch.linspace(-1.0, 1.0, 8).view(1, 2, 4).requires_grad_()

    def function(x: Tensor) -> Tensor:
        assert agrees()
        return torch.bmm(x.sin(), x.mT).exp()

    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.bmm.default])
    y = checkpoint(function, x, use_reentrant=False, context_fn=contexts)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(torch.bmm(x.sin(), x.mT).exp().sum(), x)
    assert torch.allclose(gradient, expected)


def test_no_trial_while_a_graph_is_captured(agrees: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device, trials, results = torch.device("cuda", 0), list[int](), list[bool]()
    monkeypatch.setattr(trial, "_difference", lambda *_: trials.append(1))
    for captures in (True, False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)  # noqa: B023
        results.append(agrees(device=device))
    assert results == [False, True, True] and len(trials) == 1


def test_a_trial_without_memory_is_repeated(agrees: Any) -> None:
    def exhausted(*_: Any) -> tuple[Tensor, ...]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        agrees(exhausted)
    assert agrees()


# -- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason=MISSING)
@pytest.mark.parametrize("name", ["titans in float32", "rows that end early", "without a norm"])
def test_results_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, against the definition, with equal bits each time."""
    case, ran = CASES[name], Counter[str]()
    inputs = {part: x.float() for part, x in inputs_of(case).items()}

    def counting(kernel: str, *rest: Any) -> None:
        ran[kernel] += 1
        launch.launch(kernel, *rest)

    monkeypatch.setitem(recurrence.LAUNCHERS, "cuda", counting)
    results, repeated = (results_of(case, inputs, case.engine, Tensor.cuda) for _ in range(2))
    assert ran == {"forward": 2, "backward": 2}
    assert all(torch.equal(x, repeated[part]) for part, x in results.items())
    errors = errors_of(results, expected_of(case))
    assert all(x <= (1e-3 if part.startswith("d") else 1e-5) for part, x in errors.items()), errors
