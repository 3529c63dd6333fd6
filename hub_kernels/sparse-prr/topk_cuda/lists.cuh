// The best k of a row's candidates by one block: histogram from the guess up, rank, write.
#pragma once

#include <climits>

#include "guess.cuh"
#include "topk.cuh"

namespace sparse_prr {

// Candidates of a row that a warp owns, in index order, with their indices; key 0: none.
template <int ITEMS>
struct List {
  int held;  // by the warp, without gaps: the passes over them are bound by their instructions
  uint32_t keys[ITEMS];
  int indices[ITEMS];

  template <typename Visit>
  __device__ void each(Visit visit) {
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
      if (32 * j >= held) break;
      visit(keys[j], indices[j]);
    }
  }

  // entry(i): key and index of the warp's i-th.
  template <typename Entry>
  __device__ void load(int count, Entry entry) {
    const int lane = threadIdx.x % 32;
    held = count;
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
      if (32 * j >= held) break;
      const int i = 32 * j + lane;
      const uint2 found = i < held ? entry(i) : make_uint2(0, INT_MAX);
      keys[j] = found.x;
      indices[j] = static_cast<int>(found.y);
    }
  }
};

// Count keys by slots from the guess up; what lies beyond them counts in the last.
template <int ITEMS, typename Memory>
__device__ void count_above(List<ITEMS>& list, Guess guess, Memory& shared) {
  list.each([&](uint32_t key, int) {
    if (key) atomicAdd(&shared.histogram[BINS - 1 - min((key - guess.key) >> guess.shift, BINS - 1u)], 1);
  });
}

// Write the winners, where the k-th is the need-th of `inside` <= 32 entries in [low, high]: each warp ranks all of
// those by key and index, which tells it the cut and how many of them stand before its own entries, `first` on.
template <int THREADS, int ITEMS>
__device__ void write(List<ITEMS>& list, int first, int need, int inside, uint32_t low, uint32_t high, int* winners,
                      Shared<THREADS / 32>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto* members = reinterpret_cast<uint64_t*>(shared.members);
  auto ordered = [](uint32_t key, int index) { return uint64_t{key} << 32 | static_cast<uint32_t>(~index); };
  int above = 0;
  list.each([&](uint32_t key, int index) {
    above += key > high;
    if (key >= low && key <= high) members[atomicAdd(&shared.gathered, 1)] = ordered(key, index);
  });
  above = __reduce_add_sync(ALL, above);
  if (lane == 0) shared.above[warp] = above;
  __syncthreads();
  const uint64_t own = lane < inside ? members[lane] : 0;
  int rank = 0;
  for (int t = 0; t < inside; ++t) rank += members[t] > own;
  const uint64_t cut = __shfl_sync(ALL, own, __ffs(__ballot_sync(ALL, rank == need - 1)) - 1);
  const bool before = own >= cut && static_cast<int>(~static_cast<uint32_t>(own)) < first;
  int slot = __reduce_add_sync(ALL, lane < warp ? shared.above[lane] : 0) + __popc(__ballot_sync(ALL, before));
  const unsigned below = (1u << lane) - 1;
  const uint32_t least = static_cast<uint32_t>(cut >> 32);
  const int last = static_cast<int>(~static_cast<uint32_t>(cut));
  list.each([&](uint32_t key, int index) {
    const bool chosen = key > least || (key == least && index <= last);
    const unsigned votes = __ballot_sync(ALL, chosen);
    if (chosen) winners[slot + __popc(votes & below)] = index;
    slot += __popc(votes);
  });
}

// The best k of `total` candidates. `first`: no entry of the warp has a smaller index, all of earlier warps have. The
// histogram has them by `count_above`, if the guess knows its shift, and is empty if not.
template <int THREADS, int ITEMS>
__device__ void settle(List<ITEMS>& list, int first, Guess guess, int total, const Arguments& a, int64_t r,
                       Shared<THREADS / 32>& shared) {
  if (threadIdx.x == 0) a.candidates[r] = total;
  Cut cut{0, 0};  // everything
  if (total > a.k) {
    uint32_t low, high;
    if (guess.shift < 32) {
      crossing<THREADS>(a.k, shared);
      low = guess.key + (static_cast<uint32_t>(BINS - 1 - shared.slot) << guess.shift);
      high = shared.slot == 0 ? ALL : low + ((1u << guess.shift) - 1);
    } else {
      bound<THREADS>(list, a.k, shared, low, high);
      const int shift = shift_of(low, high);
      fill<THREADS>(list, shift, low, high, shared);
      crossing<THREADS>(a.k, shared);
      enter_slot(shared.slot, shift, low, high);
    }
    if (shared.inside <= 32)
      return write<THREADS>(list, first, a.k - shared.before, shared.inside, low, high, a.free + r * a.k, shared);
    cut = narrow<THREADS>(list, a.k, low, high, shared);
  }
  compact<THREADS>(list, cut, a, r, Forced{}, shared);
}

// The same for candidates that come one after the other: entry(i) gives key and index. The histogram is empty.
template <int THREADS, typename Entry>
__device__ void finish(Entry entry, int total, Guess guess, const Arguments& a, int64_t r,
                       Shared<THREADS / 32>& shared) {
  constexpr int WARPS = THREADS / 32, ITEMS = CAPACITY / THREADS;
  const int warp = threadIdx.x / 32, chunks = (total + 31) / 32;
  const int start = min(warp * chunks / WARPS * 32, total), end = min((warp + 1) * chunks / WARPS * 32, total);
  List<ITEMS> list;
  list.load(end - start, [&](int i) { return entry(start + i); });
  if (guess.shift < 32) count_above(list, guess, shared);
  __syncthreads();
  const int first = __shfl_sync(ALL, end > start ? list.indices[0] : INT_MAX, 0);
  settle<THREADS>(list, first, guess, total, a, r, shared);
}

}  // namespace sparse_prr
