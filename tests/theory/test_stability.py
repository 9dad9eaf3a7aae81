"""Norm bounds, exchanged states, conditioning, and the findings of recipes."""

from __future__ import annotations

import pytest
import torch

import recollect as rc
from recollect.tasks import low_coherence_keys, swap_stream
from recollect.theory import (
    conditioning,
    count_errors,
    exchange_margin,
    findings,
    linear_attention_growth,
    output_bound,
)

D = torch.float64


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


# -- norms ---------------------------------------------------------------------------------------


def test_least_squares_stays_under_its_bound() -> None:
    T, K, V = 60, 4, 3
    q, k, v = random_tensor(T, K, seed=1), random_tensor(T, K, seed=2), random_tensor(T, V, seed=3)
    for ridge in (0.0, 0.5):
        recipe = rc.Recipe(
            context=rc.context.Prefix(), algorithm=rc.algorithm.LeastSquares(ridge=ridge or 1e-8)
        )
        y, _ = rc.recall(recipe, *(x[None, :, None] for x in (q, k, v)))
        norms = y[0, :, 0].norm(dim=-1)
        bound = output_bound(q, k, v, ridge=ridge)
        assert bool(bound[: K - 1].isinf().all()) == (ridge == 0)
        assert bool((norms[K:] <= bound[K:]).all())
        # By the dense inverse, token by token.
        for t in (K, T - 1):
            gram = k[: t + 1].T @ k[: t + 1]
            minimum = torch.linalg.eigvalsh(gram)[0] + ridge
            written_norm = sum(v[i].norm() * k[i].norm() for i in range(t + 1))
            torch.testing.assert_close(bound[t], q[t].norm() * written_norm / minimum)
    with pytest.raises(ValueError, match="ridge"):
        output_bound(q, k, v, ridge=-1.0)


def test_linear_attention_grows_as_computed() -> None:
    """Mean square over 400 sequences within five standard errors: 16 times longer, 4 times more."""
    B, T, K = 400, 64, 8
    q, k = (torch.nn.functional.normalize(random_tensor(B, T, K, seed=s), dim=-1) for s in (1, 2))
    v = torch.nn.functional.normalize(random_tensor(B, T, 3, seed=3), dim=-1)
    recipe = rc.zoo.get("linear_attention").recipe
    y, _ = rc.recall(recipe, *(x[:, :, None] for x in (q, k, v)))
    for t in (4, 64):
        squares = y[:, t - 1, 0].square().sum(-1)
        expected = linear_attention_growth(torch.tensor([float(t)]), size=K).square()
        assert abs(float(squares.mean() - expected)) < 5 * float(squares.std()) / B**0.5
    one, two = linear_attention_growth(torch.tensor([4.0, 64.0]), size=K)
    assert two == 4 * one


# -- exchange ------------------------------------------------------------------------------------


def rounding(kernel: rc.features.Kernel) -> rc.Recipe:
    return rc.Recipe(features=kernel, algorithm=rc.algorithm.GradientDescent(lr=1.0))


@pytest.mark.parametrize(("n", "d"), [(64, 36), (192, 64)])
def test_margins_bound_measurements(n: int, d: int) -> None:
    keys = low_coherence_keys(n, d)
    gram = keys @ keys.T - torch.eye(n)
    margin = exchange_margin(keys, torch.float32)
    assert margin.coherence == float(gram.abs().max())
    assert margin.exact
    stream = swap_stream(n, d, 60, torch.Generator().manual_seed(0))
    assert count_errors(rounding(rc.features.Round()), stream) == (0, 0)
    linear = count_errors(rounding(rc.features.LinearKernel()), stream)
    assert linear[1] > 0


def test_the_margin_s_two_parts() -> None:
    """Products of differences are within 4ε of whole numbers, and float32 is within its bound."""
    keys = low_coherence_keys(64, 36)
    margin = exchange_margin(keys, torch.float32)
    a, b = keys[:32] - keys[32:], keys[1:33] - keys[31:63]
    products = a @ b.T
    off = (products - products.round()).abs().max()
    assert 2 * margin.coherence < off <= 4 * margin.coherence + 1e-12
    rounded = (a.float() @ b.float().T).double()
    assert (rounded - products).abs().max() < margin.rounding_error < 1e-4
    assert not exchange_margin(keys, torch.bfloat16).exact, "the worst case of bfloat16"
    close = torch.nn.functional.normalize(random_tensor(20, 8), dim=-1)
    assert not exchange_margin(close, torch.float32).exact


# -- conditioning --------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.2, 1.0])
def test_errors_stay_under_their_bounds(scale: float) -> None:
    T, V = 12, 3
    k, v = random_tensor(T, 5, seed=1) * scale, random_tensor(T, V, seed=2)
    result = conditioning(k @ k.T, v)
    by_hand: list[torch.Tensor] = []
    for t in range(T):  # u_t = v_t − Σ_{i<t} κ(k_t, k_i) u_i
        by_hand.append(v[t] - sum(((k[t] @ k[i]) * by_hand[i] for i in range(t)), start=0 * v[t]))
    torch.testing.assert_close(result.u, torch.stack(by_hand))
    error = 1e-7 * random_tensor(T, T, seed=3).tril(-1)
    assert result.write_change(error) <= result.write_bound(error) * (1 + 1e-4)
    assert result.read_change(error) <= result.read_bound(error)
    assert result.number >= result.inverse_norm >= 1 - 1e-9
    half = conditioning(k @ k.T, v, rate=0.5)
    assert half.inverse_norm <= result.inverse_norm


def test_writing_is_worse_conditioned_than_reading() -> None:
    """AM: and the more so, the larger the similarities; a softmax keeps it bounded."""
    T = 24
    k, v = random_tensor(T, 4, seed=1), random_tensor(T, 3, seed=2)
    error = 1e-9 * torch.ones(T, T, dtype=D).tril(-1)
    small, large = (conditioning(s * (k @ k.T), v) for s in (0.1, 1.0))
    assert large.write_change(error) > 100 * large.read_change(error) / large.inverse_norm
    assert large.inverse_norm > 1000 * small.inverse_norm
    mask = torch.ones(T, T).tril(-1).bool()
    soft = torch.where(mask, (k @ k.T).masked_fill(~mask, -torch.inf).softmax(-1), 0).nan_to_num()
    assert conditioning(soft, v).inverse_norm < large.inverse_norm


def test_a_recipe_s_rows_are_u() -> None:
    """The stored rows of a kernel delta rule after the last token."""
    k, v = random_tensor(9, 5, seed=4), random_tensor(9, 2, seed=5)
    recipe = rounding(rc.features.LinearKernel())
    _, state = rc.recall(recipe, *(x[None, :, None] for x in (k, k, v)))
    expected = conditioning(k @ k.T, v).u
    q = random_tensor(4, 5, seed=6)
    read = rc.read(recipe, q[None, :, None], state=state)[0, :, 0]
    torch.testing.assert_close(read, (q @ k.T) @ expected)


# -- findings ------------------------------------------------------------------------------------


def test_findings_are_printed_if_they_apply() -> None:
    def text(name: str) -> str:
        return "\n".join(findings(rc.zoo.get(name).recipe, 64, 64))

    assert "grows with T" in text("linear_attention")
    assert "0.016" in text("linear_attention")
    assert "grows" not in text("delta_net") and "W_v W_k⁻¹" in text("delta_net")
    assert "W_v W_k⁻¹" not in text("gated_delta_net"), "it forgets, and follows"
    assert "λ_min" in text("rls") and "λ_min" not in text("geometric_rls")
    assert "at most 512 pairs" in text("titans")
    assert findings(rc.zoo.get("softmax_attention").recipe, 64, 64) == ()
    assert findings(rc.zoo.get("lru").recipe, 64, 64) == ()
    assert findings(rc.zoo.get("oja").recipe, 64, 64) == (), "it is not read at keys"
    tracker = rounding(rc.features.Round())
    assert any("exchange" in line for line in findings(tracker, 36, 64))
    other = tracker.replace(bias=rc.bias.DotProduct())
    assert not any("exchange" in line for line in findings(other, 36, 64))
    for decimals in (1, 2):
        rounded = rounding(rc.features.Round(decimals=decimals))
        assert not any("exchange" in line for line in findings(rounded, 36, 64))


@pytest.mark.parametrize("name", rc.zoo.names())
def test_every_architecture_has_findings_or_none(name: str) -> None:
    for line in findings(rc.zoo.get(name).recipe, 64, 64):
        assert line.endswith(")") and "nan" not in line
