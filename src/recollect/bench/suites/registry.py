"""What `recollect bench` times: named suites of cases over the public functions."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from recollect.bench.results import BenchResult, Case
from recollect.bench.suites import kernel as dual_suite
from recollect.bench.suites.deep import memory_case, own_case, titans_case
from recollect.bench.suites.least_squares import conjugate_case, step_case
from recollect.cost import cost
from recollect.engines.common.problem import Problem
from recollect.engines.kernel import local_regression
from recollect.recall.recall import recall
from recollect.recipe.initial_params import initial_params
from recollect.recipe.recipe import Recipe
from recollect.state.initial import initial_state
from recollect.zoo.preset import get, names

__all__ = ["SUITES", "Shape", "Suite", "chosen_cases", "document", "ratios"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one measured call; float32 unless ``dtype`` says otherwise."""

    B: int = 1
    T: int = 4096
    H: int = 8
    K: int = 64
    V: int = 64
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A set of cases to be timed in one run.

    Attributes:
        about: one line for ``--list``.
        cases: the cases at a shape.
        baseline: the case that ratios refer to.
        pairs: (what, numerator, denominator) of further ratios worth printing.
        min_seconds: how long one case is called in one round; long where cases of milliseconds
            alternate with some that sweep the caches for a second.
    """

    about: str
    cases: Callable[[Shape], list[Case]]
    baseline: str
    pairs: Callable[[Shape], list[tuple[str, str, str]]]
    min_seconds: float = 0.02


_HALF_LIFE = 0.1  # decays between 0 and this per token, as logs
_SHALLOW = ("linear_attention", "retnet", "gla", "delta_net", "gated_delta_net", "longhorn")


def _tensors(shape: Shape, *, grad: bool, n: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """The same q, k (unit norm) and v for every case with n associations per token."""
    generator = torch.Generator().manual_seed(0)

    def draw(size: int, several: int) -> Tensor:
        lead = (shape.B, shape.T, shape.H, *([several] if several > 1 else []))
        x = torch.randn(*lead, size, generator=generator)
        return x.to(device=shape.device, dtype=shape.dtype)

    q, k = (functional.normalize(draw(shape.K, m), dim=-1) for m in (1, n))
    return tuple(x.requires_grad_(grad) for x in (q, k, draw(shape.V, n)))  # type: ignore[return-value]


def _gates(recipe: Recipe, shape: Shape, *, grad: bool) -> dict[str, Tensor]:
    """Gates as a layer makes them at the start of training: steps in (0, 1), decays near 1."""
    generator = torch.Generator().manual_seed(1)
    sizes, n = recipe.axes(shape.K, shape.V), recipe.associations
    found: dict[str, Tensor] = {}
    for gate in recipe.gates():
        several = recipe.per_association(gate)
        axes = [*([n] if several else []), *(sizes[axis] for axis in gate.axes)]
        u = torch.rand(shape.B, shape.T, shape.H, *axes, generator=generator)
        if gate.name.startswith("log_decay"):
            x = -_HALF_LIFE * u
        elif gate.range.low is None:  # a key of its own, or an exponential input gate
            x = functional.normalize(u - 0.5, dim=-1) if axes else u - 0.5
        else:
            x = 0.1 + 0.8 * u
        found[gate.name] = x.to(device=shape.device).requires_grad_(grad)
    return found


def _params(recipe: Recipe, shape: Shape) -> dict[str, Tensor]:
    return initial_params(
        recipe,
        H=shape.H,
        K=shape.K,
        V=shape.V,
        generator=torch.Generator().manual_seed(2),
        device=shape.device,
    )


def recall_case(name: str, label: str, shape: Shape, *, backward: bool = False) -> Case:
    """A zoo recipe through `recollect.recall`, forward or forward and backward."""
    recipe = get(name).recipe

    def make() -> Callable[[], object]:
        q, k, v = _tensors(shape, grad=backward, n=recipe.associations)
        gates, params = _gates(recipe, shape, grad=backward), _params(recipe, shape)

        def forward() -> Tensor:
            return recall(recipe, q, k, v, gates, params=params, output_state=False)[0]

        return _stepper(forward, [q, k, v, *gates.values()]) if backward else forward

    price = cost(recipe, B=shape.B, H=shape.H, T=shape.T, K=shape.K, V=shape.V)
    flops = price.training if backward else price.total
    moved = None if backward else float(price.moved)
    return Case(name=label, make=make, flops=float(flops), bytes=moved)


def sdpa_case(label: str, shape: Shape, *, backward: bool = False) -> Case:
    """Causal `scaled_dot_product_attention` on contiguous ``[B, H, T, D]``, its best layout."""

    def make() -> Callable[[], object]:
        q, k, v = (
            x.detach().transpose(1, 2).contiguous().requires_grad_(backward)
            for x in _tensors(shape, grad=False)
        )

        def forward() -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        return _stepper(forward, [q, k, v]) if backward else forward

    # Two products over the lower triangle; the backward pass has five.
    products = 2 * shape.B * shape.H * shape.T * shape.T * (shape.K + shape.V) / 2
    moved = shape.B * shape.H * shape.T * (2 * shape.K + 2 * shape.V) * shape.dtype.itemsize
    return Case(
        name=label,
        make=make,
        flops=products * (3.5 if backward else 1),
        bytes=None if backward else float(moved),
    )


def _stepper(forward: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Callable[[], object]:
    def step() -> object:
        y = forward()
        return torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)

    return step


def _linear_cases(shape: Shape) -> list[Case]:
    cases = [sdpa_case("sdpa", shape), sdpa_case("sdpa, fwd+bwd", shape, backward=True)]
    for name in _SHALLOW:
        cases.append(recall_case(name, name, shape))
        cases.append(recall_case(name, f"{name}, fwd+bwd", shape, backward=True))
    double = Shape(**{**shape.__dict__, "T": 2 * shape.T})
    for name in ("linear_attention", "gated_delta_net"):
        cases.append(recall_case(name, f"{name}, 2T", double))
    return cases


def _linear_pairs(shape: Shape) -> list[tuple[str, str, str]]:
    pairs = [(f"{name}: fwd+bwd / fwd", f"{name}, fwd+bwd", name) for name in _SHALLOW]
    for name in ("linear_attention", "gated_delta_net"):
        pairs.append((f"{name}: 2T / T", f"{name}, 2T", name))
    return pairs


def _rows() -> list[str]:
    """Rows of vector and matrix memories, without those that solve or look at kernels."""
    return [name for name in names() if 11 <= (row := get(name).row) <= 32 or 36 <= row <= 43]


def _states(name: str, shape: Shape) -> Shape:
    """A decay per entry is for small states: 16 numbers per channel, as Mamba has."""
    decay = get(name).recipe.retention.decay
    return replace(shape, K=16) if decay is not None and decay.per == "entry" else shape


def _matrix_cases(shape: Shape) -> list[Case]:
    cases: list[Case] = []
    for name in _rows():
        sizes = _states(name, shape)
        cases.append(recall_case(name, name, sizes))
        cases.append(recall_case(name, f"{name}, fwd+bwd", sizes, backward=True))
    return cases


def _matrix_pairs(shape: Shape) -> list[tuple[str, str, str]]:
    return [(f"{name}: fwd+bwd / fwd", f"{name}, fwd+bwd", name) for name in _rows()]


def _deep_cases(shape: Shape) -> list[Case]:
    sizes = (shape.B, shape.T, shape.H, shape.K)
    double = (shape.B, 2 * shape.T, shape.H, shape.K)
    return [
        memory_case("mlp b=64", 64, sizes, device=shape.device),
        memory_case("mlp b=64, fwd+bwd", 64, sizes, device=shape.device, backward=True),
        memory_case("mlp b=64, 2T", 64, double, device=shape.device),
        memory_case("mlp b=16", 16, sizes, device=shape.device),
        memory_case("mlp b=16, 2T", 16, double, device=shape.device),
    ]


def _deep_pairs(shape: Shape) -> list[tuple[str, str, str]]:
    twice = [(f"mlp b={b}: 2T / T", f"mlp b={b}, 2T", f"mlp b={b}") for b in (16, 64)]
    return [("mlp b=64: fwd+bwd / fwd", "mlp b=64, fwd+bwd", "mlp b=64"), *twice]


def _titans_cases(shape: Shape) -> list[Case]:
    sizes, cases = (2, shape.T, shape.K), []
    for b in (16, 64):
        for way, backward in (("", False), (", fwd+bwd", True)):
            cases.append(own_case(f"b={b}{way}", b, sizes, backward=backward))
            for name, chunk in (("exact", 1), ("practical", b)):
                label = f"titans-pytorch {name}, b={b}{way}"
                cases.append(titans_case(label, b, chunk, sizes, backward=backward))
    return cases


def _titans_pairs(shape: Shape) -> list[tuple[str, str, str]]:
    return [
        (f"titans-pytorch {name} / ours, b={b}{way}", f"titans-pytorch {name}, {own}", own)
        for b in (16, 64)
        for way in ("", ", fwd+bwd")
        for name in ("exact", "practical")
        for own in (f"b={b}{way}",)
    ]


_ATTENTION = (
    "softmax_attention",
    "qk_norm_attention",
    "sliding_window_attention",
    "fox",
    "moba",
    "bilinear_gated_attention",
)


def _attention_cases(shape: Shape) -> list[Case]:
    cases = [sdpa_case("sdpa", shape), sdpa_case("sdpa, fwd+bwd", shape, backward=True)]
    for name in _ATTENTION:
        cases.append(recall_case(name, name, shape))
        cases.append(recall_case(name, f"{name}, fwd+bwd", shape, backward=True))
    return cases


def _attention_pairs(shape: Shape) -> list[tuple[str, str, str]]:
    return [
        (f"{name}: fwd+bwd / sdpa's", f"{name}, fwd+bwd", "sdpa, fwd+bwd") for name in _ATTENTION
    ]


def local_case(label: str, shape: Shape, *, solver: str) -> Case:
    """Local linear attention by one of its solvers."""
    recipe = get("local_linear_attention").recipe

    def make() -> Callable[[], object]:
        q, k, v = _tensors(shape, grad=False)
        length = shape.K**0.5
        state = initial_state(
            recipe,
            B=shape.B,
            H=shape.H,
            K=shape.K,
            V=shape.V,
            dtype=shape.dtype,
            device=torch.device(shape.device),
        )
        problem = Problem(
            recipe=recipe,
            q=(length * q).unsqueeze(3),
            k=length * k,
            v=v,
            rates={},
            params={},
            state=state,
        )
        return lambda: local_regression.attend(problem, solver=solver)

    price = cost(recipe, B=shape.B, H=shape.H, T=shape.T, K=shape.K, V=shape.V)
    return Case(name=label, make=make, flops=float(price.total), bytes=None)


def _local_cases(shape: Shape) -> list[Case]:
    return [
        sdpa_case("sdpa", shape),
        local_case("conjugate gradients", shape, solver="cg"),
        local_case("dense", shape, solver="dense"),
    ]


def _local_pairs(shape: Shape) -> list[tuple[str, str, str]]:
    return [("dense / conjugate gradients", "dense", "conjugate gradients")]


def _row_cases(shape: Shape) -> list[Case]:
    sizes = (shape.B, shape.T, shape.H, shape.K, shape.V)
    cases = [sdpa_case("sdpa", shape), *(dual_suite.case(name, sizes) for name in dual_suite.NAMES)]
    return [*cases, dual_suite.loop_case("delta_former, token by token", sizes)]


def _row_pairs(shape: Shape) -> list[tuple[str, str, str]]:
    return [("delta_former: loop / blocks", "delta_former, token by token", "delta_former")]


_SOLVERS = ("rls", "geometric_rls", "mesa_net")


def _solver_cases(shape: Shape) -> list[Case]:
    sizes = (shape.B, shape.T, shape.H, shape.K, shape.V)
    cases = [sdpa_case("sdpa", shape)]
    for name in ("linear_attention", "gated_delta_net", *_SOLVERS):
        cases.append(recall_case(name, name, shape))
        cases.append(recall_case(name, f"{name}, fwd+bwd", shape, backward=True))
    cases.append(conjugate_case("30 conjugate-gradient steps", sizes, 30, device=shape.device))
    cases.append(step_case("Sherman–Morrison, token by token", sizes, device=shape.device))
    return cases


def _solver_pairs(shape: Shape) -> list[tuple[str, str, str]]:
    pairs = [(f"{name}: fwd+bwd / fwd", f"{name}, fwd+bwd", name) for name in _SOLVERS]
    pairs += [(f"{name} / gated_delta_net", name, "gated_delta_net") for name in _SOLVERS]
    pairs.append(("30 CG steps / rls", "30 conjugate-gradient steps", "rls"))
    return [*pairs, ("token by token / rls", "Sherman–Morrison, token by token", "rls")]


SUITES: dict[str, Suite] = {
    "least_squares": Suite(
        about="exact least squares against SDPA, the delta rule, conjugate gradients and a loop",
        cases=_solver_cases,
        baseline="sdpa",
        pairs=_solver_pairs,
    ),
    "deep": Suite(
        about="an MLP memory against the ceiling: forward, forward+backward, twice the length",
        cases=_deep_cases,
        baseline="mlp b=64",
        pairs=_deep_pairs,
    ),
    "titans": Suite(
        about="an MLP memory against titans-pytorch at equal work (B = 2; --length 256)",
        cases=_titans_cases,
        baseline="b=16",
        pairs=_titans_pairs,
        min_seconds=0.15,
    ),
    "attention": Suite(
        about="softmax attention with windows, decays, blocks and gates against SDPA",
        cases=_attention_cases,
        baseline="sdpa",
        pairs=_attention_pairs,
    ),
    "local": Suite(
        about="local linear attention by conjugate gradients and by dense solves (take T=1024)",
        cases=_local_cases,
        baseline="sdpa",
        pairs=_local_pairs,
    ),
    "linear": Suite(
        about="the linear engine against SDPA: forward, forward+backward, twice the length",
        cases=_linear_cases,
        baseline="sdpa",
        pairs=_linear_pairs,
    ),
    "matrix": Suite(
        about="every row of a vector or matrix memory against Gated DeltaNet: rows 11-32, 36-43",
        cases=_matrix_cases,
        baseline="gated_delta_net",
        pairs=_matrix_pairs,
    ),
    "rows": Suite(
        about="memories over a kernel's features against SDPA, DeltaFormer against its loop",
        cases=_row_cases,
        baseline="sdpa",
        pairs=_row_pairs,
    ),
}


def chosen_cases(suite: Suite, shape: Shape, only: Sequence[str]) -> list[Case]:
    """The suite's cases, or those of a few names and the baseline.

    Raises:
        ValueError: a name that the suite does not have.
    """
    cases = suite.cases(shape)
    if not only:
        return cases
    known = dict.fromkeys(_subject(case.name) for case in cases)
    for name in only:
        if name not in known:
            raise ValueError(f"this suite has no {name!r}; it has {', '.join(known)}")
    kept = {*only, suite.baseline}
    return [case for case in cases if _subject(case.name) in kept]


def _subject(label: str) -> str:
    """What a case is about: its name up to the comma."""
    return label.partition(",")[0]


def ratios(suite: Suite, shape: Shape, result: BenchResult) -> dict[str, float]:
    """Median over rounds of the suite's further ratios, each taken within a round."""
    found: dict[str, float] = {}
    timed = {timing.name for timing in result.timings}
    for what, above, below in suite.pairs(shape):
        if not {above, below} <= timed:
            continue
        rounds = zip(result[above].seconds, result[below].seconds, strict=True)
        found[what] = statistics.median(a / b for a, b in rounds)
    return found


def document(
    name: str, shape: Shape, result: BenchResult, extra: dict[str, float]
) -> dict[str, object]:
    """A finished suite as JSON-ready data: sizes, timings, ceilings, ratios, device, commit."""
    sizes = {key: str(value) for key, value in shape.__dict__.items() if key == "dtype"}
    sizes |= {key: value for key, value in shape.__dict__.items() if key != "dtype"}
    return {"suite": name, "shape": sizes, **json.loads(result.to_json()), "ratios": extra}
