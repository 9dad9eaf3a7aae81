"""The recurrence over inner batches as Triton kernels, against the definition.

Without a GPU the kernels run in Triton's interpreter (`tests.gpu.recurrence`).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tests.gpu.parity import MISSING
from tests.gpu.printed import interprets, printed
from tests.gpu.recurrence_cases import CASES, MUTANTS
from tests.gpu.row_cases import apart, bound, drawn, solved, told
from torch import Tensor

import recollect as rc
from recollect.engines.deep import recurrence
from recollect.engines.deep.chain.ends.ending import Ending
from recollect.engines.deep.recurrence import launch

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
needs_triton = pytest.mark.skipif(not interprets(), reason="no triton >= 3.6 to run kernels with")
pretended = pytest.mark.skipif(
    VERSION < (2, 10), reason="torch before 2.10 has no backend that is written in Python"
)


@needs_triton
@pretended
def test_results_equal_the_definition() -> None:
    """In float64, of which nothing is rounded before the last bits."""
    results = printed("recurrence", "parity")
    assert [one["name"] for one in results] == [*CASES]
    for one in results:
        case = CASES[one["name"]]
        ran = {"forward": 1, "backward": 1} if case.taken else {}
        if case.chunk is not None:  # two groups of two batches; the last batch is one by itself
            ran = {"forward": 4, "backward": 2}
        assert one["ran"] == ran, one["name"]
        wrong = {part: x for part, x in one["errors"].items() if not x <= bound(case, part)}
        assert not wrong, (one["name"], wrong)


@needs_triton
@pretended
def test_factors_of_products_follow_the_requested_precision() -> None:
    errors = {one["precision"]: one["error"] for one in printed("recurrence", "factors")}
    assert errors["float32"] < 1e-5
    assert 1e-4 < errors["tf32"] < 1e-2
    assert 1e-3 < errors["bf16"] < 1e-2


@needs_triton
@pretended
def test_launches_do_not_depend_on_tokens() -> None:
    (_, few, waits), (_, many, waits_too) = printed("recurrence", "launches")
    assert many <= few <= 400 and waits == waits_too == 0


@needs_triton
@pretended
def test_a_trial_refuses_wrong_kernels_once() -> None:
    correct, *wrong = printed("recurrence", "trial")
    assert correct["warned"] == [] and correct["ran"] == {"forward": 3, "backward": 3}
    assert len(wrong) == len(MUTANTS)
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
    """Whether the kernels are selected for maps with so many hidden units and channels."""
    (W, D), dtype = A, more.pop("dtype", torch.float32)
    bias = more.pop("bias", rc.bias.L2())
    target = 1.0 if more.pop("share", True) else None
    ending = Ending(memory=rc.memory.MLP(**more), bias=bias, heads=1, target=target)
    maps = [torch.zeros(2, W, D, dtype=dtype), torch.zeros(2, D, W, dtype=dtype)]
    return recurrence.runner_of(maps, ending, torch.zeros(N, 2, R, D, dtype=dtype), Q) is not None


def test_a_cpu_takes_its_own_loop() -> None:
    assert not selected()


def test_structure_and_sizes_select(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(recurrence.LAUNCHERS, "cpu", lambda *_: None)
    assert selected() and selected(norm="layer") and selected((512, 128)) and selected(R=32, Q=32)
    assert selected((96, 32)) and selected(share=False, bias=rc.bias.DotProduct())
    assert not selected(norm="rms") and not selected(bias=rc.bias.DotProduct())
    assert not selected(bias=rc.bias.Huber())
    assert not selected(R=18) and not selected(Q=48) and not selected(R=64) and not selected(N=1)
    assert not selected((32, 8)) and not selected((512, 256)) and not selected((16, 32))
    assert not selected(dtype=torch.float64) and not selected(dtype=torch.bfloat16)


# -- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason=MISSING)
@pytest.mark.parametrize("name", ["titans in float32", "rows that end early", "without a norm"])
def test_results_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, against the definition, and the same bits each time."""
    case, ran = CASES[name], Counter[str]()
    inputs = {part: x.float() for part, x in drawn(case).items()}

    def counting(kernel: str, *rest: Any) -> None:
        ran[kernel] += 1
        launch.launch(kernel, *rest)

    monkeypatch.setitem(recurrence.LAUNCHERS, "cuda", counting)
    results, repeated = (solved(case, inputs, case.engine, Tensor.cuda) for _ in range(2))
    assert ran == {"forward": 2, "backward": 2}
    assert all(torch.equal(x, repeated[part]) for part, x in results.items())
    errors = apart(results, told(case))
    assert all(x <= (1e-3 if part.startswith("d") else 1e-5) for part, x in errors.items()), errors
