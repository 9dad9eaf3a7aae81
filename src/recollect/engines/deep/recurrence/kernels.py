"""The recurrence over inner batches in Triton: one program per memory runs all batches of a group.

A and S of the two maps are in global memory, for the reads and the backward pass. They pass through
registers in tiles of BW hidden units, three times in a forward step and twice in a backward step.
Sums have the type of the tensors. PRECISION is that of the factors of products. The module is
imported at the first launch, so that Triton is optional. With R associations, D channels, W hidden
units and J stacks (A, then S), where D is a power of two and channels from CHANNELS on are zeros:

    k, raw, v, nearest, d2, z2     [N, P, R, D]           T    [N, P, J, J]
    z1, u1, h1, d1              [N, P, R, W]           c    [N, P, R, J]
    M1, M2                      [N + 1, P, J, D, W]    weight, bias [H, D]

A barrier separates a thread's load from another thread's store to the same address.
"""

# Triton compiles this code; Python does not run it.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["COUNTS", "backward", "forward"]

COUNTS = ["N", "P", "H"]
"""Arguments for which a kernel is not specialized."""


@triton.jit
def _round_to_tf32(x):
    """Return x with 10 bits of mantissa, as tensor cores cut the others off."""
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def _dot(x, y, total, PRECISION: tl.constexpr):
    """Return total + x y."""
    if PRECISION == "tf32":
        x, y = _round_to_tf32(x), _round_to_tf32(y)
    return tl.dot(x, y, total, input_precision=PRECISION, out_dtype=total.dtype)


@triton.jit
def _activation(z, ACTIVATION: tl.constexpr):
    """Return σ, σ′ and σ″ of z."""
    if ACTIVATION == "gelu":
        density = tl.exp(-0.5 * z * z) * 0.3989422804014327
        gate = 0.5 + 0.5 * tl.math.erf(z * 0.7071067811865476)
        return z * gate, gate + z * density, (2.0 - z * z) * density
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh x)/2 is a sigmoid of 2x.
        square = z * z
        gate = tl.sigmoid(1.5957691216057308 * z * (1.0 + 0.044715 * square))
        inner = 1.5957691216057308 * (1.0 + 0.134145 * square)
        product = gate * (1.0 - gate)
        first = product * inner
        second = product * ((1.0 - 2.0 * gate) * inner * inner + 0.42812889763560147 * z)
        return z * gate, gate + z * first, 2.0 * first + z * second
    elif ACTIVATION == "silu":
        gate = tl.sigmoid(z)
        first = gate * (1.0 - gate)
        return z * gate, gate + z * first, first * (2.0 + z * (1.0 - 2.0 * gate))
    elif ACTIVATION == "tanh":
        y = 2.0 * tl.sigmoid(2.0 * z) - 1.0
        return y, 1.0 - y * y, -2.0 * y * (1.0 - y * y)
    elif ACTIVATION == "relu":
        derivative = tl.where(z > 0.0, 1.0, 0.0)
        return z * derivative, derivative, 0.0 * derivative
    else:
        tl.static_assert(ACTIVATION == "identity")
        return z, 0.0 * z + 1.0, 0.0 * z


@triton.jit
def _mean(x, CHANNELS: tl.constexpr):
    """Return the mean over channels."""
    return tl.sum(x, 1)[:, None] / CHANNELS


@triton.jit
def _center(x, CHANNELS: tl.constexpr):
    """Return x minus its mean, and zeros for the channels of padding."""
    centered = x - _mean(x, CHANNELS)
    if x.shape[1] == CHANNELS:
        return centered
    else:
        return tl.where(tl.arange(0, x.shape[1])[None, :] < CHANNELS, centered, 0.0)


@triton.jit
def _layer_norm(z, gain, shift, CHANNELS: tl.constexpr, NORM_EPS: tl.constexpr):
    """Return the layer norm of z, its unit output before gain and shift, and its scale."""
    center = _center(z, CHANNELS)
    scale = 1.0 / tl.sqrt(_mean(center * center, CHANNELS) + NORM_EPS)
    return gain * (center * scale) + shift, center * scale, scale


@triton.jit
def _norm_vjp(x, unit, scale, CHANNELS: tl.constexpr):
    """Return J x with the symmetric derivative J of a layer norm."""
    return scale * (_center(x, CHANNELS) - unit * _mean(x * unit, CHANNELS))


@triton.jit(do_not_specialize=COUNTS)
def forward(
    k, raw, v, nearest, weight, bias, T, c,
    M1, M2, z1, u1, h1, d1, d2, z2, scaled, rho, sizes,
    N, P, H,
    D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, J: tl.constexpr, BW: tl.constexpr,
    CHANNELS: tl.constexpr, KEEP: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, STEP_SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, OFFSET: tl.constexpr, EPS: tl.constexpr,
    NORM_EPS: tl.constexpr, TINY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute A and S at every boundary, h and δ.

    With STEP_SCALES also ρ, c′ and (|δ_1|², |h_1|²) as ``sizes``. With KEEP also z, u and the
    output z2 of the last map, for the backward pass.
    """
    p, P = tl.program_id(0).to(tl.int64), P.to(tl.int64)
    r, d, w = tl.arange(0, R), tl.arange(0, D), tl.arange(0, BW)
    rd, rw, dw = r[:, None] * D + d, r[:, None] * W + w, d[:, None] * W + w
    dr = d[:, None] + r * D
    kind = k.dtype.element_ty
    gain, shift = tl.zeros([1, D], kind), tl.zeros([1, D], kind)
    if NORM:
        head = (p % H) * D
        gain = tl.load(weight + head + d)[None, :]
        shift = tl.load(bias + head + d)[None, :]
    at = p
    for _ in range(N):
        row_start, wide = at * R * D, at * R * W
        if KEEP:
            spare = wide
        else:
            spare = p * R * W
        A1, A2 = M1 + at * J * D * W, M2 + at * J * D * W
        key, value = tl.load(k + row_start + rd), tl.load(v + row_start + rd)
        z = tl.zeros([R, D], kind)
        for t in range(0, W, BW):
            inner = _dot(key, tl.load(A1 + t + dw), tl.zeros([R, BW], kind), PRECISION)
            h, _derivative, _second_derivative = _activation(inner, ACTIVATION)
            tl.store(z1 + spare + t + rw, inner)
            tl.store(h1 + wide + t + rw, h)
            z = _dot(h, tl.trans(tl.load(A2 + t + dw)), z, PRECISION)
        prediction, unit, scale = z, z, z
        if NORM:
            prediction, unit, scale = _layer_norm(z, gain, shift, CHANNELS, NORM_EPS)
        if RESIDUAL:
            prediction += tl.load(raw + row_start + rd)
        g = SLOPE * prediction - OFFSET * value
        e = g
        if NORM:
            e = _norm_vjp(gain * g, unit, scale, CHANNELS)
        tl.store(d2 + row_start + rd, e)
        if KEEP:
            tl.store(z2 + row_start + rd, z)
        below_sum, inner_sum = tl.zeros([R, BW], kind), tl.zeros([R, BW], kind)
        tl.debug_barrier()
        for t in range(0, W, BW):
            u = _dot(e, tl.load(A2 + t + dw), tl.zeros([R, BW], kind), PRECISION)
            h, derivative, _second_derivative = _activation(
                tl.load(z1 + spare + t + rw), ACTIVATION
            )
            delta = u * derivative
            tl.store(d1 + wide + t + rw, delta)
            if KEEP:
                tl.store(u1 + wide + t + rw, u)
            if STEP_SCALES:
                below_sum += delta * delta
                inner_sum += h * h
        row = at * R + r
        step_scale = tl.full([R], 1.0, kind)
        if STEP_SCALES:
            d1_sq, h1_sq = tl.sum(below_sum, 1), tl.sum(inner_sum, 1)
            tl.store(sizes + row * 2, d1_sq)
            tl.store(sizes + row * 2 + 1, h1_sq)
            k_sq, e_sq = tl.sum(key * key, 1), tl.sum(e * e, 1)
            if NORM:
                above = tl.sum((prediction - tl.load(nearest + row_start + rd)) * g, 1)
                below = k_sq * d1_sq + h1_sq * e_sq + EPS * tl.sum(g * g, 1) + TINY
                step_scale = tl.maximum(above, 0.0) / below
            else:
                step_scale = 1.0 / (SLOPE * (h1_sq + EPS + k_sq * d1_sq / (e_sq + TINY)))
            tl.store(rho + row, step_scale)
        first = step_scale * tl.load(c + row * J)
        tl.store(scaled + row * J, first)
        second = first
        if J == 2:
            second = step_scale * tl.load(c + row * J + 1)
            tl.store(scaled + row * J + 1, second)
        tl.debug_barrier()
        key_t, e_t = tl.load(k + row_start + dr), tl.load(d2 + row_start + dr)
        a = tl.load(T + at * J * J)
        to1, to2 = A1 + P * J * D * W, A2 + P * J * D * W
        for t in range(0, W, BW):
            delta, h = tl.load(d1 + wide + t + rw), tl.load(h1 + wide + t + rw)
            one, two = tl.load(A1 + t + dw), tl.load(A2 + t + dw)
            next1, next2 = a * one, a * two
            if J == 2:
                m, s = tl.load(T + at * 4 + 1), tl.load(T + at * 4 + 3)
                one, two = tl.load(A1 + D * W + t + dw), tl.load(A2 + D * W + t + dw)
                next1 += m * one
                next2 += m * two
                moved = _dot(key_t * second[None, :], delta, s * one, PRECISION)
                tl.store(to1 + D * W + t + dw, moved)
                moved = _dot(e_t * second[None, :], h, s * two, PRECISION)
                tl.store(to2 + D * W + t + dw, moved)
            tl.store(to1 + t + dw, _dot(key_t * first[None, :], delta, next1, PRECISION))
            tl.store(to2 + t + dw, _dot(e_t * first[None, :], h, next2, PRECISION))
        tl.debug_barrier()
        at += P


@triton.jit
def _write_vjp(x, y, grad, c, up_x, up_y, up_c, PRECISION: tl.constexpr):
    """Add the gradients of x, y and c through the write c xᵀ y to their accumulators."""
    part = _dot(x, grad, tl.zeros(y.shape, y.dtype), PRECISION)
    return _dot(c * y, tl.trans(grad), up_x, PRECISION), up_y + c * part, up_c + y * part


@triton.jit(do_not_specialize=COUNTS)
def backward(
    k, raw, v, nearest, weight, bias, T,
    M1, M2, z1, u1, h1, d1, d2, z2, scaled, sizes,
    to_k, to_h, to_d, to_e, left1, right1, left2, right2,
    G1, G2, to_T, to_c, to_g, to_M, to_nearest, to_weight, spare,
    N, P, H,
    D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, J: tl.constexpr, BW: tl.constexpr,
    CHANNELS: tl.constexpr, Q: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, STEP_SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, OFFSET: tl.constexpr, EPS: tl.constexpr,
    NORM_EPS: tl.constexpr, TINY: tl.constexpr, FLOOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute gradients from the last batch to the first, in the notation of `chain.backward`.

    G1, G2 ``[P, J, D, W]``
        Gradients of A and S after the last batch, replaced by those before the first.
    to_k, to_e ``[N, P, R, D]``, to_h, to_d ``[N, P, R, W]``
        Gradients through reads. to_k becomes k̄ without z̄_1 A_1ᵀ, and z̄_1 replaces to_d.
    left ``[N, P, Q, J D]``, right ``[N, P, Q, W]``
        Factors of the reads' part in the gradients of A and S.
    to_g, to_M, to_nearest, to_weight ``[N, P, R, D]``
        Gradients of g, of the prediction, of the nearest value and of the norm's weight.
    """
    p, P = tl.program_id(0).to(tl.int64), P.to(tl.int64)
    r, d, w, q = tl.arange(0, R), tl.arange(0, D), tl.arange(0, BW), tl.arange(0, Q)
    rd, rw, dw = r[:, None] * D + d, r[:, None] * W + w, d[:, None] * W + w
    dr, qw, dq = d[:, None] + r * D, q[:, None] * W + w, d[:, None] + q * (J * D)
    kind = k.dtype.element_ty
    gain, shift = tl.zeros([1, D], kind), tl.zeros([1, D], kind)
    if NORM:
        head = (p % H) * D
        gain = tl.load(weight + head + d)[None, :]
        shift = tl.load(bias + head + d)[None, :]
    U1, U2 = G1 + p * J * D * W, G2 + p * J * D * W
    at = p + (N - 1) * P
    for _ in range(N):
        row_start, wide, row = at * R * D, at * R * W, at * R + r
        A1, A2 = M1 + at * J * D * W, M2 + at * J * D * W
        key, e = tl.load(k + row_start + rd), tl.load(d2 + row_start + rd)
        first = tl.load(scaled + row * J)[:, None]
        up_k, up_e = tl.load(to_k + row_start + rd), tl.load(to_e + row_start + rd)
        grad_e_per_pi = tl.zeros([R, D], kind)
        of_pi = tl.zeros([R, BW], kind)
        of_first, of_second = tl.zeros([R, BW], kind), tl.zeros([R, BW], kind)
        of_a, of_m, of_s = tl.zeros([D], kind), tl.zeros([D], kind), tl.zeros([D], kind)
        for t in range(0, W, BW):
            delta, h = tl.load(d1 + wide + t + rw), tl.load(h1 + wide + t + rw)
            up_d, up_h = tl.load(to_d + wide + t + rw), tl.load(to_h + wide + t + rw)
            up1, up2 = tl.load(U1 + t + dw), tl.load(U2 + t + dw)
            one, two = tl.load(A1 + t + dw), tl.load(A2 + t + dw)
            up_k, up_d, of_first = _write_vjp(
                key, delta, up1, first, up_k, up_d, of_first, PRECISION
            )
            up_e, up_h, of_first = _write_vjp(e, h, up2, first, up_e, up_h, of_first, PRECISION)
            of_a += tl.sum(up1 * one + up2 * two, 1)
            if J == 2:
                second = tl.load(scaled + row * J + 1)[:, None]
                S1, S2 = tl.load(A1 + D * W + t + dw), tl.load(A2 + D * W + t + dw)
                of_m += tl.sum(up1 * S1 + up2 * S2, 1)
                up1, up2 = tl.load(U1 + D * W + t + dw), tl.load(U2 + D * W + t + dw)
                of_s += tl.sum(up1 * S1 + up2 * S2, 1)
                up_k, up_d, of_second = _write_vjp(
                    key, delta, up1, second, up_k, up_d, of_second, PRECISION
                )
                up_e, up_h, of_second = _write_vjp(
                    e, h, up2, second, up_e, up_h, of_second, PRECISION
                )
            tl.store(to_d + wide + t + rw, up_d)
            tl.store(to_h + wide + t + rw, up_h)
            _value, derivative, _second_derivative = _activation(
                tl.load(z1 + wide + t + rw), ACTIVATION
            )
            up_e = _dot(derivative * up_d, tl.trans(two), up_e, PRECISION)
            if STEP_SCALES:
                of_pi += up_d * delta + up_h * h
                grad_e_per_pi = _dot(derivative * delta, tl.trans(two), grad_e_per_pi, PRECISION)
        tl.store(to_T + at * J * J, tl.sum(of_a))
        tl.store(to_c + row * J, tl.sum(of_first, 1))
        if J == 2:
            tl.store(to_T + at * 4 + 1, tl.sum(of_m))
            tl.store(to_T + at * 4 + 3, tl.sum(of_s))
            tl.store(to_c + row * J + 1, tl.sum(of_second, 1))
        # Output head: from δ̄_2 and π to z̄_2.
        z, value = tl.load(z2 + row_start + rd), tl.load(v + row_start + rd)
        prediction, unit, scale = z, z, z
        if NORM:
            prediction, unit, scale = _layer_norm(z, gain, shift, CHANNELS, NORM_EPS)
        if RESIDUAL:
            prediction += tl.load(raw + row_start + rd)
        g = SLOPE * prediction - OFFSET * value
        pi = tl.sum(of_pi, 1)[:, None]
        per_d, per_h, to_N, to_size = pi, pi, pi, pi
        if STEP_SCALES:
            d1_sq = tl.load(sizes + row * 2)[:, None]
            h1_sq = tl.load(sizes + row * 2 + 1)[:, None]
            k_sq, e_sq = tl.sum(key * key, 1)[:, None], tl.sum(e * e, 1)[:, None]
            ahead = k_sq * d1_sq
            if NORM:
                below = ahead + h1_sq * e_sq + EPS * tl.sum(g * g, 1)[:, None]
            else:
                below = ahead + (h1_sq + EPS) * e_sq
            twice = -2.0 * pi / tl.maximum(below, FLOOR)
            if NORM:
                distance = prediction - tl.load(nearest + row_start + rd)
                above = tl.sum(distance * g, 1)[:, None]
                to_N = tl.where(above < FLOOR, 0.0, pi / tl.maximum(above, FLOOR))
                to_size = EPS * twice
                per_e = h1_sq * twice
                tl.store(to_nearest + row_start + rd, -to_N * g)
            else:
                per_e = -ahead * twice / tl.maximum(e_sq, TINY)
            per_d, per_h = k_sq * twice, e_sq * twice
            up_e += per_d * grad_e_per_pi + per_e * e
            up_k += d1_sq * twice * key
        tl.store(to_k + row_start + rd, up_k)
        if NORM:
            s = gain * g
            of_s_up = _norm_vjp(up_e, unit, scale, CHANNELS)
            of_g = gain * of_s_up
            of_M = SLOPE * of_g
            if STEP_SCALES:
                of_g += to_N * distance + to_size * g
                of_M = SLOPE * of_g + to_N * g
            from_s = _mean(s * unit, CHANNELS) * up_e + _mean(up_e * unit, CHANNELS) * s
            inner = gain * of_M - scale * from_s
            up_z = _norm_vjp(inner, unit, scale, CHANNELS)
            up_z -= scale * _mean(up_e * e, CHANNELS) * unit
            tl.store(to_weight + row_start + rd, g * of_s_up + unit * of_M)
        else:
            of_g = up_e
            of_M = SLOPE * up_e
            up_z = of_M
        tl.store(to_g + row_start + rd, of_g)
        tl.store(to_M + row_start + rd, of_M)
        tl.store(spare + p * R * D + rd, up_z)
        tl.debug_barrier()
        key_t, e_t = tl.load(k + row_start + dr), tl.load(d2 + row_start + dr)
        up_zt = tl.load(spare + p * R * D + dr)
        x1, x2 = tl.load(left1 + at * Q * J * D + dq), tl.load(left2 + at * Q * J * D + dq)
        a = tl.load(T + at * J * J)
        for t in range(0, W, BW):
            delta, h = tl.load(d1 + wide + t + rw), tl.load(h1 + wide + t + rw)
            up_d, up_h = tl.load(to_d + wide + t + rw), tl.load(to_h + wide + t + rw)
            if STEP_SCALES:
                up_d += per_d * delta
                up_h += per_h * h
            up_h = _dot(up_z, tl.load(A2 + t + dw), up_h, PRECISION)
            _value, derivative, second_derivative = _activation(
                tl.load(z1 + wide + t + rw), ACTIVATION
            )
            up_z1 = derivative * up_h + second_derivative * tl.load(u1 + wide + t + rw) * up_d
            tl.store(to_d + wide + t + rw, up_z1)
            y1 = tl.load(right1 + at * Q * W + t + qw)
            y2 = tl.load(right2 + at * Q * W + t + qw)
            up1, up2 = tl.load(U1 + t + dw), tl.load(U2 + t + dw)
            if J == 2:
                m, s2 = tl.load(T + at * 4 + 1), tl.load(T + at * 4 + 3)
                next1 = m * up1 + s2 * tl.load(U1 + D * W + t + dw)
                next2 = m * up2 + s2 * tl.load(U2 + D * W + t + dw)
                x1s = tl.load(left1 + at * Q * J * D + D + dq)
                x2s = tl.load(left2 + at * Q * J * D + D + dq)
                tl.store(U1 + D * W + t + dw, _dot(x1s, y1, next1, PRECISION))
                tl.store(U2 + D * W + t + dw, _dot(x2s, y2, next2, PRECISION))
            next1 = _dot(x1, y1, a * up1, PRECISION)
            next1 = _dot(key_t, up_z1, next1, PRECISION)
            tl.store(U1 + t + dw, next1)
            next2 = _dot(x2, y2, a * up2, PRECISION)
            next2 = _dot(e_t, derivative * up_d, next2, PRECISION)
            next2 = _dot(up_zt, h, next2, PRECISION)
            tl.store(U2 + t + dw, next2)
        tl.debug_barrier()
        at -= P
