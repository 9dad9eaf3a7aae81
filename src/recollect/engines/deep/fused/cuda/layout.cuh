// Sizes, the activation, products of tiles, and who holds what: for the walk and the way back.
#pragma once
#include "primitives.cuh"

#ifndef TRACE
#define TRACE 0
#endif
// Threads that hold the state, and beside them those that read, or only bring tokens.
constexpr int HALF = 256, OTHERS = TRACE ? 32 : 256, THREADS = HALF + OTHERS, WARPS = 8;
constexpr int LD = D + 8, LH = HS + 8;  // rows 16 bytes apart modulo 128: no bank conflicts
constexpr int SLOTS = 1 + MOMENTUM, HIDDEN = CS * HS;
constexpr float EPS = 1e-6f, TINY = 1.17549435e-38f;

// A product [R, width]: its 16 rows by 8 columns over eight warps, each within one strip of rows.
constexpr int STRIPS = R / 16, BESIDE = WARPS / STRIPS;
constexpr int TH = (HS / 8 + BESIDE - 1) / BESIDE, TD = (D / 8 + BESIDE - 1) / BESIDE;
// The state [HS, D] in tiles of 16 hidden units by 8 channels: WIDE of them in a row, per warp.
constexpr int ACROSS = WARPS / (HS / 16), WIDE = D / 8 / ACROSS;
static_assert(R % 16 == 0 && WARPS % STRIPS == 0, "tokens of a batch");
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

// acc[16, 8] += A[16, K] B', rows of B its columns; a points at the first row, b at the first.
template <int K>
DEV void dot_rows(float* acc, const bf16* a, int la, const bf16* b, int lb) {
  const int l = tid() % 32;
  u32 f[4], g[4];
#pragma unroll
  for (int i = 0; i < K; i += 32) {
    ldm4(g, &b[(l % 8) * lb + i + (l / 8) * 8]);
    ldm4(f, &a[(l % 16) * la + i + (l / 16) * 8]);
    mma(acc, f, g);
    ldm4(f, &a[(l % 16) * la + i + 16 + (l / 16) * 8]);
    mma(acc, f, g + 2);
  }
}
// acc[16, 8] += A[16, K] B[K, 8].
template <int K>
DEV void dot_columns(float* acc, const bf16* a, int la, const bf16* b, int lb) {
  const int l = tid() % 32;
  u32 f[4], g[4];
#pragma unroll
  for (int i = 0; i < K; i += 32) {
    ldm4t(g, &b[(i + l) * lb]);
    ldm4(f, &a[(l % 16) * la + i + (l / 16) * 8]);
    mma(acc, f, g);
    ldm4(f, &a[(l % 16) * la + i + 16 + (l / 16) * 8]);
    mma(acc, f, g + 2);
  }
}
DEV u32 scaled(u32 x, float first, float second) {
  const float2 f = unpack(x);
  return pack(f.x * first, f.y * second);
}
DEV void store2(bf16* p, u32 x) { *reinterpret_cast<u32*>(p) = x; }
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

struct State {
  float W[SLOTS][2][WIDE][4];
};

struct Spot {  // the entries of the state that this thread holds
  int hidden, first;
  DEV_IN Spot() {
    const int w = tid() / 32, l = tid() % 32;
    hidden = w % (HS / 16) * 16 + l / 4, first = w / (HS / 16) * WIDE * 8 + l % 4 * 2;
  }
  DEV_IN size_t place(int map, size_t pair, int j, int e) const {
    const size_t row = (size_t)cluster_rank() * HS + hidden + e / 2 * 8, at = first + j * 8 + e % 2;
    return pair * HIDDEN * D + (map ? at * HIDDEN + row : row * D + at);
  }
};

#ifndef SIMULATED
#if __CUDA_ARCH__ >= 900
#define CLUSTERED __cluster_dims__(CS, 1, 1)
#else
#define CLUSTERED
#endif
#endif
