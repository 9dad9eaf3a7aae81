"""Entrywise stretches of deep memories as Triton kernels: numbers, launches, who takes them.

Without a GPU the kernels run in Triton's interpreter, against the definition (`tests.gpu.rows`),
and are compiled for devices that are not there: registers, local memory, types. What a long
sequence launches is held in `test_budgets`.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.gpu.parity import MISSING
from tests.gpu.printed import interprets, printed
from tests.gpu.row_cases import CASES, Case, apart, bound, drawn, solved, told
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import recollect as rc
from recollect.engines.deep.chain import rows
from recollect.engines.deep.chain.ends.ending import Ending
from recollect.engines.deep.chain.rows import launch as launching

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
needs_triton = pytest.mark.skipif(not interprets(), reason="no triton >= 3.6 to run kernels with")
pretended = pytest.mark.skipif(
    VERSION < (2, 10), reason="torch before 2.10 has no backend that is written in Python"
)


# -- in the interpreter ----------------------------------------------------------------------------

NAMES = [*CASES]
HALVES = [NAMES[: len(NAMES) // 2], NAMES[len(NAMES) // 2 :]]


def batches(case: Case) -> int:
    """Inner batches of a call, the open one too."""
    return -(-case.T // case.recipe.algorithm.batch_size)


@needs_triton
@pretended
@pytest.mark.parametrize("names", HALVES, ids=["first", "others"])
def test_numbers_are_the_definitions(names: list[str]) -> None:
    found = printed("rows", "parity", *names)
    assert [one["name"] for one in found] == names
    for one in found:
        case = CASES[one["name"]]
        ways = () if not case.taken else ("forward",) if case.again else ("forward", "backward")
        ran = {way: batches(case) for way in ways}
        if case.chunk is not None:
            ran["forward"] *= 2  # groups are made once more on the way back
        assert one["ran"] == ran, one["name"]
        far = {part: x for part, x in one["far"].items() if not x <= bound(case, part)}
        assert not far, (one["name"], far)


@needs_triton
@pretended
def test_numbers_with_no_answer_are_those_of_torch() -> None:
    """What is finite is so by both ways, and near; some is lost by both, or nothing at all."""
    found = printed("rows", "extremes")
    assert any(one["lost"] for one in found) and not all(one["lost"] for one in found)
    for one in found:
        assert one["ran"] == {"forward": 3, "backward": 3}
        assert one["other"] == 0, one["name"]
        assert all(x <= 1e-5 for x in one["far"].values()), one


@pytest.mark.slow
@needs_triton
@pretended
def test_every_factor_is_needed() -> None:
    (_, right, trusted), *wrong = printed("rows", "mutants")
    assert right < 1e-12 and len(wrong) >= 20 and trusted
    assert not [text for text, far, _ in wrong if not far > 1e-8]
    # What a device is tried with has no zeros, of which these three answer.
    believed = {text for text, _, trusted in wrong if trusted}
    assert believed == {"tl.sum(e * e, 1)", "-2.0 / below", "own = e_2"}


# -- who takes them --------------------------------------------------------------------------------


def maps(P: int = 2, D: int = 8, W: int = 32, out: int | None = None, **more: Any) -> list[Tensor]:
    return [torch.zeros(P, W, D, **more), torch.zeros(P, out or D, W, **more)]


L2, DOT = rc.bias.L2(), rc.bias.DotProduct()


@pytest.fixture
def anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has a launcher: what is left to refuse is structure."""
    monkeypatch.setitem(rows.LAUNCHERS, "cpu", lambda *_: None)


def asked(A: list[Tensor], bias: rc.bias.Bias = L2, k: Any = None, *, share: bool = True) -> bool:
    k = torch.zeros(1, dtype=A[0].dtype) if k is None else k
    ending = Ending(memory=rc.memory.MLP(), bias=bias, heads=1, target=1.0 if share else None)
    return rows.launcher(A, ending, k) is not None


def test_a_cpu_has_its_own_way() -> None:
    assert not asked(maps())


@pytest.mark.usefixtures("anybody")
def test_structure_decides() -> None:
    assert asked(maps()) and asked(maps(W=8)) and asked(maps(dtype=torch.float64))
    assert asked(maps(), DOT, share=False) and not asked(maps(), DOT)
    assert not asked(maps(W=4)), "the first narrows"
    assert not asked(maps(out=9)), "values of another size than keys: two families"
    assert not asked(maps(W=2048)), "wider than registers hold"
    assert not asked(maps()[:1]) and not asked([*maps(), *maps()])
    assert not asked(maps(), rc.bias.Huber())
    assert not asked(maps(dtype=torch.bfloat16)) and not asked(maps(dtype=torch.float16))
    assert not asked(maps(), k=torch.zeros(1, dtype=torch.float64))


@pytest.mark.usefixtures("anybody")
def test_shapes_alone_launch_nothing() -> None:
    with FakeTensorMode():
        assert not asked(maps())
    assert not asked(maps(device="meta"), k=torch.zeros(1, device="meta"))


CUDA = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float32, is_meta=False)


def test_without_triton_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "compiles", lambda _: True)
    monkeypatch.setattr(launching, "find_spec", lambda _: object())
    assert asked(maps(), k=CUDA)
    monkeypatch.setattr(launching, "find_spec", lambda _: None)
    assert not asked(maps(), k=CUDA)
    monkeypatch.setattr(launching, "find_spec", lambda _: object())
    monkeypatch.setattr(launching, "compiles", lambda _: False)
    assert not asked(maps(), k=CUDA)


def test_a_triton_that_compiles_nothing_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    launching.compiles.cache_clear()
    device = torch.device("cpu")
    monkeypatch.setattr(launching, "launch", failing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert not launching.compiles(device), "older than what was compiled"
    launching.compiles.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with pytest.warns(UserWarning, match="Failed to find C compiler.*one by one"):
        assert not launching.compiles(device)
    assert not launching.compiles(device)
    launching.compiles.cache_clear()


# -- compiled for devices that are not there -------------------------------------------------------

SIZES = {"Titans at 64": (64, 256), "at 128": (128, 512), "the widest": (256, 1024)}


def compiled(
    kernel: str, arch: int, dtype: torch.dtype, sizes: tuple[int, int], **more: Any
) -> Any:
    """A kernel as `launch` asks Triton for it, of two moments and measured steps."""
    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", arch, 32)
    kernels = importlib.import_module("recollect.engines.deep.chain.rows.kernels")
    function, (D, W) = getattr(kernels, kernel), sizes
    given = {"W": W, "D": D, "J": 2, "ROWS": 1024 // W, "BW": W, "BD": D, "SHARE": True}
    given |= {"EPS": 1e-6, "TINY": torch.finfo(dtype).tiny}
    given |= {"CURVE": "gelu", "SLOPE": 1.0} if kernel == "forward" else {}
    given |= more
    numbers = set(kernels.COUNTS)
    kind = "*fp64" if dtype == torch.float64 else "*fp32"
    types = {
        name: "constexpr" if name in given else "i32" if name in numbers else kind
        for name in function.arg_names
    }
    places = {name: (n,) for n, name in enumerate(function.arg_names)}
    source = compiler.ASTSource(
        function,
        types,
        constexprs={places[name]: x for name, x in given.items()},
        attrs={places[n]: [["tt.divisibility", 16]] for n, t in types.items() if t == kind},
    )
    return compiler.compile(source, target=target, options=launching.OPTIONS)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where Triton keeps what it compiles."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path


def used(one: Any, folder: Path) -> dict[str, int]:
    """What the machine code takes of a device: REG a thread, STACK, LOCAL and SHARED bytes."""
    knobs = importlib.import_module("triton").knobs
    path = folder / "kernel.cubin"
    path.write_bytes(one.asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(x) for name, x in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", said)}


@needs_triton
@pytest.mark.parametrize(
    ("arch", "sizes"),
    [
        pytest.param(arch, sizes, marks=pytest.mark.slow if (arch, name) != first else ())
        for first in [(90, "Titans at 64")]
        for arch in (80, 90, 100)
        for name, sizes in SIZES.items()
    ],
)
@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_kernels_compile_without_spills(
    kernel: str, arch: int, sizes: tuple[int, int], kept: Path
) -> None:
    for dtype, most in ((torch.float32, 128), (torch.float64, 255)):
        found = used(compiled(kernel, arch, dtype, sizes), kept)
        assert found["REG"] <= most, found
        assert found["STACK"] == found["LOCAL"] == 0, found


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver of a 9.0 that is not there: arguments are bound and kernels compiled, none runs."""
    runtime = importlib.import_module("triton.runtime.driver").driver
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    named = {"target": target, "device": 99, "stream": 0}  # no device's number: kernels are kept
    answers = {f"get_current_{name}": lambda *_, x=x: x for name, x in named.items()}
    monkeypatch.setattr(runtime, "_active", SimpleNamespace(**answers))


@needs_triton
@pytest.mark.usefixtures("kept", "driver")
def test_numbers_make_no_other_kernel() -> None:
    """Batches, rows and strides: what changes from launch to launch, divisible by 16 or not."""
    kernels = importlib.import_module("recollect.engines.deep.chain.rows.kernels")
    x, made = torch.zeros(64), {"forward": set[str](), "backward": set[str]()}
    both = {**launching.SMALLEST, **launching.OPTIONS}
    back = {name: x for name, x in both.items() if name not in ("CURVE", "SLOPE")}
    for n, count, P, R in ((0, 1, 1, 1), (1, 5, 3, 16), (16, 32, 16, 18), (17, 33, 1, 1)):
        counts = count, P * R, R
        one = kernels.forward.warmup(*(x,) * 8, n, n, *counts, **both, grid=(1,))
        other = kernels.backward.warmup(
            *(x,) * 9, n, *counts, R, P, 16 * R, n + 1, **back, grid=(1,)
        )
        made["forward"].add(one.hash)
        made["backward"].add(other.hash)
    assert [len(hashes) for hashes in made.values()] == [1, 1]


@needs_triton
def test_float64_is_float64_throughout(kept: Path) -> None:
    """No constant and no sum is rounded on its way; an error function has float32 of its own."""
    for kernel, more in (("forward", {"CURVE": "tanh"}), ("backward", {})):
        ptx = compiled(kernel, 90, torch.float64, (64, 256), **more).asm["ptx"]
        assert ".f64" in ptx and ".f32" not in ptx


# -- on a GPU --------------------------------------------------------------------------------------

ON_CUDA = (
    "titans", "titans in float32", "titans_minus in float32", "rows that end early", "plain steps",
    "no power of two", "zeros", "gelu_tanh between", "silu between", "tanh between",
)  # fmt: skip
"""A second or two each for the compiler."""


@pytest.mark.gpu
@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason=MISSING)
@pytest.mark.parametrize("name", ON_CUDA)
def test_numbers_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, and the same numbers each time."""
    case, ran = CASES[name], Counter[str]()

    def noting(kernel: str, *rest: Any) -> None:
        ran[kernel] += 1
        launching.launch(kernel, *rest)

    monkeypatch.setitem(rows.LAUNCHERS, "cuda", noting)
    found, again = (solved(case, drawn(case), case.engine, Tensor.cuda) for _ in range(2))
    assert (ran["forward"] > 0) == case.taken
    assert all(torch.equal(x, again[part]) for part, x in found.items())
    far = apart(found, told(case))
    assert all(x <= bound(case, part) for part, x in far.items()), far
