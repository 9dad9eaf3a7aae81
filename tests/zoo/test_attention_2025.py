"""Attention of 2024 to 2026 as loops over tokens, from the weights of their layers.

Each loop is written from the equations of the paper, in float64. Outputs agree to 1e-10 and
gradients to 1e-8, at a length of several blocks, in any split, token by token, with padding and
with packed documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.zoo.test_equivalences import METHODS, TOL, normal
from tests.zoo.test_systems import D, around, finish, gate, layer
from torch import Tensor
from torch.nn import functional

import recollect as rc

N = 71
Loop = Callable[[rc.MemoryLayer, Tensor], Tensor]
"""Outputs of the memory ``[B, T, H, V]``."""


def key_gate(mixer: rc.MemoryLayer, name: str, x: Tensor) -> Tensor:
    """A gate of K channels without a bias."""
    number = mixer.gates[name]
    h = x if number.down is None else x @ number.down.T
    return (h @ number.weight.T).unflatten(-1, number.shape)


def softmax_over(logits: list[Tensor], v: Tensor) -> Tensor:
    """Σ softmax_i(logit_i) v_i for logits ``[B, H]`` and values ``[B, i, H, V]``."""
    weights = torch.stack(logits, 1).softmax(1)
    return (weights.unsqueeze(-1) * v).sum(1)


def stick_breaking(mixer: rc.MemoryLayer, x: Tensor) -> Tensor:
    """A_ti = β_ti Π_(i<j<t) (1 − β_tj), the latest earlier token first."""
    q, k, v = around(mixer, x)
    outputs = []
    for t in range(x.shape[1]):
        y, rest = torch.zeros_like(v[:, 0]), torch.ones_like(v[:, 0, :, :1])
        for i in reversed(range(t)):
            beta = ((q[:, t] * k[:, i]).sum(-1, keepdim=True) / math.sqrt(mixer.head_dim)).sigmoid()
            y, rest = y + rest * beta * v[:, i], rest * (1 - beta)
        outputs.append(y)
    return torch.stack(outputs, 1)


def path_attention(mixer: rc.MemoryLayer, x: Tensor) -> Tensor:
    """Logits k_iᵀ H_(i+1)ᵀ … H_tᵀ q_t with matrices H_j = I − β_j w_j w_jᵀ."""
    q, k, v = around(mixer, x)
    w = functional.normalize(key_gate(mixer, "reflection", x), dim=-1)
    beta = 2 * gate(mixer, "reflection_rate", x).sigmoid()
    eye = torch.eye(mixer.head_dim, dtype=x.dtype)
    H = eye - beta[..., None, None] * w.unsqueeze(-1) * w.unsqueeze(-2)  # [B, T, H, K, K]
    outputs = []
    for t in range(x.shape[1]):
        logits, turned = [], q[:, t]
        for i in range(t, -1, -1):
            logits.insert(0, (turned * k[:, i]).sum(-1) / math.sqrt(mixer.head_dim))
            turned = torch.einsum("bhkl,bhk->bhl", H[:, i], turned)
        outputs.append(softmax_over(logits, v[:, : t + 1]))
    return torch.stack(outputs, 1)


def wall_attention(mixer: rc.MemoryLayer, x: Tensor) -> Tensor:
    """Logits Σ_n q_tn k_in exp(P_tn − P_in) with P the sum of log gates."""
    q, k, v = around(mixer, x)
    P = functional.logsigmoid(gate(mixer, "log_key_decay", x)).cumsum(1)
    outputs = []
    for t in range(x.shape[1]):
        past = slice(0, t + 1)
        decayed = q[:, t, None] * k[:, past] * (P[:, t, None] - P[:, past]).exp()
        logits = decayed.sum(-1) / math.sqrt(mixer.head_dim)
        outputs.append(softmax_over(list(logits.unbind(1)), v[:, past]))
    return torch.stack(outputs, 1)


def rotated(x: Tensor) -> Tensor:
    """Channels i and i + K/2 as complex numbers, times exp(√−1 t 10000^(−2i/K))."""
    K = x.shape[-1]
    speed = 10000 ** (-torch.arange(0, K, 2).double() / K)
    rotation = torch.exp(1j * torch.arange(x.shape[1])[:, None] * speed).unsqueeze(1)
    pairs = torch.complex(*x.chunk(2, -1)) * rotation
    return torch.cat([pairs.real, pairs.imag], -1)


def parallax(mixer: rc.MemoryLayer, x: Tensor) -> Tensor:
    """O1 = P1 V/d1, O2 = (P1 ⊙ S2) V/d1, and y = O1 (1 + d2/d1) − O2 (algorithm 1)."""
    q, k, v = around(mixer, x)
    q, k, r = rotated(q), rotated(k), rotated(key_gate(mixer, "slope", x))
    outputs = []
    for t in range(x.shape[1]):
        past = slice(0, t + 1)
        P1 = ((q[:, t, None] * k[:, past]).sum(-1, keepdim=True) / math.sqrt(mixer.head_dim)).exp()
        P2 = P1 * (r[:, t, None] * k[:, past]).sum(-1, keepdim=True)
        d1, d2 = P1.sum(1), P2.sum(1)
        O1, O2 = (P1 * v[:, past]).sum(1) / d1, (P2 * v[:, past]).sum(1) / d1
        outputs.append(O1 * (1 + d2 / d1) - O2)
    return torch.stack(outputs, 1)


LOOPS: dict[str, Loop] = {
    "parallax": parallax,
    "stick_breaking": stick_breaking,
    "path_attention": path_attention,
    "wall_attention": wall_attention,
}
NAMES = pytest.mark.parametrize("name", LOOPS)


def tokens(rows: int = 2) -> Tensor:
    return normal(rows, N, D, seed=30)


def same_states(one: rc.LayerState, other: rc.LayerState) -> None:
    for mine, theirs in zip(one.flatten()[1], other.flatten()[1], strict=True):
        torch.testing.assert_close(mine, theirs, **TOL)


@NAMES
def test_the_layer_is_the_loop_of_the_paper(name: str) -> None:
    mixer, x = layer(name), tokens()
    assert rc.select_engine(mixer.recipe).engine.name == "kernel"
    torch.testing.assert_close(mixer(x)[0], finish(mixer, LOOPS[name](mixer, x), x), **TOL)
    reference, _ = layer(name, engine="reference")(x)
    torch.testing.assert_close(reference, mixer(x)[0], **TOL)


@NAMES
def test_gradients_are_those_of_the_loop(name: str) -> None:
    mixer, x = layer(name), tokens().requires_grad_()
    weights = [x, *mixer.parameters()]
    loss = mixer(x)[0].square().sum()
    want = finish(mixer, LOOPS[name](mixer, x), x).square().sum()
    gradients = torch.autograd.grad(loss, weights)
    for one, other in zip(gradients, torch.autograd.grad(want, weights), strict=True):
        torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-8)


@NAMES
@pytest.mark.parametrize("split", [(1,) * 9 + (N - 9,), (17, 54), (64, 1, 6), (70, 1)])
def test_splits_and_tokens(name: str, split: tuple[int, ...]) -> None:
    mixer, x = layer(name), tokens()
    y, want = mixer(x)
    parts, state = [], None
    for piece in x.split(split, dim=1):
        part, state = mixer(piece, state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), y, **TOL)
    same_states(state, want)
    saved = rc.LayerState.from_dict(state.to_dict())
    torch.testing.assert_close(mixer(x, saved)[0], mixer(x, want)[0], **TOL)


@NAMES
def test_padding_and_documents(name: str) -> None:
    mixer, x = layer(name), tokens()
    mask = torch.ones(2, N)
    mask[0, :7], mask[1, 30:] = 0, 0
    _, start = mixer(normal(2, 3, D, seed=31))
    y, state = mixer(x, start, mask)
    more = normal(2, 3, D, seed=33)
    then, _ = mixer(more, state)
    for row, valid in enumerate(mask.bool()):
        expected, end = mixer(x[row : row + 1, valid], start.select(torch.tensor([row])))
        torch.testing.assert_close(y[row : row + 1, valid], expected, **TOL)
        torch.testing.assert_close(then[row : row + 1], mixer(more[row : row + 1], end)[0], **TOL)
    _, start = mixer(normal(3, 3, D, seed=32))
    y, state = mixer(x[:1], start, cu_seqlens=torch.tensor([0, 16, 16, N]))
    then, _ = mixer(normal(3, 2, D, seed=34), state)
    for row, (first, last) in enumerate(((0, 16), (16, 16), (16, N))):
        expected, end = mixer(x[:1, first:last], start.select(torch.tensor([row])))
        torch.testing.assert_close(y[:, first:last], expected, **TOL)
        expected_next, _ = mixer(normal(3, 2, D, seed=34)[row : row + 1], end)
        torch.testing.assert_close(then[row : row + 1], expected_next, **TOL)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [("parallax", 0), ("stick_breaking", 0), ("path_attention", 5), ("wall_attention", 4)],
)
def test_states_store_the_gates_of_each_token(name: str, numbers: int) -> None:
    """Keys and values of 4 channels, the gates that later queries need, and a byte of the mask."""
    mixer = layer(name)
    _, state = mixer(tokens(1))
    per_head = N * 8 * (4 + 4 + numbers)
    assert state.memory.nbytes == 2 * per_head + N + 8


# -- the members -----------------------------------------------------------------------------------

B, T, H, K, V = 2, 70, 2, 5, 4
Q, KEY, X = normal(B, T, H, K, seed=1), normal(B, T, H, K, seed=2), normal(B, T, H, V, seed=3)
W, LOG = normal(B, T, H, K, seed=4), -normal(B, T, H, K, seed=5).abs()
SOFTMAX = rc.zoo.get("softmax_attention").recipe


def within(*parts: rc.context.Context) -> rc.Recipe:
    return SOFTMAX.replace(context=rc.context.KernelWeighted(restrictions=parts))


@METHODS
def test_blocks_are_scored_by_keys_before_they_move(method: str) -> None:
    """The current block of 4 and the best other one by q·mean(k_i), with logits of k_i^(t)."""
    recipe = within(rc.context.KeyDecay(), rc.context.TopBlocks(size=4, top_k=2))
    gates = {"log_key_decay": LOG[:, :18]}
    y, _ = rc.recall(recipe, Q[:, :18], KEY[:, :18], X[:, :18], gates, engine=method)
    total = LOG.cumsum(1)
    for t in range(18):
        past, current = slice(t + 1), t // 4
        moved = KEY[:, past] * (total[:, t : t + 1] - total[:, past]).exp()
        block = torch.arange(t + 1) // 4
        visible = (block == current).expand(B, H, -1)
        if current:
            means = KEY[:, : 4 * current].unflatten(1, (current, 4)).mean(2)
            best = torch.einsum("bhk,bnhk->bhn", Q[:, t], means).argmax(-1, keepdim=True)
            visible = visible | (block == best)
        z = torch.einsum("bhk,bihk->bhi", Q[:, t], moved) / math.sqrt(K)
        p = z.masked_fill(~visible, -math.inf).softmax(-1)
        expected = torch.einsum("bhi,bihv->bhv", p, X[:, past])
        torch.testing.assert_close(y[:, t], expected, atol=1e-10, rtol=1e-10)


@METHODS
def test_the_solution_of_a_fit_as_its_slope_is_the_fit(method: str) -> None:
    """x = (Σ p c cᵀ + λ)⁻¹ (k̄ − q) gives local linear attention."""
    fitted = SOFTMAX.replace(
        memory=rc.memory.LocalPolynomial(), algorithm=rc.algorithm.Analytic(ridge=0.3)
    )
    p = torch.einsum("bthk,bihk->bhti", Q, KEY) / math.sqrt(K)
    p = p.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)
    mean = torch.einsum("bhti,bihk->bthk", p, KEY)
    c = KEY[:, None] - mean[:, :, None]  # [B, t, i, H, K]
    covariance = torch.einsum("bhti,btihk,btihl->bthkl", p, c, c) + 0.3 * torch.eye(K).double()
    x = torch.linalg.solve(covariance, mean - Q)
    slope_only = SOFTMAX.replace(memory=rc.memory.LocalPolynomial(slope="input"))
    y, _ = rc.recall(slope_only, Q, KEY, X, {"slope": x}, engine=method)
    torch.testing.assert_close(y, rc.recall(fitted, Q, KEY, X)[0], **TOL)
    zero, _ = rc.recall(slope_only, Q, KEY, X, {"slope": torch.zeros_like(x)}, engine=method)
    torch.testing.assert_close(zero, rc.recall(SOFTMAX, Q, KEY, X)[0], **TOL)


def test_fixed_slope_requires_degree_one_and_no_ridge() -> None:
    with pytest.raises(rc.RecipeError, match="needs degree=1"):
        rc.memory.LocalPolynomial(slope="input", degree=2)
    with pytest.raises(rc.RecipeError, match="fits none"):
        SOFTMAX.replace(
            memory=rc.memory.LocalPolynomial(slope="input"),
            algorithm=rc.algorithm.Analytic(ridge=1.0),
        )


@METHODS
def test_constant_keys_are_softmax_attention(method: str) -> None:
    plain, _ = rc.recall(SOFTMAX, Q, KEY, X)
    for recipe, gates in (
        (within(rc.context.KeyDecay()), {"log_key_decay": torch.zeros_like(LOG)}),
        (within(rc.context.KeyReflection(beta=0.0)), {"reflection": W}),
        (within(rc.context.KeyReflection(beta=2.0)), {"reflection": torch.zeros_like(W)}),
    ):
        y, _ = rc.recall(recipe, Q, KEY, X, gates, engine=method)
        torch.testing.assert_close(y, plain, **TOL)


@METHODS
def test_equal_decays_of_all_channels_scale_the_logits(method: str) -> None:
    alpha = 0.8
    y, _ = rc.recall(within(rc.context.KeyDecay(alpha=alpha)), Q, KEY, X, engine=method)
    logits = torch.einsum("bthk,bihk->bhti", Q, KEY) / math.sqrt(K)
    distance = (torch.arange(T)[:, None] - torch.arange(T)).double()
    logits = (logits * alpha**distance).masked_fill(distance < 0, -math.inf)
    want = torch.einsum("bhti,bihv->bthv", logits.softmax(-1), X)
    torch.testing.assert_close(y, want, **TOL)


@METHODS
def test_full_decay_hides_earlier_keys(method: str) -> None:
    """α = 0 at token 40: all earlier keys are 0, and so are their logits."""
    log = LOG.clone()
    log[:, 40] = -math.inf
    recipe = within(rc.context.KeyDecay())
    y, _ = rc.recall(recipe, Q, KEY, X, {"log_key_decay": log}, engine=method)
    assert y.isfinite().all()
    current = (Q[:, 40] * KEY[:, 40]).sum(-1) / math.sqrt(K)
    logits = torch.cat([torch.zeros(B, 40, H).double(), current.unsqueeze(1)], 1)
    torch.testing.assert_close(y[:, 40], softmax_over(list(logits.unbind(1)), X[:, :41]), **TOL)


@pytest.mark.parametrize("low", [-0.02, -1.0, -50.0])
def test_decays_of_keys_in_single_precision(low: float) -> None:
    log, recipe = LOG * abs(low), within(rc.context.KeyDecay())
    y, _ = rc.recall(recipe, Q, KEY, X, {"log_key_decay": log}, engine="reference")
    arguments = [a.float() for a in (Q, KEY, X)]
    single, _ = rc.recall(recipe, *arguments, {"log_key_decay": log.float()})
    torch.testing.assert_close(single, y.float(), atol=1e-5, rtol=1e-5)


@METHODS
def test_two_equal_reflections_cancel(method: str) -> None:
    """β = 2: the tokens 2n and 2n + 1 reflect along one direction, so that H H = I."""
    w = W[:, ::2].repeat_interleave(2, dim=1)
    recipe = within(rc.context.KeyReflection(beta=2.0))
    y, _ = rc.recall(recipe, Q, KEY, X, {"reflection": w}, engine=method)

    def reflect(x: Tensor, tokens: slice) -> Tensor:
        direction = functional.normalize(w[:, tokens], dim=-1)
        return x - 2 * (x * direction).sum(-1, keepdim=True) * direction

    for t in (20, 21, 69):
        past, even = slice(0, t + 1), torch.arange(t + 1) % 2 == 0
        # Token t has no partner yet if it is even, and neither has token i + 1 after an even key i.
        q = Q[:, t : t + 1] if t % 2 else reflect(Q[:, t : t + 1], slice(t, t + 1))
        k = torch.where(even[:, None, None], reflect(KEY[:, past], past), KEY[:, past])
        logits = (q * k).sum(-1) / math.sqrt(K)
        logits[:, t] = (Q[:, t] * KEY[:, t]).sum(-1) / math.sqrt(K)
        want = softmax_over(list(logits.unbind(1)), X[:, past])
        torch.testing.assert_close(y[:, t], want, **TOL)


@METHODS
def test_equal_logits_of_stick_breaking_are_geometric(method: str) -> None:
    """Logits of 0 break the rest of the stick in half at each earlier token."""
    recipe = rc.zoo.get("stick_breaking").recipe
    y, _ = rc.recall(recipe, torch.zeros_like(Q), KEY, X, engine=method)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    weights = torch.where(distance > 0, 0.5 ** distance.double(), 0.0)
    torch.testing.assert_close(y, torch.einsum("ti,bihv->bthv", weights, X), **TOL)


def test_extreme_logits_of_stick_breaking() -> None:
    """Logits of ±1e4: the latest key with a large logit has weight 1, also in float32."""
    recipe = rc.zoo.get("stick_breaking").recipe
    k = torch.full((1, 6, 1, 1), -1e4)
    k[0, [1, 3]] = 1e4
    q, v = torch.ones(1, 6, 1, 1), torch.arange(6.0).view(1, 6, 1, 1)
    for method in ("auto", "reference"):
        k.requires_grad_()
        y, _ = rc.recall(recipe, q, k, v, engine=method)
        assert y.flatten().tolist() == [0, 0, 1, 1, 3, 3]
        (slope,) = torch.autograd.grad(y.sum(), k)
        assert slope.isfinite().all()


def test_weights_of_stick_breaking_are_no_subnormal_numbers() -> None:
    """A CPU multiplies them many times slower than zeros."""
    k = torch.full((1, 3, 1, 4), 0.5)
    q, v = 180 * k, torch.tensor([1.0, 0.0, 0.0]).reshape(1, 3, 1, 1)  # logits of 90
    y, _ = rc.recall(rc.zoo.get("stick_breaking").recipe, q, k, v)
    assert y.flatten().tolist() == [0.0, 1.0, 0.0]  # e^−90 is 8e-40


def test_plain_sums_keep_small_weights_of_large_values() -> None:
    """e^−72 is 5e-32, which times values of 1e20 is no rounding error."""
    recipe = rc.Recipe(
        memory=rc.memory.LocalConstant(),
        bias=rc.bias.DotProduct(),
        context=rc.context.KernelWeighted(restrictions=(rc.context.KeyDecay(),)),
        algorithm=rc.algorithm.Analytic(),
    )
    q, k = torch.full((1, 1, 1, 4), 4.0), torch.full((1, 1, 1, 4), -9.0)
    v = torch.full((1, 1, 1, 4), 1e20)
    gates = {"log_key_decay": torch.zeros(1, 1, 1, 4)}
    y, _ = rc.recall(recipe, q, k, v, gates)
    expected, _ = rc.recall(recipe, q.double(), k.double(), v.double(), gates, engine="reference")
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=0)
    assert expected.abs().min() > 0


def test_restrictions_that_exclude_each_other_are_refused() -> None:
    two = (rc.context.KeyDecay(), rc.context.KeyReflection())
    with pytest.raises(rc.RecipeError, match="both move the keys"):
        within(*two)
    with pytest.raises(rc.RecipeError, match="both replace the weights"):
        within(rc.context.StickBreaking(), rc.context.StickBreaking(include_current=True))
    relu = rc.context.KernelWeighted(
        kernel=rc.features.ReluKernel(), restrictions=(rc.context.StickBreaking(),)
    )
    with pytest.raises(rc.RecipeError, match="logarithm of the similarity"):
        SOFTMAX.replace(context=relu, bias=rc.bias.DotProduct())


def test_other_kernels_run_on_the_reference_engine() -> None:
    """A Gaussian of transformed keys needs their norms, which products in blocks do not give."""
    context = rc.context.KernelWeighted(
        kernel=rc.features.Gaussian(), restrictions=(rc.context.KeyDecay(),)
    )
    selection = rc.select_engine(SOFTMAX.replace(context=context))
    assert selection.engine.name == "reference"
    assert "multiple of q·k" in str(selection)
