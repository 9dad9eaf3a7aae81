#define SIMULATED
#include "back.cuh"
extern "C" int run(const BackTask* task, unsigned seed, int skip, int from) {
  const BackTask t = *task;
  return sim::launch(t.P, CS, HALF, sizeof(BackShared),
                     [t](void* s) { walk_back(*(BackShared*)s, t); }, seed, skip, from);
}
