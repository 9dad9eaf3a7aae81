"""Deep memories as in their papers: token by token, with gradients by autograd.

This module uses nothing of the library. Weights are lists of ``[B, H, out, in]``, in order of
application. Rows and heads are independent, so the gradient of their summed losses is that of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

B, T, H, D = 2, 37, 2, 4
M = 4 * D
TOL = {"atol": 1e-10, "rtol": 1e-10}

Weights = list[Tensor]
Memory = Callable[[Sequence[Tensor], Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uniform(low: float, high: float, *shape: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(*shape, generator=g, dtype=torch.float64)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


Q, KEY, X = (
    unit(normal(B, T, H, D, seed=1)),
    unit(normal(B, T, H, D, seed=2)),
    normal(B, T, H, D, seed=3),
)
LR = uniform(0.02, 0.2, B, T, H, seed=4)
ALPHA = uniform(0.8, 1.0, B, T, H, seed=5)
CHANNEL = uniform(0.8, 1.0, B, T, H, D, seed=6)
THETA = uniform(0.0, 0.9, B, T, H, seed=7)
NORM = {
    "norm_weight": uniform(0.5, 1.5, H, D, seed=8),
    "norm_bias": normal(H, D, seed=9),
}


def start(*shapes: tuple[int, int], seed: int = 10, scale: float = 1.0) -> tuple[Tensor, ...]:
    """A₀: one ``[H, out, in]`` per map."""
    return tuple(
        scale * normal(H, *shape, seed=seed + i) / shape[1] ** 0.5 for i, shape in enumerate(shapes)
    )


MLP = start((M, D), (D, M))
"""W_2, W_1 of x + W_1 gelu(W_2 x)."""


def rows(init: Sequence[Tensor]) -> Weights:
    return [w.expand(B, *w.shape) for w in init]


# -- memories and losses ---------------------------------------------------------------------------


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / 2**0.5))


def times(w: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("bhoi,bhi->bho", w, x)


def layer_norm(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return scaled * NORM["norm_weight"] + NORM["norm_bias"]


def matrix(W: Sequence[Tensor], x: Tensor) -> Tensor:
    return times(W[0], x)


def perceptron(W: Sequence[Tensor], x: Tensor) -> Tensor:
    return x + times(W[1], gelu(times(W[0], x)))


def normed(W: Sequence[Tensor], x: Tensor) -> Tensor:
    return x + layer_norm(times(W[1], gelu(times(W[0], x))))


def project(k: Tensor, v: Tensor) -> Tensor:
    """Project v ``[B, H, D]`` to the range of `normed`: c + w ⊙ u, ‖u‖² ≤ D, Σ u = 0.

    u is the solution of (w² + λ) u + μ = w ⊙ d, Σ u = 0, as a linear system, shortened to √D.
    """
    center = k + NORM["norm_bias"]
    w, d = NORM["norm_weight"].expand_as(v), v - center
    x = w * d - (w * d).mean(-1, keepdim=True)
    stretch = (w * x).square().sum(-1) / x.square().sum(-1)
    multiplier = (torch.linalg.vector_norm(x, dim=-1) / D**0.5 - stretch).clamp(min=0)
    system = torch.ones(*v.shape[:-1], D + 1, D + 1, dtype=v.dtype)
    system[..., :D, :D] = torch.diag_embed(w**2 + multiplier.unsqueeze(-1))
    system[..., D, D] = 0
    right = torch.cat([w * d, torch.zeros_like(d[..., :1])], -1)
    u = torch.linalg.solve(system, right.unsqueeze(-1))[..., :D, 0]
    length = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
    return center + w * u * (D**0.5 / length).clamp(max=1)


def half_square(p: Tensor, v: Tensor) -> Tensor:
    return 0.5 * (p - v).square().sum(-1)


def gradient(memory: Memory, loss: Loss, W: Sequence[Tensor], k: Tensor, v: Tensor) -> Weights:
    """∇_W ℓ(M(W; k), v) by autograd."""
    points = [w.detach().clone().requires_grad_() for w in W]
    return list(torch.autograd.grad(loss(memory(points, k), v).sum(), points))


def normalised(
    memory: Memory,
    loss: Loss,
    W: Sequence[Tensor],
    k: Tensor,
    v: Tensor,
    sizes: Callable[[Weights], list[Tensor]] = lambda W: [torch.ones(()) for _ in W],
    *,
    under: bool | None = None,
) -> Weights:
    """ρ ∇_W ℓ, ρ = ⟨e, g⟩ / (Σ_l c_l ‖∂ℓ/∂W_l‖² + 1e-6 |g|²), e = M(W; k) − v, g = ∂ℓ/∂M.

    Under a norm e = M(W; k) − `project(k, v)`, and ρ is at least 0.

    Args:
        sizes: c_l, the gain of W for a step of A, if there is a link between them.
        under: whether the memory ends in `layer_norm`; `normed` does.
    """
    under = memory is normed if under is None else under
    read = memory(W, k).detach().requires_grad_()
    (g,) = torch.autograd.grad(loss(read, v).sum(), [read])
    slopes = gradient(memory, loss, W, k, v)
    parts = zip(sizes(list(W)), slopes, strict=True)
    size = torch.stack([c * x.square().sum((-2, -1)) for c, x in parts]).sum(0)
    above = ((read.detach() - (project(k, v) if under else v)) * g).sum(-1)
    rho = (above.clamp(min=0) if under else above) / (size + 1e-6 * g.square().sum(-1))
    return [rho[..., None, None] * x for x in slopes]


def remaining_rate(k: Tensor, *, b: int = 16, n: int = 8) -> Tensor:
    """r_t = max(0, u_t),  u_t = 1 − Σ_(j<t in the batch of t) |cos(k_t, k_j)| u_j / n.

    Args:
        k: keys ``[B, T, H, D]``; one of zeros has a cosine of 0 with all.
    """
    u: list[Tensor] = []
    for t in range(k.shape[1]):
        now = torch.ones(k.shape[0], k.shape[2], dtype=k.dtype)
        for j in range(t - t % b, t):
            lengths = k[:, t].norm(dim=-1) * k[:, j].norm(dim=-1)
            none = lengths == 0
            cosine = (k[:, t] * k[:, j]).sum(-1) / lengths.masked_fill(none, 1.0)
            now = now - cosine.abs() * u[j] / n
        u.append(now)
    return torch.stack(u, 1).clamp_min(0)


REDUCED_LR = LR * remaining_rate(KEY)
"""η_t r_t of LR: the rate that earlier keys of the batch leave."""

# -- one token after the other ---------------------------------------------------------------------


def at(number: Tensor, t: int) -> Tensor:
    return number[:, t][..., None, None]


def channels(alpha: Tensor, t: int, W: Sequence[Tensor]) -> Weights:
    """Return a decay per value channel for the last map, and its mean logarithm for other maps."""
    now = alpha[:, t]
    mean = now.log().mean(-1).exp()[..., None, None]
    return [*[mean] * (len(W) - 1), now.unsqueeze(-1)]


Step = Callable[[Weights, Weights, int], Weights]


def run(
    step: Step,
    memory: Memory,
    A: Weights,
    *,
    batch: int = 16,
    link: Callable[[Tensor], Tensor] = lambda A: A,
    chunks: bool = True,
    q: Tensor = Q,
    length: int = T,
    on_token: Callable[[int, Weights], None] = lambda t, W: None,
) -> Tensor:
    """y_t = M(W_t; q_t) for A_t = step(A_(t−1), W°, t).

    Args:
        link: W = link(A) of a map. With ``chunks`` it acts at the boundary of an inner batch, which
            sets W°; inside the batch the read weights take the steps of A, starting from W°.
            Otherwise every token reads link(A_t).
    """
    W = R = A
    outputs = []
    for t in range(length):
        if t % batch == 0:
            W = R = [link(a) for a in A]
        R = step(R, W, t)
        A = step(A, W, t)
        on_token(t, A)
        outputs.append(memory(R if chunks else [link(a) for a in A], q[:, t]))
    return torch.stack(outputs, 1)
