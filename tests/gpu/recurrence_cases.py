"""Cases of the recurrence over inner batches, and incorrect kernels for its trial."""

from __future__ import annotations

import torch
from tests.gpu.row_cases import Case, TwiceLessThrice, recipe

import recollect as rc

NORM = {"norm": "layer"}
TITANS = recipe(memory=NORM)
CASES = {
    "titans": Case(TITANS),
    "titans in float32": Case(TITANS, dtype=torch.float32),
    "rows that end early": Case(TITANS, B=2, padded=True),
    "without momentum": Case(recipe(momentum=False, memory=NORM), B=2, padded=True),
    "plain steps": Case(recipe(share=False, memory=NORM)),
    "without a norm": Case(recipe()),
    "another affine error": Case(recipe(bias=TwiceLessThrice()), T=24),
    "no decay, no residual": Case(
        recipe(
            momentum=False,
            share=False,
            retention=rc.retention.Keep(),
            memory={"residual": False, "activation": "silu"},
        ),
        T=24,
    ),
    "zeros": Case(TITANS, zeros=True),
    "a window of 17 tokens": Case(
        recipe(memory=NORM, context=rc.context.Window(size=17, gated=False))
    ),
    "several groups": Case(TITANS, T=72, chunk=32),
    "gradients of gradients": Case(TITANS, T=20, again=True),
    **{
        f"{name} between": Case(recipe(memory={**NORM, "activation": name}), T=24)
        for name in ("gelu_tanh", "tanh", "relu", "identity")
    },
    "one batch": Case(TITANS, T=16, taken=False),
    "batches of 5 tokens": Case(recipe(b=5, memory=NORM), T=17, taken=False),
    "8 channels": Case(TITANS, K=8, T=20, taken=False),
    "a root mean square": Case(recipe(memory={"norm": "rms"}), T=20, taken=False),
    "three maps": Case(recipe(memory={**NORM, "depth": 3}), T=20, taken=False),
    "PyTorch operations": Case(TITANS, T=20, engine="torch", taken=False),
}

MUTANTS = (
    ("share = tl.maximum(above, 0.0) / below", "share = above / above"),
    ("next1 += m * one", "next1 += one"),
    ("up_k += d1_sq * twice * key", "up_k += 0.0"),
    ("of_g += to_N * distance + to_size * g", "of_g += to_size * g"),
    ("bend * tl.load(u1 + wide + t + rw) * up_d", "bend * up_d"),
    ("next2 = _dot(up_zt, h, next2, PRECISION)", "next2 = next2 + 0.0"),
)
"""Code of `kernels`, and incorrect code in its place."""
