"""flash-linear-attention as a backend: the operator of a recipe, and its results.

Three tests that need no GPU: the table selects the expected operator (by hand, below); a layer on
the pretended GPU calls it as its documentation requires, and gets the CPU's results
(`tests.gpu.backend`); the package's kernels, in Triton's interpreter, give the reference's results
(`tests.gpu.operators`). The last test also runs on a GPU, in bfloat16 (`make test-gpu`).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.gpu.operator_cases import CASES, SETS, distance, solved
from tests.gpu.parity import MISSING
from tests.gpu.printed import interprets, printed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import recollect as rc
from recollect.choices.matmul_precision import matmul_precision
from recollect.engines.common.problem import Problem
from recollect.engines.fla import calls, choose, offer, recurrences
from recollect.engines.fla.operators import function, gated_backward_raises
from recollect.functional.binding import bind, named
from recollect.functional.one_operation import memorise_op

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

# Written by hand from the papers' recurrences and the package's documentation: for bf16, and if it
# differs, for float32 as TF32. Presets that are missing here have none.
SUM, GATE, DELTA = "chunk_simple_gla", "chunk_gla", "chunk_gated_delta_rule"
PLAIN, ANY = "chunk_delta_rule", "chunk_dplr_delta_rule"
EXPECTED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        (
            "linear_attention", "normalized_linear_attention", "performer", "rfa", "cosformer",
            "hedgehog", "based", "rebased", "dijiang", "polysketchformer", "retnet",
            "lightning_attention", "mamba2", "mlstm",
        ),
        (SUM, SUM),
    ),
    **dict.fromkeys(
        ("retnet_xpos", "gla", "gateloop", "hgrn2", "kalman_linear_attention"), (GATE, GATE)
    ),
    **dict.fromkeys(
        ("delta_net", "dpfp", "efla", "longhorn", "nlms", "product_key_memory"), (PLAIN, DELTA)
    ),
    **dict.fromkeys(
        ("delta_product", "gated_delta_product", "erase_then_delta"),
        ("chunk_gated_delta_product", DELTA),
    ),
    **dict.fromkeys(
        (
            "leaky_lms", "rwkv7", "falcon_1", "comba", "gated_delta_net_2", "q_delta",
            "preconditioned_gated_delta_net", "preconditioned_kda",
        ),
        (ANY, ANY),
    ),
    "kimi_delta_attention": ("chunk_kda", "chunk_kda"),
    **dict.fromkeys(("lru", "rg_lru"), ("fused_recurrent_hgrn", "fused_recurrent_hgrn")),
    "gated_delta_net": (DELTA, DELTA),
    "rwkv6": ("chunk_rwkv6", "chunk_rwkv6"),
    "mesa_net": ("chunk_mesa_net", "chunk_mesa_net"),
    "fox": ("parallel_forgetting_attn", "parallel_forgetting_attn"),
}  # fmt: skip

SIZES = {"H": 2, "K": 16, "V": 16}


def _taken(recipe: rc.Recipe, dtype: torch.dtype, **sizes: int) -> str | None:
    """Return the operator for keys of a dtype, or ``None``."""
    at = bind(recipe, **(SIZES | sizes))
    fitting = [one for one in offer(at).operators if one.supports(dtype, at.num_features)]
    return fitting[0].name if fitting else None


# -- the table -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", rc.zoo.names())
def test_presets_take_the_expected_operator(name: str) -> None:
    recipe = rc.zoo.get(name).recipe
    result = _taken(recipe, torch.bfloat16), _taken(recipe, torch.float32)
    assert result == EXPECTED.get(name, (None, None))


@rc.member
class TwiceAToken(rc.bias.Bias):
    """½‖2 p − 3 v‖² by half of 2 p − 3 v: a user's bias that is declared affine."""

    affine = (2.0, 3.0)

    def error(self, prediction: Tensor, value: Tensor, gates: Any) -> Tensor:
        return 2.0 * prediction - 3.0 * value


@rc.member
class Cubed(rc.features.Features):
    """x³: a user's finite features."""

    def map(self, x: Tensor, params: Any, side: str, position: Tensor) -> Tensor:
        return x**3


DESCENT = rc.algorithm.GradientDescent()


def _recipe(per: str | None, order: str = "after", **choices: Any) -> rc.Recipe:
    retention = rc.retention.Keep() if per is None else rc.retention.Decay(per=per, when=order)
    return rc.Recipe(
        **{"bias": TwiceAToken(), "algorithm": DESCENT, "retention": retention, **choices}
    )


@pytest.mark.parametrize(
    ("recipe", "operator"),
    [
        (_recipe(None), PLAIN),
        (_recipe("head", "before"), DELTA),
        (_recipe("key", "before"), "chunk_kda"),
        (_recipe("head", "after"), ANY),
        (_recipe("key", "after"), ANY),
        (_recipe("key", "after", bias=rc.bias.DotProduct()), GATE),
        (_recipe("head", "before", algorithm=rc.algorithm.GradientDescent(updates_per_token=3)),
         "chunk_gated_delta_product"),
    ],
)  # fmt: skip
def test_custom_recipe_takes_the_operator_of_its_structure(
    recipe: rc.Recipe, operator: str
) -> None:
    assert _taken(recipe, torch.bfloat16) == operator


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (rc.zoo.get("titans").recipe, "memory.MLP is not linear"),
        (rc.zoo.get("momentum_delta_net").recipe, "the momentum of algorithm.Momentum"),
        (rc.zoo.get("swla").recipe, "context.Window, which writes a token more than once"),
        (rc.zoo.get("mamba").recipe, "a decay per entry"),
        (_recipe("value", "before"), "value channels with separate equations"),
        (_recipe("value", memory=rc.memory.Vector()), "takes? logarithms"),
        (rc.zoo.get("rls").recipe, "a constant ridge"),
        (rc.zoo.get("softmax_attention").recipe, "under one decay"),
        (rc.zoo.get("delta_former").recipe, "softmax attention with one decay"),
    ],
)
def test_uncovered_recipes_state_the_reason(recipe: rc.Recipe, reason: str) -> None:
    at = bind(recipe, **SIZES)
    with pytest.raises(rc.RecipeError, match=rf"engine='fla' cannot run this recipe: .*{reason}"):
        offer(at, "fla")
    message = offer(at)
    assert not message.operators
    assert str(message).startswith("not flash-linear-attention: ")


def test_keys_may_be_too_wide() -> None:
    recipe = rc.zoo.get("gated_delta_net").recipe
    assert _taken(recipe, torch.bfloat16, K=256) == DELTA
    assert _taken(recipe, torch.bfloat16, K=320) is None
    assert "at most 256 key features, not 320" in str(offer(bind(recipe, H=1, K=320, V=16)))
    wide = rc.zoo.get("linear_attention").recipe
    assert _taken(wide, torch.bfloat16, K=320) == SUM


# -- a backward pass that raises -------------------------------------------------------------------

KDA = "chunk_kda"
ON_HOPPER: dict[str, tuple[str, str]] = {
    **EXPECTED,
    **dict.fromkeys(("retnet", "lightning_attention", "mamba2", "mlstm"), (GATE, GATE)),
    **dict.fromkeys(
        ("delta_net", "dpfp", "efla", "longhorn", "nlms", "product_key_memory"), (PLAIN, KDA)
    ),
    "gated_delta_net": (KDA, KDA),
    "delta_product": ("chunk_gated_delta_product", KDA),
    **dict.fromkeys(("gated_delta_product", "erase_then_delta"), (KDA, KDA)),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_presets_train_on_hopper_by_the_expected_operator(name: str) -> None:
    at = bind(rc.zoo.get(name).recipe, **SIZES)
    able = offer(at).without_gated_backward
    names = (
        next(one.name for one in able if one.supports(dtype, at.num_features))
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert tuple(names) == ON_HOPPER[name]


@pytest.mark.parametrize(
    ("capabilities", "triton", "hip", "raises"),
    [
        ([(9, 0)], "3.6.0", None, True),
        ([(9, 0)], "3.4.0", None, True),
        ([(9, 0)], "3.7.0+git123", None, True),
        ([(8, 0), (9, 0)], "3.5.1", None, True),
        ([(9, 0)], "3.3.1", None, False),
        ([(9, 0)], "3.7.1", None, False),
        ([(9, 0)], "3.10.0", None, False),
        ([(8, 9), (10, 0)], "3.6.0", None, False),
        ([(9, 4)], "3.6.0", "7.0", False),  # an AMD MI300
        ([], "3.6.0", None, False),
    ],
)
def test_machines_on_which_a_backward_pass_raises(
    capabilities: list[tuple[int, int]],
    triton: str,
    hip: str | None,
    raises: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device])
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=triton))
    assert gated_backward_raises.__wrapped__() is raises


@pytest.fixture
def on_hopper(anywhere: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the package's functions; return the list of those that are called."""
    called: list[str] = []

    def recorded(module: str, name: str) -> Callable[..., tuple[Tensor, Tensor]]:
        def run(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
            called.append(name)
            return v + q.sum() + k.sum() + more["g"].sum(), 1 * more["initial_state"]

        return run

    monkeypatch.setattr(recurrences, "function", recorded)
    monkeypatch.setattr(choose, "gated_backward_raises", lambda: True)
    return called


def _arguments(*, trains: bool) -> dict[str, Any]:
    """Return arguments of a call with more tokens than are computed one by one."""
    q, k, v = torch.randn(3, 1, 20, 2, 8).requires_grad_(trains)
    gates = {"lr": torch.rand(1, 20, 2), "log_decay": -torch.rand(1, 20, 2)}
    return {"q": q, "k": k, "v": v, "gates": gates}


def _recall(**arguments: Any) -> Tensor:
    return rc.recall("gated_delta_net", **arguments, engine="fla", precision="tf32")[0]


def test_without_a_gradient_the_faster_operator_runs(on_hopper: list[str]) -> None:
    _recall(**_arguments(trains=False))
    arguments = _arguments(trains=True)
    with torch.no_grad():
        _recall(**arguments)
    assert on_hopper == [DELTA, DELTA]
    _recall(**arguments).sum().backward()
    _recall(**arguments, cu_seqlens=torch.tensor([0, 3, 20]))
    assert on_hopper == [DELTA, DELTA, KDA, KDA]


@pytest.mark.parametrize(("reentrant", "expected"), [(False, [KDA, KDA]), (True, [DELTA, KDA])])
def test_recomputed_calls_train(reentrant: bool, expected: list[str], on_hopper: list[str]) -> None:
    """Reentrant checkpointing runs the first pass without a gradient."""
    arguments = _arguments(trains=True)
    q = arguments.pop("q").detach().requires_grad_()
    y = checkpoint(lambda q: _recall(q=q, **arguments), q, use_reentrant=reentrant)
    y.sum().backward()
    assert on_hopper == expected
    assert q.grad is not None


def test_a_compiled_call_trains(on_hopper: list[str]) -> None:
    """A compiled call is one operation of the graph, whose backward pass solves again."""
    arguments = _arguments(trains=True)
    recipe = rc.zoo.get("gated_delta_net").recipe
    bound = named(bind(recipe, H=2, K=8, V=8, engine="fla", precision="tf32"))
    y, _ = memorise_op(Problem(bound=bound, params={}, **arguments))
    assert on_hopper == [DELTA]
    torch.autograd.grad(y.sum(), arguments["q"])
    assert on_hopper == [DELTA, KDA]


# -- the code around an operator -------------------------------------------------------------------


class _Operator(torch.autograd.Function):
    """An operator that computes nothing and allocates its results."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return torch.empty_like(inputs[2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


class _LargeResults(TorchDispatchMode):
    """Note operations that write as many numbers as the queries have."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.names = size, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in str(func) and "detach" not in str(func):
            tensors = (x for x in tree_leaves(result) if isinstance(x, Tensor))
            self.names += [str(func) for x in tensors if x.numel() >= self.size]
        return result


@pytest.mark.parametrize("name", ["gated_delta_net", "delta_net", "linear_attention"])
@pytest.mark.usefixtures("anywhere")
def test_tensors_of_16_bits_are_not_copied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator gets q, k and v uncopied, and gradients return uncopied."""

    def run(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, **more: Any) -> tuple[Tensor, None]:
        gates += tuple(x for x in (more.get("g"), more.get("beta")) if x is not None)
        assert more["output_final_state"] is False
        return _Operator.apply(q, k, v, *gates), None  # type: ignore[no-untyped-call]

    monkeypatch.setattr(recurrences, "function", lambda module, name: run)
    q, k, v = (torch.randn(2, 40, 2, 8).bfloat16().requires_grad_() for _ in range(3))
    values = {"lr": torch.rand(2, 40, 2), "log_decay": -torch.rand(2, 40, 2)}
    recipe = rc.zoo.get(name).recipe
    gates = {gate.name: values[gate.name].requires_grad_() for gate in recipe.gates()}
    grad = torch.ones_like(v)
    with _LargeResults(q.numel()) as noted:
        y, _ = rc.recall(recipe, q, k, v, gates, engine="fla", output_final_state=False)
        torch.autograd.grad(y, [q, k, v, *gates.values()], grad)
    assert noted.names == []


# -- the choice of a caller ------------------------------------------------------------------------


def test_methods() -> None:
    """On a CPU "fla" refuses in one sentence, and no other engine uses it."""
    q, k, v = torch.randn(3, 1, 5, 2, 8)
    gates = {"lr": torch.rand(1, 5, 2)}
    y, _ = rc.recall("delta_net", q, k, v, gates)
    for method in ("torch", "linear"):
        assert torch.equal(rc.recall("delta_net", q, k, v, gates, engine=method)[0], y)
    with pytest.raises(rc.RecipeError, match="cannot run this call: its kernels run on cuda"):
        rc.recall("delta_net", q, k, v, gates, engine="fla")
    with pytest.raises(rc.RecipeError, match=r"memory\.MLP is not linear"):
        rc.zoo.get("titans").build(d_model=8, num_heads=1, engine="fla")
    with pytest.raises(rc.RecipeError, match=r"memory\.MLP is not linear"):
        rc.explain("titans", engine="fla")


def test_explain_names_the_operator_and_the_reason() -> None:
    backend = rc.explain("delta_net").backend
    assert backend == (
        "on CUDA with recollect-layers[gpu]: chunk_delta_rule of flash-linear-attention, if "
        "products may be bf16 or fp16; chunk_gated_delta_rule, if TF32\n"
        "training on a Hopper GPU with Triton 3.4 to 3.7.0: chunk_kda in place of "
        "chunk_gated_delta_rule, whose backward pass raises there"
    )
    text = str(rc.explain("delta_net"))
    assert all(line in text for line in backend.splitlines())
    assert rc.explain("gated_delta_product").backend.endswith(
        "\ntraining on a Hopper GPU with Triton 3.4 to 3.7.0: chunk_kda in place of "
        "chunk_gated_delta_product and chunk_gated_delta_rule, whose backward pass raises there"
    )
    assert "Hopper" not in rc.explain("gla").backend
    assert "engine='torch' does not use it" in rc.explain("delta_net", engine="torch").backend


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels run on a CPU, so that calls are refused for other reasons."""
    monkeypatch.setattr(choose, "DEVICES", {"cpu"})
    monkeypatch.setattr(choose, "installed", lambda: True)


@pytest.mark.usefixtures("anywhere")
def test_refused_calls_state_the_reason() -> None:
    q, k, v = torch.randn(3, 1, 20, 2, 8)
    lr, log_decay = torch.rand(1, 20, 2), -torch.rand(1, 20, 2)
    grown = q.clone().requires_grad_()
    assert torch.get_float32_matmul_precision() == "highest"

    def refused(name: str, sentence: str, *x: Tensor, **options: Any) -> None:
        with pytest.raises(rc.RecipeError, match=f"cannot run this call: .*{sentence}"):
            rc.recall(name, *x, engine="fla", **options)

    refused("delta_net", "TF32, and .* is 'highest'", grown, k, v, gates={"lr": lr})
    requested = {"gates": {"lr": lr}, "precision": "float32"}
    refused("delta_net", "precision='float32' is requested", grown, k, v, **requested)
    wide = [x.double() for x in (q, k, v)]
    refused("delta_net", "not support float64", *wide, gates={"lr": lr.double()})
    one = [x[:, :1] for x in (q, k, v)]
    refused("fox", "cannot run a single token", *one, gates={"log_decay": log_decay[:, :1]})
    _, state = rc.recall("fox", q, k, v, {"log_decay": log_decay})
    refused(
        "fox",
        "the state contains earlier tokens",
        q,
        k,
        v,
        gates={"log_decay": log_decay},
        state=state,
    )


@pytest.mark.usefixtures("anywhere")
def test_other_calls_take_the_path_of_the_engine() -> None:
    """With "auto" none of those calls is refused or changed."""
    q, k, v = torch.randn(3, 1, 20, 2, 8, requires_grad=True)
    gates = {"lr": torch.rand(1, 20, 2)}
    y, _ = rc.recall("delta_net", q, k, v, gates)
    assert torch.equal(y, rc.recall("delta_net", q, k, v, gates, engine="torch")[0])


@pytest.mark.parametrize(
    ("precision", "dtype", "taken"),
    [
        (None, torch.float32, None),
        (None, torch.bfloat16, torch.bfloat16),
        ("float32", torch.bfloat16, None),
        ("tf32", torch.float32, torch.float32),
        ("tf32", torch.bfloat16, torch.float32),
    ],
)
def test_kernels_multiply_in_the_requested_precision(
    precision: str | None, dtype: torch.dtype, taken: torch.dtype | None
) -> None:
    with matmul_precision(precision, "cuda"):
        assert choose.allowed(dtype) is taken


# -- on the pretended GPU --------------------------------------------------------------------------


NEAR = {"y": 1e-5, "decoded": 1e-5, "gradient": 1e-3}
ONE_OF_EACH = (
    "gla", "rwkv6", "gated_delta_net", "rwkv7", "gated_delta_product", "rg_lru", "mesa_net", "fox",
    "titans",
)  # fmt: skip


@pytest.mark.skipif(VERSION < (2, 10), reason="torch before 2.10 has no backend written in Python")
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(ONE_OF_EACH, id="one of each"),
        pytest.param([*EXPECTED], id="all", marks=pytest.mark.slow),
    ],
)
def test_layers_on_a_gpu_call_them(names: list[str]) -> None:
    result = printed("backend", *names)
    assert [one["name"] for one in result] == [*names]
    for one in result:
        single = EXPECTED[one["name"]][1:] if one["name"] in EXPECTED else ()
        called = one["called"]
        assert called["cpu"] == []
        assert tuple(called["training"]) == single, one["name"]
        assert called["decoding"][:1] == [*single]
        is_recurrent = single and single[0].startswith("chunk") and "mesa" not in single[0]
        assert len(called["decoding"]) == (2 if is_recurrent else len(single))
        errors = [
            f"{part}: {one[part]:.1e}" for part, near in NEAR.items() if not one[part] <= near
        ]
        assert not errors, f"{one['name']}: {errors}"


# -- the package's kernels -------------------------------------------------------------------------

# Relative to ‖·‖: products of operands with 10 bits (TF32, fp16) or 7 (bf16), errors of 2^−11 and
# 2^−8 each. The gradient of a decay is a difference of such sums, which is smaller for a stronger
# decay.
TF32, BF16, SINGLE = 2e-3, 1e-2, 2e-6
FAINT = 1e-2


def _bound(name: str, part: str) -> float:
    quotient = "normalised" in name and part == "d q"
    if "bf16" in name:
        return 3 * BF16 if quotient else BF16
    if name.startswith(("token by token", "fused")) or ("twice" in name and part.startswith("d")):
        return SINGLE  # float32, or the path of this library
    if quotient:
        return 2 * TF32
    return FAINT if part == "d log_decay" and "strong" in name else TF32


needs_triton = pytest.mark.skipif(
    not interprets() or importlib.util.find_spec("fla") is None,
    reason="triton >= 3.6 or flash-linear-attention is not installed: recollect-layers[gpu]",
)


ONE_CASE_EACH = (
    "chunk_simple_gla, packed", "chunk_gla, read before", "chunk_rwkv6", "chunk_delta_rule, bf16",
    "chunk_gated_delta_rule, packed, twice", "chunk_gated_delta_product, fp16", "chunk_kda",
    "chunk_dplr_delta_rule", "fused_recurrent_hgrn", "chunk_mesa_net", "parallel_forgetting_attn",
    "token by token: delta after decay",
)  # fmt: skip
"""A case of every operator; the others are slow: Triton's interpreter takes a second for each."""
OTHERS = [name for name in SETS["quick"] if name not in ONE_CASE_EACH]


@needs_triton
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(ONE_CASE_EACH, id="one case each"),
        pytest.param(OTHERS, id="others", marks=pytest.mark.slow),
        *(
            pytest.param([*SETS[name]], id=name, marks=pytest.mark.slow)
            for name in ("hopper", "long", "hopper_long")
        ),
    ],
)
def test_kernels_equal_the_reference(cases: Sequence[str], request: pytest.FixtureRequest) -> None:
    # A named set claims another device.
    named = request.node.callspec.id
    result = printed("operators", *([named] if named in SETS else cases))
    assert [one["name"] for one in result] == [*cases]
    for one in result:
        name = one["name"]
        if not name.startswith("token by token"):
            assert one["ran"] == [name.partition(",")[0].partition(" ")[0]]
        errors = [
            f"{part}: {x:.1e}" for part, x in one["far"].items() if not x <= _bound(name, part)
        ]
        assert not errors, f"{name}: {errors}"


# -- on a GPU --------------------------------------------------------------------------------------

ON_CUDA = [name for name, case in CASES.items() if case.decoded or case.dtype != torch.float32]
"""In 16 bits, and token by token, whose kernels multiply in float32."""


@pytest.mark.gpu
@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason=MISSING)
@pytest.mark.parametrize("name", ON_CUDA)
def test_kernels_on_a_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """The package's kernels, compiled, against the reference in float64 on the CPU.

    With the first configuration of each, because trying all takes minutes per case. Timed runs test
    the selected one.
    """
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    run = autotuner.run

    def first(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.configs = self.configs[:1]
        return run(self, *args, **kwargs)

    monkeypatch.setattr(autotuner, "run", first)
    ran: list[str] = []

    def requested(module: str, operator: str) -> Any:
        ran.append(operator)
        return function(module, operator)

    monkeypatch.setattr(recurrences, "function", requested)
    monkeypatch.setattr(calls, "function", requested)
    theirs, exact = solved(CASES[name], "fla", device="cuda"), solved(CASES[name], "reference")
    assert ran, "nothing of the package ran"
    assert theirs.keys() == exact.keys()
    away = {part: distance(x, exact[part]) for part, x in theirs.items()}
    record_property("operator", ", ".join(dict.fromkeys(ran)))
    record_property("worst", max(away.values()))
    errors = [f"{part}: {x:.1e}" for part, x in away.items() if not x <= _bound(name, part)]
    assert not errors, f"{name}: {errors}"
