// Exact top-k of a long row by one block that reads it once: guess, collect, refine.
#pragma once

#include "lists.cuh"

namespace sparse_prr {

constexpr int STREAM_THREADS = 512;

// Collect what the guess leaves in `list`, of CAPACITY entries, and settle it. Returns false, with the histogram empty,
// if the guess was bad.
template <typename T, int THREADS, int SAMPLES>
__device__ bool stream(const Stream& s, int64_t r, bool known, uint2* list, Shared<THREADS / 32>& shared) {
  constexpr int WARPS = THREADS / 32, ITEMS = 4096 / THREADS, SLAB = THREADS * ITEMS;
  __shared__ int counted[2][WARPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = warp * 32 * ITEMS + lane;
  const T* row = static_cast<const T*>(s.row.scores) + r * s.row.head_stride;
  const int limit = limit_of(s.row, r);
  const Guess cut = guess<T, THREADS, SAMPLES>(row, s.row.k, s.row.N, limit, known, Given{s, r}, shared);
  const float least = lowest(cut);
  T ahead[ITEMS];
#pragma unroll
  for (int j = 0; j < ITEMS; ++j) ahead[j] = own + 32 * j < limit ? row[own + 32 * j] : T(NAN);
  const unsigned below = (1u << lane) - 1;
  int total = 0;
  for (int from = 0, turn = 0; from < limit && total <= CAPACITY; from += SLAB, turn ^= 1) {
    float found[ITEMS];
    int count = 0;
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
      const int i = from + own + 32 * j;
      found[j] = value(ahead[j]);
      ahead[j] = i + SLAB < limit ? row[i + SLAB] : T(NAN);
      count += __popc(__ballot_sync(ALL, found[j] >= least));
    }
    if (lane == 0) counted[turn][warp] = count;
    __syncthreads();  // one a slab: the next one writes the other half
    int slot = total + __reduce_add_sync(ALL, lane < warp ? counted[turn][lane] : 0);
    total += __reduce_add_sync(ALL, lane < WARPS ? counted[turn][lane] : 0);
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
      const unsigned votes = __ballot_sync(ALL, found[j] >= least);
      const int mine = slot + __popc(votes & below);
      if (found[j] >= least && mine < CAPACITY) list[mine] = make_uint2(key_of(found[j]), from + own + 32 * j);
      slot += __popc(votes);
    }
  }
  __syncthreads();
  if (total > CAPACITY || (total < s.row.k && cut.key > 1)) return false;
  finish<THREADS>([&](int i) { return list[i]; }, total, cut, s.row, r, shared);
  return true;
}

// A guess that was bad: 128K entries take 85 us searched whole by this block, and a third of that streamed, which ties
// don't let pass. `streamed`: it was tried. Not inlined: it is rare, and longer than all the rest.
template <typename T, int THREADS>
__device__ __noinline__ void fall_back(const Stream& s, int64_t r, bool streamed, uint2* list,
                                       Shared<THREADS / 32>& shared) {
  if (!streamed && stream<T, THREADS, 8>(s, r, false, list, shared)) return;
  select<T, THREADS, 8192 / THREADS, false>(s.row, 0, r, r, shared);
}

// Where there are rows enough to fill the GPU with a block each.
template <typename T, int SAMPLES>
__global__ void __launch_bounds__(STREAM_THREADS, 2) stream_row(const __grid_constant__ Stream s) {
  extern __shared__ uint2 list[];
  __shared__ Shared<STREAM_THREADS / 32> shared;
  clear<STREAM_THREADS>(shared);
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();

  const int64_t r = blockIdx.x;
  const bool known = s.threshold, fine = stream<T, STREAM_THREADS, SAMPLES>(s, r, known, list, shared);
  if (!fine) fall_back<T, STREAM_THREADS>(s, r, !known, list, shared);
  if (threadIdx.x == 0) s.fallback[r] = !fine;
}

}  // namespace sparse_prr
