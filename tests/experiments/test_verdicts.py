"""Every verdict rule is true and false for data that support and contradict its claim.

The numbers are not measurements, but constructed on either side of the rule.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from recollect.experiments import EXPERIMENTS, Record, Results
from recollect.experiments.papers.atlas.learnability import MAPPINGS
from recollect.experiments.papers.miras.ablations import COMPONENTS
from recollect.experiments.papers.reading.documents import EXPECTED_ORDER
from recollect.experiments.papers.reduction import STEPS
from recollect.experiments.papers.ttr.recall import mean_named_pairs

Rows = list[tuple[dict[str, Any], dict[str, Any]]]


def make_results(name: str, rows: Rows, *, scale: str = "small", **config: Any) -> Results:
    """Return results with three equal seeds, in the configuration of the small scale."""
    full = {**EXPERIMENTS[name].configs["small"], **config}
    triples = [(cell, seed, values) for seed in range(3) for cell, values in rows]
    return Results.from_rows(triples, scale=scale, config=full)


def fig2(linear: float, rls: float, softmax: float, local: float, naive: float) -> Rows:
    result = {
        "linear attention": linear,
        "RLS": rls,
        "softmax attention": softmax,
        "local linear attention": local,
        "naive forecaster": naive,
    }
    return [
        ({"layer": layer}, {"before": x, "after": x, "last quarter": x})
        for layer, x in result.items()
    ]


def stability(linear: float, rls: float, under: float = 1.0) -> Rows:
    return [
        ({"layer": "linear attention"}, {"slope": linear, "under the bound": 0.5}),
        ({"layer": "RLS"}, {"slope": rls, "under the bound": under}),
    ]


def fig3(construction: float, few: float, rls: float, linear: float) -> Rows:
    rows: Rows = []
    for T in (128, 512):
        for layer in ("linear attention", "RLS"):
            rows.append(
                ({"kind": "untrained", "layer": layer, "P": 64, "T": T}, {"accuracy": construction})
            )
            rows.append(({"kind": "trained", "layer": layer, "P": 64, "T": T}, {"accuracy": few}))
            many = rls if layer == "RLS" else linear
            rows.append(({"kind": "trained", "layer": layer, "P": 128, "T": T}, {"accuracy": many}))
    return rows


def exchange(rounding: float, linear: float, error: float = 0.0) -> Rows:
    cell = {"n": 64, "d": 36, "dtype": "float32"}
    return [
        ({**cell, "kernel": "rounding"}, {"accuracy": rounding, "largest error": error}),
        ({**cell, "kernel": "linear"}, {"last quarter": linear}),
    ]


def differences(largest: float) -> Rows:
    return [
        ({"axis": axis, "kernel": "exp", "at": 4}, {"standard errors apart": x})
        for axis, x in (("N", 1.0), ("d", largest), ("τ", 0.5))
    ]


def needed(exp: float, linear: float) -> Rows:
    cell = {"axis": "needed d", "at": 64}
    return [
        ({**cell, "kernel": "exp"}, {"d": exp, "formula": 9.48}),
        ({**cell, "kernel": "linear"}, {"d": linear}),
    ]


def by(axis: str, kernels: Iterable[str], places: Iterable[float], values: Iterable[float]) -> Rows:
    pairs = list(zip(places, values, strict=True))
    return [
        ({"axis": axis, "kernel": kernel, "at": at}, {"SNR⁻¹": x})
        for kernel in kernels
        for at, x in pairs
    ]


def order(three: float) -> Rows:
    return [
        ({"axis": "order", "kernel": "exp", "at": at}, {"order": x})
        for at, x in ((2.0, 7.0), (3.0, three))
    ]


def icl(one: float, two: float, power: float) -> Rows:
    return [
        ({"model": "DeltaNet", "heads": 1}, {"at the end": one}),
        ({"model": "DeltaNet", "heads": 2}, {"at the end": two}),
        ({"model": "softmax attention", "heads": 1}, {"power of t": power}),
    ]


def fig4(delta: float, transformer: float) -> Rows:
    return [
        (
            {"model": "DeltaFormer", "heads": heads, "layers": 1, "kernel": kernel},
            {"accuracy": x},
        )
        for heads in ("4 × 3", "1 × 12")
        for kernel, x in (("linear", delta), ("relu", 0.4))
    ] + [
        (
            {"model": "Transformer", "heads": "4 × 3", "layers": layers, "kernel": "none"},
            {"accuracy": transformer},
        )
        for layers in (1, 2)
    ]


def fig5(linear: float, rounding: float) -> Rows:
    return [
        ({"n": n, "kernel": kernel}, {"accuracy": x})
        for n in (128, 256)
        for kernel, x in (("linear", 1.0 if n == 128 else linear), ("round", rounding))
    ]


def fig6(curriculum: float, direct: float, *, nope: float, rope: float, retained: float) -> Rows:
    return [
        (
            {"position": position, "training": training},
            {
                "accuracy": x,
                "at twice the length": x - (0.1 if position == "RoPE" else retained),
                "accuracy by steps": [nope if position == "NoPE" else rope] * 3,
            },
        )
        for position in ("RoPE", "NoPE")
        for training, x in (("curriculum", curriculum), ("direct", direct))
    ]


def fig7(delta: float, transformer: float) -> Rows:
    return [
        ({"model": "DeltaFormer", "layers": 1, "kernel": "linear"}, {"accuracy": delta}),
        ({"model": "DeltaFormer", "layers": 1, "kernel": "exp"}, {"accuracy": 0.6}),
        ({"model": "Transformer", "layers": 1, "kernel": "none"}, {"accuracy": 0.7}),
        ({"model": "Transformer", "layers": 4, "kernel": "none"}, {"accuracy": transformer}),
    ]


def fig8(linear: float, exp: float) -> Rows:
    return [
        ({"kernel": kernel, "w-heads": heads}, {"accuracy": x})
        for kernel, gain in (("linear", linear), ("exp", exp))
        for heads, x in ((1, 0.5), (3, 0.5 + gain / 2), (4, 0.5 + gain))
    ]


def capacities(matrix: float, polynomial: float, two: float, three: float) -> Rows:
    return [
        ({"memory": "matrix", "order": 1, "d_k": 3}, {"pairs": matrix}),
        ({"memory": "polynomial", "order": 2, "d_k": 3}, {"pairs": polynomial}),
        ({"memory": "MLP", "order": 2, "d_k": 3}, {"pairs": two}),
        ({"memory": "MLP", "order": 3, "d_k": 3}, {"pairs": three}),
    ]


def maps(low_rank: float, mlp: float, attention: float, inputs: float, sliding: float) -> Rows:
    result = dict(zip(MAPPINGS, (low_rank, mlp, attention, inputs, sliding), strict=True))
    return [
        (
            {"mapping": name, "memory": "2×1", "optimizer": optimizer},
            {"loss": x + worse, "last quarter": x + worse},
        )
        for name, x in result.items()
        for optimizer, worse in (("SGD", 0.0), ("Adam", 0.3))
    ]


def recalled(linear: float, delta: float, atlas: float) -> Rows:
    return [
        ({"architecture": name, "width": 16}, {"accuracy": x, "state bytes": size})
        for name, x, size in (
            ("linear_attention", linear, 1024.0),
            ("delta_net", delta, 1024.0),
            ("softmax_attention", 1.0, 4096.0),
            ("atlas", atlas, 4096.0),
        )
    ]


def mad(*values: float) -> Rows:
    names = ("atlas", "omega_net", "titans", "softmax_attention")
    return [
        ({"architecture": name, "task": task}, {"accuracy": x})
        for name, x in zip(names, values, strict=True)
        for task in ("compression", "memorization")
    ]


def groups(name: str, *values: tuple[str, float]) -> Rows:
    return [
        ({"group": name, "model": model}, {"accuracy": x, "at the longest": x})
        for model, x in values
    ]


def models(**values: float) -> Rows:
    """Return language models by name, and their bits per byte."""
    return [({"model": name}, {"bits per byte": x}) for name, x in values.items()]


def heads(kernel: str, few: float, many: float) -> Rows:
    return [
        ({"kernel": kernel, "heads": at}, {"bits per byte": x}) for at, x in ((1, few), (4, many))
    ]


def table2(ours: float, recurrent: float, attention: float = 3.0, *, last: float = 0.0) -> Rows:
    """MIRAS's three models and their hybrids against the others; ``last`` is added once to each."""
    result = {
        **dict.fromkeys(("retnet", "gla", "mamba2", "delta_net", "ttt_linear"), recurrent + 0.1),
        "gated_delta_net": recurrent,
        **dict.fromkeys(("moneta", "yaad", "moneta_h", "yaad_h"), ours),
        **dict.fromkeys(("memora", "memora_h"), ours + last),
        **dict.fromkeys(("samba", "gated_delta_net_h2"), recurrent),
        "softmax_attention": attention,
    }
    return models(**result)


def powers(over_p: dict[float, float], over_q: dict[float, float]) -> Rows:
    """MONETA by p at q = 4 and by q at p = 3: bits at the shortest rows, then 1 or the argument."""
    cells = [((p, 4.0), x) for p, x in over_p.items()] + [((3.0, q), x) for q, x in over_q.items()]
    return [
        ({"p": p, "q": q, "length": length}, {"bits per byte": x})
        for (p, q), short in cells
        for length, x in ((64, short), (256, 2.0))
    ]


def reduced(**changed: float) -> Rows:
    """Return every step of the reduction at 2 bits per byte, plus the arguments."""
    return models(**{name: 2.0 + changed.get(name, 0.0) for name in STEPS})


def parts(full: float, less: float, name: str) -> Rows:
    return models(**{"YAAD": full, name: less})


def windows(first: float, last: float) -> Rows:
    return [
        ({"c": c, "length": length}, {"bits per byte": x})
        for length, shift in ((64, 0.0), (256, last))
        for c, x in ((1, first), (8, 2.0 + shift))
    ]


def atlas(**changed: float) -> Rows:
    """Atlas at 2 bits per byte and 50 per cent; the arguments change the others."""
    names = {
        "gated": "+ gated memory",
        "mag": "+ attention (MAG)",
        "mal": "+ attention (MAL)",
        "linear": "linear memory",
        "muon": "without Muon",
        "one": "c = 1",
        "polynomials": "without polynomials",
    }
    return [
        ({"model": name}, {"bits per byte": 2.0 + x, "accuracy": 0.5 - x / 10})
        for name, x in (("Atlas", 0.0), *((names[key], x) for key, x in changed.items()))
    ]


def lengths(deep: float, matrix: float) -> Rows:
    """Return bits by length, with this gain for the longest rows."""
    return [
        ({"model": model, "width": 64, "length": length}, {"bits per byte": x})
        for model, gain in (("titans", deep), ("yaad", deep), ("mamba2", matrix))
        for length, x in ((64, 3.0), (512, 3.0 - gain))
    ]


def budgets(deep: float) -> Rows:
    """A baseline at 3.0 and 2.0 bits, and between its FLOPs, at 2.5, one of MIRAS's and another."""
    points = [
        *(("mamba2", 32, 1e9, 3.0), ("mamba2", 64, 1e11, 2.0)),
        *(("yaad", 32, 1e10, deep), ("titans", 32, 1e10, 9.0)),
    ]
    return [
        ({"model": model, "width": width, "length": 128}, {"bits per byte": x, "FLOPs": flops})
        for model, width, flops, x in points
    ]


def needles(deep: float, shallow: float, *, hybrid: float = 0.9, learned: float = 1.0) -> Rows:
    """Return accuracies beyond the training's length, at which all but one have learned."""
    beyond = {
        "titans": deep,
        "atlas": deep,
        "atlas_mag": hybrid,
        "delta_net": shallow,
        "ttt_linear": shallow,
        "ttt_mlp": 0.9,
    }
    return [
        (
            {"model": model},
            {
                f"{task} {length}": at_first if length == 512 else x
                for task in ("passkey", "number", "uuid")
                for length in (512, 1024, 2048, 8192)
            },
        )
        for model, x in beyond.items()
        for at_first in (0.4 if model == "ttt_mlp" else learned,)
    ]


def facts(titans: float, atlas: float, *, middle: float = 0.95, learned: float = 1.0) -> Rows:
    return [
        (
            {"model": model},
            {
                "256 tokens": learned,
                "512 tokens": middle,
                "1024 tokens": middle,
                "4096 tokens": x,
            },
        )
        for model, x in (("titans_mac", titans), ("atlas_mac", atlas))
    ]


def documents(*values: float) -> Rows:
    pairs = zip(EXPECTED_ORDER, values, strict=True)
    return [({"model": model}, {"average": x}) for model, x in pairs]


TWO, FOUR = "β in [0, 2], n = 2", "β in [0, 2], n = 4"
ONE, POSITIVE = "β in [0, 2]", "β in [0, 1]"
TAUS = (2.0, 4.0, 8.0)
BOTH = ("linear", "exp")

CASES: dict[tuple[str, str], tuple[Rows, list[Rows]]] = {
    ("ttr-fig2", "linear attention is worst"): (
        fig2(0.4, 0.2, 0.1, 0.05, 0.01),
        [fig2(0.15, 0.2, 0.1, 0.05, 0.01), fig2(math.nan, 0.2, 0.1, 0.05, 0.01)],
    ),
    ("ttr-fig2", "RLS does not adapt"): (
        fig2(0.4, 0.2, 0.1, 0.05, 0.01),
        [fig2(0.4, 0.04, 0.1, 0.05, 0.01), fig2(0.4, 0.2, 0.1, 0.05, 0.3)],
    ),
    ("ttr-fig2", "slopes help"): (
        fig2(0.4, 0.2, 0.1, 0.05, 0.01),
        [fig2(0.4, 0.2, 0.1, 0.11, 0.01)],
    ),
    ("ttr-stability", "linear attention grows"): (stability(0.9, 0.0), [stability(0.1, 0.0)]),
    ("ttr-stability", "least squares stays"): (
        stability(0.9, 0.0),
        [stability(0.9, 0.5), stability(0.9, 0.0, under=0.99)],
    ),
    ("ttr-fig3", "construction"): (fig3(1.0, 1.0, 1.0, 0.8), [fig3(0.999, 1.0, 1.0, 0.8)]),
    ("ttr-fig3", "P = d"): (fig3(1.0, 1.0, 1.0, 0.8), [fig3(1.0, 0.9, 1.0, 0.8)]),
    ("ttr-fig3", "P = 2d"): (
        fig3(1.0, 1.0, 1.0, 0.8),
        [fig3(1.0, 1.0, 1.0, 0.99), fig3(1.0, 1.0, 0.8, 0.5)],
    ),
    ("am-state-exchange", "rounding tracks"): (
        exchange(1.0, 0.1),
        [exchange(0.999, 0.1), exchange(1.0, 0.1, error=0.7)],
    ),
    ("am-state-exchange", "linear fails"): (exchange(1.0, 0.1), [exchange(1.0, 0.95)]),
    ("am-snr", "closed forms"): (differences(4.0), [differences(6.0), differences(math.nan)]),
    ("am-snr", "d = O(log² N)"): (needed(10, 64), [needed(14, 64), needed(10, 9)]),
    ("am-snr", "temperature"): (
        by("τ", ("exp",), TAUS, (1.0, 2.0, 3.0)),
        [by("τ", ("exp",), TAUS, (2.0, 1.0, 3.0))],
    ),
    ("am-snr", "truncation"): (order(8.0), [order(9.0)]),
    ("am-snr", "heads"): (
        by("heads", BOTH, (1, 4), (1.0, 0.5)),
        [by("heads", BOTH, (1, 4), (1.0, 1.1))],
    ),
    ("am-icl", "one head converges"): (icl(1e-6, 0.3, -1.0), [icl(0.1, 0.3, -1.0)]),
    ("am-icl", "several heads do not"): (
        icl(1e-6, 0.3, -1.0),
        [icl(1e-6, 1e-3, -1.0), icl(0.1, 0.3, -1.0)],
    ),
    ("am-icl", "softmax's updates vanish"): (icl(1e-6, 0.3, -1.0), [icl(1e-6, 0.3, -0.1)]),
    ("am-fig4", "DeltaFormer"): (fig4(1.0, 0.5), [fig4(0.9, 0.5)]),
    ("am-fig4", "Transformers"): (fig4(1.0, 0.5), [fig4(1.0, 0.95), fig4(0.5, 0.6)]),
    ("am-fig5", "linear kernel degrades"): (fig5(0.2, 1.0), [fig5(0.95, 1.0)]),
    ("am-fig5", "rounding does not"): (fig5(0.2, 1.0), [fig5(0.2, 0.9)]),
    ("am-fig6", "curriculum wins"): (
        fig6(0.9, 0.5, nope=0.4, rope=0.6, retained=0.0),
        [fig6(0.5, 0.5, nope=0.4, rope=0.6, retained=0.0)],
    ),
    ("am-fig6", "NoPE is slower"): (
        fig6(0.9, 0.5, nope=0.4, rope=0.6, retained=0.0),
        [fig6(0.9, 0.5, nope=0.7, rope=0.6, retained=0.0)],
    ),
    ("am-fig6", "NoPE generalises further"): (
        fig6(0.9, 0.5, nope=0.4, rope=0.6, retained=0.0),
        [fig6(0.9, 0.5, nope=0.4, rope=0.6, retained=0.2)],
    ),
    ("am-fig7", "DeltaFormer"): (fig7(0.99, 0.9), [fig7(0.9, 0.9)]),
    ("am-fig7", "Transformers"): (fig7(0.99, 0.9), [fig7(1.0, 0.99), fig7(0.8, 0.9)]),
    ("am-fig8", "nonlinear kernels"): (
        fig8(0.0, 0.1),
        [fig8(0.0, 0.0), fig8(0.0, -0.1)],
    ),
    ("am-fig8", "linear kernel"): (fig8(0.0, 0.1), [fig8(0.1, 0.1), fig8(-0.1, 0.1)]),
    ("atlas-capacity", "matrix"): (capacities(3, 10, 5, 7), [capacities(4, 10, 5, 7)]),
    ("atlas-capacity", "polynomial"): (capacities(3, 10, 5, 7), [capacities(3, 9, 5, 7)]),
    ("atlas-capacity", "deep memory"): (capacities(3, 10, 5, 7), [capacities(3, 10, 3, 7)]),
    ("atlas-capacity", "depth"): (capacities(3, 10, 5, 7), [capacities(3, 10, 5, 5)]),
    ("atlas-learnability", "1 is easiest"): (
        maps(0.1, 0.3, 0.8, 0.2, 0.9),
        [maps(0.3, 0.2, 0.8, 0.25, 0.9)],
    ),
    ("atlas-learnability", "4 faster than 2"): (
        maps(0.1, 0.3, 0.8, 0.2, 0.9),
        [maps(0.1, 0.2, 0.8, 0.3, 0.9)],
    ),
    ("atlas-learnability", "3 and 5 hardest"): (
        maps(0.1, 0.3, 0.8, 0.2, 0.9),
        [maps(0.1, 0.3, 0.9, 0.2, 0.8), maps(0.1, 0.85, 0.8, 0.2, 0.9)],
    ),
    ("mqar", "delta rule above Hebbian"): (recalled(0.5, 0.9, 1.0), [recalled(0.9, 0.9, 1.0)]),
    ("mqar", "Atlas best per state"): (recalled(0.5, 0.9, 1.0), [recalled(0.5, 0.9, 0.8)]),
    ("mad", "order"): (mad(0.9, 0.8, 0.8, 0.7), [mad(0.9, 0.8, 0.7, 0.8)]),
    ("word-problems", "parity"): (
        groups("parity", (POSITIVE, 0.6), (ONE, 1.0)),
        [
            groups("parity", (POSITIVE, 0.95), (ONE, 1.0)),
            groups("parity", (POSITIVE, 0.6), (ONE, 0.9)),
        ],
    ),
    ("word-problems", "S₃ needs two steps"): (
        groups("S3", (ONE, 0.7), (TWO, 0.95)),
        [groups("S3", (ONE, 0.95), (TWO, 0.95)), groups("S3", (ONE, 0.3), (TWO, 0.4))],
    ),
    ("word-problems", "S₅ with four steps"): (
        groups("S5", (ONE, 0.2), (FOUR, 0.99)),
        [groups("S5", (ONE, 0.2), (FOUR, 0.9)), groups("S5", (ONE, 1.0), (FOUR, 0.99))],
    ),
    ("am-fig2", "fewer heads help the linear kernel"): (
        heads("linear", 2.0, 2.1),
        [heads("linear", 2.1, 2.0), heads("linear", math.nan, 2.0)],
    ),
    ("am-fig2", "fewer heads hurt the exponential kernel"): (
        heads("exp", 2.1, 2.0),
        [heads("exp", 2.0, 2.1), heads("exp", 2.0, 2.0), heads("exp", 2.0, math.nan)],
    ),
    ("miras-table2", "below all recurrent baselines"): (
        table2(2.0, 2.1),
        [table2(2.2, 2.1), table2(2.0, 2.1, last=0.15), table2(2.0, 2.1, last=math.nan)],
    ),
    ("miras-table2", "below the Transformer"): (
        table2(2.0, 2.1, attention=2.1),
        [table2(2.0, 2.1, attention=1.9)],
    ),
    ("miras-table2", "hybrids"): (table2(2.0, 2.1), [table2(2.0, 2.1, last=0.15)]),
    ("miras-pq", "p = 3 best, 4 worst"): (
        powers({2.0: 2.3, 3.0: 2.1, 4.0: 2.5}, {2.0: 2.2}),
        [
            powers({2.0: 2.0, 3.0: 2.1, 4.0: 2.5}, {2.0: 2.2}),
            powers({2.0: 2.6, 3.0: 2.1, 4.0: 2.5}, {2.0: 2.2}),
        ],
    ),
    ("miras-pq", "q changes the scaling"): (
        powers({2.0: 2.3, 3.0: 2.3, 4.0: 2.31}, {2.0: 2.8, 3.0: 2.1}),
        [powers({2.0: 2.8, 3.0: 2.1, 4.0: 2.31}, {2.0: 2.3, 3.0: 2.3})],
    ),
    **{
        ("miras-ablation", f"{name.removeprefix('without ')} helps"): (
            parts(2.0, 2.1, name),
            [parts(2.1, 2.0, name), parts(math.nan, 2.0, name)],
        )
        for name in COMPONENTS
    },
    ("atlas-table2", "below Titans"): (
        models(titans=2.1, omega_net=2.0, atlas=1.9),
        [
            models(titans=2.1, omega_net=2.2, atlas=1.9),
            models(titans=2.1, omega_net=2.0, atlas=2.2),
        ],
    ),
    ("atlas-table2", "Transformers"): (
        models(dot=1.9, deep_transformer=2.0, softmax_attention=2.1),
        [
            models(dot=2.0, deep_transformer=1.9, softmax_attention=2.1),
            models(dot=1.9, deep_transformer=2.2, softmax_attention=2.1),
        ],
    ),
    ("atlas-window", "a larger window helps"): (
        windows(2.1, 0.0),
        [windows(1.9, 0.0), windows(2.1, 0.3), windows(2.1, math.nan)],
    ),
    ("atlas-ablation", "every part contributes"): (
        atlas(linear=0.1, muon=0.1, one=0.1, polynomials=0.1),
        [atlas(linear=0.1, muon=-0.1, one=0.1, polynomials=0.1)],
    ),
    ("atlas-ablation", "polynomials and depth, perplexity"): (
        atlas(linear=0.3, muon=-0.1, one=0.1, polynomials=0.2),
        [
            atlas(linear=0.1, muon=-0.1, one=0.3, polynomials=0.2),
            atlas(linear=-0.1, muon=-0.4, one=-0.3, polynomials=-0.2),
        ],
    ),
    ("atlas-ablation", "polynomials and depth, accuracy"): (
        atlas(linear=0.3, muon=-0.1, one=0.1, polynomials=0.2),
        [atlas(linear=0.1, muon=-0.1, one=0.3, polynomials=0.2)],
    ),
    ("atlas-ablation", "a gated memory helps"): (atlas(gated=-0.1), [atlas(gated=0.1)]),
    ("atlas-ablation", "attention helps, MAG more"): (
        atlas(mag=-0.2, mal=-0.1),
        [atlas(mag=-0.1, mal=-0.2), atlas(mag=0.1, mal=0.2)],
    ),
    ("scaling", "deep memories gain more from length"): (
        lengths(0.5, 0.3),
        [lengths(0.2, 0.3), lengths(math.nan, 0.3)],
    ),
    ("scaling", "lower at equal FLOPs"): (budgets(2.4), [budgets(2.6), budgets(math.nan)]),
    ("ttt-reduction", "little is lost"): (
        reduced(**{"linear attention": 0.05}),
        [reduced(**{"linear attention": 0.15}), reduced(**{"linear attention": math.nan})],
    ),
    ("ttt-reduction", "no step costs much"): (
        reduced(**{"no Muon": 0.05, "no depth": -0.05}),
        [reduced(**{"no Muon": 0.15}), reduced(**{"no depth": -0.2})],
    ),
    ("ttt-reduction", "the inner batch of a matrix"): (
        reduced(**{"no inner batch": 0.005}),
        [reduced(**{"no inner batch": 0.02}), reduced(**{"no depth": 0.02})],
    ),
    ("niah", "deep memories hold"): (
        needles(0.6, 0.3),
        [needles(0.6, 0.6), needles(0.3, 0.1), needles(0.3, 0.6)],
    ),
    ("niah", "hybrid reaches further"): (
        needles(0.6, 0.3, hybrid=0.7),
        [needles(0.6, 0.3, hybrid=0.5)],
    ),
    ("babilong", "flat with length"): (
        facts(0.95, 0.95),
        [facts(0.8, 0.95), facts(0.95, 0.95, middle=0.8)],
    ),
    ("babilong", "Atlas in the longest"): (
        facts(0.5, 0.95),
        [facts(0.95, 0.9), facts(0.95, 0.95), facts(0.4, 0.5)],
    ),
    ("recall-real", "order"): (
        documents(0.9, 0.8, 0.7, 0.6),
        [documents(0.9, 0.7, 0.8, 0.6), documents(0.8, 0.8, 0.7, 0.6)],
    ),
    ("recall-real", "Transformers first"): (
        documents(0.9, 0.8, 0.7, 0.6),
        [documents(0.7, 0.8, 0.7, 0.6)],
    ),
}


def test_every_claim_has_a_rule() -> None:
    claims = {(e.name, claim.name) for e in EXPERIMENTS.values() for claim in e.claims}
    assert set(CASES) == claims


@pytest.mark.parametrize(("experiment", "claim"), CASES)
def test_rule_is_true_and_false(experiment: str, claim: str) -> None:
    (result,) = [c for c in EXPERIMENTS[experiment].claims if c.name == claim]
    supporting, contradicting = CASES[experiment, claim]
    scale = result.scales[-1]
    verdict = result.verdict(make_results(experiment, supporting, scale=scale))
    assert verdict.status == "holds", verdict.evidence
    for rows in contradicting:
        verdict = result.verdict(make_results(experiment, rows, scale=scale))
        assert verdict.status == "does not hold", verdict.evidence


@pytest.mark.parametrize(("experiment", "claim"), CASES)
def test_missing_measurements_have_no_verdict(experiment: str, claim: str) -> None:
    """A rule without data is neither true nor false."""
    (result,) = [c for c in EXPERIMENTS[experiment].claims if c.name == claim]
    stray: Rows = [({"layer": "none of them", "memory": "none of them"}, {"nothing": 1.0})]
    verdict = result.verdict(make_results(experiment, stray, scale=result.scales[-1]))
    assert verdict.status == "not testable at this scale", verdict.evidence


def test_trained_models_have_no_verdict_at_smoke_scale() -> None:
    (claim,) = [c for c in EXPERIMENTS["am-fig4"].claims if c.name == "DeltaFormer"]
    verdict = claim.verdict(make_results("am-fig4", fig4(1.0, 0.5), scale="smoke"))
    assert verdict.status == "not testable at this scale"


@pytest.mark.parametrize(
    ("experiment", "rows"),
    [
        ("niah", needles(0.1, 0.1, learned=0.4)),
        ("babilong", facts(0.3, 0.3, learned=0.4)),
        ("recall-real", documents(0.19, 0.1, 0.05, 0.0)),
    ],
)
def test_readers_that_learned_nothing_have_no_verdict(experiment: str, rows: Rows) -> None:
    """An accuracy that is low at every length cannot decrease."""
    for claim in EXPERIMENTS[experiment].claims:
        verdict = claim.verdict(make_results(experiment, rows))
        assert verdict.status == "not testable at this scale", verdict.evidence


@pytest.mark.parametrize("order", [1, -1])
def test_a_diverged_run_counts_in_any_order_of_the_cells(order: int) -> None:
    widths: Rows = [
        ({"architecture": name, "width": width}, {"accuracy": x})
        for width, delta in ((8, math.nan), (16, 0.9))
        for name, x in (("linear_attention", 0.3), ("delta_net", delta))
    ]
    positive = [({"group": "parity", "model": POSITIVE}, {"accuracy": x}) for x in (0.6, math.nan)]
    parity: Rows = [*positive, ({"group": "parity", "model": ONE}, {"accuracy": 1.0})]
    for name, claim, rows in (
        ("mqar", "delta rule above Hebbian", widths),
        ("word-problems", "parity", parity),
    ):
        (result,) = [c for c in EXPERIMENTS[name].claims if c.name == claim]
        verdict = result.verdict(make_results(name, rows[::order]))
        assert verdict.status == "does not hold", verdict.evidence


def test_number_of_named_pairs() -> None:
    """The number equals the sum over pairs of the probability of their choice."""
    assert mean_named_pairs(1, 2) == pytest.approx(1.0)
    assert mean_named_pairs(2, 4) == pytest.approx(1.5)
    assert mean_named_pairs(128, 128) < 64 < mean_named_pairs(128, 512)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_stored_verdicts_equal_those_of_the_rules(name: str) -> None:
    """`python results/reproduce/refresh.py` rewrites them after a change of a rule."""
    path = Path(__file__).parents[2] / "results" / "reproduce" / name / "results.json"
    data = json.loads(path.read_text("utf-8"))
    records = tuple(map(Record.from_dict, data["records"]))
    results = Results(records=records, scale=data["scale"], config=data["config"])
    verdicts = EXPERIMENTS[name].verdicts(results)
    assert data["claims"] == [claim.to_dict(verdict) for claim, verdict in verdicts]
