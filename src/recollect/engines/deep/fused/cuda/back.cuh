// The way back over the inner batches: the gradients of A and S, from the last batch to the first.
//
// Everything about reads is known before, for all batches: what they ask of h, d and e, and the
// factors of what they add to the gradients of A and S. With X the gradient of A or S (slots j) at a
// batch's end, w_j = rho c_j and, in front of each, what reads ask,
//
//   d'  += sum_j w_j X1_j k,   h' += sum_j w_j X2_j' e,   e' += sum_j w_j X2_j h,   k' = sum_j w_j X1_j' d
//   c'_j = <X1_j' d, k> + <X2_j h, e>,    pi = <k', k> + <e', e>;  what pi adds to d', h', e'
//   t = f' d',   e' += A2 t,   p' = a e',   h' += A2' p',   z' = f' h' + f'' (A2' e) d'
//   X_A <- a X_A,  X_S <- m X_A + s X_S,   then  X_A1 += z' k',  X_A2 += p' h' + e t',  and reads
//
// Gradients of a, m and s are <X_j, W_i>. Hidden units are divided over the cluster as on the walk,
// 256 threads a block; k', pi, c' and e' are summed over it. Keys get A1' z' outside, for all
// batches at once.
//
// A batch is gone through in PARTS of R tokens, from the last: all of them ask the copies of X at the
// batch's end and of A2 at its beginning, and X goes through the border at the first of them.
#pragma once
#include "layout.cuh"

#ifndef PARTS
#define PARTS 1
#endif

enum Place { BEGIN, ASKED, WEIGHED, TURNED, SUMMED, PREDICTED, GATHERED, MOVED, END };

struct BackTask {
  const bf16 *k, *e, *h, *d, *slope, *bend, *W;  // [N, P, tokens, D or hidden], W [N, P, slots, 2, hidden, D]
  const bf16 *left[2], *right[2];  // of reads, maps 1 and 2: [N, P, slots, tokens, D], [N, P, tokens, hidden]
  const float *to_d, *to_h, *to_e;  // what reads ask of d, h [N, P, tokens, hidden] and e [N, P, tokens, D]
  const float* pi;                  // <k', k> + <e', e> of reads, [N, P, tokens]
  const float* w;                   // rho c_j, [N, P, slots, tokens]; 0 where a batch's end is not kept
  const float* sizes;               // |d|^2, |h|^2, |e|^2, |k|^2, [N, P, tokens, 4]
  const float* T;                   // a, m, s and whether the end is kept, [N, P, 4]
  const float* end[4];              // as `Task.start` of the walk
  float* start[4];
  float *k_own, *e_own;             // k' and e' [N, P, tokens, D]
  float *z_own;                     // z' [N, P, tokens, hidden]
  float *weight;                    // c' [N, P, slots, tokens]
  float *k_scale;                   // what pi adds to k', in units of k, [N, P, tokens]
  float *gram;                      // <X_A, A>, <X_A, S>, <X_S, S> by block, [N, P, CS, 3]
  int N, P;
};

struct BackShared {
  bf16 X[SLOTS][2][HS * LD], A2[HS * LD];
  bf16 k[R * LD], e[R * LD], p[R * LD], left[2][SLOTS][R * LD];
  bf16 h[R * LH], d[R * LH], t[R * LH], z[R * LH], right[2][R * LH];
  float k_part[R * D], e_part[2][R * D];  // e' by turns: peers read it late
  float asked[R * BESIDE * (1 + SLOTS)];  // pi and c' by warp
  float add[3][R];                        // what pi adds to d', h', e'
  float gram[WARPS * 4];
};
static_assert(sizeof(BackShared) == BACK_BYTES, "the host counts otherwise");

template <int W>
DEV void take(bf16* to, const bf16* from, size_t apart, int rows) {
  bring_rows<W>(to, from, apart, rows, tid(), HALF);
}

// Where a part's batch, its rows, and those of a slot begin, in units of a batch or of R rows.
DEV size_t at_batch(const BackTask& task, int part) {
  return (size_t)(part / PARTS) * task.P + block() / CS;
}
DEV size_t at_rows(const BackTask& task, int part) {
  return at_batch(task, part) * PARTS + part % PARTS;
}
DEV size_t at_slot(const BackTask& task, int part, int slot) {
  return (at_batch(task, part) * SLOTS + slot) * PARTS + part % PARTS;
}
DEV bool first_part(int part) { return part % PARTS == PARTS - 1; }

DEV void fetch_part(BackShared& s, const BackTask& task, int n) {
  const size_t at = at_rows(task, n), mine = cluster_rank() * HS;
  take<D>(s.k, task.k + at * R * D, D, R);
  take<D>(s.e, task.e + at * R * D, D, R);
  take<HS>(s.h, task.h + at * R * HIDDEN + mine, HIDDEN, R);
  take<HS>(s.d, task.d + at * R * HIDDEN + mine, HIDDEN, R);
  if (first_part(n))
    take<D>(s.A2, task.W + (at_batch(task, n) * SLOTS * 2 * HIDDEN + HIDDEN + mine) * D, D, HS);
#pragma unroll
  for (int map = 0; map < 2; map++) {
    take<HS>(s.right[map], task.right[map] + at * R * HIDDEN + mine, HIDDEN, R);
    for (int j = 0; j < SLOTS; j++)
      take<D>(s.left[map][j], task.left[map] + at_slot(task, n, j) * R * D, D, R);
  }
}

// This thread's rows of hidden units: tiles of a product [R, HS], gr and gr + 8 of its strip.
struct Rows {
  float d[TH][4], h[TH][4];
};

// What the batch's end asks: d' and h' of this block's units, and its part of k', e', c' and pi.
DEV void ask(BackShared& s, const BackTask& task, int n, Rows& own) {
  const Strip strip;
  const size_t at = at_rows(task, n);
  float w[SLOTS][2];
#pragma unroll
  for (int j = 0; j < SLOTS; j++)
#pragma unroll
    for (int e = 0; e < 2; e++) w[j][e] = task.w[at_slot(task, n, j) * R + strip.row + strip.gr + e * 8];
#pragma unroll
  for (int j = 0; j < TH; j++) {
    const int col = (strip.warp * TH + j) * 8;
    if (col >= HS) break;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const size_t o = (at * R + strip.row + strip.gr + e / 2 * 8) * HIDDEN + cluster_rank() * HS +
                       col + strip.gc + e % 2;
      own.d[j][e] = task.to_d[o], own.h[j][e] = task.to_h[o];
    }
#pragma unroll
    for (int i = 0; i < SLOTS; i++) {
      float x[4] = {0, 0, 0, 0}, y[4] = {0, 0, 0, 0};
      dot_rows<D>(x, s.k, strip.row, s.X[i][0], col);
      dot_rows<D>(y, s.e, strip.row, s.X[i][1], col);
#pragma unroll
      for (int e = 0; e < 4; e++) own.d[j][e] += w[i][e / 2] * x[e], own.h[j][e] += w[i][e / 2] * y[e];
    }
  }
  float pi[2] = {0, 0}, c[SLOTS][2] = {};
#pragma unroll 1
  for (int j = 0; j < TD; j++) {
    const int col = (strip.warp * TD + j) * 8;
    if (col >= D) break;
    const int place = cell<D>(strip.row + strip.gr, col + strip.gc);
    float k_part[4] = {0, 0, 0, 0}, e_part[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < SLOTS; i++) {
      float x[4] = {0, 0, 0, 0}, y[4] = {0, 0, 0, 0};
      dot_columns<HS>(x, s.d, strip.row, s.X[i][0], col);
      dot_columns<HS>(y, s.h, strip.row, s.X[i][1], col);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int o = place + cell<D>(e * 8, 0);
        const float2 k = unpack(load2(&s.k[o])), f = unpack(load2(&s.e[o]));
        c[i][e] += x[2 * e] * k.x + x[2 * e + 1] * k.y + y[2 * e] * f.x + y[2 * e + 1] * f.y;
      }
#pragma unroll
      for (int e = 0; e < 4; e++) k_part[e] += w[i][e / 2] * x[e], e_part[e] += w[i][e / 2] * y[e];
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int o = (strip.row + strip.gr + e * 8) * D + col + strip.gc;
      *reinterpret_cast<float2*>(&s.k_part[o]) = float2{k_part[2 * e], k_part[2 * e + 1]};
      *reinterpret_cast<float2*>(&s.e_part[n & 1][o]) = float2{e_part[2 * e], e_part[2 * e + 1]};
    }
  }
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int r = strip.row + strip.gr + e * 8;
#pragma unroll
    for (int i = 0; i < SLOTS; i++) {
      pi[e] += w[i][e] * c[i][e];
      const float x = over_row(c[i][e]);
      if (strip.gc == 0) s.asked[((1 + i) * R + r) * BESIDE + strip.warp] = x;
    }
    const float x = over_row(pi[e]);
    if (strip.gc == 0) s.asked[r * BESIDE + strip.warp] = x;
  }
}

// pi and c' of every row, over the cluster, and what pi adds; this block's share of k'.
DEV void weigh_back(BackShared& s, const BackTask& task, int n) {
  const size_t at = at_rows(task, n);
  const int sub = tid() % 8;
#pragma unroll
  for (int r = tid() / 8; r < R; r += HALF / 8) {
    float x[1 + SLOTS];
#pragma unroll
    for (int i = 0; i <= SLOTS; i++) {
      x[i] = 0;
      for (int j = sub; j < CS * BESIDE; j += 8)
        x[i] += peer1(&s.asked[(i * R + r) * BESIDE + j % BESIDE], j / BESIDE);
#pragma unroll
      for (int mask = 1; mask < 8; mask *= 2) x[i] += shuffle_xor(x[i], mask);
    }
    float add[4] = {0, 0, 0, 0};  // to d', h', e', k', in units of d, h, e, k
    if (NORMALISED) {
      const float* size = &task.sizes[(at * R + r) * 4];
      const float pi = x[0] + task.pi[at * R + r], along = size[2] / ERROR_A;
      const float below = fmaxf(size[3] * size[0] + size[1] * size[2] + EPS * size[2], TINY);
      const float twice = -2.f * pi / below;
      add[0] = size[3] * twice, add[1] = size[2] * twice, add[3] = size[0] * twice;
      add[2] = (size[1] + EPS) * twice + (along > 0.f ? 2.f * pi / (along * ERROR_A) : 0.f);
    }
    if (sub == 0) {
#pragma unroll
      for (int i = 0; i < 3; i++) s.add[i][r] = add[i];
      if (cluster_rank() == 0) {
        task.k_scale[at * R + r] = add[3];
        for (int i = 0; i < SLOTS; i++) task.weight[at_slot(task, n, i) * R + r] = x[1 + i];
      }
    }
  }
  constexpr int SHARE = (R * D / 2 + CS - 1) / CS * 2;
  const int from = cluster_rank() * SHARE, to = from + SHARE < R * D ? from + SHARE : R * D;
  for (int i = from + 2 * tid(); i < to; i += 2 * HALF) {
    float2 sum = {0, 0};
#pragma unroll 4
    for (int c = 0; c < CS; c++) {
      const float2 f = peer2(&s.k_part[i], c);
      sum.x += f.x, sum.y += f.y;
    }
    *reinterpret_cast<float2*>(&task.k_own[at * R * D + i]) = sum;
  }
}

DEV float2 half2_at(const bf16* p, const BackTask& task, int n, int r, int col) {
  return unpack(load2(&p[(at_rows(task, n) * R + r) * HIDDEN + cluster_rank() * HS + col]));
}

// t = f' d', and h' so far.
DEV void turn(BackShared& s, const BackTask& task, int n, Rows& own) {
  const Strip strip;
  const int place = cell<HS>(strip.row + strip.gr, strip.warp * TH * 8 + strip.gc);
#pragma unroll
  for (int j = 0; j < TH; j++) {
    const int col = (strip.warp * TH + j) * 8 + strip.gc;
    if (col >= HS) break;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int r = strip.row + strip.gr + e * 8;
      const int o = place + cell<HS>(e * 8, j * 8);
      const float2 d = unpack(load2(&s.d[o])), h = unpack(load2(&s.h[o]));
      const float2 slope = half2_at(task.slope, task, n, r, col);
      own.d[j][2 * e] += s.add[0][r] * d.x, own.d[j][2 * e + 1] += s.add[0][r] * d.y;
      own.h[j][2 * e] += s.add[1][r] * h.x, own.h[j][2 * e + 1] += s.add[1][r] * h.y;
      store2(&s.t[o], pack(slope.x * own.d[j][2 * e], slope.y * own.d[j][2 * e + 1]));
    }
  }
}

// This block's part of e': what the batch's end asked, and A2 t.
DEV void turn_on(BackShared& s, int n) {
  const Strip strip;
#pragma unroll 1
  for (int j = 0; j < TD; j++) {
    const int col = (strip.warp * TD + j) * 8;
    if (col >= D) break;
    float x[4] = {0, 0, 0, 0};
    dot_columns<HS>(x, s.t, strip.row, s.A2, col);
#pragma unroll
    for (int e = 0; e < 2; e++) {  // what this thread put there itself
      float* to = &s.e_part[n & 1][(strip.row + strip.gr + e * 8) * D + col + strip.gc];
      to[0] += x[2 * e], to[1] += x[2 * e + 1];
    }
  }
}

// e' of all channels in every block, and p' = a e'.
DEV void find_prediction(BackShared& s, const BackTask& task, int n) {
  const size_t at = at_rows(task, n) * R * D;
  for (int i = 2 * tid(); i < R * D; i += 2 * HALF) {
    const int r = i / D, col = i % D;
    const float2 own = unpack(load2(&s.e[cell<D>(r, col)]));
    const float2 given = *reinterpret_cast<const float2*>(&task.to_e[at + i]);
    float x = given.x + s.add[2][r] * own.x, y = given.y + s.add[2][r] * own.y;
#pragma unroll 4
    for (int c = 0; c < CS; c++) {
      const float2 f = peer2(&s.e_part[n & 1][i], c);
      x += f.x, y += f.y;
    }
    if (cluster_rank() == 0) *reinterpret_cast<float2*>(&task.e_own[at + i]) = float2{x, y};
    store2(&s.p[cell<D>(r, col)], pack(ERROR_A * x, ERROR_A * y));
  }
}

// h' += A2' p', z' = f' h' + f'' (A2' e) d'.
DEV void find_hidden(BackShared& s, const BackTask& task, int n, Rows& own) {
  const Strip strip;
  const int place = cell<HS>(strip.row + strip.gr, strip.warp * TH * 8 + strip.gc);
#pragma unroll
  for (int j = 0; j < TH; j++) {
    const int col = (strip.warp * TH + j) * 8;
    if (col >= HS) break;
    dot_rows<D>(own.h[j], s.p, strip.row, s.A2, col);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int r = strip.row + strip.gr + e * 8, c = col + strip.gc;
      const float2 slope = half2_at(task.slope, task, n, r, c), bend = half2_at(task.bend, task, n, r, c);
      const float2 z = {slope.x * own.h[j][2 * e] + bend.x * own.d[j][2 * e],
                        slope.y * own.h[j][2 * e + 1] + bend.y * own.d[j][2 * e + 1]};
      store2(&s.z[place + cell<HS>(e * 8, j * 8)], pack(z.x, z.y));
      const size_t o = (at_rows(task, n) * R + r) * HIDDEN + cluster_rank() * HS + c;
      *reinterpret_cast<float2*>(&task.z_own[o]) = z;
    }
  }
}

// <X_j, W_i>, and X through the border; batches whose end is not kept pass it on.
DEV void cross(State& X, BackShared& s, const BackTask& task, int n) {
  const size_t at = at_batch(task, n);
  const float ta = task.T[at * 4], tm = task.T[at * 4 + 1], ts = task.T[at * 4 + 2];
  if (task.T[at * 4 + 3] == 0.f) {
    if (tid() % 32 == 0)
      for (int i = 0; i < 3; i++) s.gram[tid() / 32 * 4 + i] = 0;
    return;
  }
  const Spot spot;
  const bf16* W = task.W + at * SLOTS * 2 * HIDDEN * D;
  float sum[3] = {0, 0, 0};
#pragma unroll
  for (int map = 0; map < 2; map++)
#pragma unroll
    for (int j = 0; j < WIDE; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const size_t row = map * HIDDEN + cluster_rank() * HS + spot.hidden + e * 8;
        const size_t o = row * D + spot.first + j * 8;
        const float2 A = unpack(load2(&W[o]));
        float* x = &X.W[0][map][j][2 * e];
        sum[0] += x[0] * A.x + x[1] * A.y;
        if (MOMENTUM) {
          const float2 S = unpack(load2(&W[(size_t)2 * HIDDEN * D + o]));
          float* y = &X.W[SLOTS - 1][map][j][2 * e];
          sum[1] += x[0] * S.x + x[1] * S.y, sum[2] += y[0] * S.x + y[1] * S.y;
          y[0] = tm * x[0] + ts * y[0], y[1] = tm * x[1] + ts * y[1];
        }
        x[0] *= ta, x[1] *= ta;
      }
#pragma unroll
  for (int i = 0; i < 3; i++) {
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) sum[i] += shuffle_xor(sum[i], mask);
    if (tid() % 32 == 0) s.gram[tid() / 32 * 4 + i] = sum[i];
  }
}

// X[map] += left' right over tokens: units of `left` in rows, channels of `right` in columns.
DEV void add_product(float (*X)[4], const bf16* left, const bf16* right) {
  const int l = tid() % 32, w = tid() / 32;
  const int rows = cell<HS>(l % 8 + l / 16 * 8, w % (HS / 16) * 16 + l / 8 % 2 * 8);
  const int columns = cell<D>(l % 16, w / (HS / 16) * WIDE * 8 + l / 16 * 8);
#pragma unroll
  for (int i = 0; i < R; i += 16) {
    u32 f[4], b[4];
    ldm4t(f, &left[rows + cell<HS>(i, 0)]);
#pragma unroll
    for (int j = 0; j < WIDE; j += 2) {
      ldm4t(b, &right[columns + cell<D>(i, j * 8)]);
      mma(X[j], f, b);
      mma(X[j + 1], f, b + 2);
    }
  }
}

DEV void store_copy(const State& X, BackShared& s) {
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
          const float* x = &X.W[i][map][j][2 * e];
          store2(&s.X[i][map][o + cell<D>(e * 8, j * 8)], pack(x[0], x[1]));
        }
}

DEV void walk_back(BackShared& s, const BackTask& task) {
  State X;
  take_state(X, task.end);
  for (int n = task.N * PARTS - 1; n >= 0; n--) {
    Rows own;
    if (first_part(n)) store_copy(X, s);
    fetch_part(s, task, n);
    wait_copies();
    sync_block(BEGIN);
    ask(s, task, n, own);
    sync_cluster(ASKED);
    weigh_back(s, task, n);
    sync_block(WEIGHED);
    turn(s, task, n, own);
    sync_block(TURNED);
    turn_on(s, n);
    sync_cluster(SUMMED);
    find_prediction(s, task, n);
    sync_block(PREDICTED);
    find_hidden(s, task, n, own);
    if (first_part(n)) cross(X, s, task, n);
    sync_block(GATHERED);
    if (first_part(n) && tid() < 3) {
      float x = 0;
      for (int i = 0; i < WARPS; i++) x += s.gram[i * 4 + tid()];
      task.gram[(at_batch(task, n) * CS + cluster_rank()) * 3 + tid()] = x;
    }
    add_product(X.W[0][0], s.z, s.k);
    add_product(X.W[0][1], s.h, s.p);
    add_product(X.W[0][1], s.t, s.e);
#pragma unroll
    for (int i = 0; i < SLOTS; i++)
#pragma unroll
      for (int map = 0; map < 2; map++) add_product(X.W[i][map], s.right[map], s.left[map][i]);
    sync_block(MOVED);
  }
  sync_cluster(END);
  give_state(X, task.start);
}

#ifndef SIMULATED
extern "C" __global__ void CLUSTERED __launch_bounds__(HALF, 1) fused_walk_back(const BackTask task) {
  extern __shared__ __align__(16) unsigned char raw[];
  walk_back(*reinterpret_cast<BackShared*>(raw), task);
}
#endif
