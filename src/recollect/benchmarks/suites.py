"""Suites of `recollect bench`: their cases, baselines and ratios."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from recollect.benchmarks.cases.baselines import (
    delta_former_loop,
    local_case,
    sdpa_case,
    sherman_morrison_loop,
)
from recollect.benchmarks.cases.deep import mlp_recipe, titans_case
from recollect.benchmarks.cases.recall import Shape, recall_case
from recollect.benchmarks.results import BenchResult, Case
from recollect.choices import algorithm, bias, context, memory, retention
from recollect.recipe.recipe import Recipe
from recollect.zoo.preset import get, names

__all__ = [
    "MEASURED_RECIPES",
    "SUITES",
    "CaseSpec",
    "Shape",
    "Suite",
    "build_cases",
    "compute_ratios",
    "to_report",
]

Ratio = tuple[str, str, str]
"""Label, and the names of two cases, whose times are divided."""


@dataclass(frozen=True, kw_only=True)
class CaseSpec:
    """A case of a suite, of any size."""

    name: str
    build: Callable[..., Case]  # function from the sizes to the case, called with name=


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Cases that are timed in one run."""

    title: str  # description in one line
    cases: Sequence[CaseSpec]
    baseline: str  # name of the case that ratios refer to
    ratios: Sequence[Ratio] = ()  # ratios in addition to those of the baseline
    # Smallest time of the calls of one case in one round, in seconds. Cases of milliseconds need
    # more if other cases evict them from the caches.
    min_seconds: float = 0.02
    shape: Shape = field(default_factory=Shape)  # default sizes
    timer: Callable[[], float] = time.perf_counter  # clock of the harness
    max_flops: float = math.inf  # largest number of FLOPs of a case
    # function from the sizes to relative errors by case
    errors: Callable[[Shape], dict[str, float]] = lambda shape: {}


def case(name: str, build: Callable[..., Case], **options: Any) -> CaseSpec:
    """Return a case; the build function gets the options."""
    return CaseSpec(name=name, build=partial(build, **options))


def recall(
    recipe: str | Recipe, name: str = "", *, scale_T: int = 1, K: int | None = None, **options: Any
) -> CaseSpec:
    """Return a case of a recipe.

    Args:
        recipe: a recipe or the name of a preset.
        name: name of the case up to the comma; by default that of the preset.
        scale_T: factor of the number of tokens.
        K: number of key channels in place of the suite's.
        options: options of `recall_case`.
    """

    def build(shape: Shape, *, name: str) -> Case:
        shape = replace(shape, T=scale_T * shape.T, K=K or shape.K)
        return recall_case(recipe, shape, name=name, **options)

    suffix = ", fwd+bwd" if options.get("backward") else ""
    suffix += f", {scale_T}T" if scale_T > 1 else ""
    return case(f"{name or recipe}{suffix}", build)


def both_passes(*presets: str, **options: Any) -> list[CaseSpec]:
    """Return cases of the forward pass, and of the forward and backward pass, of each preset."""
    return [recall(x, backward=backward, **options) for x in presets for backward in (False, True)]


def backward_ratios(*presets: str) -> list[Ratio]:
    """Return the ratios of both passes to the forward pass."""
    return [(f"{name}: fwd+bwd / fwd", f"{name}, fwd+bwd", name) for name in presets]


def _small_key_dim(preset: str) -> int | None:
    """Return 16 for a decay per entry, as in Mamba, which is for small states."""
    decay = get(preset).recipe.retention.decay
    return 16 if decay is not None and decay.per == "entry" else None


SDPA = case("sdpa", sdpa_case)
SDPA_BACKWARD = case("sdpa, fwd+bwd", sdpa_case, backward=True)

# -- presets by suite ----------------------------------------------------------------------------

_LINEAR = ("linear_attention", "retnet", "gla", "delta_net", "gated_delta_net", "longhorn")
_DOUBLED = ("linear_attention", "gated_delta_net")
_ATTENTION = (
    "softmax_attention",
    "qk_norm_attention",
    "sliding_window_attention",
    "fox",
    "moba",
    "bilinear_gated_attention",
)
_SOLVERS = ("rls", "geometric_rls", "mesa_net")
_MATRIX_FAMILIES = (
    "linear_attention",
    "feature_maps",
    "decay",
    "state_space",
    "xlstm",
    "mamba3",
    "delta_rule",
    "delta_rule_2025",
    "falcon",
    "least_mean_squares",
    "rwkv",
)
"""Families of vector and matrix memories that do not solve equations."""
_MATRIX = [name for family in _MATRIX_FAMILIES for name in names(family)]

_PUBLISHED_LAYERS = (
    "Qwen3NextGatedDeltaNet",
    "KimiLinearDeltaAttention",
    "Mamba2Mixer",
    "MambaMixer",
)
_PHASES = {"prefill": "", "token": ", token"}
_DECODE_MODES = {"tokens": "", "prefill": ", prefill", "compiled": ", compiled"}
"""Suffixes of the names of cases."""

_LLAMA = "transformers' Llama"
_DECODED = ("softmax_attention", "mamba2", "gated_delta_net", "rls", "titans")
_COMPILED = ("mamba2", "gated_delta_net", "rls", "titans")
"""Presets with states of constant size."""


def _adopt_case(shape: Shape, **options: Any) -> Case:
    from recollect.benchmarks.cases.adopt import adopt_case  # imports transformers

    return adopt_case(shape, **options)


def _adopt_errors(shape: Shape) -> dict[str, float]:
    from recollect.benchmarks.cases.adopt import adopt_errors

    errors = {layer: adopt_errors(shape, layer=layer) for layer in _PUBLISHED_LAYERS}
    return {
        f"{layer}{suffix}, adopted": errors[layer][phase]
        for layer in _PUBLISHED_LAYERS
        for phase, suffix in _PHASES.items()
    }


def _decode_case(shape: Shape, **options: Any) -> Case:
    from recollect.benchmarks.cases.decode import decode_case

    return decode_case(shape, **options)


# -- recipes without a preset --------------------------------------------------------------------

_HUBER = Recipe(bias=bias.Huber())
_OTHER_RECIPES = {
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
"""Recipes without a preset, most of which run token by token."""

MEASURED_RECIPES: dict[str, tuple[str | Recipe, str]] = {
    **{name: (name, "auto") for name in names()},
    **{name: (recipe, "auto") for name, recipe in _OTHER_RECIPES.items()},
    "delta_net by the reference": ("delta_net", "reference"),
}
"""Recipe and engine of each case of the suite ``presets``."""

# -- suites --------------------------------------------------------------------------------------

SUITES: dict[str, Suite] = {
    "adopt": Suite(
        title="processor time of published layers, original and adopted: prefill and one token",
        cases=[
            case(
                f"{layer}{suffix}{', adopted' * adopted}",
                _adopt_case,
                layer=layer,
                phase=phase,
                adopted=adopted,
            )
            for layer in _PUBLISHED_LAYERS
            for phase, suffix in _PHASES.items()
            for adopted in (False, True)
        ],
        baseline="Qwen3NextGatedDeltaNet",
        ratios=[
            (f"{x}, {phase}: adopted / original", f"{x}{suffix}, adopted", f"{x}{suffix}")
            for x in _PUBLISHED_LAYERS
            for phase, suffix in _PHASES.items()
        ],
        min_seconds=0.1,
        shape=Shape(T=512),
        timer=time.process_time,
        errors=_adopt_errors,
    ),
    "decode": Suite(
        title="language models token by token (32 after a prompt of 128) against Llama; compiled",
        cases=[
            case(f"{preset or _LLAMA}{suffix}", _decode_case, preset=preset, mode=mode)
            for preset in (None, *_DECODED)
            for mode, suffix in _DECODE_MODES.items()
            if mode != "compiled" or preset in _COMPILED
        ],
        baseline=_LLAMA,
        ratios=[
            *((f"{x}: prefill / Llama's", f"{x}, prefill", f"{_LLAMA}, prefill") for x in _DECODED),
            *((f"{x}: compiled / not", f"{x}, compiled", x) for x in _COMPILED),
        ],
    ),
    "least_squares": Suite(
        title="exact least squares against SDPA, the delta rule, conjugate gradients and a loop",
        cases=[
            SDPA,
            *both_passes("linear_attention", "gated_delta_net", *_SOLVERS),
            recall(
                Recipe(context=context.Prefix(), algorithm=algorithm.Preconditioned(steps=30)),
                "30 conjugate-gradient steps",
            ),
            case("Sherman–Morrison, token by token", sherman_morrison_loop),
        ],
        baseline="sdpa",
        ratios=[
            *backward_ratios(*_SOLVERS),
            *((f"{name} / gated_delta_net", name, "gated_delta_net") for name in _SOLVERS),
            ("30 CG steps / rls", "30 conjugate-gradient steps", "rls"),
            ("token by token / rls", "Sherman–Morrison, token by token", "rls"),
        ],
    ),
    "deep": Suite(
        title="an MLP memory against the ceiling: forward, forward+backward, twice the length",
        cases=[
            recall(mlp_recipe(64), "mlp b=64"),
            recall(mlp_recipe(64), "mlp b=64", backward=True),
            recall(mlp_recipe(64), "mlp b=64", scale_T=2),
            recall(mlp_recipe(16), "mlp b=16"),
            recall(mlp_recipe(16), "mlp b=16", scale_T=2),
        ],
        baseline="mlp b=64",
        ratios=[
            *backward_ratios("mlp b=64"),
            ("mlp b=16: 2T / T", "mlp b=16, 2T", "mlp b=16"),
            ("mlp b=64: 2T / T", "mlp b=64, 2T", "mlp b=64"),
        ],
    ),
    "titans": Suite(
        title="an MLP memory against titans-pytorch at equal work",
        cases=[
            case(
                f"{prefix}b={b}{suffix}",
                titans_case,
                batch_size=b,
                chunk_size=chunk_size,
                backward=bool(suffix),
            )
            for b in (16, 64)
            for suffix in ("", ", fwd+bwd")
            for prefix, chunk_size in (
                ("", None),
                ("titans-pytorch exact, ", 1),
                ("titans-pytorch practical, ", b),
            )
        ],
        baseline="b=16",
        ratios=[
            (
                f"titans-pytorch {setting} / ours, b={b}{suffix}",
                f"titans-pytorch {setting}, b={b}{suffix}",
                f"b={b}{suffix}",
            )
            for b in (16, 64)
            for suffix in ("", ", fwd+bwd")
            for setting in ("exact", "practical")
        ],
        min_seconds=0.15,
        # titans-pytorch needs more than 20 GB for 4,096 tokens with gates per token.
        shape=Shape(B=2, T=256, H=1),
    ),
    "attention": Suite(
        title="softmax attention with windows, decays, blocks and gates against SDPA",
        cases=[SDPA, SDPA_BACKWARD, *both_passes(*_ATTENTION)],
        baseline="sdpa",
        ratios=[
            (f"{name}: fwd+bwd / sdpa's", f"{name}, fwd+bwd", "sdpa, fwd+bwd")
            for name in _ATTENTION
        ],
    ),
    "local": Suite(
        title="local linear attention by conjugate gradients and by dense solves",
        cases=[
            SDPA,
            case("conjugate gradients", local_case, solver="cg"),
            case("dense", local_case, solver="dense"),
        ],
        baseline="sdpa",
        ratios=[("dense / conjugate gradients", "dense", "conjugate gradients")],
        shape=Shape(T=1024),
    ),
    "linear": Suite(
        title="the linear engine against SDPA: forward, forward+backward, twice the length",
        cases=[
            SDPA,
            SDPA_BACKWARD,
            *both_passes(*_LINEAR),
            *(recall(name, scale_T=2) for name in _DOUBLED),
        ],
        baseline="sdpa",
        ratios=[
            *backward_ratios(*_LINEAR),
            *((f"{name}: 2T / T", f"{name}, 2T", name) for name in _DOUBLED),
        ],
    ),
    "matrix": Suite(
        title="vector and matrix memories against Gated DeltaNet",
        cases=[spec for name in _MATRIX for spec in both_passes(name, K=_small_key_dim(name))],
        baseline="gated_delta_net",
        ratios=backward_ratios(*_MATRIX),
    ),
    "presets": Suite(
        title="processor time of every preset, and of recipes that run token by token",
        cases=[
            recall(recipe, name, engine=engine)
            for name, (recipe, engine) in MEASURED_RECIPES.items()
        ],
        baseline="gated_delta_net",
        shape=Shape(T=512, H=4),
        timer=time.process_time,
        max_flops=1e12,
    ),
    "rows": Suite(
        title="memories over a kernel's features against SDPA, DeltaFormer against its loop",
        cases=[
            SDPA,
            *map(recall, ("delta_former", "deep_transformer", "swdt", "dot")),
            case("delta_former, token by token", delta_former_loop),
        ],
        baseline="sdpa",
        ratios=[("delta_former: loop / blocks", "delta_former, token by token", "delta_former")],
    ),
}


def build_cases(suite: Suite, shape: Shape, only: Sequence[str] = ()) -> list[Case]:
    """Return the cases of a suite: the baseline and those with a name up to the comma in ``only``.

    An empty ``only`` selects all cases.
    """
    known = {spec.name: spec.name.partition(",")[0] for spec in suite.cases}
    for name in only:
        if name not in known.values():
            choices = ", ".join(dict.fromkeys(known.values()))
            raise ValueError(f"this suite has no {name!r}; it has {choices}")
    selected = {*only, suite.baseline} if only else set(known.values())
    cases = [
        spec.build(shape, name=spec.name) for spec in suite.cases if known[spec.name] in selected
    ]
    return [x for x in cases if (x.flops or 0) <= suite.max_flops]


def compute_ratios(suite: Suite, result: BenchResult) -> dict[str, float]:
    """Return the additional ratios of a suite: medians of the ratios within rounds."""
    seconds = {timing.name: timing.seconds for timing in result.timings}
    return {
        label: statistics.median(a / b for a, b in zip(seconds[x], seconds[y], strict=True))
        for label, x, y in suite.ratios
        if x in seconds and y in seconds
    }


def to_report(
    name: str, shape: Shape, result: BenchResult, ratios: dict[str, float]
) -> dict[str, Any]:
    """Return the sizes, times, ceilings and ratios of a suite, ready for JSON."""
    return {
        "suite": name,
        "timer": SUITES[name].timer.__name__,
        "shape": shape.to_dict(),
        **json.loads(result.to_json()),
        "ratios": ratios,
    }
