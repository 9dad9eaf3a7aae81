// What the kernels are written over: PTX on a GPU, and emulations of it in tests (SIMULATED).
#pragma once
#ifdef SIMULATED
#include "sim.h"
#else
typedef unsigned int u32;
typedef unsigned long long u64;
struct bf16 {
  unsigned short x;
};
#define DEV __device__ __forceinline__
#define DEV_IN __device__ __forceinline__  // inside of a class

// Opaque to the optimiser, or it would keep every address of a loop in a register of its own.
DEV int tid() {
  int t = threadIdx.x;
  asm volatile("" : "+r"(t));
  return t;
}
DEV int block() { return blockIdx.x; }

// Barriers. `which` names the place in the source, for the tests that leave one out.
DEV void sync_block(int) { __syncthreads(); }
DEV void sync_group(int, int id, int count) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}
#if __CUDA_ARCH__ >= 900
DEV int cluster_rank() {
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
DEV void sync_cluster(int) {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n\t"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}
// What stands at the same place in the shared memory of another block of the cluster.
DEV u32 peer_address(const void* p, int rank) {
  u32 a;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(a)
      : "r"((u32)__cvta_generic_to_shared(p)), "r"(rank));
  return a;
}
DEV float peer1(const float* p, int rank) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(peer_address(p, rank)) : "memory");
  return x;
}
DEV float2 peer2(const float* p, int rank) {
  float2 x;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(x.x), "=f"(x.y)
               : "r"(peer_address(p, rank))
               : "memory");
  return x;
}
#else  // no clusters: a memory lives in one block
DEV int cluster_rank() { return 0; }
DEV void sync_cluster(int) { __syncthreads(); }
DEV float peer1(const float* p, int) { return *p; }
DEV float2 peer2(const float* p, int) { return *reinterpret_cast<const float2*>(p); }
#endif

DEV void noted(const void*, int) {}  // a store into shared memory; a simulator follows them

DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV void ldm4(u32* r, const bf16* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(p))
               : "memory");
}
DEV void ldm4t(u32* r, const bf16* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(p))
               : "memory");
}
DEV void ldm2t(u32* r, const bf16* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(p))
               : "memory");
}
// 16 bytes from device memory into shared memory, there after `wait_copies` of the same thread.
DEV void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}
DEV void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
DEV void mma(float* c, const u32* a, const u32* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEV u32 pack(float x, float y) {
  u32 u;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(u) : "f"(y), "f"(x));
  return u;
}
DEV float2 unpack(u32 u) {
  return make_float2(__uint_as_float(u << 16), __uint_as_float(u & 0xffff0000u));
}
DEV float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
// Four numbers, whose address is a multiple of 16 bytes.
DEV float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
DEV void store4(float* p, float4 x) { *reinterpret_cast<float4*>(p) = x; }
#endif
