// Sizes, the activation, products of tiles, and who holds what: for the walk and the way back.
#pragma once
#include "primitives.cuh"

#ifndef TRACE
#define TRACE 0
#endif
// With 64 tokens whole warpgroups multiply.
constexpr bool CORES = R == 64;
// Threads that hold the state, and beside them those that read, or only bring tokens: then a warp, or
// a whole group, since only groups give registers away.
constexpr int HALF = 256, OTHERS = !TRACE ? 256 : CORES ? 128 : 32, THREADS = HALF + OTHERS;
constexpr int WARPS = 8;
// Matrices of halves: in rows 16 bytes apart modulo 128, or, for warpgroups, in core matrices of 8
// rows by 8 columns, 128 bytes each; neither has bank conflicts.
constexpr int LD = CORES ? D : D + 8, LH = CORES ? HS : HS + 8;
constexpr int SLOTS = 1 + MOMENTUM, HIDDEN = CS * HS;
constexpr float EPS = 1e-6f, TINY = 1.17549435e-38f;

// A product [R, width]: its 16 rows by 8 columns over eight warps, each within one strip of rows.
constexpr int STRIPS = R / 16, BESIDE = WARPS / STRIPS;
constexpr int TH = (HS / 8 + BESIDE - 1) / BESIDE, TD = (D / 8 + BESIDE - 1) / BESIDE;
// The state [HS, D] in tiles of 16 hidden units by 8 channels: WIDE of them in a row, per warp.
constexpr int ACROSS = WARPS / (HS / 16), WIDE = D / 8 / ACROSS;
static_assert(R % 16 == 0 && WARPS % STRIPS == 0, "tokens of a batch");
// Tiles of a product that are found together: one, or with whole warpgroups all of a warp's.
constexpr int GH = CORES ? TH : 1, GD = CORES ? 4 : 1, GR = CORES ? R / 8 : 2;
static_assert(HS % 32 == 0 && HS <= 128 && D % 32 == 0 && WIDE % 2 == 0, "hidden units, channels");

#if CURVE == 0  // gelu
DEV void curve(float z, float& y, float& slope) {
  const float c = 0.5f * (1.f + erff(z * 0.70710678f));
  y = z * c, slope = c + z * 0.39894228f * expf(-0.5f * z * z);
}
DEV float curve_bend(float z) { return (2.f - z * z) * 0.39894228f * expf(-0.5f * z * z); }
#elif CURVE == 1  // gelu by tanh
DEV void curve(float z, float& y, float& slope) {
  const float t = tanhf(0.79788456f * z * (1.f + 0.044715f * z * z)), c = 0.5f * (1.f + t);
  y = z * c, slope = c + 0.5f * z * (1.f - t * t) * 0.79788456f * (1.f + 0.134145f * z * z);
}
DEV float curve_bend(float z) {
  const float square = z * z, t = tanhf(0.79788456f * z * (1.f + 0.044715f * square));
  const float inner = 0.79788456f * (1.f + 0.134145f * square);
  const float second = 0.21406447f * z - 2.f * t * inner * inner;
  return (1.f - t * t) * (inner + 0.5f * z * second);
}
#elif CURVE == 2  // silu
DEV void curve(float z, float& y, float& slope) {
  const float c = 1.f / (1.f + expf(-z));
  y = z * c, slope = c + y * (1.f - c);
}
DEV float curve_bend(float z) {
  const float c = 1.f / (1.f + expf(-z));
  return c * (1.f - c) * (2.f + z * (1.f - 2.f * c));
}
#else  // relu
DEV void curve(float z, float& y, float& slope) {
  y = z > 0.f ? z : 0.f, slope = z > 0.f ? 1.f : 0.f;
}
DEV float curve_bend(float) { return 0.f; }
#endif

// Where an entry of a matrix of halves with W columns lies. Places add up: cell(row + 8 i, col + 8 j)
// is cell(row, col) + cell(8 i, 8 j), of which the compiler knows the second.
template <int W>
DEV int cell(int row, int col) {
  return CORES ? row / 8 * 8 * W + col / 8 * 64 + row % 8 * 8 + col % 8 : row * (W + 8) + col;
}

// acc[16, 8] += A[16, K] B', rows of B its columns: from rows `row` of a and `col` of b on.
template <int K>
DEV void dot_rows(float* acc, const bf16* a, int row, const bf16* b, int col) {
  const int l = tid() % 32, left = cell<K>(row + l % 16, l / 16 * 8);
  const int right = cell<K>(col + l % 8, l / 8 * 8);
  u32 f[4], g[4];
#pragma unroll
  for (int i = 0; i < K; i += 32) {
    ldm4(g, &b[right + cell<K>(0, i)]);
    ldm4(f, &a[left + cell<K>(0, i)]);
    mma(acc, f, g);
    ldm4(f, &a[left + cell<K>(0, i + 16)]);
    mma(acc, f, g + 2);
  }
}
// acc[16, 8] += A[16, K] B[K, 8], of B's D columns those from `col` on.
template <int K>
DEV void dot_columns(float* acc, const bf16* a, int row, const bf16* b, int col) {
  const int l = tid() % 32, left = cell<K>(row + l % 16, l / 16 * 8), right = cell<D>(l, col);
  u32 f[4], g[4];
#pragma unroll
  for (int i = 0; i < K; i += 32) {
    ldm4t(g, &b[right + cell<D>(i, 0)]);
    ldm4(f, &a[left + cell<K>(0, i)]);
    mma(acc, f, g);
    ldm4(f, &a[left + cell<K>(0, i + 16)]);
    mma(acc, f, g + 2);
  }
}
#if R == 64
#include "warpgroup.cuh"
#else  // the same by products of a warp, tile by tile; their results are there at once
DEV void hand_over(int) {}
template <int COUNT>
DEV void registers() {}
DEV void open_products(int) {}
DEV void close_products(int) {}
template <int TILES>
DEV void settle_tiles(float (*)[4]) {}
template <int COUNT>
DEV void settle_left(u32 (*)[4]) {}
template <int K, int TILES>
DEV void rows_into(float (*acc)[4], const bf16* a, int row, const bf16* b, int col) {
#pragma unroll
  for (int j = 0; j < TILES; j++) {
#pragma unroll
    for (int e = 0; e < 4; e++) acc[j][e] = 0;
    dot_rows<K>(acc[j], a, row, b, col + j * 8);
  }
}
template <int K, int TILES>
DEV void columns_into(float (*acc)[4], const bf16* a, int row, const bf16* b, int col) {
#pragma unroll
  for (int j = 0; j < TILES; j++) {
#pragma unroll
    for (int e = 0; e < 4; e++) acc[j][e] = 0;
    dot_columns<K>(acc[j], a, row, b, col + j * 8);
  }
}
template <int W, int TILES, int ADD>
DEV void strip_into(float (*acc)[4], const u32* a, const bf16* b, int row, int col) {
  const int l = tid() % 32;
  u32 f[2];
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    if (!ADD)
#pragma unroll
      for (int e = 0; e < 4; e++) acc[j][e] = 0;
    ldm2t(f, &b[cell<W>(row + l % 16, col + j * 8)]);
    mma(acc[j], a, f);
  }
}
#endif

DEV u32 scaled(u32 x, float first, float second) {
  const float2 f = unpack(x);
  return pack(f.x * first, f.y * second);
}
DEV void store2(bf16* p, u32 x) {
  *reinterpret_cast<u32*>(p) = x;
  noted(p, 4);
}
DEV u32 load2(const bf16* p) { return *reinterpret_cast<const u32*>(p); }
// Over the four lanes that hold one row of a tile.
DEV float over_row(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}
// Where a warp's tiles of a product [R, width] are: its strip of rows, and its first column.
struct Strip {
  int row, warp, gr, gc;
  DEV_IN Strip() {
    const int w = tid() % HALF / 32, l = tid() % 32;
    row = w % STRIPS * 16, warp = w / STRIPS, gr = l / 4, gc = l % 4 * 2;
  }
};

// Halves from device memory, rows of W of them `apart` from one another, 16 bytes at a time.
template <int W>
DEV void bring_rows(bf16* to, const bf16* from, size_t apart, int rows, int thread, int step) {
#pragma unroll
  for (int i = thread; i < rows * W / 8; i += step) {
    // Of core matrices eight threads bring one.
    const int r = CORES ? i / W * 8 + i % 8 : i / (W / 8);
    const int c = CORES ? i % W / 8 * 8 : i % (W / 8) * 8;
    copy_async(&to[cell<W>(r, c)], &from[r * apart + c]);
  }
}

struct State {
  float W[SLOTS][2][WIDE][4];
};

struct Spot {  // the entries of the state that this thread holds
  int hidden, first;
  DEV_IN Spot() {
    const int w = tid() / 32, l = tid() % 32;
    hidden = w % (HS / 16) * 16 + l / 4, first = w / (HS / 16) * WIDE * 8 + l % 4 * 2;
  }
  // Where the first of them lies in device memory, and how far from it the others do.
  DEV_IN size_t place(int map, size_t pair) const {
    const size_t row = (size_t)cluster_rank() * HS + hidden;
    return pair * HIDDEN * D + (map ? (size_t)first * HIDDEN + row : row * D + first);
  }
  DEV_IN static constexpr int beyond(int map, int j, int e) {
    const int row = e / 2 * 8, at = j * 8 + e % 2;
    return map ? at * HIDDEN + row : row * D + at;
  }
};

// The state from device memory and to it: A1 [P, hidden, D], A2 [P, D, hidden], then S1, S2.
DEV void take_state(State& state, const float* const* from) {
  const Spot spot;
#pragma unroll
  for (int i = 0; i < SLOTS; i++)
#pragma unroll
    for (int map = 0; map < 2; map++) {
      const float* p = from[2 * i + map] + spot.place(map, block() / CS);
#pragma unroll
      for (int j = 0; j < WIDE; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) state.W[i][map][j][e] = p[Spot::beyond(map, j, e)];
    }
}
DEV void give_state(const State& state, float* const* to) {
  const Spot spot;
#pragma unroll
  for (int i = 0; i < SLOTS; i++)
#pragma unroll
    for (int map = 0; map < 2; map++) {
      float* p = to[2 * i + map] + spot.place(map, block() / CS);
#pragma unroll
      for (int j = 0; j < WIDE; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) p[Spot::beyond(map, j, e)] = state.W[i][map][j][e];
    }
}

#ifndef SIMULATED
#if __CUDA_ARCH__ >= 900
#define CLUSTERED __cluster_dims__(CS, 1, 1)
#else
#define CLUSTERED
#endif
#endif
