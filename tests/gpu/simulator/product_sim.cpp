// One product of a warpgroup by descriptors that a test gives, over shared memory that it gives.
#define SIMULATED
#include "layout.cuh"
struct Given {
  const char* memory;
  u64 left, right;
  float* out;  // [64, 32]
  int bytes, transposed;
};
DEV void multiply_given(char* shared, const Given& given) {
  for (int i = tid() * 4; i < given.bytes; i += HALF * 4) {
    memcpy(&shared[i], &given.memory[i], 4);
    noted(&shared[i], 4);
  }
  hand_over(0);
  sync_block(0);
  if (tid() >= 128) return;
  float c[4][4];
  open_products(0);
  if (given.transposed)
    wgmma<4, 1, 0>(c, given.left, given.right);
  else
    wgmma<4, 0, 0>(c, given.left, given.right);
  close_products(0);
  for (int j = 0; j < 4; j++)
    for (int e = 0; e < 4; e++) {
      const int row = tid() / 32 * 16 + tid() % 32 / 4 + e / 2 * 8;
      given.out[row * 32 + j * 8 + tid() % 4 * 2 + e % 2] = c[j][e];
    }
}
extern "C" int run(const Given* given, unsigned seed, int skip, int from) {
  const Given g = *given;
  return sim::launch(1, 1, HALF, g.bytes, [g](void* s) { multiply_given((char*)s, g); }, seed, skip,
                     from);
}
