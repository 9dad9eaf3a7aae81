// Products of whole warpgroups (wgmma, compute capability 9.0): 64 rows at a time.
//
// A warp holds 16 of the rows, in the accumulators of `mma`. The right side is read from shared
// memory, the left one too or from registers, as `mma` takes it. Both are read at any time between
// `open_products` and `close_products`, and sums are there behind it. What other instructions have
// stored is seen by these products once its thread has crossed `hand_over` before a barrier.
//
// Matrices lie in core matrices of 8 rows by 8 columns, 128 bytes each, eight rows of the matrix one
// core matrix behind the other (`cell`). A descriptor says where the first one is (bits 0 to 13, in 16
// bytes), and how far they lie apart along the summed dimension (from bit 16) and along the other
// one (from bit 32); no swizzle (bits 62, 63). The same matrix is summed over columns, as it lies,
// or over rows, transposed.
#pragma once

#ifdef SIMULATED
#include "warpgroup_sim.h"
#else
DEV void hand_over(int) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEV void products_fence(int) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void products_commit(int) { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
DEV void products_wait(int) { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Registers of a thread from here on, of the 128 that each of 512 begins with, or 168 of 384: all four
// warps of a group, and what some take others give.
template <int COUNT>
DEV void registers() {
  if constexpr (COUNT > 128)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
  else
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Keeps what uses registers on its own side of the instructions above.
DEV void settle(float& x) { asm volatile("" : "+f"(x)::"memory"); }
DEV void settle(u32& x) { asm volatile("" : "+r"(x)::"memory"); }

#define TILE(c, j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define TILES4(c, j) TILE(c, j), TILE(c, j + 1), TILE(c, j + 2), TILE(c, j + 3)
#define SUMS8 "{%0,%1,%2,%3,%4,%5,%6,%7}, "
#define SUMS16 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
#define SUMS32                                                                             \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
  "%24,%25,%26,%27,%28,%29,%30,%31}, "
#define PRODUCT(n, add, sums, sides)                             \
  "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " add ", 0;\n\t"          \
  "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 " sums \
  sides ";\n\t}"

// c[64, 8 TILES] = a b, or += ; b is summed over its columns, or (TRANSPOSED) over its rows.
template <int TILES, int TRANSPOSED, int ADD>
DEV void wgmma(float (*c)[4], u64 a, u64 b) {
  static_assert(TILES == 2 || TILES == 4 || TILES == 8, "columns of a product");
  if constexpr (TILES == 2)
    asm volatile(PRODUCT("16", "%10", SUMS8, "%8, %9, p, 1, 1, 0, %11")
                 : TILE(c, 0), TILE(c, 1)
                 : "l"(a), "l"(b), "n"(ADD), "n"(TRANSPOSED));
  else if constexpr (TILES == 4)
    asm volatile(PRODUCT("32", "%18", SUMS16, "%16, %17, p, 1, 1, 0, %19")
                 : TILES4(c, 0)
                 : "l"(a), "l"(b), "n"(ADD), "n"(TRANSPOSED));
  else
    asm volatile(PRODUCT("64", "%34", SUMS32, "%32, %33, p, 1, 1, 0, %35")
                 : TILES4(c, 0), TILES4(c, 4)
                 : "l"(a), "l"(b), "n"(ADD), "n"(TRANSPOSED));
}
template <int TILES, int TRANSPOSED, int ADD>
DEV void wgmma(float (*c)[4], const u32* a, u64 b) {
  static_assert(TILES == 2 || TILES == 4 || TILES == 8, "columns of a product");
  if constexpr (TILES == 2)
    asm volatile(PRODUCT("16", "%13", SUMS8, "{%8,%9,%10,%11}, %12, p, 1, 1, %14")
                 : TILE(c, 0), TILE(c, 1)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD), "n"(TRANSPOSED));
  else if constexpr (TILES == 4)
    asm volatile(PRODUCT("32", "%21", SUMS16, "{%16,%17,%18,%19}, %20, p, 1, 1, %22")
                 : TILES4(c, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD), "n"(TRANSPOSED));
  else
    asm volatile(PRODUCT("64", "%37", SUMS32, "{%32,%33,%34,%35}, %36, p, 1, 1, %38")
                 : TILES4(c, 0), TILES4(c, 4)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD), "n"(TRANSPOSED));
}
#endif

constexpr u64 CORE = 128;  // bytes of a core matrix
DEV u64 descriptor(const bf16* p, u64 along, u64 across) {
  return (shared_address(p) & 0x3ffff) >> 4 | along >> 4 << 16 | across >> 4 << 32;
}

template <int TILES>
DEV void settle_tiles(float (*c)[4]) {
#pragma unroll
  for (int j = 0; j < TILES; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) settle(c[j][e]);
}

template <int COUNT>
DEV void settle_left(u32 (*a)[4]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++)
#pragma unroll
    for (int x = 0; x < 4; x++) settle(a[i][x]);
}

DEV void open_products(int which) { products_fence(which); }
DEV void close_products(int which) {
  products_commit(which);
  products_wait(which);
}

// acc[64, 8 TILES] = A[64, K] B', rows of B its columns: from row `col` on.
template <int K, int TILES>
DEV void rows_into(float (*acc)[4], const bf16* a, int, const bf16* b, int col) {
#pragma unroll
  for (int i = 0; i < K; i += 16) {
    const u64 left = descriptor(&a[cell<K>(0, i)], CORE, K / 8 * CORE);
    const u64 right = descriptor(&b[cell<K>(col, 0) + cell<K>(0, i)], CORE, K / 8 * CORE);
    if (i == 0)
      wgmma<TILES, 0, 0>(acc, left, right);
    else
      wgmma<TILES, 0, 1>(acc, left, right);
  }
}
// acc[64, 8 TILES] = A[64, K] B[K, ...], of B's D columns those from `col` on.
template <int K, int TILES>
DEV void columns_into(float (*acc)[4], const bf16* a, int, const bf16* b, int col) {
#pragma unroll
  for (int i = 0; i < K; i += 16) {
    const u64 left = descriptor(&a[cell<K>(0, i)], CORE, K / 8 * CORE);
    const u64 right = descriptor(&b[cell<D>(0, col) + cell<D>(i, 0)], D / 8 * CORE, CORE);
    if (i == 0)
      wgmma<TILES, 1, 0>(acc, left, right);
    else
      wgmma<TILES, 1, 1>(acc, left, right);
  }
}
// acc = or += A[64, 16] of registers times rows `row` to `row` + 15 of B, W columns wide.
template <int W, int TILES, int ADD>
DEV void strip_into(float (*acc)[4], const u32* a, const bf16* b, int row, int col) {
  wgmma<TILES, 1, ADD>(acc, a, descriptor(&b[cell<W>(0, col) + cell<W>(row, 0)], W / 8 * CORE, CORE));
}
