#define SIMULATED
#include "decode.cuh"
extern "C" int run(const TokenTask* task, unsigned seed, int skip, int from) {
  const TokenTask t = *task;
  return sim::launch(t.P, CS, HALF, sizeof(TokenShared),
                     [t](void* s) { decode(*(TokenShared*)s, t); }, seed, skip, from);
}
