// wgmma on the simulated cluster: descriptors, fragments, and what may happen before a wait.
//
// Each warp of a warpgroup works by itself, on its 16 rows; nothing orders the four. Operands are
// read at once, and once more when the warp waits: one that has changed by then is a fault. Until
// then accumulators hold NaN of a kind of its own; what reads them sees NaN, and what writes them is
// a fault. A product reads shared memory as the asynchronous proxy sees it: a store of other
// instructions is there once its thread has crossed `hand_over`, and a product that reads one that is
// not is a fault. So are a product that no fence has preceded since the last wait, warps that give
// different operands, warps of a group that do not all multiply, and addresses or distances that no
// descriptor has.
#pragma once
#include <utility>

namespace sim {
enum WideFault { CHANGED = 4, NOT_HANDED_OVER, UNFENCED, TOUCHED, DISAGREE, DESCRIPTOR };
constexpr u32 LATER = 0x7fabcdef;  // what an accumulator holds until it is waited for
// What a test leaves out: places as barriers are, from 50 on for `hand_over`, and from 100 on, three
// for each product, for fence, commit and wait.
constexpr int HANDED = 50, FENCED = 100, COMMITTED = 101, WAITED = 102;

struct Sum {  // tiles of 32 threads
  float (*at[32])[4];
  int tiles;
  std::vector<float> value[32];
};
struct Piece {  // what a product has read
  const void* from;
  uint16_t what[8];
};
struct Job {
  std::vector<Piece> pieces;
  const u32* left[32] = {};
  u32 given[32][4];
  int sum;
  bool committed = false;
};
struct WideWarp {
  std::vector<Job> jobs;
  std::vector<Sum> sums;
  long products = 0;
  bool fenced = false;
  // of the call in progress
  float (*c[32])[4];
  const u32* a[32];
  u64 left[32], right[32];
};
static std::vector<WideWarp> wide;
static std::vector<std::vector<std::vector<u64>>> asked;   // by block, by warpgroup: all products
static std::vector<std::vector<char>> seen;                // shared memory by the other proxy
static std::vector<std::vector<std::pair<size_t, int>>> stored;  // by thread

static void border(bool begins) {
  if (!begins) {  // all warps of a group have multiplied as often
    for (size_t w = 0; w < wide.size() && !fault; w++) {
      const int block = (int)w / (threads / 32), group = (int)w % (threads / 32) / 4;
      if (wide[w].products != (long)asked[block][group].size()) fault = DISAGREE;
    }
    return;
  }
  wide.assign(warps.size(), {});
  asked.assign(blocks, std::vector<std::vector<u64>>((threads / 32 + 3) / 4));
  seen.assign(blocks, std::vector<char>(memory_bytes, (char)0xff));
  stored.assign(fibers.size(), {});
}
static const bool bordered = (at_border = border, true);

static inline WideWarp& wide_warp() { return wide[me->rank * (threads / 32) + me->tid / 32]; }
static inline void blame(int what) {
  if (!fault) fault = what;
}

// Eight halves of a core matrix's row, as the other proxy sees them.
static const uint16_t* core_row(Job& job, size_t place) {
  if (place % 16 || place + 16 > memory_bytes) {
    blame(DESCRIPTOR);
    place = 0;
  }
  const char *now = memory[me->rank] + place, *then = &seen[me->rank][place];
  if (memcmp(now, then, 16)) blame(NOT_HANDED_OVER);
  Piece piece = {now};
  memcpy(piece.what, now, 16);
  job.pieces.push_back(piece);
  return (const uint16_t*)then;
}

// A matrix [8 strips, 16] by its descriptor; transposed, eight of `strips` lie in a row.
static std::vector<float> matrix(Job& job, u64 given, int from, int strips, bool transposed) {
  if (given >> 62 || given >> 49 & 7) blame(DESCRIPTOR);  // no swizzle here
  const size_t start = (given & 0x3fff) << 4;
  const size_t along = (given >> 16 & 0x3fff) << 4, across = (given >> 32 & 0x3fff) << 4;
  std::vector<float> m(strips * 8 * 16);
  for (int s = 0; s < strips; s++)
    for (int k = 0; k < 2; k++)
      for (int i = 0; i < 8; i++) {
        const uint16_t* row = core_row(job, start + (from + s) * across + k * along + i * 16);
        for (int j = 0; j < 8; j++)
          m[(s * 8 + (transposed ? j : i)) * 16 + k * 8 + (transposed ? i : j)] = as_float(row[j]);
      }
  return m;
}

static void multiply(WideWarp& w, int tiles, bool by_register, bool transposed, bool add) {
  Job job;
  for (int l = 1; l < 32; l++)
    if (w.right[l] != w.right[0] || (!by_register && w.left[l] != w.left[0])) blame(DISAGREE);
  const int strip = me->tid / 32 % 4;
  auto& said = asked[me->rank][me->tid / 128];
  const u64 kind = w.right[0] * 31 + (by_register ? 1 : w.left[0]) * 17 + tiles * 8 + transposed * 2 + add;
  if (w.products == (long)said.size())
    said.push_back(kind);
  else if (said[w.products] != kind)
    blame(DISAGREE);
  w.products++;
  if (!w.fenced) blame(UNFENCED);

  float A[16][16];
  if (by_register)
    for (int l = 0; l < 32; l++) {
      job.left[l] = w.a[l];
      memcpy(job.given[l], w.a[l], 16);
      for (int i = 0; i < 4; i++) {
        const float2 f = unpack(w.a[l][i]);
        float* to = &A[l / 4 + i % 2 * 8][l % 4 * 2 + i / 2 * 8];
        to[0] = f.x, to[1] = f.y;
      }
    }
  else {
    const std::vector<float> m = matrix(job, w.left[0], strip * 2, 2, false);
    memcpy(A, m.data(), sizeof A);
  }
  const std::vector<float> B = matrix(job, w.right[0], 0, tiles, transposed);

  job.sum = -1;
  for (int i = 0; i < (int)w.sums.size(); i++)
    if (w.sums[i].at[0] == w.c[0]) job.sum = i;
  if (job.sum < 0) {
    Sum sum;
    sum.tiles = tiles;
    for (int l = 0; l < 32; l++) {
      sum.at[l] = w.c[l];
      sum.value[l].assign(&w.c[l][0][0], &w.c[l][0][0] + tiles * 4);
      for (int i = 0; i < tiles * 4; i++) memcpy(&w.c[l][i / 4][i % 4], &LATER, 4);
    }
    job.sum = (int)w.sums.size();
    w.sums.push_back(sum);
  }
  Sum& sum = w.sums[job.sum];
  if (sum.tiles != tiles) return blame(TOUCHED);
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < tiles * 4; i++) {
      const int row = l / 4 + i % 4 / 2 * 8, col = i / 4 * 8 + l % 4 * 2 + i % 2;
      float x = 0;
      for (int k = 0; k < 16; k++) x += A[row][k] * B[col * 16 + k];
      sum.value[l][i] = add ? sum.value[l][i] + x : x;
    }
  w.jobs.push_back(job);
}

static void finish(WideWarp& w) {
  w.fenced = false;
  std::vector<Job> left;
  for (Job& job : w.jobs) {
    if (!job.committed) {
      left.push_back(job);
      continue;
    }
    for (const Piece& x : job.pieces)
      if (memcmp(x.from, x.what, 16)) blame(CHANGED);
    for (int l = 0; l < 32; l++)
      if (job.left[l] && memcmp(job.left[l], job.given[l], 16)) blame(CHANGED);
  }
  w.jobs = left;
  if (!left.empty()) return;  // sums of what nobody has committed are never there
  for (Sum& sum : w.sums)
    for (int l = 0; l < 32; l++)
      for (int i = 0; i < sum.tiles * 4; i++) {
        if (memcmp(&sum.at[l][i / 4][i % 4], &LATER, 4)) return blame(TOUCHED);
        sum.at[l][i / 4][i % 4] = sum.value[l][i];
      }
  w.sums.clear();
}
}  // namespace sim

DEV u32 shared_address(const void* p) { return (u32)((const char*)p - sim::memory[sim::me->rank]); }
static void noted(const void* p, int bytes) {
  const char *at = (const char*)p, *from = sim::memory[sim::me->rank];
  if (at >= from && at < from + sim::memory_bytes)
    sim::stored[sim::me - sim::fibers.data()].push_back({at - from, bytes});
}
DEV void hand_over(int which) {
  if (left_out(sim::HANDED + which)) return;
  for (const auto& x : sim::stored[sim::me - sim::fibers.data()])
    memcpy(&sim::seen[sim::me->rank][x.first], sim::memory[sim::me->rank] + x.first, x.second);
  sim::stored[sim::me - sim::fibers.data()].clear();
}
DEV void products_fence(int which) {
  const bool left = left_out(sim::FENCED + 3 * which);
  auto& w = sim::wide_warp();
  sim::meet(sim::warp().m, 32, [&w, left] { w.fenced |= !left; });
}
DEV void products_commit(int which) {
  const bool left = left_out(sim::COMMITTED + 3 * which);
  auto& w = sim::wide_warp();
  sim::meet(sim::warp().m, 32, [&w, left] {
    for (auto& job : w.jobs) job.committed |= !left;
  });
}
DEV void products_wait(int which) {
  if (left_out(sim::WAITED + 3 * which)) return;
  for (int i = 0; i < 2; i++) sim::pause();  // others go on meanwhile
  auto& w = sim::wide_warp();
  sim::meet(sim::warp().m, 32, [&w] { sim::finish(w); });
}
template <int TILES, int TRANSPOSED, int ADD>
DEV void wgmma(float (*c)[4], u64 a, u64 b) {
  auto& w = sim::wide_warp();
  const int lane = sim::me->tid % 32;
  w.c[lane] = c, w.left[lane] = a, w.right[lane] = b;
  sim::meet(sim::warp().m, 32, [&w] { sim::multiply(w, TILES, false, TRANSPOSED, ADD); });
}
template <int TILES, int TRANSPOSED, int ADD>
DEV void wgmma(float (*c)[4], const u32* a, u64 b) {
  auto& w = sim::wide_warp();
  const int lane = sim::me->tid % 32;
  w.c[lane] = c, w.a[lane] = a, w.right[lane] = b;
  sim::meet(sim::warp().m, 32, [&w] { sim::multiply(w, TILES, true, TRANSPOSED, ADD); });
}
DEV void settle(float&) {}
DEV void settle(u32&) {}
template <int COUNT>
DEV void registers() {}
