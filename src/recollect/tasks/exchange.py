"""State exchange: n values under n keys, and a stream of swaps that a memory must follow (AM 10).

With keys of length 1 whose inner products stay below 1/8, the token k = k_a − k_b with value 0
makes u_t = v_t − Σ_i f(k_i·k_t) u_i exchange the values of k_a and k_b, for any f that rounds to
the nearest integer (AM theorem 1). There are no learned parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from recollect.fields import choice_check, int_check, validate

__all__ = ["Exchange", "low_coherence_keys", "swap_stream", "welch"]


def _signs(power: int) -> Tensor:
    """Return the Kronecker power of [[1, 1], [1, −1]], a symmetric H with H² = 2^power I."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    H = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(power):
        H = torch.kron(H, two)
    return H


def low_coherence_keys(n: int, d: int) -> Tensor:
    """Return n unit vectors of size d with inner products below 1/8, ``[n, d]`` in float64.

    n ≤ d: unit vectors of the axes. (64, 36): with M = 2I₄ − J₄ and H = M⊗M⊗M, H² = 64 I and H has
    36 eigenvalues 8, so that I + (H − I)/9 is a Gram matrix of rank 36; inner products ±1/9.
    (2d, d), d a power of two from 128 on: unit vectors and the columns of a Hadamard matrix; inner
    products ±1/√d or 0. Other sizes, such as (128, 56), (192, 64) and (512, 128): descent on a soft
    maximum of the inner products from a fixed initial value (seconds, then cached). The largest
    inner product of n vectors is at least √((n − d)/(d(n − 1))) (Welch), so 64 keys need d ≥ 33.

    Args:
        n: number of vectors, ≥ 1.
        d: size of each vector, ≥ 1.

    Raises:
        ValueError: no such keys are known for these sizes.

    Examples:
        >>> keys = rc.tasks.low_coherence_keys(64, 36)
        >>> off = keys @ keys.T - torch.eye(64)
        >>> round(float(off.abs().max()), 4)
        0.1111
    """
    if 1 <= n <= d:
        return torch.eye(n, d, dtype=torch.float64)
    if (n, d) == (64, 36):
        M = 2 * torch.eye(4, dtype=torch.float64) - 1
        H = torch.kron(torch.kron(M, M), M)
        # (8I + H)/9 = (16/9) P with the projection P = (8I + H)/16 = QQᵀ, and the keys are (4/3) Q.
        _, vectors = torch.linalg.eigh((8 * torch.eye(64, dtype=torch.float64) + H) / 16)
        return 4 / 3 * vectors[:, -36:]
    power = d.bit_length() - 1
    if n == 2 * d and d == 2**power and d >= 128:
        eye = torch.eye(d, dtype=torch.float64)
        return torch.cat([eye, _signs(power) / math.sqrt(d)])
    if d >= 1 and welch(n, d) < 1 / 8 and n <= 1024:
        keys = _minimize_coherence(n, d)
        if keys is not None:
            return keys.clone()
    raise ValueError(
        f"no keys are known for n = {n}, d = {d}: use n ≤ d, (64, 36), (128, 56), (192, 64), "
        "(512, 128), or (2d, d), d = 128 2^i"
    )


def welch(n: int, d: int) -> float:
    """Return the lower bound of the largest |inner product| of n unit vectors of size d."""
    return math.sqrt(max(0, n - d) / (d * max(1, n - 1)))


@lru_cache(maxsize=8)
def _minimize_coherence(n: int, d: int) -> Tensor | None:
    """Return unit vectors with inner products below 1/8 by descent, or None if it fails."""
    generator = torch.Generator().manual_seed(0)
    free = torch.randn(n, d, generator=generator, dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.Adam([free], lr=0.02)
    with torch.enable_grad():
        for step in range(3000):
            keys = torch.nn.functional.normalize(free, dim=-1)
            gram = (keys @ keys.T).square() * (1 - torch.eye(n, dtype=torch.float64))
            if step % 10 == 0 and float(gram.detach().max()) < 0.1245**2:
                return keys.detach()
            # p-norms of the squared inner products, with an increasing p.
            power = 2 + 14 * min(1.0, step / 600)
            loss = (gram / (1 / 64)).pow(power).mean().pow(1 / power)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return None


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One stream: n writes, then swaps.

    Attributes:
        k, v: ``[n + swaps, d]`` and ``[n + swaps, n]``; values are one-hot for writes, 0 for swaps.
        keys: ``[n, d]``.
        q: key of the question at each token, ``[n + swaps, d]``.
        query_index, answer_index: index of that key, and of its value after the token,
            ``[n + swaps]``.
        final_assignment: index of the value of each key after the last token, ``[n]``.

    Examples:
        >>> stream = rc.tasks.swap_stream(4, 8, 3, torch.Generator().manual_seed(0))
        >>> stream.k.shape, stream.v.shape  # four writes, three swaps
        (torch.Size([7, 8]), torch.Size([7, 4]))
        >>> stream.final_assignment.sort().values  # the four values, in another order
        tensor([0, 1, 2, 3])
    """

    k: Tensor
    v: Tensor
    keys: Tensor
    q: Tensor
    query_index: Tensor
    answer_index: Tensor
    final_assignment: Tensor


def swap_stream(
    n: int,
    d: int,
    swaps: int,
    generator: torch.Generator,
    *,
    ask: Literal["any", "first"] = "any",
    dtype: torch.dtype = torch.float32,
) -> Exchange:
    """Draw a stream of random swaps of two different keys, with a question per token.

    Args:
        n, d, swaps: sizes.
        generator: the only source of randomness.
        ask: question about ``"any"`` earlier key at random, or always about the ``"first"``, as in
            AM figures 4 to 6, in which the read-out is learned.
        dtype: dtype of keys and values.

    Raises:
        ValueError: sizes without known keys, a negative number of swaps, or
            swaps of fewer than two keys.

    Examples:
        >>> draw = torch.Generator().manual_seed(0)
        >>> stream = rc.tasks.swap_stream(4, 8, 3, draw)
        >>> stream.k.shape, stream.final_assignment.shape
        (torch.Size([7, 8]), torch.Size([4]))
    """
    validate("swap_stream: ask", choice_check("any", "first"), ask)
    validate("swap_stream: swaps", int_check(), swaps)
    if swaps > 0 and n < 2:
        raise ValueError(f"swap_stream: swaps need two keys, and n is {n}")
    keys = low_coherence_keys(n, d).to(dtype)

    def question(num_keys: int) -> int:
        return 0 if ask == "first" else int(torch.randint(num_keys, (), generator=generator))

    assignment = list(range(n))
    k, queries, answers = [keys], [], []
    for t in range(n):
        index = question(t + 1)
        queries.append(index)
        answers.append(assignment[index])
    for _ in range(swaps):
        a, b = torch.randperm(n, generator=generator)[:2].tolist()
        assignment[a], assignment[b] = assignment[b], assignment[a]
        k.append(keys[a : a + 1] - keys[b : b + 1])
        index = question(n)
        queries.append(index)
        answers.append(assignment[index])
    values = torch.cat([torch.eye(n, dtype=dtype), torch.zeros(swaps, n, dtype=dtype)])
    return Exchange(
        k=torch.cat(k),
        v=values,
        keys=keys,
        q=keys[queries],
        query_index=torch.tensor(queries),
        answer_index=torch.tensor(answers),
        final_assignment=torch.tensor(assignment),
    )
