// Exact top-k of one row by one block: bound, histogram, rank, compact. `select_row` at the end is the whole of it.
#pragma once

#include "search.cuh"

namespace sparse_prr {

// What a warp knows of the forced blocks. F is a few: the first 32 are held by the lanes, one each, from the start.
struct Forced {
  const int* list;
  int64_t stride;
  int F, first;

  // t is the same for the whole warp.
  __device__ int at(int t) const { return t < 32 ? __shfl_sync(ALL, first, t) : list[t * stride]; }

  __device__ void read(const Arguments& a, int64_t batch, int64_t head) {
    const int lane = threadIdx.x % 32;
    F = a.F;
    stride = a.forced_slot;
    list = a.forced + batch * a.forced_batch + head * a.forced_head;
    first = lane < F ? list[lane * stride] : -1;
  }

  __device__ bool less(int f, int block) const { return static_cast<unsigned>(f) < static_cast<unsigned>(block); }

  // How many are in front of a block, the same for the whole warp.
  __device__ int ahead(int block) const {
    int found = __popc(__ballot_sync(ALL, less(first, block)));
    for (int t = 32; t < F; ++t) found += less(list[t * stride], block);
    return found;
  }

  // The same for a block of each lane. There are up to 4 as a rule: shuffles in a row take the time of one.
  __device__ int before(int block) const {
    int found = 0;
#pragma unroll
    for (int t = 0; t < 4; ++t) found += less(__shfl_sync(ALL, first, t), block);
    for (int t = 4; t < F; ++t) found += less(at(t), block);
    return found;
  }
};

// The forced blocks and the `total` in `list`, which are also written to free; all ascending, -1 behind.
template <int THREADS>
__device__ void merge(const int* list, int total, const Arguments& a, int64_t r, const Forced& forced) {
  constexpr int WARPS = THREADS / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int *free = a.free + r * a.k, *selected = a.selected + r * (a.F + a.k);
  for (int from = 32 * warp; from < total; from += THREADS) {
    const int i = from + lane, block = i < total ? list[i] : 0, before = forced.before(block);
    if (i < total) {
      free[i] = block;
      selected[i + before] = block;
    }
  }
  for (int t = WARPS - 1 - warp; t < a.F; t += WARPS) {  // a warp each, the ones without a part in the above first
    const int block = forced.at(t);
    if (block < 0) continue;
    int at = forced.ahead(block);
    for (int from = 0; from < total; from += 32)
      at += __popc(__ballot_sync(ALL, from + lane < total && list[from + lane] < block));
    if (lane == 0) selected[at] = block;
  }
  for (int i = total + forced.ahead(INT32_MAX) + threadIdx.x; i < a.F + a.k; i += THREADS) selected[i] = -1;
}

// Write what the cut takes, ascending, and merged with the forced blocks; -1 behind. Returns how many entries are above
// the cut or equal to it.
template <int THREADS, typename Row>
__device__ int compact(Row& row, Cut cut, const Arguments& a, int64_t r, const Forced& forced,
                        Shared<THREADS / 32>& shared) {
  constexpr int WARPS = THREADS / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned below = (1u << lane) - 1;
  int above = 0, equal = 0;
  row.each([&](uint32_t key, int) {
    above += key > cut.key;
    equal += key == cut.key;
  });
  above = __reduce_add_sync(ALL, above);
  if (lane == 0) shared.above[warp] = above;
  if (cut.ties) {  // the same for the whole block
    equal = __reduce_add_sync(ALL, equal);
    if (lane == 0) shared.equal[warp] = equal;
  }
  __syncthreads();
  int slot = __reduce_add_sync(ALL, lane < warp ? shared.above[lane] : 0);
  int total = __reduce_add_sync(ALL, lane < WARPS ? shared.above[lane] : 0), tied = 0, ties = 0;
  if (cut.ties) {
    tied = __reduce_add_sync(ALL, lane < warp ? shared.equal[lane] : 0);
    ties = __reduce_add_sync(ALL, lane < WARPS ? shared.equal[lane] : 0);
    slot += min(tied, cut.ties);
  }
  const int candidates = total + ties;
  total += min(ties, cut.ties);

  // To be merged with the forced blocks a list is in shared memory, if it fits; marks in this loop cost 1 us more.
  int* free = a.free + r * a.k;
  int* list = a.selected && a.k <= BINS ? shared.histogram : free;
  row.each([&](uint32_t key, int index) {
    bool chosen = key > cut.key;
    if (cut.ties) {
      const unsigned equals = __ballot_sync(ALL, key == cut.key);
      chosen |= key == cut.key && tied + __popc(equals & below) < cut.ties;
      tied += __popc(equals);
    }
    const unsigned winners = __ballot_sync(ALL, chosen);
    if (chosen) list[slot + __popc(winners & below)] = index;
    slot += __popc(winners);
  });
  for (int i = total + threadIdx.x; i < a.k; i += THREADS) free[i] = -1;
  if (a.selected) {
    __syncthreads();
    merge<THREADS>(list, total, a, r, forced);
  }
  return candidates;
}

// Select from the whole row. The histogram is empty.
template <typename T, int THREADS, int ITEMS, bool RESIDENT>
__device__ void select(const Arguments& a, int64_t batch, int64_t head, int64_t r, Shared<THREADS / 32>& shared) {
  constexpr int WARPS = THREADS / 32;
  Segment<T, ITEMS, RESIDENT> row;
  row.lane = threadIdx.x % 32;
  row.limit = limit_of(a, r);
  row.row = static_cast<const T*>(a.scores) + batch * a.batch_stride + head * a.head_stride;
  const int extent = RESIDENT ? a.N : row.limit;  // resident: loads must not wait for the length
  const int chunks = (extent + 31) / 32, warp = threadIdx.x / 32;  // evenly: `bound` wants no warp without entries
  row.start = min(warp * chunks / WARPS * 32, extent);
  row.end = min((warp + 1) * chunks / WARPS * 32, extent);
  Forced forced;
  if (a.selected) forced.read(a, batch, head);
  if (RESIDENT) row.load(row.start);

  Cut cut{0, 0};  // everything
  if (a.k == 0) {
    cut.key = ALL;
  } else if (row.limit > a.k) {
    cut = search<THREADS>(row, a.k, shared);
  }
  const int candidates = compact<THREADS>(row, cut, a, r, forced, shared);
  if (a.candidates && threadIdx.x == 0) a.candidates[r] = candidates;
}

template <typename T, int THREADS, int ITEMS, bool RESIDENT>
__global__ void __launch_bounds__(THREADS, 1) select_row(const Arguments a) {
  __shared__ Shared<THREADS / 32> shared;
  clear<THREADS>(shared);
  // From here on the scores are there. The next kernel may launch: it waits for the end of this one before it reads.
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();

  const int64_t batch = blockIdx.y, head = blockIdx.x;
  select<T, THREADS, ITEMS, RESIDENT>(a, batch, head, batch * gridDim.x + head, shared);
}

}  // namespace sparse_prr
