"""Test-time training by chunks as loops over chunks, from the weights of the layers.

Each loop is written from the equations of the paper and its code, in float64, with gradients by
autograd. The chunks have 8 tokens instead of 64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.zoo.test_equivalences import TOL, normal
from tests.zoo.test_systems import D, around, finish, gate
from torch import Tensor
from torch.nn import functional

import recollect as rc

N, CHUNK = 29, 8
Weights = list[Tensor]
Loop = Callable[[rc.MemoryLayer, Tensor], tuple[Tensor, Weights]]
"""Outputs of the memory ``[B, T, H, V]`` and its weights after the last full chunk."""


def layer(name: str, engine: str = "auto") -> rc.MemoryLayer:
    preset = rc.zoo.get(name)
    algorithm = replace(preset.recipe.algorithm, batch_size=CHUNK)  # type: ignore[type-var]
    torch.manual_seed(0)
    module = preset.replace(algorithm=algorithm).build(D, 2, engine=engine).double()
    with torch.no_grad():  # away from the special values at which learning starts
        for weight in module.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return module


def times(W: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("bhoi,bthi->btho", W, x)


def unit(x: Tensor) -> Tensor:
    """Return x with unit norm and the layer's ε, since Newton–Schulz amplifies a thousandfold."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-12).rsqrt()


def start(module: rc.MemoryLayer, x: Tensor) -> Weights:
    assert module.memory is not None
    return [w.expand(x.shape[0], *w.shape) for w in module.memory()]


def row_lengths(W: Tensor) -> Tensor:
    return W.norm(dim=-1, keepdim=True)


def orthogonalised(S: Tensor) -> Tensor:
    """Five iterations X ← 3.4445 X − 4.775 (X Xᵀ) X + 2.0315 (X Xᵀ)² X from S/(‖S‖ + 1e-7)."""
    X = S / (S.flatten(2).norm(dim=-1)[..., None, None] + 1e-7)
    for _ in range(5):
        G = X @ X.mT
        X = 3.4445 * X - 4.775 * G @ X + 2.0315 * G @ G @ X
    return X


def lact(module: rc.MemoryLayer, x: Tensor) -> tuple[Tensor, Weights]:
    """Read a chunk, then W ← L2-normalise(W + NS5(S)), S = θ̄ S − ∇ Σ_s −η_s ⟨f(k_s), v_s⟩."""
    q, k, v = around(module, x)
    q, k = unit(q), unit(k)
    eta = functional.softplus(gate(module, "lr", x)).unsqueeze(-1)
    theta = 0.999999 * gate(module, "momentum", x).sigmoid()  # the gate's range excludes 1

    def f(W: Weights, x: Tensor) -> Tensor:
        W2, W3, W1 = W
        return times(W1, functional.silu(times(W2, x)) * times(W3, x))

    W = start(module, x)
    lengths, S, outputs = [row_lengths(w) for w in W], [torch.zeros_like(w) for w in W], []
    for first in range(0, x.shape[1], CHUNK):
        chunk = slice(first, first + CHUNK)
        outputs.append(f(W, q[:, chunk]))
        if first + CHUNK > x.shape[1]:
            break
        at = [w if w.requires_grad else w.clone().requires_grad_() for w in W]
        loss = -(eta[:, chunk] * f(at, k[:, chunk]) * v[:, chunk]).sum()
        slopes = torch.autograd.grad(loss, at, create_graph=True)
        mean = theta[:, chunk].mean(1)[..., None, None]
        S = [mean * s - g for s, g in zip(S, slopes, strict=True)]
        W = [w + orthogonalised(s) for w, s in zip(W, S, strict=True)]
        W = [w / row_lengths(w) * size for w, size in zip(W, lengths, strict=True)]
    return torch.cat(outputs, 1), W


def in_place_ttt(module: rc.MemoryLayer, x: Tensor) -> tuple[Tensor, Weights]:
    """O = Z Wᵀ of a chunk, then W ← W + η V̂ᵀ Z with the target of the next token."""
    q, k, v = around(module, x)
    q, k = (part.shape[-1] ** 0.5 * unit(part) for part in (q, k))
    params = {name: param(x) for name, param in module.params.items()}
    G, U = params["feature_gate"], params["feature_map"]

    def units(x: Tensor) -> Tensor:
        g, u = (torch.einsum("hfk,bthk->bthf", weight, x) for weight in (G, U))
        return g * g.sigmoid() * u

    Z, queries = units(k), units(q)
    (W,) = start(module, x)
    outputs = []
    for first in range(0, x.shape[1], CHUNK):
        tokens = range(first, min(first + CHUNK, x.shape[1]))
        outputs += [torch.einsum("bhvf,bhf->bhv", W, queries[:, t]) for t in tokens]
        if first + CHUNK > x.shape[1]:
            break
        for t in tokens:
            if t > 0:
                W = W + params["lr"].view(-1, 1, 1) * (v[:, t, ..., None] * Z[:, t - 1, :, None])
    return torch.stack(outputs, 1), [W]


LOOPS: dict[str, Loop] = {"lact": lact, "in_place_ttt": in_place_ttt}
NAMES = pytest.mark.parametrize("name", LOOPS)
ENGINES = pytest.mark.parametrize("engine", ["auto", "reference"])


def tokens(rows: int = 2, count: int = N) -> Tensor:
    return normal(rows, count, D, seed=30)


@NAMES
@ENGINES
def test_the_layer_is_the_loop_of_the_paper(name: str, engine: str) -> None:
    module, x = layer(name, engine), tokens()
    y, _ = module(x)
    memory, _ = LOOPS[name](module, x)
    torch.testing.assert_close(y, finish(module, memory, x), **TOL)
    _, state = module(x[:, : 3 * CHUNK])
    _, weights = LOOPS[name](module, x[:, : 3 * CHUNK])
    for w, want in zip(state.memory.weights, weights, strict=True):
        torch.testing.assert_close(w, want, **TOL)


@NAMES
@ENGINES
def test_gradients_are_those_of_the_loop(name: str, engine: str) -> None:
    module, x = layer(name, engine), tokens().requires_grad_()
    weights = [x, *module.parameters()]
    loss = module(x)[0].square().sum()
    want = finish(module, LOOPS[name](module, x)[0], x).square().sum()
    gradients = torch.autograd.grad(loss, weights)
    for one, other in zip(gradients, torch.autograd.grad(want, weights), strict=True):
        torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-8)
    rates = module.gates["lr"].weight if "lr" in module.gates else module.params["lr"].bias
    (slope,) = torch.autograd.grad(module(x)[0].square().sum(), [rates])
    assert slope.abs().max() > 1e-8  # chunks were written


@NAMES
@pytest.mark.parametrize("split", [(1,) * 18 + (N - 18,), (13, 16), (24, 5)])
def test_splits_and_tokens(name: str, split: tuple[int, ...]) -> None:
    module, x = layer(name), tokens()
    y, want = module(x)
    parts, state = [], None
    for piece in x.split(split, dim=1):
        part, state = module(piece, state)
        state = rc.LayerState.from_dict(state.to_dict())
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), y, **TOL)
    for one, other in zip(state.flatten()[1], want.flatten()[1], strict=True):
        torch.testing.assert_close(one, other, **TOL)


@NAMES
def test_padding_and_documents(name: str) -> None:
    module, x = layer(name), tokens()
    mask = torch.ones(2, N)
    mask[0, :7], mask[1, 21:] = 0, 0
    _, earlier = module(tokens(2, 3))
    y, state = module(x, earlier, mask)
    for row, valid in enumerate(mask.bool()):
        single, end = module(x[row : row + 1, valid], earlier.select(torch.tensor([row])))
        torch.testing.assert_close(y[row : row + 1, valid], single, **TOL)
        mine = state.select(torch.tensor([row])).flatten()[1]
        for one, other in zip(mine, end.flatten()[1], strict=True):
            torch.testing.assert_close(one, other, **TOL)
    _, earlier = module(tokens(3, 3))
    y, state = module(x[:1], earlier, cu_seqlens=torch.tensor([0, 10, 10, N]))
    for row, (first, last) in enumerate(((0, 10), (10, 10), (10, N))):
        single, end = module(x[:1, first:last], earlier.select(torch.tensor([row])))
        torch.testing.assert_close(y[:, first:last], single, **TOL)
        mine = state.select(torch.tensor([row])).flatten()[1]
        for one, other in zip(mine, end.flatten()[1], strict=True):
            torch.testing.assert_close(one, other, **TOL)


def test_lact_keeps_the_lengths_of_rows() -> None:
    """Rows have their initial norms after three chunks, and another direction."""
    module, x = layer("lact"), tokens()
    assert module.initial_memory is not None
    _, state = module(x)
    for w, w0 in zip(state.memory.weights, module.initial_memory, strict=True):
        lengths = row_lengths(w0).expand_as(row_lengths(w))
        torch.testing.assert_close(row_lengths(w), lengths, **TOL)
        assert (w - w0).abs().max() > 0.1


def test_row_norm_turns_a_row_on_its_circle() -> None:
    """A step along the tangent turns a row of length r by arctan(|step|/r), zeros stay zero."""
    A = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]]).double()
    step = torch.tensor([[-4.0, 3.0], [1.0, 1.0], [-1.0, 0.0]]).double()
    moved = rc.retention.RowNorm().advance(A, step, None, {})
    angle = torch.atan2(A[0, 1], A[0, 0]) + torch.pi / 4
    want = torch.stack([5 * torch.stack([angle.cos(), angle.sin()]), *torch.zeros(2, 2).double()])
    torch.testing.assert_close(moved, want, **TOL)
    for size in (1e-200, 1e200):
        moved = rc.retention.RowNorm().advance(size * A, size * step, None, {})
        torch.testing.assert_close(moved / size, want, **TOL)


@pytest.mark.parametrize("link", ["none", "rows"])
def test_descent_at_the_end_of_batches_is_muon_without_orthogonalisation(link: str) -> None:
    """θ = 0, η inside and no Newton–Schulz: one step −Σ_s η_s g_s per batch."""
    ends = {"batch_size": 4, "update_every": "batch"}
    muon = rc.algorithm.Muon(
        momentum=0.0, ns_steps=0, lr_position="inside", momentum_every="batch", **ends
    )
    keep = rc.retention.RowNorm() if link == "rows" else rc.retention.Decay()
    recipes = [
        rc.Recipe(memory=rc.memory.MLP(), retention=keep, algorithm=algorithm)
        for algorithm in (muon, rc.algorithm.GradientDescent(**ends))
    ]
    q, k, v = (normal(2, 11, 2, 4, seed=seed) for seed in (1, 2, 3))
    gates = {"lr": normal(2, 11, 2, seed=4).sigmoid()}
    if link == "none":
        gates["log_decay"] = -normal(2, 11, 2, seed=5).abs()
    init = [0.5 * normal(2, *shape, seed=6) for shape in recipes[0].shapes(4, 4)]
    (y, state), (other, end) = (
        rc.recall(recipe, q, k, v, gates, initial_memory=tuple(init)) for recipe in recipes
    )
    torch.testing.assert_close(y, other, **TOL)
    for one, two in zip(state.weights, end.weights, strict=True):
        torch.testing.assert_close(one, two, **TOL)
    assert not end.algorithm_state


def test_meaningless_updates_at_the_end_of_batches_are_refused() -> None:
    descent, ends = rc.algorithm.GradientDescent, {"update_every": "batch"}
    with pytest.raises(rc.RecipeError, match="set batch_size > 1"):
        rc.Recipe(algorithm=descent(**ends))
    with pytest.raises(rc.RecipeError, match="tokens read the mean over their open batch"):
        descent(batch_size=4, reduction="mean", **ends)
    with pytest.raises(rc.RecipeError, match=r"momentum_every='batch'.*update_every='batch'"):
        rc.Recipe(memory=rc.memory.MLP(), algorithm=rc.algorithm.Muon(momentum_every="batch"))
    with pytest.raises(rc.RecipeError, match="rows are written token by token"):
        rc.Recipe(features=rc.features.Gaussian(), algorithm=descent(batch_size=4, **ends))
    with pytest.raises(rc.RecipeError, match=r"rows, and those of memory\.Matrix start at zero"):
        rc.Recipe(retention=rc.retention.RowNorm())
    with pytest.raises(rc.RecipeError, match=r"averages steps from W°, which retention\.RowNorm"):
        rc.Recipe(
            memory=rc.memory.MLP(),
            retention=rc.retention.RowNorm(),
            algorithm=descent(reduction="mean"),
        )
    with pytest.raises(rc.RecipeError, match="or update_every='batch' if it has it"):
        rc.Recipe(
            memory=rc.memory.MLP(),
            retention=rc.retention.RowNorm(),
            algorithm=descent(batch_size=4),
        )


def test_rows_that_keep_a_length_of_zero_are_refused() -> None:
    preset = rc.zoo.get("lact")
    with pytest.raises(rc.RecipeError, match="keeps the length of rows: set a scale above 0"):
        rc.MemoryLayer(8, 2, preset.recipe, replace(preset.options, last_map_init_scale=0.0))


def test_state_size_of_lact() -> None:
    """Three maps and their momentum, and the associations of an open chunk."""
    preset, K = rc.zoo.get("lact"), 16
    cost = rc.cost(preset.recipe, K=K, V=K)
    assert cost.state["memory"] == cost.state["algorithm"] == 4 * 3 * K * K
    numbers = 4 * (2 * K + 2)  # a key, a value, a rate and a momentum
    assert 63 * numbers <= cost.state["open tokens"] <= 63 * (numbers + 8)
    assert cost.state_bytes_per_token == 0


def test_explain_states_the_problem_of_lact() -> None:
    explained = rc.explain("lact")
    assert explained.problem == "−⟨W1(silu(W2 k_t) ⊙ W3 k_t), v_t⟩"
    assert explained.write_equations[:3] == (
        "S_t = θ̄ S° − Σ_s η_s ∇ℓ(W°; k_s, v_s)",
        "Z_t = W° + NS5(S_t)",
        "W_t = Z_t ‖W°‖/‖Z_t‖ row by row at the last token of the inner batch",
    )
    assert "deep" in explained.engine


def test_explain_states_the_problem_of_in_place_ttt() -> None:
    explained = rc.explain("in_place_ttt")
    assert explained.problem == "−⟨W1 φ(k_t), v_t⟩"
    assert "φ: silu(Gx) ⊙ Ux, learned" in explained.symbols
    assert explained.ties == ("k_t ← k_(t−1)",)


def test_in_place_ttt_is_its_mlp_before_the_first_update() -> None:
    """The first chunk reads the initial output map, and the second does not."""
    module, x = layer("in_place_ttt"), tokens()
    params = {name: param(x) for name, param in module.params.items()}
    inputs = module.memory_inputs(x)
    phi = module.recipe.features.phi(inputs.q.unsqueeze(3), params, "query", torch.zeros(2, N))
    (W,) = start(module, x)
    plain = torch.einsum("bhvf,bthf->bthv", W, phi.squeeze(3))
    y, _ = rc.recall(
        module.recipe,
        *(inputs.q, inputs.k, inputs.v, inputs.gates),
        params=params,
        initial_memory=module.initial_memory,
    )
    torch.testing.assert_close(y[:, :CHUNK], plain[:, :CHUNK], **TOL)
    assert (y - plain)[:, CHUNK:].abs().amax((0, 2, 3)).min() > 1e-6


def test_gated_units_are_the_hidden_units_of_swiglu() -> None:
    """With W2 and W3 of a gated memory, the features are its hidden activations."""
    memory, features = rc.memory.GatedMLP(residual=False), rc.features.GatedUnits()
    W2, W3, W1 = (normal(2, *shape, seed=8) for shape in memory.shapes(4, 4))
    x = normal(1, 5, 2, 4, seed=9)
    params = {"feature_gate": W2, "feature_map": W3}
    phi = features.phi(x.unsqueeze(3), params, "key", torch.zeros(1, 5)).squeeze(3)
    want = memory.forward([W2, W3, W1], x.transpose(1, 2), x.transpose(1, 2), {})
    torch.testing.assert_close(torch.einsum("hvf,bthf->bhtv", W1, phi), want, **TOL)
