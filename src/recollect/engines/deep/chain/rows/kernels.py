"""The two stretches in Triton: a program takes a few associations, row by row (`stretches`).

Imported where a kernel is launched, and nowhere else: Triton need not be installed. Sums are of the
numbers' own type, float32 or float64. Which row of which tensor is where: with row = p R + r of the
P R associations of batch n,

    narrow, [2, N, P, R, D]        ((l N + n) P R + row) D
    wide, to_wide, scales, [N, P, 2, R, W]      (2 (n P R + p R) + l R + r) W
    Q, to_Q [N, P, 2, R, J, D]     likewise, times J D
"""

# Python in syntax alone.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["COUNTS", "backward", "forward"]

COUNTS = ["n", "kept", "N", "rows", "R", "k_batch", "k_head", "e_batch", "e_head"]
"""Numbers that change from launch to launch: none of them makes another kernel."""


@triton.jit
def _pull(u, z, y, CURVE: tl.constexpr):
    """σ′(z) ⊙ u, where y is σ(z)."""
    if CURVE == "gelu":
        density = tl.exp(-0.5 * z * z) * 0.3989422804014327
        return u * (0.5 + 0.5 * tl.math.erf(z * 0.7071067811865476) + z * density)
    elif CURVE == "gelu_tanh":
        # (1 + tanh x)/2 is a sigmoid of 2x.
        square = z * z
        gate = tl.sigmoid(1.5957691216057308 * z * (1.0 + 0.044715 * square))
        inner = 1.5957691216057308 * (1.0 + 0.134145 * square)
        return u * (gate + z * gate * (1.0 - gate) * inner)
    elif CURVE == "silu":
        gate = tl.sigmoid(z)
        return u * gate * (1.0 + z * (1.0 - gate))
    elif CURVE == "tanh":
        return u * (1.0 - y * y)
    elif CURVE == "relu":
        return tl.where(z <= 0.0, 0.0, u)
    else:
        tl.static_assert(CURVE == "identity")
        return u


@triton.jit
def _own(
    rows, W: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BW: tl.constexpr, BD: tl.constexpr
):
    """A program's rows, channels of the two widths, and which of them there are."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i, j = tl.arange(0, BW)[None, :], tl.arange(0, BD)[None, :]
    there = row < rows
    return row, i, j, there, there[:, None] & (i < W), there[:, None] & (j < D)


@triton.jit(do_not_specialize=COUNTS)
def forward(
    z,
    u,
    wide,
    narrow,
    c,
    rho,
    weights,
    Q,
    n,
    kept,
    N,
    rows,
    R,
    W: tl.constexpr,
    D: tl.constexpr,
    J: tl.constexpr,
    ROWS: tl.constexpr,
    BW: tl.constexpr,
    BD: tl.constexpr,
    CURVE: tl.constexpr,
    SHARE: tl.constexpr,
    SLOPE: tl.constexpr,
    EPS: tl.constexpr,
    TINY: tl.constexpr,
):
    """δ_1, ρ, c′ and Q of batch n; z, u and Q keep batch ``kept``."""
    row, i, j, there, over_w, over_d = _own(rows, W, D, ROWS, BW, BD)
    n, kept = n.to(tl.int64), kept.to(tl.int64)
    r = row % R
    head = row - r
    here = n * rows + row
    first = (2 * (n * rows + head) + r)[:, None] * W + i
    inside = (kept * rows + row)[:, None] * W + i
    h = tl.load(wide + first + R * W, mask=over_w, other=0.0)
    z_1 = tl.load(z + inside, mask=over_w, other=0.0)
    u_1 = tl.load(u + inside, mask=over_w, other=0.0)
    delta = _pull(u_1, z_1, h, CURVE)
    tl.store(wide + first, delta, mask=over_w)
    k = tl.load(narrow + here[:, None] * D + j, mask=over_d, other=0.0)
    e = tl.load(narrow + (N * rows + here)[:, None] * D + j, mask=over_d, other=0.0)
    if SHARE:
        gain = tl.sum(k * k, 1) * tl.sum(delta * delta, 1) / (tl.sum(e * e, 1) + TINY)
        share = 1.0 / (SLOPE * (tl.sum(h * h, 1) + EPS + gain))
        tl.store(rho + here, share, mask=there)
    place = (2 * (kept * rows + head) + r)[:, None] * (J * D) + j
    for x in tl.static_range(J):
        each = tl.load(c + here * J + x, mask=there, other=0.0)
        if SHARE:
            each = each * share
            tl.store(weights + here * J + x, each, mask=there)
        tl.store(Q + place + x * D, each[:, None] * k, mask=over_d)
        tl.store(Q + place + R * (J * D) + x * D, each[:, None] * e, mask=over_d)


@triton.jit(do_not_specialize=COUNTS)
def backward(
    wide,
    to_wide,
    narrow,
    to_k,
    to_e,
    weights,
    to_Q,
    scales,
    key_wide,
    n,
    N,
    rows,
    R,
    k_batch,
    k_head,
    e_batch,
    e_head,
    W: tl.constexpr,
    D: tl.constexpr,
    J: tl.constexpr,
    ROWS: tl.constexpr,
    BW: tl.constexpr,
    BD: tl.constexpr,
    SHARE: tl.constexpr,
    EPS: tl.constexpr,
    TINY: tl.constexpr,
):
    """h̄ and δ̄ of batch n, ū and σ″ ⊙ u ⊙ δ̄_1; a head of ``key_wide`` has 2 R rows a map."""
    row, i, j, there, over_w, over_d = _own(rows, W, D, ROWS, BW, BD)
    n = n.to(tl.int64)
    r = row % R
    head = row - r
    here = n * rows + row
    first = (2 * (n * rows + head) + r)[:, None] * W + i
    second = first + R * W
    at_k = (n * k_batch + (head // R) * k_head + r * D)[:, None] + j
    at_e = (n * e_batch + (head // R) * e_head + r * D)[:, None] + j
    up_delta = tl.load(to_wide + first, mask=over_w, other=0.0)
    up_k = tl.load(to_k + at_k, mask=over_d, other=0.0)
    up_e = tl.load(to_e + at_e, mask=over_d, other=0.0)
    place = (2 * (n * rows + head) + r)[:, None] * (J * D) + j
    for x in tl.static_range(J):
        each = tl.load(weights + here * J + x, mask=there, other=0.0)[:, None]
        up_k += each * tl.load(to_Q + place + x * D, mask=over_d, other=0.0)
        up_e += each * tl.load(to_Q + place + R * (J * D) + x * D, mask=over_d, other=0.0)
    if SHARE:
        delta = tl.load(wide + first, mask=over_w, other=0.0)
        h = tl.load(wide + second, mask=over_w, other=0.0)
        up_h = tl.load(to_wide + second, mask=over_w, other=0.0)
        k = tl.load(narrow + here[:, None] * D + j, mask=over_d, other=0.0)
        e = tl.load(narrow + (N * rows + here)[:, None] * D + j, mask=over_d, other=0.0)
        k_2, delta_2, e_2 = tl.sum(k * k, 1), tl.sum(delta * delta, 1), tl.sum(e * e, 1)
        gain = k_2 * delta_2
        below = gain + (tl.sum(h * h, 1) + EPS) * e_2
        twice = -2.0 / tl.maximum(below, TINY, propagate_nan=tl.PropagateNan.ALL)
        own = tl.maximum(e_2, TINY, propagate_nan=tl.PropagateNan.ALL)
        pi = (tl.sum(up_delta * delta, 1) + tl.sum(up_h * h, 1))[:, None]
        up_delta += pi * (delta * (k_2 * twice)[:, None])
        up_h += pi * (h * (e_2 * twice)[:, None])
        tl.store(to_wide + second, up_h, mask=over_w)
        up_k += pi * (k * (delta_2 * twice)[:, None])
        # 2/|e|² − 2 (|h|² + ε)/Q, without a difference of large numbers.
        up_e += pi * (e * (-gain * twice / own)[:, None])
    tl.store(to_k + at_k, up_k, mask=over_d)
    tl.store(to_e + at_e, up_e, mask=over_d)
    bend = tl.load(scales + first, mask=over_w, other=0.0)
    slope = tl.load(scales + second, mask=over_w, other=0.0)
    # Twice as many rows a map: keys' own factors stand in the first half of each.
    key = (4 * (n * rows + head) + r)[:, None] * W + i
    tl.store(key_wide + key, bend * up_delta, mask=over_w)
    tl.store(key_wide + key + 2 * R * W, slope * up_delta, mask=over_w)
