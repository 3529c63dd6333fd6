// The exact cut of a row by one block: bound, histogram, rank.
//
// Scores are seen as uint32 keys that order as they do; 0 is NaN, or not there. The k-th key is sought in a key range:
//   bound    k groups of lanes have an entry each, so the smallest of their maxima is at or below the k-th key
//   bin      BINS equal bins from the largest key down; prefix sums say which one holds the k-th
//   rank     few members: each is ranked among the others; many: the bin becomes the range (3 rounds reach one key)
// What comes out is a cut: take all keys above it and the first `ties` of those equal to it, in index order.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace sparse_prr {

constexpr int BINS = 2048;
constexpr int RANKED = 256;  // members of a bin that are ranked at once; more take another round
constexpr unsigned ALL = 0xFFFFFFFFu;

struct Arguments {
  const void* scores;  // [batch, heads, N], the last stride 1; a row is a block of the grid (heads, batch)
  int64_t batch_stride, head_stride;
  int N, k;
  const void* lengths;  // int32 or int64 [rows], or null
  int64_t length_stride;
  bool wide_lengths;
  const int* forced;  // [batch, heads, F], or null; -1 = no block
  int64_t forced_batch, forced_head, forced_slot;
  int F;
  int* free;        // [rows, k]
  int* selected;    // [rows, F + k], or null
  int* candidates;  // [rows]: entries that were refined
};

struct Cut {
  uint32_t key;
  int ties;
};

template <int WARPS>
struct Shared {
  uint32_t low[WARPS], high[WARPS];
  int sums[WARPS], above[WARPS], equal[WARPS];
  alignas(8) uint32_t members[RANKED];
  int gathered;  // of members
  int total;     // of a list
  int slot, before, inside;
  Cut cut;
  alignas(16) int histogram[BINS];
};

template <int THREADS>
__device__ void clear(Shared<THREADS / 32>& shared) {
#pragma unroll
  for (int b = 0; b < BINS; b += THREADS) shared.histogram[b + threadIdx.x] = 0;
  if (threadIdx.x == 0) shared.gathered = shared.inside = shared.total = 0;
}

__device__ inline float value(float x) { return x; }
__device__ inline float value(__half x) { return __half2float(x); }
__device__ inline float value(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ inline uint32_t key_of(float x) {
  const uint32_t bits = x == 0.0f ? 0u : __float_as_uint(x);
  const uint32_t key = bits >> 31 ? ~bits : bits | 0x80000000u;
  return x == x ? key : 0u;
}

// Row r's length, 0 to N.
__device__ inline int limit_of(const Arguments& a, int64_t r) {
  if (!a.lengths) return a.N;
  const int64_t at = r * a.length_stride;
  const int64_t length =
      a.wide_lengths ? static_cast<const int64_t*>(a.lengths)[at] : static_cast<const int*>(a.lengths)[at];
  return static_cast<int>(min(max(length, int64_t{0}), int64_t{a.N}));
}

// The score of a key; NaN of 0.
__device__ inline float score_of(uint32_t key) { return __uint_as_float(key >> 31 ? key ^ 1u << 31 : ~key); }

// The part of a row that a warp owns, `start` to `end`, in chunks of 32 entries, one a lane. A resident row stays in
// registers; others are read again in each pass, ITEMS loads in flight, and L1 holds them up to about 50,000 entries.
template <typename T, int ITEMS, bool RESIDENT>
struct Segment {
  const T* row;
  int start, end, limit, lane;
  uint32_t keys[ITEMS];

  __device__ void load(int from) {
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
      const int i = from + 32 * j + lane;
      float score = 0.0f;
      if (i < end) score = value(row[i]);
      keys[j] = i < end && i < limit ? key_of(score) : 0u;
    }
  }

  // visit(key, index), in index order, by whole warps.
  template <typename Visit>
  __device__ void each(Visit visit) {
    if constexpr (RESIDENT) {
#pragma unroll
      for (int j = 0; j < ITEMS; ++j)
        if (start + 32 * j < end) visit(keys[j], start + 32 * j + lane);
    } else {
#pragma unroll 1
      for (int from = start; from < end; from += 32 * ITEMS) {
        load(from);
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) visit(keys[j], from + 32 * j + lane);
      }
    }
  }
};

// The largest key, and one at or below the k-th: [low, high] holds k keys or more, or all there are. high = 0: none.
// From the smallest key instead, a row of both signs spans so many octaves that a bin is an eighth of one.
template <int THREADS, typename Row>
__device__ void bound(Row& row, int k, Shared<THREADS / 32>& shared, uint32_t& low, uint32_t& high) {
  constexpr int WARPS = THREADS / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t top = 0, bottom = ALL;  // bottom: the smallest key, less 1, so that 0 comes out largest
  row.each([&](uint32_t key, int) {
    top = max(top, key);
    bottom = min(bottom, key - 1);
  });
  int lanes = 1;  // of a group: as many as leave k groups
  if (k <= THREADS) {
    uint32_t group = top;
    for (; lanes < 32 && 2 * lanes * k <= THREADS; lanes *= 2) group = max(group, __shfl_xor_sync(ALL, group, lanes));
    bottom = group - 1;
  }
  const bool filled = bottom != ALL;
  const uint32_t warp_top = __reduce_max_sync(ALL, top), warp_bottom = __reduce_min_sync(ALL, bottom);
  if (lane == 0) {
    shared.high[warp] = warp_top;
    shared.low[warp] = warp_bottom;
  }
  const int lanes_filled = __syncthreads_count(filled);
  high = __reduce_max_sync(ALL, lane < WARPS ? shared.high[lane] : 0u);
  low = __reduce_min_sync(ALL, lane < WARPS ? shared.low[lane] : ALL) + 1;
  if (k <= THREADS && lanes_filled < k * lanes) low = 1;  // fewer than k groups have an entry
}

// Slots of 2^shift keys: high - low fits in 32 - clz bits, a slot's number in 11.
__device__ inline int shift_of(uint32_t low, uint32_t high) { return max(0, 21 - __clz(high - low)); }

// Count a row's keys in [low, high] by slots, from `high` down.
template <int THREADS, typename Row>
__device__ void fill(Row& row, int shift, uint32_t low, uint32_t high, Shared<THREADS / 32>& shared) {
  row.each([&](uint32_t key, int) {
    if (key >= low && key <= high) atomicAdd(&shared.histogram[(high - key) >> shift], 1);
  });
  __syncthreads();
}

// Where the need-th key from the top lies: shared.slot, .before (keys in slots before it) and .inside (keys in it).
// .inside stays 0 where there are fewer than `need` keys. Empties the histogram.
template <int THREADS>
__device__ void crossing(int need, Shared<THREADS / 32>& shared) {
  constexpr int OWN = BINS / THREADS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int own[OWN], sum = 0;
#pragma unroll
  for (int b = 0; b < OWN; ++b) {
    own[b] = shared.histogram[threadIdx.x * OWN + b];
    shared.histogram[threadIdx.x * OWN + b] = 0;
    sum += own[b];
  }
  const int warp_sum = __reduce_add_sync(ALL, sum);
  if (lane == 0) shared.sums[warp] = warp_sum;
  __syncthreads();
  const int before = __reduce_add_sync(ALL, lane < warp ? shared.sums[lane] : 0);
  if (before < need && before + warp_sum >= need) {  // one warp
    int through = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(ALL, through, step);
      if (lane >= step) through += other;
    }
    int at = before + through - sum;
#pragma unroll
    for (int b = 0; b < OWN; ++b) {
      if (at < need && at + own[b] >= need) {  // one thread
        shared.slot = threadIdx.x * OWN + b;
        shared.before = at;
        shared.inside = own[b];
      }
      at += own[b];
    }
  }
  __syncthreads();
}

// The need-th of `count` <= RANKED keys in [low, high].
template <typename Row, typename Memory>
__device__ Cut rank(Row& row, int need, int count, uint32_t low, uint32_t high, Memory& shared) {
  row.each([&](uint32_t key, int) {
    if (key >= low && key <= high) shared.members[atomicAdd(&shared.gathered, 1)] = key;
  });
  __syncthreads();
  const int own = threadIdx.x;
  if (own < count) {
    const uint32_t key = shared.members[own];
    int above = 0, equal = 0, earlier = 0;
#pragma unroll 4
    for (int t = 0; t < count; ++t) {
      const uint32_t other = shared.members[t];
      above += other > key;
      equal += other == key;
      earlier += other == key && t < own;
    }
    if (above + earlier == need - 1) {  // one thread; which of equal keys it is changes nothing
      const bool all = above + equal == need;
      shared.cut = all ? Cut{key - 1, 0} : Cut{key, need - above};
    }
  }
  __syncthreads();
  return shared.cut;
}

// The slot that `crossing` found, of 2^shift keys each from `high` down.
__device__ inline void enter_slot(int slot, int shift, uint32_t& low, uint32_t& high) {
  high -= static_cast<uint32_t>(slot) << shift;
  const uint32_t width = (1u << shift) - 1;
  if (high - low > width) low = high - width;
}

// The cut at the need-th key from the top, which `crossing` has just found to lie in the slot [low, high].
template <int THREADS, typename Row>
__device__ Cut narrow(Row& row, int need, uint32_t low, uint32_t high, Shared<THREADS / 32>& shared) {
  for (;;) {
    const int inside = shared.inside;
    if (inside == 0) return {0, 0};  // fewer than `need` keys
    need -= shared.before;
    if (inside == need) return {low - 1, 0};
    if (low == high) return {high, need};
    if (inside <= RANKED) return rank(row, need, inside, low, high, shared);
    const int shift = shift_of(low, high);
    fill<THREADS>(row, shift, low, high, shared);
    crossing<THREADS>(need, shared);
    enter_slot(shared.slot, shift, low, high);
  }
}

// The cut of a row that holds more than k entries, k >= 1.
template <int THREADS, typename Row>
__device__ Cut search(Row& row, int k, Shared<THREADS / 32>& shared) {
  uint32_t low, high;
  bound<THREADS>(row, k, shared, low, high);
  if (high == 0) return {0, 0};
  const int shift = shift_of(low, high);
  fill<THREADS>(row, shift, low, high, shared);
  crossing<THREADS>(k, shared);
  enter_slot(shared.slot, shift, low, high);
  return narrow<THREADS>(row, k, low, high, shared);
}

}  // namespace sparse_prr
