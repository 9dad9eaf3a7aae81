"""The numeric core of the linear engine against the definition, per token and head.

The oracle below differentiates the written-out loss of each association with autograd and takes the
step literally. It shares no formula with the engine.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import recollect as rc
from recollect.engines.linear.chunked import chunked
from recollect.engines.linear.inputs import LinearProblem, Past
from recollect.engines.linear.recurrent import recurrent

Numbers = dict[str, Any]
LENGTHS = (1, 2, 15, 16, 17) * 3 + (63, 64, 65)
CHUNKS = (1, 3, 16, 64, None)


# -------------------------------------------------------------------------------------- oracle


def gradient(loss_at: Any, point: Tensor) -> Tensor:
    """Return the gradient of ``loss_at`` at ``point``, differentiable again."""
    tap = torch.zeros_like(point).requires_grad_()
    (result,) = torch.autograd.grad(loss_at(point + tap), tap, create_graph=True)
    return result


def oracle(n: Numbers, b: int, h: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return y ``[length, G, V]``, A and S of one head."""
    a_, b_ = n["affine"]

    def of(name: str) -> Tensor | None:
        return None if n.get(name) is None else n[name][b, :, h]

    q, k, v, lr = (n[name][b, :, h] for name in ("q", "k", "v", "lr"))
    decay, decay_value = of("log_decay"), of("log_decay_value")
    theta, gamma, probe, erase = of("momentum"), of("window"), of("probe"), of("erase")
    V, K = v.shape[-1], k.shape[-1]
    A = v.new_zeros(V, K) if n.get("A0") is None else n["A0"][b, h]
    S = v.new_zeros(V, K) if n.get("S0") is None else n["S0"][b, h]
    pairs: list[tuple[Tensor, Tensor]] = []
    if n.get("k_past") is not None:
        for i in range(n["k_past"].shape[1]):
            if n.get("past_mask") is None or n["past_mask"][b, i]:
                pairs.append((n["k_past"][b, i, h], n["v_past"][b, i, h]))
    outputs: list[Tensor] = []
    for t in range(length):
        pairs.append((k[t], v[t]))
        D = torch.ones_like(A)
        if decay is not None:
            D = D * decay[t].exp()
        if decay_value is not None:
            D = D * decay_value[t].exp()[:, None]
        point = D * A if n["decays_first"] else A

        def weighed(erases: bool, writes: bool, t: int = t, point: Tensor = point) -> Tensor:
            def loss(W: Tensor) -> Tensor:
                total = W.new_zeros(())
                for m in range(1 if gamma is None else gamma.shape[-1]):
                    if m < len(pairs):
                        key, value = pairs[-1 - m]
                        weight = 1.0 if gamma is None else gamma[t, m]
                        if erases:
                            total = total + weight * 0.5 * a_ * (W @ key).square().sum()
                        if writes:
                            total = total - weight * b_ * torch.dot(W @ key, value)
                return total

            return gradient(loss, point)

        if probe is not None and erase is not None:
            A = D * A - a_ * torch.outer(point @ probe[t], erase[t])
            A = A - lr[t] * weighed(False, True)
        elif theta is None:
            A = D * A - lr[t] * weighed(True, True)
        elif n["momentum_on"] == "gradient":
            S = theta[t] * S - lr[t] * weighed(True, True)
            A = D * A + S
        else:
            S = theta[t] * S - lr[t] * weighed(False, True)
            A = D * A - lr[t] * weighed(True, False) + S
        outputs.append(q[t] @ A.T)
    empty = v.new_zeros(0, q.shape[1], V)
    return (torch.stack(outputs) if outputs else empty), A, S


def expected(n: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """Run the oracle over rows and heads; outputs of masked tokens are zeros."""
    B, T, H, G, _ = n["q"].shape
    rows = []
    for b, h in itertools.product(range(B), range(H)):
        length = T if n.get("token_mask") is None else int(n["token_mask"][b].sum())
        y, A, S = oracle(n, b, h, length)
        pad = y.new_zeros(T - length, G, y.shape[-1])
        rows.append((torch.cat([y, pad]), A, S))
    y, A, S = (torch.stack(parts).unflatten(0, (B, H)) for parts in zip(*rows, strict=True))
    return y.transpose(1, 2), A, S


# --------------------------------------------------------------------------------------- cases


def numbers(
    *,
    T: int,
    decay: str = "none",
    decay_first: bool = False,
    momentum: str = "none",
    window: int | None = None,
    affine: tuple[float, float] = (1.0, 1.0),
    probe: bool = False,
    B: int = 1,
    H: int = 2,
    G: int = 1,
    K: int = 4,
    V: int = 3,
    masked: bool = False,
    state: bool = True,
    depth: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Numbers:
    """Return random arguments of ``chunked``; log decays are uniform in [−depth, 0]."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64)

    def unit(x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)

    n: Numbers = {
        "q": randn(B, T, H, G, K),
        "k": unit(randn(B, T, H, K)),
        "v": randn(B, T, H, V),
        "lr": rand(B, T, H) / (1 if window is None else window),
        "affine": affine,
        "decays_first": decay_first,
        "momentum_on": "value" if momentum == "value" else "gradient",
    }
    if decay == "head":
        n["log_decay"] = -depth * rand(B, T, H)
    if decay in ("key", "both"):
        n["log_decay"] = -depth * rand(B, T, H, K)
    if decay in ("value", "both"):
        n["log_decay_value"] = -depth * rand(B, T, H, V)
    if momentum != "none":
        n["momentum"] = (0.9 * rand(B, T, H)) * (rand(B, T, H) > 0.2)  # some values are exactly 0
    if window is not None:
        n["window"] = rand(B, T, H, window)
        if state:
            n["k_past"] = unit(randn(B, window - 1, H, K))
            n["v_past"] = randn(B, window - 1, H, V)
            n["past_mask"] = torch.arange(window - 1).flip(0) < torch.randint(0, window, (B, 1))
    if probe:
        n["probe"] = unit(randn(B, T, H, K))
        n["erase"] = rand(B, T, H, 1) * unit(n["probe"] + 0.2 * randn(B, T, H, K))
    if state:
        n["A0"] = randn(B, H, V, K)
        if momentum != "none":
            n["S0"] = 0.3 * randn(B, H, V, K)
    if masked:
        lengths = torch.randint(0, T + 1, (B, 1))
        lengths[0] = T // 2
        n["token_mask"] = torch.arange(T) < lengths
    return {
        name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in n.items()
    }


def problem(n: Numbers, chunk: int | None = None) -> LinearProblem:
    """Return the arguments of the engine; missing states are zeros."""
    rest = {name: x for name, x in n.items() if not name.endswith("_past") and name != "past_mask"}
    zeros = n["v"].new_zeros(*n["v"].shape[::2], n["v"].shape[-1], n["k"].shape[-1])
    rest.setdefault("A0", zeros)
    if "momentum" in n:
        rest.setdefault("S0", zeros)
    if "k_past" in n:
        rest["past"] = Past(k=n["k_past"], v=n["v_past"], mask=n["past_mask"])
    return LinearProblem(**rest, chunk_size=chunk)


def run(n: Numbers, chunk: int | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return chunked(problem(n, chunk))


def scan(n: Numbers) -> tuple[Tensor, Tensor, Tensor | None]:
    return recurrent(problem(n))


def valid_combinations() -> list[Numbers]:
    """Return every valid combination of features."""
    result: list[Numbers] = []
    for decay, initial, momentum, window, affine in itertools.product(
        ("none", "head", "key", "value", "both"),
        (False, True),
        ("none", "gradient", "value"),
        (None, 3),
        ((1.0, 1.0), (0.0, 1.0), (1.0, 1.5)),
    ):
        if affine[0] != 0 and decay in ("value", "both"):
            continue
        result.append(
            {
                "decay": decay,
                "decay_first": initial,
                "momentum": momentum,
                "window": window,
                "affine": affine,
            }
        )
    for decay, initial, affine in itertools.product(
        ("none", "head", "key"), (False, True), ((1.0, 1.0), (1.0, 1.5))
    ):
        result.append({"decay": decay, "decay_first": initial, "affine": affine, "probe": True})
    return result


def name_of(choice: Numbers) -> str:
    return "-".join(
        str(x) if key not in ("decay_first", "probe") else (key if x else "after")
        for key, x in choice.items()
        if x not in ("none", None)
    ).replace(" ", "")


def leaves(n: Numbers) -> dict[str, Tensor]:
    return {
        name: x.requires_grad_()
        for name, x in n.items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> bool:
    scale = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    return torch.allclose(actual, expected, rtol=0, atol=tolerance * scale)


def norm_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def agree(n: Numbers, engine: Any, *, gradients: bool = True) -> None:
    """Compare outputs, states and every gradient of ``engine`` with the oracle."""
    inputs = leaves(n)
    y, A, S = expected(n)
    found_y, found_A, found_S = engine(n)
    if n.get("token_mask") is not None:
        assert found_y.isfinite().all()
        found_y = torch.where(n["token_mask"][:, :, None, None, None], found_y, 0.0)
    assert close(found_y, y)
    assert close(found_A, A)
    assert (found_S is None) == ("momentum" not in n)
    pairs = [(found_y, y), (found_A, A)]
    if found_S is not None:
        assert close(found_S, S)
        pairs.append((found_S, S))
    if not gradients:
        return
    # Gradients of a caller can be non-contiguous.
    weights = [torch.randn_like(target.mT).mT for _, target in pairs]
    names = list(inputs)

    def pull(which: int) -> list[Tensor]:
        total = torch.stack(
            [(w * pair[which]).sum() for w, pair in zip(weights, pairs, strict=True)]
        ).sum()
        if not total.requires_grad:  # only masked tokens
            return [torch.zeros_like(inputs[name]) for name in names]
        result = torch.autograd.grad(total, [inputs[name] for name in names], allow_unused=True)
        return [
            torch.zeros_like(inputs[name]) if g is None else g
            for name, g in zip(names, result, strict=True)
        ]

    for name, result, target in zip(names, pull(0), pull(1), strict=True):
        assert close(result, target), f"gradient of {name}: {(result - target).abs().max():.1e}"


# --------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("choice", valid_combinations(), ids=name_of)
def test_agrees_with_the_definition(choice: Numbers) -> None:
    draw = random.Random(name_of(choice))
    T, chunk = draw.choice(LENGTHS), draw.choice(CHUNKS)
    H = 1 if T > 2 else 2
    extras = {"G": draw.choice((1, 1, 2)), "state": draw.random() < 0.7}
    n = numbers(T=T, H=H, masked=draw.random() < 0.3, **choice, **extras)
    agree(n, lambda n: run(n, chunk))


@pytest.mark.parametrize("choice", valid_combinations()[::4], ids=name_of)
def test_the_scan_agrees_with_the_definition(choice: Numbers) -> None:
    draw = random.Random(name_of(choice) + "scan")
    n = numbers(T=draw.choice((1, 2, 7)), H=1, masked=draw.random() < 0.3, B=2, **choice)
    agree(n, scan)


@pytest.mark.parametrize(
    "choice",
    [
        {"decay": "head", "decay_first": True},
        {"decay": "head", "momentum": "gradient", "window": 3},
        {"decay": "key", "decay_first": True, "probe": True},
        {"decay": "both", "affine": (0.0, 1.0)},
    ],
    ids=name_of,
)
def test_long_sequences(choice: Numbers) -> None:
    n = numbers(T=200, H=1, **choice)
    agree(n, run)
    y, A, _ = run(n)
    for chunk in (1, 16, 100):
        repeated, B, _ = run(n, chunk)
        assert close(repeated, y)
        assert close(B, A)


@pytest.mark.parametrize("choice", valid_combinations()[1::5], ids=name_of)
def test_chunk_size_and_splits_change_nothing(choice: Numbers) -> None:
    T = 71
    n = numbers(T=T, B=2, K=5, **choice)
    y, A, S = run(n, 16)
    for chunk in (7, 100):
        other = run(n, chunk)
        assert close(other[0], y)
        assert close(other[1], A)
        assert S is None or close(other[2], S)
    c = 1 if "window" not in n else n["window"].shape[-1]
    past: Numbers = {}
    if c > 1:
        past = {
            "k": torch.cat([n["k_past"], n["k"]], 1),
            "v": torch.cat([n["v_past"], n["v"]], 1),
            "mask": torch.cat([n["past_mask"], torch.ones(2, T, dtype=torch.bool)], 1),
        }
    outputs: list[Tensor] = []
    state: Numbers = {"A0": n["A0"], "S0": n.get("S0")}
    for start, stop in ((0, 1), (1, 20), (20, 20), (20, 71)):
        piece = {
            name: x[:, start:stop]
            if isinstance(x, Tensor) and name not in ("A0", "S0", "k_past", "v_past", "past_mask")
            else x
            for name, x in n.items()
        }
        piece.update(state)
        if c > 1:
            span = slice(start, start + c - 1)
            piece.update(k_past=past["k"][:, span], v_past=past["v"][:, span])
            piece.update(past_mask=past["mask"][:, span])
        part, state["A0"], state["S0"] = run(piece, 16)
        outputs.append(part)
    assert close(torch.cat(outputs, 1), y)
    assert close(state["A0"], A)
    assert S is None or close(state["S0"], S)


@pytest.mark.parametrize("momentum", ["none", "gradient", "value"])
@pytest.mark.parametrize("decay", ["head", "key"])
def test_padding_leaves_the_state_untouched(decay: str, momentum: str) -> None:
    n = numbers(T=40, B=3, decay=decay, momentum=momentum, window=2, H=1)
    n["token_mask"] = torch.arange(40) < torch.tensor([[40], [17], [0]])
    n["lr"] = torch.where(n["token_mask"].unsqueeze(-1), n["lr"], torch.nan)
    for name in ("q", "k", "v"):
        dead = ~n["token_mask"].view(3, 40, *(1,) * (n[name].dim() - 2))
        n[name] = n[name].masked_fill(dead, torch.nan)
    agree(n, lambda n: run(n, 16))
    assert torch.equal(run(n, 16)[1][2], n["A0"][2])


@pytest.mark.parametrize("decay", ["head", "key", "value", "both"])
@pytest.mark.parametrize("depth", [2.0, 20.0, 50.0])
def test_strong_decays_in_float32(decay: str, depth: float) -> None:
    affine = (0.0, 1.0) if decay in ("value", "both") else (1.0, 1.0)
    n = numbers(T=150, K=8, V=8, decay=decay, affine=affine, depth=depth)
    for name in ("log_decay", "log_decay_value"):
        if name in n:
            # Mostly weak decays, with some channels and tokens that forget nearly everything.
            n[name] = torch.where(torch.rand_like(n[name]) < 0.7, n[name] / 1000, n[name])
    exact, A, _ = run(n, 3)
    repeated, B, _ = scan(n)
    assert close(exact, repeated)
    assert close(A, B)
    low = {k: x.float() if isinstance(x, Tensor) else x for k, x in n.items()}
    double = {k: x.double() if isinstance(x, Tensor) else x for k, x in low.items()}
    target, target_A, _ = run(double, 3)
    for chunk in (None, 16, 128):
        y, A, _ = run(low, chunk)
        assert y.dtype == A.dtype == torch.float32
        assert norm_error(y, target) < 1e-6
        assert norm_error(A, target_A) < 1e-6


@pytest.mark.parametrize("decay", ["head", "key", "value", "both"])
def test_long_strong_decays_have_no_nan(decay: str) -> None:
    affine = (0.0, 1.0) if decay in ("value", "both") else (1.0, 1.0)
    n = numbers(T=8192, H=1, decay=decay, affine=affine, depth=0.0, dtype=torch.float32)
    for name in ("log_decay", "log_decay_value"):
        if name in n:
            n[name] = torch.full_like(n[name], -50.0)
    inputs = leaves(n)
    y, A, _ = run(n)
    result = torch.autograd.grad(y.sum() + A.sum(), list(inputs.values()))
    assert all(x.isfinite().all() for x in (y, A, *result))


@pytest.mark.parametrize("engine", [run, scan])
@pytest.mark.parametrize("momentum", ["none", "gradient"])
@pytest.mark.parametrize("decay", ["head", "key", "value", "both"])
def test_a_decay_of_minus_infinity_resets(decay: str, momentum: str, engine: Any) -> None:
    affine = (0.0, 1.0) if decay in ("value", "both") else (1.0, 1.0)
    n = numbers(T=40, H=1, decay=decay, momentum=momentum, affine=affine, decay_first=True)
    for name in ("log_decay", "log_decay_value"):
        if name in n:
            n[name][:, 0] = n[name][:, 20:22] = -torch.inf
    agree(n, engine)


def test_momentum_of_exactly_zero_is_no_momentum() -> None:
    n = numbers(T=70, decay="head", momentum="gradient")
    n["momentum"] = torch.zeros_like(n["momentum"])
    y, A, _ = run(n)
    without = {name: x for name, x in n.items() if name not in ("momentum", "S0")}
    wanted_y, wanted_A, none = run(without)
    assert none is None
    assert close(y, wanted_y)
    assert close(A, wanted_A)


@pytest.mark.parametrize("momentum", ["gradient", "value"])
def test_gradients_of_a_momentum_that_is_sometimes_zero(momentum: str) -> None:
    n = numbers(T=40, H=1, decay="head", momentum=momentum)
    n["momentum"][:, ::7] = 0.0
    agree(n, run)


def test_momentum_backward_reads_no_values() -> None:
    """The backward pass of torch.cumprod reads values, to look for zeros."""
    n = numbers(T=70, decay="head", momentum="gradient")
    n["momentum"].requires_grad_()
    pending: list[Any] = [run(n)[0].grad_fn]
    visited: set[Any] = {None}
    while pending:
        node = pending.pop()
        if node not in visited:
            visited.add(node)
            pending += [parent for parent, _ in node.next_functions]
    assert not [node for node in visited - {None} if "Cumprod" in node.name()]


@pytest.mark.parametrize("momentum", ["none", "gradient"])
@pytest.mark.parametrize(("B", "T"), [(2, 0), (0, 5), (0, 0)])
def test_empty_input(B: int, T: int, momentum: str) -> None:
    n = numbers(T=5, B=2, momentum=momentum, decay="head", window=3)
    n = {
        name: x
        if not isinstance(x, Tensor)
        else (x[:B] if name in ("A0", "S0", "k_past", "v_past", "past_mask") else x[:B, :T])
        for name, x in n.items()
    }
    y, A, S = run(n)
    assert y.shape == (B, T, 2, 1, 3)
    assert torch.equal(A, n["A0"])
    assert S is None if momentum == "none" else torch.equal(S, n["S0"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 200])
def test_low_precision_inputs_keep_a_float32_state(tokens: int, dtype: torch.dtype) -> None:
    n = numbers(T=200, K=16, V=16, decay="head", depth=0.1)
    recipe = rc.Recipe(retention=rc.retention.Decay(when="before"))

    def recall(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        state, outputs = None, []
        for t in range(0, 200, tokens):
            q, k, v, lr, log = (
                n[name][:, t : t + tokens].to(dtype) for name in ("q", "k", "v", "lr", "log_decay")
            )
            gates = {"lr": lr, "log_decay": log}
            y, state = rc.recall(recipe, q.squeeze(3), k, v, gates, state=state, engine="linear")
            outputs.append(y)
        assert state is not None
        return torch.cat(outputs, 1), state.weights[0]

    exact, exact_A = recall(torch.float64)
    y, A = recall(dtype)
    assert y.dtype == dtype
    assert A.dtype == torch.float32
    limit = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-6}[dtype]
    assert norm_error(y, exact) < limit
    assert norm_error(A, exact_A) < limit


@pytest.mark.parametrize("tokens", [1, 5])
def test_float64_inputs_widen_a_float32_state(tokens: int) -> None:
    n = numbers(T=5)
    q, k, v, lr = n["q"].squeeze(3), n["k"], n["v"], n["lr"]
    low, gates = [x.float() for x in (q, k, v)], {"lr": lr.float()}
    _, state = rc.recall(rc.Recipe(), *low, gates, engine="linear")
    assert state is not None
    assert state.weights[0].dtype == torch.float32
    q, k, v, gates = q[:, :tokens], k[:, :tokens], v[:, :tokens], {"lr": lr[:, :tokens]}
    y, final_state = rc.recall(rc.Recipe(), q, k, v, gates, state=state, engine="linear")
    wide = state.map(lambda x: x.double() if x.is_floating_point() else x)
    exact, _ = rc.recall(rc.Recipe(), q, k, v, gates, state=wide, engine="reference")
    assert final_state is not None
    assert y.dtype == final_state.weights[0].dtype == torch.float64
    assert close(y, exact)


@pytest.mark.parametrize("decay_first", [False, True])
def test_repeated_keys_at_full_rate_stay_accurate(decay_first: bool) -> None:
    """The worst-conditioned system of unit keys is a triangle of ones."""
    n = numbers(T=128, K=32, V=16, decay="head", decay_first=decay_first, depth=0.01)
    n["k"] = n["k"][:, :1] + 1e-2 * n["k"]
    n["k"] = n["k"] / n["k"].norm(dim=-1, keepdim=True)
    n["lr"] = torch.ones_like(n["lr"])
    low = {name: x.float() if isinstance(x, Tensor) else x for name, x in n.items()}
    target = {name: x.double() if isinstance(x, Tensor) else x for name, x in low.items()}
    exact, A, _ = scan(target)
    for chunk in (None, 32, 128):
        y, result, _ = run(low, chunk)
        assert norm_error(y, exact) < 1e-5
        assert norm_error(result, A) < 1e-5


def test_gradients_of_gradients() -> None:
    n = numbers(T=3, H=1, K=2, V=2, decay="head", decay_first=True)
    inputs = leaves(n)
    names = ("q", "k", "v", "lr", "log_decay", "A0")

    def function(*values: Tensor) -> tuple[Tensor, Tensor]:
        return run({**n, **dict(zip(names, values, strict=True))}, 2)[:2]

    values = tuple(inputs[name] for name in names)
    assert torch.autograd.gradcheck(function, values)
    assert torch.autograd.gradgradcheck(function, values)


@pytest.mark.parametrize("G", [1, 2])
@pytest.mark.parametrize("affine", [(1.0, 1.0), (0.0, 1.0)])
@pytest.mark.parametrize("decay", ["none", "head", "key"])
def test_groups_of_chunks(
    decay: str, affine: tuple[float, float], G: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recollect.engines.linear.chunked.GROUP", 32)
    agree(numbers(T=37, H=2, B=2, G=G, decay=decay, affine=affine), lambda n: run(n, 4))


def test_decay_per_value_channel_of_a_delta_rule_is_refused() -> None:
    n = numbers(T=3, decay="value")
    with pytest.raises(ValueError, match="a = 0"):
        run(n)


def test_runs_of_tokens_equal_one_call() -> None:
    n = numbers(T=10, B=2, decay="both", momentum="gradient", probe=True, masked=True)
    full = problem(n)
    runs = list(full.split(4))
    assert [run.k.shape[1] for run in runs] == [4, 4, 2]
    for name, x in full.tokens().items():
        assert torch.equal(torch.cat([run.tokens()[name] for run in runs], 1), x)
    assert torch.equal(torch.cat([run.token_mask for run in runs], 1), n["token_mask"])
    assert all(run.A0 is full.A0 and run.S0 is full.S0 for run in runs)


def test_values_of_masked_tokens_have_no_effect() -> None:
    n = numbers(T=6, B=2, decay="head", momentum="gradient", window=2, masked=True)
    dead = ~n["token_mask"]
    n["momentum"][dead], n["v"][dead], n["log_decay"][dead] = torch.nan, torch.nan, -torch.inf
    masked = problem(n).masked()
    for name, x in masked.tokens().items():
        assert bool((x[dead] == (1.0 if name == "momentum" else 0.0)).all())
        assert torch.equal(x[~dead], n[name][~dead])
