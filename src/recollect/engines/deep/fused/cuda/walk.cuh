// The walk of a memory of two maps over its inner batches, and all reads on the way.
//
//   keys, at batch n    z = A1 k,  h = f(z),  p = A2 h (+ k),  e = a p - b v,
//                       d = f'(z) (A2' e),  w_r = rho_r c_r,
//                       A <- a A + m S + sum_r w_r d_r k_r',   S <- s S + sum_r rho_r D_r d_r k_r'
//   queries, at batch   z = a_t A1 x + m_t S1 x + sum_i C[t, i] rho_i (x . k_i) d_i,  x1 = f(z),
//   n - 1               y = a_t A2 x1 + m_t S2 x1 + sum_i C[t, i] rho_i (x1 . h_i) e_i (+ x)
//
// A cluster of blocks shares one memory: each holds HS hidden units, rows of A1 and columns of A2,
// in the float32 accumulators of its first eight warps, for the whole sequence. What is multiplied
// is a bfloat16 copy in shared memory, of this batch and of the one before, which the other eight
// warps read at their queries. Sums over hidden units (p, y, |h|^2, |d|^2) go through the shared
// memory of the cluster. docs/design/fused-kernel.md derives sizes and barriers.
//
// Sizes and choices are macros: D channels of keys and values, R tokens of a batch, HS hidden units
// of a block, CS blocks of a cluster, MOMENTUM, NORMALISED, RESIDUAL (0 or 1), CURVE, and ERROR_A,
// ERROR_B of the error. With TRACE nothing is read, and what the way back needs is written: W at
// the start of every batch, h, d, f'(z) and f''(z) (A2' e), e, and |d|^2, |h|^2, |e|^2.
#pragma once
#include "layout.cuh"

// The barriers of the walk, as tests name them.
enum Place { BEGIN, HIDDEN_THERE, PREDICTED, ERROR_THERE, DELTA_THERE, SHARES, MOVED, READ, END, ASKED };
// Its products, likewise.
enum Product { HIDDEN_UNITS, PREDICTION, TURNED_BACK, STATE_MOVED, SCORES, READS };

struct Task {
  // Tokens [N, P, R, D] in bfloat16; coefficients [N, P, ...]: a, m [R], C [R, R], s [], D [R].
  const bf16 *q, *k, *v;
  const float *a, *m, *C, *s, *last;
  const float* length;                 // |k|^2, [N, P, R], where steps are normalised
  const int* full;                     // [P]: batches whose end is kept
  const float* start[4];               // A1 [P, hidden, D], A2 [P, D, hidden], then S1, S2
  float* end[4];
  float* y;                            // [N, P, R, D]
  bf16 *W, *h, *d, *slope, *bend, *e;  // a trace: [N, P, slots, 2, hidden, D], [N, P, R, hidden or D]
  float* sums;                         // [N, P, R, 4]
  int N, P;
};

// A second barrier of the cluster lies between two batches where shares are summed. With 64 tokens it
// does always, and what peers read has one side in place of two.
constexpr bool CROSSED = NORMALISED || CORES;
constexpr int SIDES = CORES ? 1 : 2;
// Of 64 tokens with 128 channels memory holds less: values and coefficients of reads come from device
// memory when they are needed, and hidden units at queries take the queries' place.
constexpr bool LEAN = CORES && D > 64;

struct Shared {
  bf16 W[2][SLOTS][2][HS * LD];        // by batch: A and S, maps 1 and 2, hidden units in rows
  bf16 k[2][R * LD], v[2][LEAN ? 8 : R * LD], q[R * LD], e[R * LD];
  bf16 h[2][R * LH], x[LEAN ? 8 : R * LH], d[R * LH];
  float part[SIDES][R * D], read[SIDES][R * D];
  float C[LEAN ? 4 : R * R], edge[2][R];  // of the reads of a batch; its last row, for its keys
  float a[2][R], m[2][R], last[2][R], length[2][R], s[2][4];
  float hh[R * BESIDE], dd[R * BESIDE], ee[R * BESIDE], hsum[2][R], w[2][R], rho[R];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host counts otherwise");

// Where a batch's tokens or numbers begin, in units of a batch.
DEV size_t at_batch(const Task& task, int n) { return (size_t)n * task.P + block() / CS; }

DEV void sync_keys(int place) { sync_group(place, 1, HALF); }
DEV void sync_queries(int place) { sync_group(place, 2, HALF); }

// -- keys: eight warps, the state in their registers ---------------------------------------------

DEV void publish(const State& state, bf16 (*to)[2][HS * LD]) {
  const Spot spot;
  const int o = cell<D>(spot.hidden, spot.first);
#pragma unroll
  for (int i = 0; i < SLOTS; i++)
#pragma unroll
    for (int map = 0; map < 2; map++)
#pragma unroll
      for (int j = 0; j < WIDE; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float* x = &state.W[i][map][j][2 * e];
          store2(&to[i][map][o + cell<D>(e * 8, j * 8)], pack(x[0], x[1]));
        }
}

DEV void keep_state(const State& state, const Task& task, size_t pair, int n) {
  const Spot spot;
  bf16* to = task.W + ((size_t)n * task.P + pair) * SLOTS * 2 * HIDDEN * D +
             (size_t)(cluster_rank() * HS + spot.hidden) * D + spot.first;
#pragma unroll
  for (int i = 0; i < SLOTS; i++)
#pragma unroll
    for (int map = 0; map < 2; map++)
#pragma unroll
      for (int j = 0; j < WIDE; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float* x = &state.W[i][map][j][2 * e];
          store2(&to[((2 * i + map) * HIDDEN + e * 8) * D + j * 8], pack(x[0], x[1]));
        }
}

// Rows of this block's hidden units in a trace, [N, P, R, hidden].
DEV size_t trace_row(const Task& task, int n, int r) {
  const size_t pair = block() / CS;
  return ((n * (size_t)task.P + pair) * R + r) * HIDDEN + cluster_rank() * HS;
}

// z, h and f'(z) (for a trace z in its place) of this block's hidden units; |h|^2 of each row, by warp.
DEV void hidden_units(Shared& s, const Task& task, int n, float (*slope)[4]) {
  const Strip strip;
  const bf16* A = s.W[n & 1][0][0];
  float own[2] = {0, 0};
#pragma unroll
  for (int j = 0; j < TH; j += GH) {
    const int first = (strip.warp * TH + j) * 8;
    if (first >= HS) break;
    float z[GH][4];
    open_products(HIDDEN_UNITS);
    rows_into<D, GH>(z, s.k[n & 1], strip.row, A, first);
    close_products(HIDDEN_UNITS);
    settle_tiles<GH>(z);
    const int o = cell<HS>(strip.row + strip.gr, first + strip.gc);
    const size_t there = TRACE ? trace_row(task, n, strip.row + strip.gr) + first + strip.gc : 0;
#pragma unroll
    for (int i = 0; i < GH; i++) {
      float h[4];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        curve(z[i][e], h[e], slope[j + i][e]);
        if (TRACE) slope[j + i][e] = z[i][e];
      }
#pragma unroll
      for (int e = 0; e < 2; e++) {
        if (TRACE)
          store2(&task.h[there + e * 8 * HIDDEN + i * 8], pack(h[2 * e], h[2 * e + 1]));
        own[e] += h[2 * e] * h[2 * e] + h[2 * e + 1] * h[2 * e + 1];
        store2(&s.h[n & 1][o + cell<HS>(e * 8, i * 8)], pack(h[2 * e], h[2 * e + 1]));
      }
    }
  }
  if (NORMALISED)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float x = over_row(own[e]);
      if (strip.gc == 0) s.hh[(strip.row + strip.gr + e * 8) * BESIDE + strip.warp] = x;
    }
}

// What this block's hidden units say, to be summed over the cluster.
DEV void predict(Shared& s, int n) {
  const Strip strip;
#pragma unroll 1
  for (int j = 0; j < TD; j += GD) {
    const int first = (strip.warp * TD + j) * 8;
    if (first >= D) break;
    float p[GD][4];
    open_products(PREDICTION);
    columns_into<HS, GD>(p, s.h[n & 1], strip.row, s.W[n & 1][0][1], first);
    close_products(PREDICTION);
    settle_tiles<GD>(p);
    float* to = &s.part[n % SIDES][(strip.row + strip.gr) * D + first + strip.gc];
#pragma unroll
    for (int i = 0; i < GD; i++)
#pragma unroll
      for (int e = 0; e < 2; e++)
        *reinterpret_cast<float2*>(&to[e * 8 * D + i * 8]) = float2{p[i][2 * e], p[i][2 * e + 1]};
  }
  if (NORMALISED && tid() < R) {
    float x = 0;
#pragma unroll
    for (int i = 0; i < BESIDE; i++) x += s.hh[tid() * BESIDE + i];
    s.hsum[n & 1][tid()] = x;
  }
}

// e of all channels, in every block; |e|^2 of each row, by warp.
DEV void find_error(Shared& s, const Task& task, int n) {
  const Strip strip;
  float own[2] = {0, 0};
  const int o = cell<D>(strip.row + strip.gr, strip.warp * TD * 8 + strip.gc);
#pragma unroll
  for (int j = 0; j < TD; j++) {
    const int col = (strip.warp * TD + j) * 8 + strip.gc;
    if (col >= D) break;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int r = strip.row + strip.gr + e * 8;
      float x = 0, y = 0;
#pragma unroll 4
      for (int c = 0; c < CS; c++) {
        const float2 f = peer2(&s.part[n % SIDES][r * D + col], c);
        x += f.x, y += f.y;
      }
      if (RESIDUAL) {
        const float2 f = unpack(load2(&s.k[n & 1][o + cell<D>(e * 8, j * 8)]));
        x += f.x, y += f.y;
      }
      const bf16* value = &s.v[n & 1][LEAN ? 0 : o + cell<D>(e * 8, j * 8)];
      if (LEAN) value = &task.v[(at_batch(task, n) * R + r) * D + col];
      const float2 v = unpack(load2(value));
      x = ERROR_A * x - ERROR_B * v.x, y = ERROR_A * y - ERROR_B * v.y;
      own[e] += x * x + y * y;
      store2(&s.e[o + cell<D>(e * 8, j * 8)], pack(x, y));
      if (TRACE && cluster_rank() == 0)
        store2(&task.e[(((size_t)n * task.P + block() / CS) * R + r) * D + col], pack(x, y));
    }
  }
  if (NORMALISED)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float x = over_row(own[e]);
      if (strip.gc == 0) s.ee[(strip.row + strip.gr + e * 8) * BESIDE + strip.warp] = x;
    }
}

// d = f'(z) (A2' e) of this block's hidden units; |d|^2 of each row, by warp.
DEV void turn_back(Shared& s, const Task& task, int n, float (*slope)[4]) {
  const Strip strip;
  float own[2] = {0, 0};
#pragma unroll
  for (int j = 0; j < TH; j += GH) {
    const int start = (strip.warp * TH + j) * 8;
    if (start >= HS) break;
    float u[GH][4];
    open_products(TURNED_BACK);
    rows_into<D, GH>(u, s.e, strip.row, s.W[n & 1][0][1], start);
    close_products(TURNED_BACK);
    settle_tiles<GH>(u);
    const int o = cell<HS>(strip.row + strip.gr, start + strip.gc);
    const size_t there = TRACE ? trace_row(task, n, strip.row + strip.gr) + start + strip.gc : 0;
#pragma unroll
    for (int i = 0; i < GH; i++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const size_t to = there + e * 8 * HIDDEN + i * 8;
        float *f = &slope[j + i][2 * e], *v = &u[i][2 * e];
        if (TRACE) {
          float bend[2], h;
#pragma unroll
          for (int x = 0; x < 2; x++) {
            bend[x] = v[x] * curve_bend(f[x]);
            curve(f[x], h, f[x]);
          }
          store2(&task.bend[to], pack(bend[0], bend[1]));
          store2(&task.slope[to], pack(f[0], f[1]));
        }
        const float x = v[0] * f[0], y = v[1] * f[1];
        own[e] += x * x + y * y;
        store2(&s.d[o + cell<HS>(e * 8, i * 8)], pack(x, y));
        if (TRACE) store2(&task.d[to], pack(x, y));
      }
  }
  if (NORMALISED)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float x = over_row(own[e]);
      if (strip.gc == 0) s.dd[(strip.row + strip.gr + e * 8) * BESIDE + strip.warp] = x;
    }
}

// rho = <e, e>/a / (|k|^2 |d|^2 + |h|^2 |e|^2 + eps |e|^2), and what it makes of c and D.
DEV void weigh(Shared& s, const Task& task, int n, bool kept) {
  const float *c = s.edge[n & 1], *last = s.last[n & 1];
  if (!NORMALISED) {
    if (tid() < R) {
      s.w[0][tid()] = kept ? c[tid()] : 0.f;
      if (MOMENTUM) s.w[1][tid()] = kept ? last[tid()] : 0.f;
    }
    return;
  }
  const int sub = tid() % 8;
#pragma unroll
  for (int r = tid() / 8; r < R; r += HALF / 8) {
    float d = 0, h = 0, e = 0;
    for (int i = sub; i < CS * BESIDE; i += 8)
      d += peer1(&s.dd[r * BESIDE + i % BESIDE], i / BESIDE);
    for (int i = sub; i < CS; i += 8) h += peer1(&s.hsum[n & 1][r], i);
    if (sub < BESIDE) e = s.ee[r * BESIDE + sub];
#pragma unroll
    for (int mask = 1; mask < 8; mask *= 2)
      d += shuffle_xor(d, mask), h += shuffle_xor(h, mask), e += shuffle_xor(e, mask);
    const float below = s.length[n & 1][r] * d + h * e + EPS * e;
    const float rho = e / (ERROR_A * fmaxf(below, TINY));
    if (sub == 0) {
      s.rho[r] = rho;
      if (TRACE && cluster_rank() == 0) {
        float* to = task.sums + (((size_t)n * task.P + block() / CS) * R + r) * 4;
        to[0] = d, to[1] = h, to[2] = e, to[3] = rho;
      }
      s.w[0][r] = kept ? rho * c[r] : 0.f;
      if (MOMENTUM) s.w[1][r] = kept ? rho * last[r] : 0.f;
    }
  }
}

// Sixteen tokens of d or h by hidden units, weighed for A and for S.
DEV void weigh_strip(u32 (*own)[4], Shared& s, const bf16* from, int i, int o, int t) {
  u32 f[4];
  ldm4t(f, &from[o + cell<HS>(i, 0)]);
#pragma unroll
  for (int slot = 0; slot < SLOTS; slot++)
#pragma unroll
    for (int x = 0; x < 4; x++) {
      const float* weight = &s.w[slot][i + t + x / 2 * 8];
      own[slot][x] = scaled(f[x], weight[0], weight[1]);
    }
}

// Whether a warpgroup's product has its 64 rows in the state: hidden units of a block.
constexpr bool WIDE_STATE = CORES && HS % 64 == 0;

DEV void add_strip(State& state, int map, u32 (*own)[4], const bf16* side, int i, int first) {
  if (WIDE_STATE) {
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot++)
      strip_into<D, WIDE, 1>(state.W[slot][map], own[slot], side, i, first);
    return;
  }
  // Of the right side each load serves A and S.
  const int l = tid() % 32, o = cell<D>(l % 16, first + l / 16 * 8);
  u32 b[4];
#pragma unroll
  for (int j = 0; j < WIDE; j += 2) {
    ldm4t(b, &side[o + cell<D>(i, j * 8)]);
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot++) {
      mma(state.W[slot][map][j], own[slot], b);
      mma(state.W[slot][map][j + 1], own[slot], b + 2);
    }
  }
}

DEV void move(State& state, Shared& s, int n, bool kept) {
  const int l = tid() % 32, w = tid() / 32, mine = w % (HS / 16) * 16;
  const int first = w / (HS / 16) * WIDE * 8;
  const float ta = kept ? s.a[n & 1][R - 1] : 1.f, tm = kept && MOMENTUM ? s.m[n & 1][R - 1] : 0.f;
  const float ts = kept && MOMENTUM ? s.s[n & 1][0] : 1.f;
#pragma unroll
  for (int map = 0; map < 2; map++)
#pragma unroll
    for (int j = 0; j < WIDE; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float& A = state.W[0][map][j][e];
        A *= ta;
        if (MOMENTUM) {
          float& S = state.W[SLOTS - 1][map][j][e];
          A += tm * S, S *= ts;
        }
      }
  // The left sides, tokens summed over: with whole warpgroups two together (more spill).
  constexpr int STRIPS_AT_ONCE = WIDE_STATE ? 2 : 1;
  const int o = cell<HS>(l % 8 + l / 16 * 8, mine + l / 8 % 2 * 8), t = l % 4 * 2;
#pragma unroll
  for (int map = 0; map < 2; map++)
#pragma unroll
    for (int from = 0; from < R; from += 16 * STRIPS_AT_ONCE) {
      const bf16* side = map ? s.e : s.k[n & 1];
      u32 own[STRIPS_AT_ONCE][SLOTS][4];
#pragma unroll
      for (int x = 0; x < STRIPS_AT_ONCE; x++)
        weigh_strip(own[x], s, map ? s.h[n & 1] : s.d, from + x * 16, o, t);
      settle_left<STRIPS_AT_ONCE * SLOTS>(own[0]);
#pragma unroll
      for (int slot = 0; slot < SLOTS; slot++) settle_tiles<WIDE>(state.W[slot][map]);
      if (WIDE_STATE) open_products(STATE_MOVED);
#pragma unroll
      for (int x = 0; x < STRIPS_AT_ONCE; x++)
        add_strip(state, map, own[x], side, from + x * 16, first);
      if (WIDE_STATE) close_products(STATE_MOVED);
#pragma unroll
      for (int slot = 0; slot < SLOTS; slot++) settle_tiles<WIDE>(state.W[slot][map]);
    }
}

DEV void walk_keys(Shared& s, const Task& task) {
  const size_t pair = block() / CS;
  const int full = task.full[pair];
  State state;
  take_state(state, task.start);
  publish(state, s.W[0]);
  hand_over(BEGIN);
  sync_block(BEGIN);
  for (int n = 0; n < task.N; n++) {
    float slope[TH][4];
    if (TRACE) keep_state(state, task, pair, n);
    hidden_units(s, task, n, slope);
    hand_over(HIDDEN_THERE);
    sync_keys(HIDDEN_THERE);
    predict(s, n);
    sync_cluster(PREDICTED);
    find_error(s, task, n);
    hand_over(ERROR_THERE);
    sync_keys(ERROR_THERE);
    turn_back(s, task, n, slope);
    if (CROSSED) {
      sync_cluster(DELTA_THERE);
      weigh(s, task, n, n < full);
      sync_keys(SHARES);
    } else {
      weigh(s, task, n, n < full);
      sync_keys(DELTA_THERE);
    }
    move(state, s, n, n < full);
    publish(state, s.W[(n + 1) & 1]);
    hand_over(MOVED);
    sync_block(MOVED);
  }
  give_state(state, task.end);
  sync_cluster(PREDICTED);
  sync_cluster(END);
}

// -- queries: eight warps, one batch behind -------------------------------------------------------

// Brings numbers from device memory, 16 bytes at a time, past the registers.
template <int COUNT>
DEV void bring(float* to, const float* from) {
  static_assert(COUNT % 4 == 0, "pieces of 16 bytes");
#pragma unroll
  for (int i = tid() % HALF; i < COUNT / 4; i += OTHERS) copy_async(&to[i * 4], &from[i * 4]);
}
DEV void bring_tokens(bf16* to, const bf16* from) {
  bring_rows<D>(to, from, D, R, tid() % HALF, OTHERS);
}

// Keys, values and coefficients of batch n + 1, into the side that batch n - 1 no longer needs,
// and queries of batch n.
DEV void fetch(Shared& s, const Task& task, size_t pair, int n) {
  const size_t now = (size_t)n * task.P + pair, next = now + task.P;
  const int side = (n + 1) & 1, t = tid() % HALF;
  if (n >= 0 && !TRACE) {
    bring_tokens(s.q, task.q + now * R * D);
    if (!LEAN) bring<R * R>(s.C, task.C + now * R * R);
  }
  if (n + 1 < task.N) {
    bring_tokens(s.k[side], task.k + next * R * D);
    if (!LEAN) bring_tokens(s.v[side], task.v + next * R * D);
    bring<R>(s.edge[side], task.C + (next * R + R - 1) * R);
    bring<R>(s.a[side], task.a + next * R);
    if (MOMENTUM) {
      bring<R>(s.m[side], task.m + next * R);
      bring<R>(s.last[side], task.last + next * R);
      if (t == 0) s.s[side][0] = task.s[next];
    }
    if (NORMALISED) bring<R>(s.length[side], task.length + next * R);
  }
}

// C[t, i] rho_i (x_t . h_i) of a strip of 16 queries, as the left side of a product over keys.
template <int K>
DEV void masked(u32 (*mask)[4], Shared& s, const Task& task, int n, const bf16* x, const bf16* h) {
  const Strip strip;
  const float* C = LEAN ? task.C + at_batch(task, n) * R * R : s.C;
#pragma unroll
  for (int j = 0; j < R / 8; j += GR) {
    float z[GR][4];
    open_products(SCORES);
    rows_into<K, GR>(z, x, strip.row, h, j * 8);
    close_products(SCORES);
    settle_tiles<GR>(z);
#pragma unroll
    for (int i = 0; i < GR; i++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int key = (j + i) * 8 + strip.gc + e % 2, r = strip.row + strip.gr + e / 2 * 8;
        z[i][e] *= C[r * R + key] * (NORMALISED ? s.rho[key] : 1.f);
      }
#pragma unroll
      for (int e = 0; e < 2; e++)
        mask[(j + i) / 2][(j + i) % 2 * 2 + e] = pack(z[i][2 * e], z[i][2 * e + 1]);
    }
  }
}

// Tiles of a read: a_t (A x) + m_t (S x) + mask . d, from a column on. Map 1 sums over W's columns,
// map 2 over its rows.
template <int MAP, int TILES>
DEV void read_tiles(float (*z)[4], Shared& s, int side, const bf16* x, const bf16* d, int col,
                    u32 (*mask)[4]) {
  constexpr int BESIDE_D = MAP ? D : HS;  // columns of d
  const Strip strip;
  float moved[SLOTS][TILES][4];
  settle_left<R / 16>(mask);
  open_products(READS);
#pragma unroll
  for (int i = 0; i < SLOTS; i++)
    if (MAP == 0)
      rows_into<D, TILES>(moved[i], x, strip.row, s.W[side][i][0], col);
    else
      columns_into<HS, TILES>(moved[i], x, strip.row, s.W[side][i][1], col);
#pragma unroll
  for (int i = 0; i < R / 16; i++)
    if (i == 0)
      strip_into<BESIDE_D, TILES, 0>(z, mask[i], d, i * 16, col);
    else
      strip_into<BESIDE_D, TILES, 1>(z, mask[i], d, i * 16, col);
  close_products(READS);
  settle_tiles<TILES>(z);
#pragma unroll
  for (int i = 0; i < SLOTS; i++) {
    settle_tiles<TILES>(moved[i]);
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int r = strip.row + strip.gr + e / 2 * 8;
        z[j][e] += (i ? s.m[side][r] : s.a[side][r]) * moved[i][j][e];
      }
  }
}

DEV bf16* query_units(Shared& s) { return LEAN ? s.q : s.x; }

DEV void read_hidden(Shared& s, const Task& task, int n) {
  const Strip strip;
  if (strip.warp * TH * 8 >= HS) return;
  u32 mask[R / 16][4];
  masked<D>(mask, s, task, n, s.q, s.k[n & 1]);
#pragma unroll
  for (int j = 0; j < TH; j += GH) {
    const int first = (strip.warp * TH + j) * 8;
    float z[GH][4], y[4], slope;
    read_tiles<0, GH>(z, s, n & 1, s.q, s.d, first, mask);
    if (LEAN) sync_queries(ASKED);
    const int o = cell<HS>(strip.row + strip.gr, first + strip.gc);
#pragma unroll
    for (int i = 0; i < GH; i++) {
#pragma unroll
      for (int e = 0; e < 4; e++) curve(z[i][e], y[e], slope);
#pragma unroll
      for (int e = 0; e < 2; e++)
        store2(&query_units(s)[o + cell<HS>(e * 8, i * 8)], pack(y[2 * e], y[2 * e + 1]));
    }
  }
}

DEV void read_output(Shared& s, const Task& task, int n) {
  const Strip strip;
  const bf16* x = query_units(s);
  u32 mask[R / 16][4];
  masked<HS>(mask, s, task, n, x, s.h[n & 1]);
#pragma unroll 1
  for (int j = 0; j < TD; j += GD) {
    const int first = (strip.warp * TD + j) * 8;
    if (first >= D) break;
    float z[GD][4];
    read_tiles<1, GD>(z, s, n & 1, x, s.e, first, mask);
    const int r = strip.row + strip.gr, c = first + strip.gc, o = cell<D>(r, c);
#pragma unroll
    for (int i = 0; i < GD; i++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float2 own = {z[i][2 * e], z[i][2 * e + 1]};
        if (RESIDUAL && cluster_rank() == 0) {
          const bf16* query = &s.q[LEAN ? 0 : o + cell<D>(e * 8, i * 8)];
          if (LEAN) query = &task.q[(at_batch(task, n) * R + r + e * 8) * D + c + i * 8];
          const float2 f = unpack(load2(query));
          own.x += f.x, own.y += f.y;
        }
        *reinterpret_cast<float2*>(&s.read[n % SIDES][(r + e * 8) * D + c + i * 8]) = own;
      }
  }
}

// Each block sums its share of the outputs over the cluster.
DEV void hand_out(Shared& s, const Task& task, size_t pair, int n) {
  constexpr int SHARE = (R * D / 2 + CS - 1) / CS * 2;
  const int from = cluster_rank() * SHARE, to = from + SHARE < R * D ? from + SHARE : R * D;
  float* y = task.y + ((size_t)n * task.P + pair) * R * D;
  for (int i = from + 2 * (tid() % HALF); i < to; i += 2 * HALF) {
    float2 sum = {0, 0};
#pragma unroll 4
    for (int c = 0; c < CS; c++) {
      const float2 f = peer2(&s.read[n % SIDES][i], c);
      sum.x += f.x, sum.y += f.y;
    }
    *reinterpret_cast<float2*>(&y[i]) = sum;
  }
}

DEV void walk_queries(Shared& s, const Task& task) {
  const size_t pair = block() / CS;
  fetch(s, task, pair, -1);
  wait_copies();
  hand_over(BEGIN);
  sync_block(BEGIN);
  for (int n = 0; n <= task.N; n++) {
    if (n > 0 && !TRACE) {
      read_hidden(s, task, n - 1);
      hand_over(READ);
      sync_queries(READ);
      read_output(s, task, n - 1);
    }
    sync_cluster(PREDICTED);
    if (n < task.N) fetch(s, task, pair, n);
    if (n > 0 && !TRACE) hand_out(s, task, pair, n - 1);
    if (n == task.N) break;
    if (CROSSED) sync_cluster(DELTA_THERE);
    wait_copies();
    hand_over(MOVED);
    sync_block(MOVED);
  }
  sync_cluster(END);
}

DEV void walk(Shared& s, const Task& task) {
  if (tid() < HALF) {
    registers<TRACE ? 208 : 152>();
    walk_keys(s, task);
  } else {
    registers<TRACE ? 88 : 104>();
    walk_queries(s, task);
  }
}

#ifndef SIMULATED
extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1) fused_walk(const Task task) {
  extern __shared__ __align__(16) unsigned char raw[];
  walk(*reinterpret_cast<Shared*>(raw), task);
}
#endif
