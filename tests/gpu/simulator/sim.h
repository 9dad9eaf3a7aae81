// A cluster of thread blocks on one CPU thread, for kernels that are written over primitives.cuh.
//
// Every GPU thread is a fiber. Instructions of a whole warp (products, matrix loads, shuffles) and
// barriers are meeting points. Warps run in random order, some fall behind for a while, and whole
// blocks do, so that a missing barrier shows as wrong numbers. Shared memory begins as NaN, and is
// NaN again at the moment in which its block ends; to form an address in an ended block is a fault.
// A barrier that not all reach is a deadlock. `launch` returns what went wrong (`Fault`).
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <random>
#include <vector>

#define DEV static inline
#define DEV_IN inline  // inside of a class
typedef uint32_t u32;
typedef unsigned long long u64;
struct bf16 {
  uint16_t x;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct uint4 {
  uint32_t x, y, z, w;
};

static inline float as_float(uint16_t u) {
  uint32_t b = (uint32_t)u << 16;
  float f;
  memcpy(&f, &b, 4);
  return f;
}
static inline uint16_t as_bf16(float f) {  // to nearest, ties to even
  uint32_t b;
  memcpy(&b, &f, 4);
  if ((b & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (uint16_t)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
DEV u32 pack(float x, float y) { return as_bf16(x) | ((u32)as_bf16(y) << 16); }
DEV float2 unpack(u32 u) { return {as_float(u & 0xffff), as_float(u >> 16)}; }

namespace sim {
enum Fault { NONE = 0, DEADLOCK = 1, MISALIGNED = 2, ENDED = 3 };
constexpr size_t STACK = 32768;
struct Meet {
  int n = 0;
  long gen = 0;
};
struct Warp {
  Meet m;
  const void* p[32];
  u32* r[32];
  float* c[32];
  const u32* a[32];
  const u32* b[32];
  float given[32], taken[32];
};
struct Copy {
  void* to;
  const void* from;
};
struct Fiber {
  jmp_buf here;
  ucontext_t first;
  int tid, rank, crossed;
  bool begun, done;
  Meet* on;
  long gen;
  std::vector<Copy> copies;
};
static jmp_buf root;
static ucontext_t root_first;
static std::vector<Fiber> fibers;
static Fiber* me;
static std::vector<Warp> warps;
static std::vector<std::vector<Meet>> groups;  // per block, per hardware barrier
static Meet cluster;
static int threads, blocks, first_block, fault, skipped = -1, skipped_from = 0;
static std::vector<char*> memory;
static std::vector<int> alive;
static size_t memory_bytes;
static std::function<void(void*)> program;
static void (*at_border)(bool) = [](bool) {};  // a cluster begins, or has ended

static inline Warp& warp() { return warps[me->rank * (threads / 32) + me->tid / 32]; }

static inline void pause() {
  if (!_setjmp(me->here)) _longjmp(root, 1);
}
template <class Act>
static inline void meet(Meet& m, int total, Act act) {
  if (++m.n == total) {
    m.n = 0;
    act();
    m.gen++;
    return;
  }
  me->on = &m;
  me->gen = m.gen;
  pause();
  me->on = nullptr;
}
static void entry() {
  program(memory[me->rank]);
  me->done = true;
  if (--alive[me->rank] == 0) memset(memory[me->rank], 0xff, memory_bytes);
  _longjmp(root, 1);
}
static inline bool waits(const Fiber& x) { return x.done || (x.on && x.on->gen == x.gen); }

static void resume(Fiber& x) {
  me = &x;
  if (_setjmp(root)) return;
  if (x.begun) _longjmp(x.here, 1);
  x.begun = true;
  swapcontext(&root_first, &x.first);
}

static int launch(int clusters, int size, int count, size_t bytes, std::function<void(void*)> f,
                  unsigned seed, int skip, int from) {
  threads = count, blocks = size, program = f, memory_bytes = bytes, fault = NONE;
  skipped = skip, skipped_from = from;
  std::mt19937 g(seed);
  char* stacks = (char*)malloc((size_t)size * count * STACK);
  for (int at = 0; at < clusters && !fault; at++) {
    first_block = at * size;
    fibers.assign(size * count, {});
    warps.assign(size * count / 32, {});
    groups.assign(size, std::vector<Meet>(16));
    alive.assign(size, count);
    cluster = {};
    memory.assign(size, nullptr);
    for (auto& s : memory) {
      s = (char*)aligned_alloc(128, (bytes + 127) / 128 * 128);
      memset(s, 0xff, bytes);
    }
    for (int i = 0; i < (int)fibers.size(); i++) {
      Fiber& x = fibers[i];
      x.tid = i % count, x.rank = i / count;
      getcontext(&x.first);
      x.first.uc_stack.ss_sp = stacks + (size_t)i * STACK;
      x.first.uc_stack.ss_size = STACK;
      x.first.uc_link = nullptr;
      makecontext(&x.first, entry, 0);
    }
    at_border(true);
    const int total = (int)warps.size(), per = count / 32;
    std::vector<int> order(total), lag(total, 0), late(size, 0);
    for (int i = 0; i < total; i++) order[i] = i;
    for (long round = 0; !fault; round++) {
      if (round % 16 == 0) {  // some warps fall behind, and now and then a whole block,
        for (auto& x : lag) x = g() % 4 ? 0 : (int)(g() % 15);
        for (auto& x : late)  // for a while (1) or until nobody else can go on (2)
          if (x != 2) x = g() % 6 ? 0 : 1 + (int)(g() % 2);
      }
      std::shuffle(order.begin(), order.end(), g);
      bool any = false, left = false, held = false;
      for (int w : order) {
        Fiber* x = &fibers[w * 32];
        bool can = false;
        for (int i = 0; i < 32; i++) can |= !waits(x[i]), left |= !x[i].done;
        if (!can) continue;
        if (late[w / per] || (int)(g() % 16) < lag[w]) {
          held = true;
          continue;
        }
        any = true;
        for (int turns = 1 + (int)(g() % 6); turns > 0; turns--)
          for (int i = 0; i < 32; i++)
            if (!waits(x[i])) resume(x[i]);
      }
      if (!left) break;
      if (!any && !held) fault = DEADLOCK;
      if (!any) std::fill(late.begin(), late.end(), 0);
    }
    at_border(false);
    for (auto s : memory) free(s);
  }
  free(stacks);
  return fault;
}
}  // namespace sim

DEV int tid() { return sim::me->tid; }
DEV int block() { return sim::first_block + sim::me->rank; }
DEV int cluster_rank() { return sim::me->rank; }

// `which` names a barrier in the source, so that a test can leave it out, from some crossing on.
static inline bool left_out(int which) {
  return which == sim::skipped && sim::me->crossed++ >= sim::skipped_from;
}
DEV void sync_group(int which, int id, int count) {
  if (left_out(which)) return;
  sim::meet(sim::groups[sim::me->rank][id], count, [] {});
}
DEV void sync_block(int which) { sync_group(which, 0, sim::threads); }
DEV void sync_cluster(int which) {
  if (left_out(which)) return;
  sim::meet(sim::cluster, sim::threads * sim::blocks, [] {});
}
static inline const char* peer(const void* p, int rank) {
  if (!sim::alive[rank]) sim::fault = sim::ENDED;
  return sim::memory[rank] + ((const char*)p - sim::memory[sim::me->rank]);
}
DEV float peer1(const float* p, int rank) { return *(const float*)peer(p, rank); }
DEV float2 peer2(const float* p, int rank) { return *(const float2*)peer(p, rank); }

#if R == 64
static void noted(const void* p, int bytes);  // a store; products of warpgroups see it later
#else
DEV void noted(const void*, int) {}
#endif

// Copies arrive as late as they may: when their thread waits for them.
DEV void copy_async(void* to, const void* from) {
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16) sim::fault = sim::MISALIGNED;
  sim::me->copies.push_back({to, from});
}
DEV void wait_copies() {
  for (const auto& x : sim::me->copies) {
    memcpy(x.to, x.from, 16);
    noted(x.to, 16);
  }
  sim::me->copies.clear();
}

DEV float4 load4(const float* p) {
  if ((uintptr_t)p % 16) sim::fault = sim::MISALIGNED;
  return *(const float4*)p;
}
DEV void store4(float* p, float4 x) {
  if ((uintptr_t)p % 16) sim::fault = sim::MISALIGNED;
  *(float4*)p = x;
}

DEV float shuffle_xor(float x, int mask) {
  auto& w = sim::warp();
  const int lane = sim::me->tid % 32;
  w.given[lane] = x;
  sim::meet(w.m, 32, [&w] { memcpy(w.taken, w.given, sizeof w.given); });
  return w.taken[lane ^ mask];
}
static inline void load_matrices(u32* r, const bf16* p, bool transposed, int count) {
  auto& w = sim::warp();
  const int lane = sim::me->tid % 32;
  w.p[lane] = p, w.r[lane] = r;
  if ((uintptr_t)p % 16) sim::fault = sim::MISALIGNED;
  sim::meet(w.m, 32, [&w, transposed, count] {
    for (int m = 0; m < count; m++)
      for (int l = 0; l < 32; l++) {
        uint16_t e[2];
        for (int i = 0; i < 2; i++) {
          const int row = l / 4, col = (l % 4) * 2 + i;
          const bf16* q = (const bf16*)w.p[m * 8 + (transposed ? col : row)];
          e[i] = q[transposed ? row : col].x;
        }
        w.r[l][m] = e[0] | ((u32)e[1] << 16);
      }
  });
}
DEV void ldm4(u32* r, const bf16* p) { load_matrices(r, p, false, 4); }
DEV void ldm4t(u32* r, const bf16* p) { load_matrices(r, p, true, 4); }
DEV void ldm2t(u32* r, const bf16* p) { load_matrices(r, p, true, 2); }
DEV void mma(float* c, const u32* a, const u32* b) {  // m16n8k16, float32 sums
  auto& w = sim::warp();
  const int lane = sim::me->tid % 32;
  w.c[lane] = c, w.a[lane] = a, w.b[lane] = b;
  sim::meet(w.m, 32, [&w] {
    float A[16][16], B[16][8], S[16][8] = {};
    for (int l = 0; l < 32; l++) {
      const int g = l / 4, t = (l % 4) * 2;
      for (int i = 0; i < 4; i++) {
        const float2 f = unpack(w.a[l][i]);
        A[g + (i & 1) * 8][t + (i >> 1) * 8] = f.x, A[g + (i & 1) * 8][t + (i >> 1) * 8 + 1] = f.y;
      }
      for (int i = 0; i < 2; i++) {
        const float2 f = unpack(w.b[l][i]);
        B[t + i * 8][g] = f.x, B[t + i * 8 + 1][g] = f.y;
      }
    }
    for (int r = 0; r < 16; r++)
      for (int k = 0; k < 16; k++)
        for (int n = 0; n < 8; n++) S[r][n] += A[r][k] * B[k][n];
    for (int l = 0; l < 32; l++)
      for (int i = 0; i < 4; i++) w.c[l][i] += S[l / 4 + (i >> 1) * 8][(l % 4) * 2 + (i & 1)];
  });
}
