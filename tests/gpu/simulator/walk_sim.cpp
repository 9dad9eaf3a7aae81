#define SIMULATED
#include "walk.cuh"
extern "C" int run(const Task* task, unsigned seed, int skip, int from) {
  const Task t = *task;
  return sim::launch(t.P, CS, THREADS, sizeof(Shared), [t](void* s) { walk(*(Shared*)s, t); }, seed,
                     skip, from);
}
