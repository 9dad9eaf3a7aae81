"""What `recollect bench` times: named suites of cases over the public functions."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from recollect.benchmarks.results import BenchResult, Case
from recollect.benchmarks.suites import kernel as dual_suite
from recollect.benchmarks.suites.calls import Shape, local_case, recall_case, sdpa_case
from recollect.benchmarks.suites.deep import memory_case, own_case, titans_case
from recollect.benchmarks.suites.least_squares import conjugate_case, step_case
from recollect.choices import algorithm, bias, context, memory, retention
from recollect.recipe.recipe import Recipe
from recollect.zoo.preset import get, names

__all__ = [
    "MOST_FLOPS",
    "SUITES",
    "Shape",
    "Suite",
    "chosen_cases",
    "document",
    "measured_recipes",
    "ratios",
]


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
        shape: sizes where the command says none.
        timer: clock of the harness.
        errors: relative differences of outputs by case, for cases that compute what others do.
    """

    about: str
    cases: Callable[[Shape], list[Case]]
    baseline: str
    pairs: Callable[[Shape], list[tuple[str, str, str]]]
    min_seconds: float = 0.02
    shape: Shape = field(default_factory=Shape)
    timer: Callable[[], float] = time.perf_counter
    errors: Callable[[Shape], dict[str, float]] = lambda shape: {}


_SHALLOW = ("linear_attention", "retnet", "gla", "delta_net", "gated_delta_net", "longhorn")


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


_MATRIX_FAMILIES = (
    *("linear_attention", "feature_maps", "decay", "state_space", "rwkv", "xlstm"),
    *("delta_rule", "least_mean_squares"),
)


def _rows() -> list[str]:
    """Rows of vector and matrix memories, without those that solve or look at kernels."""
    return [name for family in _MATRIX_FAMILIES for name in names(family)]


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
    if shape.H != 1:
        raise ValueError("the suite 'titans' times one memory: leave --heads out, or say 1")
    sizes, cases = (shape.B, shape.T, shape.K), []
    for b in (16, 64):
        for way, backward in (("", False), (", fwd+bwd", True)):
            cases.append(own_case(f"b={b}{way}", b, sizes, backward=backward, device=shape.device))
            for name, chunk in (("exact", 1), ("practical", b)):
                label = f"titans-pytorch {name}, b={b}{way}"
                cases.append(
                    titans_case(label, b, chunk, sizes, backward=backward, device=shape.device)
                )
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


def _local_cases(shape: Shape) -> list[Case]:
    return [
        sdpa_case("sdpa", shape),
        local_case("conjugate gradients", shape, solver="cg"),
        local_case("dense", shape, solver="dense"),
    ]


def _local_pairs(shape: Shape) -> list[tuple[str, str, str]]:
    return [("dense / conjugate gradients", "dense", "conjugate gradients")]


MOST_FLOPS = 10**12
"""FLOPs of a call above which the suite ``presets`` leaves a recipe out."""

_HUBER = Recipe(bias=bias.Huber())
_OWN_RECIPES: dict[str, Recipe] = {
    "Huber": _HUBER,
    "Huber in inner batches": _HUBER.replace(algorithm=algorithm.GradientDescent(batch_size=16)),
    "Huber with a window and a decay": _HUBER.replace(
        context=context.Window(size=4), retention=retention.Decay(when="before")
    ),
    "Lp with a link": Recipe(bias=bias.Lp(p=3), retention=retention.ElasticNet()),
    "MLP": Recipe(memory=memory.MLP()),
    "Muon": Recipe(algorithm=algorithm.Muon()),
    "momentum with a decay per key": Recipe(
        retention=retention.Decay(per="key"), algorithm=algorithm.Momentum()
    ),
}
"""Recipes that no preset has, most of them token by token."""


def measured_recipes() -> dict[str, tuple[Recipe, str]]:
    """Recipe and method of every case of the suite ``presets``, by name."""
    recipes = {name: get(name).recipe for name in names()} | _OWN_RECIPES
    measured = {name: (recipe, "auto") for name, recipe in recipes.items()}
    return {**measured, "delta_net by the reference": (get("delta_net").recipe, "reference")}


def _preset_cases(shape: Shape) -> list[Case]:
    cases = [
        recall_case(recipe, name, shape, engine=method)
        for name, (recipe, method) in measured_recipes().items()
    ]
    return [case for case in cases if (case.flops or 0) <= MOST_FLOPS]


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


def _decode_cases(shape: Shape) -> list[Case]:
    from recollect.benchmarks.suites.decode import decode_cases  # needs transformers

    return decode_cases(shape.device)


def _decode_pairs(shape: Shape) -> list[tuple[str, str, str]]:
    from recollect.benchmarks.suites.decode import BASELINE, COMPILED, NAMES

    each = [(f"{name}: prefill / Llama's", name) for name in NAMES]
    pairs = [(what, f"{name}, prefill", f"{BASELINE}, prefill") for what, name in each]
    return [*pairs, *((f"{name}: compiled / not", f"{name}, compiled", name) for name in COMPILED)]


def _adopt_cases(shape: Shape) -> list[Case]:
    from recollect.benchmarks.suites.adopt import adopt_cases  # needs transformers

    return adopt_cases(shape.T, shape.device)


def _adopt_pairs(shape: Shape) -> list[tuple[str, str, str]]:
    from recollect.benchmarks.suites.adopt import adopt_pairs

    return adopt_pairs()


def _adopt_errors(shape: Shape) -> dict[str, float]:
    from recollect.benchmarks.suites.adopt import adopt_errors

    return adopt_errors(shape.T, shape.device)


SUITES: dict[str, Suite] = {
    "adopt": Suite(
        about="processor time of published layers, original and adopted: prefill and one token",
        cases=_adopt_cases,
        baseline="Qwen3NextGatedDeltaNet",
        pairs=_adopt_pairs,
        min_seconds=0.1,
        shape=Shape(T=512),
        timer=time.process_time,
        errors=_adopt_errors,
    ),
    "decode": Suite(
        about="language models token by token (32 after a prompt of 128) against Llama; compiled",
        cases=_decode_cases,
        baseline="transformers' Llama",
        pairs=_decode_pairs,
    ),
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
        about="an MLP memory against titans-pytorch at equal work",
        cases=_titans_cases,
        baseline="b=16",
        pairs=_titans_pairs,
        min_seconds=0.15,
        # The peer's exact setting takes more than 20 GB for 4,096 tokens.
        shape=Shape(B=2, T=256, H=1),
    ),
    "attention": Suite(
        about="softmax attention with windows, decays, blocks and gates against SDPA",
        cases=_attention_cases,
        baseline="sdpa",
        pairs=_attention_pairs,
    ),
    "local": Suite(
        about="local linear attention by conjugate gradients and by dense solves",
        cases=_local_cases,
        baseline="sdpa",
        pairs=_local_pairs,
        shape=Shape(T=1024),
    ),
    "linear": Suite(
        about="the linear engine against SDPA: forward, forward+backward, twice the length",
        cases=_linear_cases,
        baseline="sdpa",
        pairs=_linear_pairs,
    ),
    "matrix": Suite(
        about="every vector or matrix memory without a solver against Gated DeltaNet",
        cases=_matrix_cases,
        baseline="gated_delta_net",
        pairs=_matrix_pairs,
    ),
    "presets": Suite(
        about="processor time of every preset, and of recipes that run token by token",
        cases=_preset_cases,
        baseline="gated_delta_net",
        pairs=lambda shape: [],
        shape=Shape(T=512, H=4),
        timer=time.process_time,
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
    timer = SUITES[name].timer.__name__
    data = {"suite": name, "timer": timer, "shape": sizes}
    return {**data, **json.loads(result.to_json()), "ratios": extra}
