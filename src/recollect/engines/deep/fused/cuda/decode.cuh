// One token of a memory of two maps, from what a state keeps of the open inner batch.
//
//   z = A1 k,  h = f(z),  e = a (A2 h (+ k)) - b v,  d = f'(z) (A2' e),  c = -lr rho
//   C <- (alpha C + theta D, c),  D <- (theta D, c)    rows over A, S and the batch's associations
//                                                      (D is called last here)
//   x1 = f(C_A A1 x + C_S S1 x + sum_i C_i (x . k_i) d_i)
//   y  = C_A A2 x1 + C_S S2 x1 + sum_i C_i (x1 . h_i) e_i (+ x)
//   at a batch's end also  A <- C_A A + C_S S + sum_i C_i d_i k_i',  S <- D_S S + sum_i D_i d_i k_i'
//
// Everything is float32. A token reads A and S once, which is its cost: eight threads share a row of
// them, with 16 bytes of each at a time, and keep it in registers. A cluster of blocks shares one
// memory as in the walk; what it sums over hidden units goes through the cluster's shared memory.
#pragma once
#include "layout.cuh"

// The barriers of a token, as tests name them.
enum TokenPlace {
  TOKEN_BEGIN, TOKEN_HIDDEN, TOKEN_PREDICTED, TOKEN_ERROR, TOKEN_TURNED, TOKEN_DELTA, TOKEN_ASKED,
  TOKEN_READ, TOKEN_END
};

struct Source {  // [B, H, .], where what one memory is given lies in one piece; null where nothing is
  const float* at;
  long long row, head;
};

struct TokenTask {
  Source q, k, v, rate, log_decay, momentum;
  const float* tau;       // [P], where steps are averaged: C_i = tau D_i
  const float* start[4];  // A1 [P, hidden, D], A2 [P, D, hidden], then S1, S2
  float* end[4];          // the same after a batch's last token; else null
  // Of the batch's n tokens before: k, d, h, e beside each other [P, n, ROW], and C, D
  // [P, SLOTS + n] (of averages D is [P, n]).
  const float *factors, *C, *last;
  float *y, *factors_after, *C_after, *last_after;  // [P, D]; the same of n + 1, null after the last
  // Raw k, v, rate, log_decay, momentum [B, slots, H, .], newest last, and which slots hold one; the
  // tokens of every row [B]. Null where the caller keeps them.
  const float* kept[5];
  float* kept_after[5];
  const unsigned char* held;
  unsigned char* held_after;
  const long long* position;
  long long* position_after;
  int n, P, H, slots;
};

constexpr int ROW = 2 * D + 2 * HIDDEN, LE = D + 4;

struct TokenShared {
  float k[R * D], e[R * LE], d[R * HS], h[R * HS];  // factors, hidden units of this block
  float x[D], v[D], part[D], read[D];
  float slope[HS], z[HS], x1[HS], u[WARPS * HS];
  float along[R], own[R], C[R + 4], last[R + 4], dd[4], hh[4];
};
static_assert(sizeof(TokenShared) == TOKEN_BYTES, "the host counts otherwise");
static_assert(CS * (HS / 32) <= 32, "a lane per part of a sum over the cluster");

DEV const float* given(const Source& x, const TokenTask& task, size_t pair) {
  return x.at + pair / task.H * x.row + pair % task.H * x.head;
}
DEV float over_warp(float x) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) x += shuffle_xor(x, mask);
  return x;
}
// Over the eight lanes that share a row.
DEV float over_eight(float x) {
  x += shuffle_xor(x, 1);
  x += shuffle_xor(x, 2);
  return x + shuffle_xor(x, 4);
}
DEV float dot4(float4 a, float4 b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}
DEV float4 plus4(float4 sum, float by, float4 x) {
  return float4{fmaf(by, x.x, sum.x), fmaf(by, x.y, sum.y), fmaf(by, x.z, sum.z),
                fmaf(by, x.w, sum.w)};
}

// Which of 32 rows a thread has a part of, and where that begins.
struct Lane {
  int row, column;
  DEV_IN Lane() {
    const int t = tid();
    row = t / 8, column = t % 8 * 4;
  }
};

// A part of a map of ROWS rows by WIDE numbers: every 32nd row, and 4 of every 32 numbers of it.
template <int ROWS, int WIDE>
struct Part {
  float4 w[ROWS / 32][WIDE / 32];
  DEV_IN void load(const Lane& at, const float* from, int stride) {
    from += (size_t)at.row * stride + at.column;
#pragma unroll
    for (int i = 0; i < ROWS / 32; i++)
#pragma unroll
      for (int j = 0; j < WIDE / 32; j++) w[i][j] = load4(&from[(size_t)i * 32 * stride + j * 32]);
  }
  DEV_IN void store(const Lane& at, float* to, int stride) const {
    to += (size_t)at.row * stride + at.column;
#pragma unroll
    for (int i = 0; i < ROWS / 32; i++)
#pragma unroll
      for (int j = 0; j < WIDE / 32; j++) store4(&to[(size_t)i * 32 * stride + j * 32], w[i][j]);
  }
  // This thread's part of row i times x.
  DEV_IN float along(const Lane& at, int i, const float* x) const {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < WIDE / 32; j++) sum = dot4(w[i][j], load4(&x[at.column + j * 32]), sum);
    return sum;
  }
  // w = by w + more other.
  DEV_IN void combine(float by, float more, const Part& other) {
#pragma unroll
    for (int i = 0; i < ROWS / 32; i++)
#pragma unroll
      for (int j = 0; j < WIDE / 32; j++)
        w[i][j] = plus4(plus4(float4{0, 0, 0, 0}, by, w[i][j]), more, other.w[i][j]);
  }
  // w += by up across'.
  DEV_IN void write(const Lane& at, float by, const float* up, const float* across) {
#pragma unroll
    for (int i = 0; i < ROWS / 32; i++) {
      const float own = by * up[at.row + i * 32];
#pragma unroll
      for (int j = 0; j < WIDE / 32; j++)
        w[i][j] = plus4(w[i][j], own, load4(&across[at.column + j * 32]));
    }
  }
};

struct Memory {
  Part<HS, D> first[SLOTS];
  Part<D, HS> second[SLOTS];
};

// The token, and factors and coefficients of those before it, which are also handed on.
DEV void bring_token(TokenShared& s, const TokenTask& task, size_t pair) {
  const int n = task.n, t = tid(), rank = cluster_rank();
  if (t < D) {
    s.k[n * D + t] = given(task.k, task, pair)[t];
    s.x[t] = given(task.q, task, pair)[t], s.v[t] = given(task.v, task, pair)[t];
    if (task.factors_after && rank == n % CS)
      task.factors_after[(pair * (n + 1) + n) * ROW + t] = s.k[n * D + t];
  }
  constexpr int PIECES = (2 * D + 2 * HS) / 4;
  for (int at = t; at < n * PIECES; at += HALF) {
    const int i = at / PIECES, piece = at % PIECES * 4, own = piece - 2 * D;
    float* to;
    int from;
    if (piece < D)
      to = &s.k[i * D + piece], from = piece;
    else if (own < 0)
      to = &s.e[i * LE + piece - D], from = piece + 2 * HIDDEN;
    else if (own < HS)
      to = &s.d[i * HS + own], from = D + rank * HS + own;
    else
      to = &s.h[i * HS + own - HS], from = D + HIDDEN + rank * HS + own - HS;
    const float4 x = load4(&task.factors[(pair * n + i) * ROW + from]);
    store4(to, x);
    if (task.factors_after && (own >= 0 || i % CS == rank))
      store4(&task.factors_after[(pair * (n + 1) + i) * ROW + from], x);
  }
  const float alpha = task.log_decay.at ? expf(*given(task.log_decay, task, pair)) : 1.f;
  if (t < SLOTS + n) {
    // Before a batch's first token A is itself, and so is S.
    float c = t == 0 ? 1.f : 0.f, d = t == 1 ? 1.f : 0.f;
    if (task.tau) {
      if (t > 0) d = task.last[pair * n + t - 1], c = task.tau[pair] * d;
    } else {
      if (n > 0) c = task.C[pair * (SLOTS + n) + t];
      c *= alpha;
      if (MOMENTUM) {
        if (n > 0) d = task.last[pair * (SLOTS + n) + t];
        d *= *given(task.momentum, task, pair);
        c += d;
      }
    }
    s.C[t] = c, s.last[t] = d;
    if (task.C_after && rank == 0) {
      task.C_after[pair * (SLOTS + n + 1) + t] = c;
      if (MOMENTUM) task.last_after[pair * (SLOTS + n + 1) + t] = d;
      if (task.tau && t > 0) task.last_after[pair * (n + 1) + t - 1] = d;
    }
  }
}

// -lr rho, in every thread.
DEV float step_of(TokenShared& s, const TokenTask& task, size_t pair) {
  const float rate = task.rate.at ? *given(task.rate, task, pair) : 1.f;
  if (!NORMALISED) return -rate;
  const int lane = tid() % 32, n = task.n;
  float k = 0, e = 0;
#pragma unroll
  for (int c = lane; c < D; c += 32) {
    k = fmaf(s.k[n * D + c], s.k[n * D + c], k);
    e = fmaf(s.e[n * LE + c], s.e[n * LE + c], e);
  }
  constexpr int SUMS = HS / 32;
  float h = lane < CS ? peer1(&s.hh[0], lane) : 0.f;
  float d = lane < CS * SUMS ? peer1(&s.dd[lane % SUMS], lane / SUMS) : 0.f;
  k = over_warp(k), e = over_warp(e), h = over_warp(h), d = over_warp(d);
  return -rate * e / (ERROR_A * fmaxf(k * d + h * e + EPS * e, TINY));
}

// The memory after a batch's last token.
DEV void move_token(Memory& w, TokenShared& s, const TokenTask& task, size_t pair) {
  const Lane at;
  const size_t size = (size_t)HIDDEN * D;
#pragma unroll
  for (int i = 0; i < SLOTS; i++) {
    const float* weights = i ? s.last : s.C;
    // A has no part in S.
    const float by = weights[i], more = i + 1 < SLOTS ? weights[1] : 0.f;
    w.first[i].combine(by, more, w.first[SLOTS - 1]);
    w.second[i].combine(by, more, w.second[SLOTS - 1]);
#pragma unroll 1
    for (int token = 0; token <= task.n; token++) {
      const float own = weights[SLOTS + token];
      w.first[i].write(at, own, &s.d[token * HS], &s.k[token * D]);
      w.second[i].write(at, own, &s.e[token * LE], &s.h[token * HS]);
    }
    w.first[i].store(at, task.end[2 * i] + pair * size + (size_t)cluster_rank() * HS * D, D);
    w.second[i].store(at, task.end[2 * i + 1] + pair * size + cluster_rank() * HS, HIDDEN);
  }
}

// The raw associations one token on, which are none after a batch's last token.
DEV void roll(const TokenTask& task, size_t pair) {
  const size_t row = pair / task.H, head = pair % task.H;
  const int t = tid(), rank = cluster_rank(), slots = task.slots;
  const bool ends = task.end[0];
#pragma unroll
  for (int i = 0; i < 5; i++) {
    if (!task.kept_after[i] || rank != i % CS) continue;
    const int width = i < 2 ? D : 1;
    const Source& source = i == 0   ? task.k
                           : i == 1 ? task.v
                           : i == 2 ? task.rate
                           : i == 3 ? task.log_decay
                                    : task.momentum;
    const float* now = given(source, task, pair);
    for (int at = t; at < slots * width; at += HALF) {
      const int slot = at / width, c = at % width;
      const size_t to = ((row * slots + slot) * task.H + head) * width + c;
      float x = 0;
      if (!ends) x = slot + 1 < slots ? task.kept[i][to + (size_t)task.H * width] : now[c];
      task.kept_after[i][to] = x;
    }
  }
  if (task.held_after && rank == 0 && head == 0) {
    for (int slot = t; slot < slots; slot += HALF) {
      const unsigned char last = slot + 1 < slots ? task.held[row * slots + slot + 1] : 1;
      task.held_after[row * slots + slot] = ends ? 0 : last;
    }
    if (t == 0) task.position_after[row] = task.position[row] + 1;
  }
}

DEV void decode(TokenShared& s, const TokenTask& task) {
  const size_t pair = block() / CS;
  const int t = tid(), lane = t % 32, warp = t / 32, rank = cluster_rank(), n = task.n;
  const size_t size = (size_t)HIDDEN * D, row = (pair * (n + 1) + n) * ROW + rank * HS;
  const Lane at;
  Memory w;
#pragma unroll
  for (int i = 0; i < SLOTS; i++) {
    w.first[i].load(at, task.start[2 * i] + pair * size + (size_t)rank * HS * D, D);
    w.second[i].load(at, task.start[2 * i + 1] + pair * size + rank * HS, HIDDEN);
  }
  bring_token(s, task, pair);
  sync_block(TOKEN_BEGIN);

  const float of_A = s.C[0], of_S = MOMENTUM ? s.C[1] : 0.f;
#pragma unroll
  for (int i = 0; i < HS / 32; i++) {
    const float z = over_eight(w.first[0].along(at, i, &s.k[n * D]));
    float x = of_A * w.first[0].along(at, i, s.x);
    if (MOMENTUM) x = fmaf(of_S, w.first[SLOTS - 1].along(at, i, s.x), x);
    x = over_eight(x);
    const int j = at.row + i * 32;
    if (lane % 8 == 0) {
      float h, slope;
      curve(z, h, slope);
      s.z[j] = x, s.h[n * HS + j] = h, s.slope[j] = slope;
      if (task.factors_after) task.factors_after[row + D + HIDDEN + j] = h;
    }
  }
  for (int i = warp; i <= n; i += WARPS) {
    float x = 0;
#pragma unroll
    for (int c = lane; c < D; c += 32) x = fmaf(s.x[c], s.k[i * D + c], x);
    x = over_warp(x);
    if (lane == 0) s.along[i] = x;
  }
  sync_block(TOKEN_HIDDEN);

#pragma unroll
  for (int i = 0; i < D / 32; i++) {
    const float p = over_eight(w.second[0].along(at, i, &s.h[n * HS]));
    if (lane % 8 == 0) s.part[at.row + i * 32] = p;
  }
  if (NORMALISED && warp == 0) {
    float h = 0;
#pragma unroll
    for (int j = lane; j < HS; j += 32) h = fmaf(s.h[n * HS + j], s.h[n * HS + j], h);
    h = over_warp(h);
    if (lane == 0) s.hh[0] = h;
  }
  sync_cluster(TOKEN_PREDICTED);

  if (t < D) {
    float p = RESIDUAL ? s.k[n * D + t] : 0.f;
#pragma unroll
    for (int c = 0; c < CS; c++) p += peer1(&s.part[t], c);
    const float e = ERROR_A * p - ERROR_B * s.v[t];
    s.e[n * LE + t] = e;
    if (task.factors_after && rank == n % CS)
      task.factors_after[row - rank * HS + D + 2 * HIDDEN + t] = e;
  }
  sync_block(TOKEN_ERROR);

#pragma unroll
  for (int j = 0; j < HS / 32; j++) {
    float4 u = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < D / 32; i++)
      u = plus4(u, s.e[n * LE + at.row + i * 32], w.second[0].w[i][j]);
#pragma unroll
    for (int mask = 8; mask < 32; mask *= 2) {
      u.x += shuffle_xor(u.x, mask), u.y += shuffle_xor(u.y, mask);
      u.z += shuffle_xor(u.z, mask), u.w += shuffle_xor(u.w, mask);
    }
    if (lane < 8) store4(&s.u[warp * HS + at.column + j * 32], u);
  }
  sync_block(TOKEN_TURNED);

  if (t < HS) {
    float u = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) u += s.u[i * HS + t];
    const float d = u * s.slope[t];
    s.d[n * HS + t] = d;
    if (task.factors_after) task.factors_after[row + D + t] = d;
    if (NORMALISED) {
      const float sum = over_warp(d * d);
      if (lane == 0) s.dd[warp] = sum;
    }
  }
  if (NORMALISED) sync_cluster(TOKEN_DELTA);

  const float last = step_of(s, task, pair), now = task.tau ? task.tau[pair] * last : last;
  if (t == 0) {
    s.C[SLOTS + n] = now, s.last[SLOTS + n] = last;
    if (task.C_after && rank == 0) {
      task.C_after[pair * (SLOTS + n + 1) + SLOTS + n] = now;
      if (MOMENTUM) task.last_after[pair * (SLOTS + n + 1) + SLOTS + n] = last;
      if (task.tau) task.last_after[pair * (n + 1) + n] = last;
    }
  }
  if (t < HS) {
    float x = s.z[t], slope, y;
    for (int i = 0; i < n; i++) x = fmaf(s.C[SLOTS + i] * s.along[i], s.d[i * HS + t], x);
    x = fmaf(now * s.along[n], s.d[n * HS + t], x);
    curve(x, y, slope);
    s.x1[t] = y;
  }
  sync_block(TOKEN_ASKED);

#pragma unroll
  for (int i = 0; i < D / 32; i++) {
    float y = of_A * w.second[0].along(at, i, s.x1);
    if (MOMENTUM) y = fmaf(of_S, w.second[SLOTS - 1].along(at, i, s.x1), y);
    y = over_eight(y);
    if (lane % 8 == 0) s.read[at.row + i * 32] = y;
  }
  for (int i = warp; i <= n; i += WARPS) {
    float x = 0;
#pragma unroll
    for (int j = lane; j < HS; j += 32) x = fmaf(s.x1[j], s.h[i * HS + j], x);
    x = over_warp(x);
    if (lane == 0) s.own[i] = s.C[SLOTS + i] * x;
  }
  sync_cluster(TOKEN_READ);

  // Each block sums its channels over the cluster, each warp one of them at a time.
  float own[(R + 31) / 32];
#pragma unroll
  for (int part = 0; part < (R + 31) / 32; part++) {
    const int i = part * 32 + lane;
    own[part] = 0;
    if (i <= n)
#pragma unroll
      for (int c = 0; c < CS; c++) own[part] += peer1(&s.own[i], c);
  }
  for (int c = rank + CS * warp; c < D; c += CS * WARPS) {
    float y = lane < CS ? peer1(&s.read[c], lane) : 0.f;
#pragma unroll
    for (int part = 0; part < (R + 31) / 32; part++)
      if (part * 32 + lane <= n) y = fmaf(own[part], s.e[(part * 32 + lane) * LE + c], y);
    y = over_warp(y);
    if (lane == 0) task.y[pair * D + c] = RESIDUAL ? y + s.x[c] : y;
  }

  if (task.end[0]) move_token(w, s, task, pair);
  roll(task, pair);
  sync_cluster(TOKEN_END);
}

#ifndef SIMULATED
extern "C" __global__ void CLUSTERED __launch_bounds__(HALF, 2) fused_walk_token(const TokenTask task) {
  extern __shared__ __align__(16) unsigned char raw[];
  decode(*reinterpret_cast<TokenShared*>(raw), task);
}
#endif
