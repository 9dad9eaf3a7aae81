"""Calls of operators of flash-linear-attention, and their oracle.

Recipes by structure, cases of each, and one way to run a case: by the operator on any device, or by
the reference, which takes its inner gradients by autograd, token by token, in float64 on the CPU,
and shares nothing with an operator. Triton's interpreter (`tests.gpu.operators`) or a GPU
(`tests.gpu.test_backend`) runs the operators' kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

import recollect as rc

HEADS, K, V, TOKENS = 2, 16, 12, 70
"""A chunk of 64 and a piece; V is not a power of two."""


# -- recipes ---------------------------------------------------------------------------------------

UNIT_RATE = rc.algorithm.GradientDescent(lr=1.0)
LEARNED = rc.algorithm.GradientDescent()


def _matrix(**choices: Any) -> rc.Recipe:
    return rc.Recipe(**{"algorithm": LEARNED, **choices})


def _decayed(per: str, order: str, **choices: Any) -> rc.Recipe:
    return _matrix(retention=rc.retention.Decay(per=per, when=order), **choices)


DOT = rc.bias.DotProduct()
ERASING = rc.bias.L2(probe=rc.bias.Probe(at="token", write="probe", per="key"))
RECIPES: Mapping[str, rc.Recipe] = {
    "sum": _matrix(bias=DOT),
    "normalised": _matrix(
        bias=DOT,
        features=rc.features.EluPlusOne(),
        memory=rc.memory.Matrix(read=rc.memory.Read(normalize="sum")),
    ),
    "decay per head": _decayed("head", "after", bias=DOT),
    "decay per key": _decayed("key", "after", bias=DOT),
    "read before": _decayed(
        "key", "after", bias=DOT, memory=rc.memory.Matrix(read=rc.memory.Read(when="before"))
    ),
    "read before, bonus": _decayed(
        "key",
        "after",
        bias=DOT,
        algorithm=UNIT_RATE,
        memory=rc.memory.Matrix(read=rc.memory.Read(when="before", bonus="learned")),
    ),
    "delta": _matrix(),
    "delta after decay": _decayed("head", "before"),
    "delta before decay": _decayed("head", "after"),
    "delta after decay per key": _decayed("key", "before"),
    "delta before decay per key": _decayed("key", "after"),
    "probe": _decayed("key", "after", bias=ERASING, algorithm=UNIT_RATE),
    "probe after decay": _decayed("head", "before", bias=ERASING, algorithm=UNIT_RATE),
    "two steps": _decayed(
        "head", "before", algorithm=rc.algorithm.GradientDescent(updates_per_token=2)
    ),
    "vector": rc.zoo.get("rg_lru").recipe,
    "ridge": rc.zoo.get("mesa_net").recipe,
    "attention": rc.zoo.get("fox").recipe,
    **{
        name: rc.zoo.get(name).recipe
        for name in (
            "gated_delta_net", "mamba2", "retnet", "lightning_attention", "mlstm",
            "gated_delta_product", "delta_product", "delta_net", "linear_attention",
        )
    },
}  # fmt: skip


# -- cases -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call of a recipe.

    Attributes:
        recipe: by name.
        dtype: of q, k and v. tokens: their number. queries: per memory.
        borders: of documents in one row. padded: whether rows have different lengths.
        decay: factor of log decays; forgets: whether one of them is −inf.
        decoded: whether tokens run one by one, without a gradient.
        starts: whether the initial memory differs from zero.
        second_order: whether the gradient of a gradient is compared too.
        values, keys: channels of each.
    """

    recipe: str
    dtype: torch.dtype = torch.float32
    tokens: int = TOKENS
    queries: int = 1
    borders: tuple[int, ...] = ()
    padded: bool = False
    decay: float = 1.0
    forgets: bool = False
    decoded: bool = False
    starts: bool = True
    second_order: bool = False
    values: int = V
    keys: int = K


HALF, BRAIN = torch.float16, torch.bfloat16
PACKED = (0, 3, 30, 70)
SHORT = (0, 3, 20)

QUICK: Mapping[str, Case] = {
    "chunk_simple_gla": Case(recipe="decay per head", queries=2),
    "chunk_simple_gla, normalised": Case(recipe="normalised", tokens=20, starts=False),
    "chunk_simple_gla, normalised, bf16": Case(
        recipe="normalised", dtype=BRAIN, tokens=20, starts=False
    ),
    "chunk_simple_gla, bf16": Case(recipe="decay per head", dtype=BRAIN, tokens=20),
    "chunk_simple_gla, packed": Case(recipe="decay per head", borders=SHORT, tokens=20),
    "chunk_gla": Case(recipe="decay per key", padded=True, forgets=True, tokens=20),
    "chunk_gla, strong decays": Case(recipe="decay per key", decay=50.0, tokens=40),
    "chunk_gla, read before": Case(recipe="read before", tokens=20),
    "chunk_rwkv6": Case(recipe="read before, bonus", tokens=20),
    "chunk_delta_rule, fp16": Case(recipe="delta", dtype=HALF),
    "chunk_delta_rule, bf16": Case(recipe="delta", dtype=BRAIN, tokens=20),
    "chunk_gated_delta_rule, no decay": Case(recipe="delta", tokens=20),
    "chunk_gated_delta_rule": Case(recipe="delta after decay", queries=2),
    "chunk_gated_delta_rule, twice": Case(recipe="delta after decay", second_order=True, tokens=10),
    "chunk_gated_delta_rule, twice, bf16": Case(
        recipe="delta after decay", dtype=BRAIN, second_order=True, tokens=10
    ),
    "chunk_gated_delta_rule, packed": Case(recipe="delta after decay", borders=SHORT, tokens=20),
    "chunk_gated_delta_rule, packed, twice": Case(
        recipe="delta after decay", borders=(0, 3, 8), second_order=True, tokens=8
    ),
    "chunk_gated_delta_rule, strong decays": Case(
        recipe="delta after decay", decay=50.0, forgets=True, tokens=20
    ),
    "chunk_gated_delta_rule, two steps": Case(recipe="two steps", tokens=20),
    "chunk_gated_delta_product, fp16": Case(recipe="two steps", dtype=HALF, tokens=20),
    "chunk_gated_delta_product, packed": Case(
        recipe="two steps", dtype=HALF, borders=SHORT, tokens=20
    ),
    "chunk_kda": Case(recipe="delta after decay per key", tokens=20),
    "chunk_dplr_delta_rule": Case(
        recipe="probe after decay", decay=50.0, forgets=True, tokens=20
    ),
    "chunk_dplr_delta_rule, key": Case(recipe="delta before decay", tokens=20),
    "fused_recurrent_hgrn": Case(recipe="vector", values=K, forgets=True, padded=True, tokens=20),
    "chunk_mesa_net": Case(recipe="ridge", values=K, tokens=20),
    "parallel_forgetting_attn": Case(recipe="attention", starts=False, queries=2, tokens=40),
    **{
        f"token by token: {name}": Case(recipe=name, decoded=True, tokens=4)
        for name in (
            "decay per head", "decay per key", "read before, bonus", "delta", "delta after decay",
            "delta after decay per key", "delta before decay", "probe",
        )
    },
}  # fmt: skip

LONG: Mapping[str, Case] = {
    "chunk_simple_gla, no decay": Case(recipe="sum"),
    "chunk_simple_gla, packed over chunks": Case(recipe="decay per head", borders=PACKED),
    "chunk_gla over chunks": Case(recipe="decay per key", forgets=True),
    "chunk_rwkv6 over chunks": Case(recipe="read before, bonus"),
    "chunk_gated_delta_rule, packed over chunks": Case(recipe="delta after decay", borders=PACKED),
    "chunk_gated_delta_rule, strong decays over chunks": Case(
        recipe="delta after decay", decay=50.0, forgets=True
    ),
    "chunk_gated_delta_rule, bf16": Case(recipe="delta after decay", dtype=BRAIN),
    "chunk_gated_delta_product, fp16 over chunks": Case(recipe="two steps", dtype=HALF),
    "chunk_kda over chunks": Case(recipe="delta after decay per key"),
    "chunk_kda, strong decays": Case(recipe="delta after decay per key", decay=50.0, forgets=True),
    "chunk_kda, packed": Case(recipe="delta after decay per key", borders=PACKED),
    "chunk_dplr_delta_rule over chunks": Case(recipe="probe"),
    "chunk_dplr_delta_rule, two queries": Case(recipe="delta before decay", queries=2),
    "chunk_dplr_delta_rule, decay per key": Case(recipe="delta before decay per key"),
    "chunk_dplr_delta_rule, strong decays": Case(recipe="probe", decay=50.0, forgets=True),
    "chunk_dplr_delta_rule, packed": Case(recipe="probe", borders=PACKED),
    "chunk_gated_delta_rule, odd, bf16": Case(
        recipe="delta after decay", dtype=BRAIN, keys=15, values=13, queries=2, tokens=20
    ),
    "chunk_kda, odd, bf16": Case(
        recipe="delta after decay per key", dtype=BRAIN, keys=17, values=13, tokens=20
    ),
    "chunk_rwkv6, odd, fp16": Case(
        recipe="read before, bonus", dtype=HALF, keys=13, values=15, tokens=20
    ),
    "chunk_dplr_delta_rule, odd, bf16": Case(
        recipe="probe after decay", dtype=BRAIN, keys=15, values=13, tokens=20
    ),
    "chunk_dplr_delta_rule, bf16": Case(recipe="probe", dtype=BRAIN),
    "chunk_rwkv6, twice, bf16": Case(
        recipe="read before, bonus", dtype=BRAIN, second_order=True, tokens=10
    ),
    "chunk_gla, read before, bf16": Case(recipe="read before", dtype=BRAIN, tokens=20),
    "chunk_mesa_net over chunks": Case(recipe="ridge", values=K, queries=2, padded=True),
    "parallel_forgetting_attn, strong decays": Case(
        recipe="attention", starts=False, decay=20.0, forgets=True
    ),
}
HOPPER: Mapping[str, Case] = {
    "chunk_kda, gated_delta_net, bf16": Case(recipe="gated_delta_net", dtype=BRAIN, tokens=20),
    "chunk_kda, delta_net": Case(recipe="delta_net", tokens=20),
    "chunk_gla, mamba2, bf16": Case(recipe="mamba2", dtype=BRAIN, tokens=20),
    "chunk_simple_gla, linear_attention": Case(recipe="linear_attention", tokens=20),
}
"""Presets whose first operator has no backward pass on some Hopper GPUs, and a neighbor."""

HOPPER_LONG: Mapping[str, Case] = {
    "chunk_kda, gated_delta_net, strong decays": Case(
        recipe="gated_delta_net", decay=50.0, forgets=True, tokens=20
    ),
    "chunk_kda, gated_delta_product, fp16": Case(
        recipe="gated_delta_product", dtype=HALF, tokens=10
    ),
    "chunk_gla, mamba2, strong decays": Case(
        recipe="mamba2", decay=50.0, forgets=True, tokens=20
    ),
    "chunk_gla, retnet": Case(recipe="retnet", tokens=20),
    "chunk_gla, lightning_attention": Case(recipe="lightning_attention", tokens=20),
    "chunk_gla, mlstm": Case(recipe="mlstm", tokens=20, starts=False),
    "chunk_delta_rule, delta_net, bf16": Case(recipe="delta_net", dtype=BRAIN, tokens=20),
    "chunk_gated_delta_product, delta_product, fp16": Case(
        recipe="delta_product", dtype=HALF, tokens=20
    ),
}  # fmt: skip
"""More of these presets and neighbors."""

HALF_PRECISION: Mapping[str, Case] = {
    f"{name}, in bf16": replace(case, dtype=BRAIN)
    for name, case in {**QUICK, **LONG}.items()
    if case.dtype == torch.float32 and not case.decoded and not case.second_order
}
"""Cases of training on a GPU: every structure, in the operators that accept bfloat16."""

SETS = {
    "quick": QUICK,
    "long": LONG,
    "halves": HALF_PRECISION,
    "hopper": HOPPER,
    "hopper_long": HOPPER_LONG,
}
CASES = {name: case for cases in SETS.values() for name, case in cases.items()}


def random_tensor(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(*shape: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=g, dtype=torch.float64)


def numbers(case: Case, recipe: rc.Recipe, rows: int) -> dict[str, dict[str, Tensor]]:
    """Return tensors, gates and params of a call, in float64."""
    lead, n = (rows, case.tokens, HEADS), recipe.associations_per_token
    each = (n,) if n > 1 else ()
    sizes = recipe.axes(case.keys, case.values)
    q = random_tensor(rows, case.tokens, HEADS * case.queries, case.keys, seed=1)
    k = random_tensor(*lead, *each, case.keys, seed=2)
    v = random_tensor(*lead, *each, case.values, seed=3)
    tensors = {"q": q, "k": k if recipe.memory.is_elementwise else normalize(k, dim=-1), "v": v}
    gates: dict[str, Tensor] = {}
    for seed, gate in enumerate(recipe.gates(), start=10):
        sub_steps = each if recipe.per_association(gate) else ()
        shape = (*lead, *sub_steps, *(sizes[axis] for axis in gate.axes))
        x = unit(*shape, seed=seed)
        if gate.name.startswith("log_decay"):
            x = -0.3 * case.decay * x
            if case.forgets:
                x[:, case.tokens // 3] = -torch.inf
        if gate.name == "probe":
            x = normalize(x - 0.5, dim=-1)
        gates[gate.name] = x
    params: dict[str, Tensor] = {}
    for param in recipe.params():
        x = 0.5 + unit(HEADS, *(sizes[axis] for axis in param.axes), seed=40)
        params[param.name] = x if param.range.high is None else x * param.range.high / 1.5
    return {"tensors": tensors, "gates": gates, "params": params}


def start(case: Case, recipe: rc.Recipe) -> Tensor | None:
    """Return an initial memory, if the case has one."""
    if not case.starts:
        return None
    shape = (case.values,) if recipe.memory.is_elementwise else (case.values, case.keys)
    return random_tensor(HEADS, *shape, seed=50)


# -- a call ----------------------------------------------------------------------------------------

Arguments = Mapping[str, Mapping[str, Tensor]]


def call(
    recipe: rc.Recipe, arguments: Arguments, init: Tensor | None, method: str, **options: Any
) -> tuple[Tensor, rc.State]:
    """Return outputs and final state."""
    y, state = rc.recall(
        recipe,
        arguments["tensors"]["q"],
        arguments["tensors"]["k"],
        arguments["tensors"]["v"],
        arguments["gates"],
        params=arguments["params"],
        initial_memory=init,
        engine=method,
        **options,
    )
    assert state is not None
    return y, state


def solved(case: Case, method: str, *, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return outputs, final states and gradients by name, on the CPU.

    Args:
        case: the call; q, k and v are representable in its dtype.
        method: of `recollect.recall`; the reference computes in float64.
        device: device of the call.
    """
    recipe = RECIPES[case.recipe]
    rows = 2 if case.padded else 1
    arguments = numbers(case, recipe, rows)
    exact = method == "reference"
    wide = torch.float64 if exact else torch.float32
    arguments["tensors"] = {
        name: x.to(case.dtype).to(wide if exact else case.dtype)
        for name, x in arguments["tensors"].items()
    }
    for part in ("gates", "params"):
        arguments[part] = {name: x.float().to(wide) for name, x in arguments[part].items()}
    init = start(case, recipe)
    init = None if init is None else init.float().to(wide)
    options: dict[str, Any] = {}
    if case.borders:
        options["cu_seqlens"] = torch.tensor(case.borders)
    if case.padded:
        mask = torch.ones(rows, case.tokens, dtype=torch.bool)
        mask[0, case.tokens - 7 :] = False
        options["attention_mask"] = mask
    arguments = {
        part: {n: x.to(device) for n, x in part_tensors.items()}
        for part, part_tensors in arguments.items()
    }
    init = None if init is None else init.to(device)
    options = {name: x.to(device) for name, x in options.items()}

    def wave(x: Tensor, seed: int) -> Tensor:
        return random_tensor(*x.shape, seed=seed).to(device, wide)

    if case.decoded:
        return {name: x.cpu() for name, x in decoded(recipe, arguments, init, method).items()}
    leaves = [x for part in arguments.values() for x in part.values()] + (
        [] if init is None else [init]
    )
    names = [name for part in arguments.values() for name in part] + ["init"] * (init is not None)
    for x in leaves:
        x.requires_grad_()
    y, state = call(recipe, arguments, init, method, **options)
    result = {"y": y, **{f"state {n}": x for n, x in enumerate(computed_tensors(recipe, state))}}
    total = torch.zeros((), dtype=wide, device=device)
    for seed, x in enumerate(result.values(), start=60):
        total = total + (x.to(wide) * wave(x, seed)).sum()
    slopes = torch.autograd.grad(total, leaves, create_graph=case.second_order)
    result |= {f"d {name}": g for name, g in zip(names, slopes, strict=True)}
    if case.second_order:
        second = sum((g.to(wide) * wave(g, 80)).sum() for g in slopes)
        twice = torch.autograd.grad(second, leaves, allow_unused=True)  # type: ignore[arg-type]
        result |= {f"dd {name}": g for name, g in zip(names, twice, strict=True) if g is not None}
    return {name: x.detach().cpu() for name, x in result.items()}


def computed_tensors(recipe: rc.Recipe, state: rc.State) -> list[Tensor]:
    """Return the tensors of a state that an operator computes."""
    slots = [x for name in ("gram",) for x in state.algorithm_state.get(name, ())]
    return [] if recipe.nonparametric else [*state.weights, *slots]


@torch.no_grad()
def decoded(
    recipe: rc.Recipe, arguments: Arguments, init: Tensor | None, method: str
) -> dict[str, Tensor]:
    """Run one token after another, each from a stored state."""
    outputs: list[Tensor] = []
    state: rc.State | None = None
    for t in range(arguments["tensors"]["q"].shape[1]):
        part = {
            name: {n: x if name == "params" else x[:, t : t + 1] for n, x in tensors.items()}
            for name, tensors in arguments.items()
        }
        initial = None if state is None else [x.clone() for x in state.weights]
        first_memory = init if state is None else None
        y, later = call(recipe, part, first_memory, method, state=state)
        if state is not None and initial is not None:
            assert all(map(torch.equal, initial, state.weights)), "a state was written into"
        outputs.append(y)
        state = later
    assert state is not None
    return {"y": torch.cat(outputs, 1), "state 0": state.weights[0]}


def distance(x: Tensor, y: Tensor) -> float:
    """Return ‖x − y‖ relative to ‖y‖; infinite if x is not finite."""
    x, y = x.double(), y.double()
    if not bool(x.isfinite().all()):
        return float("inf")
    return float((x - y).norm() / y.norm().clamp_min(1e-30))
