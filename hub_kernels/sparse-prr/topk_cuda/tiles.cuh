// Exact top-k of long rows by a whole grid, each row read once: guess, collect, refine.
//
//   collect  all blocks of a grid: each writes the entries of its tile at or above the guess, in index order
//   refine   a block a row: if k entries or more came out and they fit on chip, the k-th is sought among them alone;
//            if not, in the row. So the guess decides how long it takes and nothing else
#pragma once

#include "stream.cuh"

namespace sparse_prr {

constexpr int REFINE_THREADS = 1024, MAX_TILES = 1024;

// SAMPLES = 0: the guess is there. Else each block samples for itself: as fast as reading what another kernel found.
// A block is a tile, of up to ITEMS chunks a warp.
template <typename T, int THREADS, int ITEMS, int SAMPLES>
__global__ void __launch_bounds__(THREADS) collect(const Stream s) {
  constexpr int WARPS = THREADS / 32;
  __shared__ int sums[WARPS];
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();

  const int64_t r = blockIdx.y, at = r * s.tiles + blockIdx.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int from = blockIdx.x * s.tile + warp * (s.tile / WARPS) + lane, to = from - lane + s.tile / WARPS;
  const T* row = static_cast<const T*>(s.row.scores) + r * s.row.head_stride;
  float scores[ITEMS];  // loading them does not wait for the row's length
  if (s.tile == THREADS * ITEMS && (blockIdx.x + 1) * s.tile <= s.row.N) {
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) scores[j] = value(row[from + 32 * j]);
  } else {
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
      const int i = from + 32 * j;
      scores[j] = i < to && i < s.row.N ? value(row[i]) : NAN;
    }
  }
  const int limit = limit_of(s.row, r);
  Guess cut;
  if constexpr (SAMPLES > 0) {
    __shared__ Shared<WARPS> shared;
    clear<THREADS>(shared);
    if (blockIdx.x > 0 && blockIdx.x * s.tile >= limit) {
      if (threadIdx.x == 0) s.counts[at] = 0;
      return;
    }
    cut = guess<T, THREADS, SAMPLES>(row, s.row.k, s.row.N, limit, s.threshold, Given{s, r}, shared);
    if (blockIdx.x == 0 && threadIdx.x == 0) s.guesses[r] = cut;
  } else {
    cut = s.guesses[r];
  }

  if ((blockIdx.x + 1) * s.tile > limit) {
#pragma unroll
    for (int j = 0; j < ITEMS; ++j)
      if (from + 32 * j >= limit) scores[j] = NAN;
  }
  const float least = lowest(cut);  // scores, not keys, are compared: 10 instructions an entry instead of 27
  unsigned votes[ITEMS];
  int count = 0;
#pragma unroll
  for (int j = 0; j < ITEMS; ++j) {
    votes[j] = __ballot_sync(ALL, scores[j] >= least);
    count += __popc(votes[j]);
  }
  if (lane == 0) sums[warp] = count;
  __syncthreads();
  int slot = __reduce_add_sync(ALL, lane < warp ? sums[lane] : 0);
  const int total = __reduce_add_sync(ALL, lane < WARPS ? sums[lane] : 0);
  if (threadIdx.x == 0) s.counts[at] = total;
  uint2* entries = s.entries + at * s.kept;
  const unsigned below = (1u << lane) - 1;
#pragma unroll
  for (int j = 0; j < ITEMS; ++j) {
    const int mine = slot + __popc(votes[j] & below);
    if (scores[j] >= least && mine < s.kept) entries[mine] = make_uint2(key_of(scores[j]), from + 32 * j);
    slot += __popc(votes[j]);
  }
}

// Put a tile's candidates in their places in the list: by a warp, from `entries` or, if they don't hold all, from the
// row.
template <typename T>
__device__ void gather_tile(const Stream& s, int64_t r, int tile, int count, uint2* list, uint32_t cut, int limit) {
  constexpr int AHEAD = 8;
  const int lane = threadIdx.x % 32;
  if (count <= s.kept) {
    const uint2* entries = s.entries + (r * s.tiles + tile) * s.kept;
    for (int from = lane; from - lane < count; from += 32 * AHEAD) {
      uint2 held[AHEAD];
#pragma unroll
      for (int j = 0; j < AHEAD; ++j)
        if (from + 32 * j < count) held[j] = entries[from + 32 * j];
#pragma unroll
      for (int j = 0; j < AHEAD; ++j)
        if (from + 32 * j < count) list[from + 32 * j] = held[j];
    }
    return;
  }
  Segment<T, AHEAD, false> row;
  row.row = static_cast<const T*>(s.row.scores) + r * s.row.head_stride;
  row.start = tile * s.tile;
  row.limit = row.end = min((tile + 1) * s.tile, limit);
  row.lane = lane;
  row.each([&](uint32_t key, int index) {
    const unsigned votes = __ballot_sync(ALL, key >= cut);
    if (key >= cut) list[__popc(votes & ((1u << lane) - 1))] = make_uint2(key, index);
    list += __popc(votes);
  });
}

// A guess that was bad: 128K entries take 85 us searched whole by this block, and a third of that streamed.
template <typename T, int THREADS>
__device__ void fall_back(const Stream& s, int64_t r, Shared<THREADS / 32>& shared) {
  if (!stream<T, THREADS, 8>(s, r, false, s.lists + r * CAPACITY, shared)) search_whole<T, THREADS>(s, r, shared);
}

// Candidates as `collect` left them, OWN tiles a warp. Returns false, with the histogram empty, if a warp has more than
// fit in its registers.
template <typename T, int OWN>
__device__ bool refine_in_registers(const Stream& s, int64_t r, Guess guess, Shared<REFINE_THREADS / 32>& shared) {
  constexpr int THREADS = REFINE_THREADS, ITEMS = CAPACITY / THREADS;
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * OWN;
  const int64_t at = r * s.tiles + first;
  const int count = lane < OWN && first + lane < s.tiles ? s.counts[at + lane] : 0;
  int begin[OWN + 1];  // of each tile in the warp's list
  begin[0] = 0;
#pragma unroll
  for (int i = 0; i < OWN; ++i) begin[i + 1] = begin[i] + __shfl_sync(ALL, count, i);
  const int own = begin[OWN];
  const bool fits = own <= 32 * ITEMS && __all_sync(ALL, count <= s.kept);
  List<ITEMS> list;
  list.load(fits ? own : 0, [&](int i) {
    int tile = 0, behind = 0;
#pragma unroll
    for (int t = 1; t < OWN; ++t)
      if (i >= begin[t]) {
        tile = t;
        behind = begin[t];
      }
    return s.entries[(at + tile) * s.kept + i - behind];
  });
  if (guess.shift < 32) count_above(list, guess, shared);
  if (lane == 0) atomicAdd(&shared.total, own);
  const bool crowded = __syncthreads_or(!fits);
  const int total = shared.total;
  const bool bad = total < s.row.k && guess.key > 1;
  if (crowded || bad) {
    __syncthreads();
    clear<THREADS>(shared);
    __syncthreads();
    if (crowded) return false;
    fall_back<T, THREADS>(s, r, shared);
  } else {
    settle<THREADS>(list, first * s.tile, guess, total, s.row, r, shared);
  }
  if (threadIdx.x == 0) s.fallback[r] = bad;
  return true;
}

// What a scorer collected by.
__device__ inline Guess given_guess(const Stream& s, int64_t r) {
  const float* given = s.threshold + r * s.threshold_stride;
  const uint32_t key = at_least(given[0]), top = s.reaches ? max(key_of(given[1]), key) : 0u;
  return {key, s.reaches && key > 1 ? shift_of(key, top) : 32, top};
}

// OWN: tiles of a warp whose entries stay in registers.
template <typename T, int OWN>
__global__ void __launch_bounds__(REFINE_THREADS, 1) refine(const Stream s) {
  constexpr int THREADS = REFINE_THREADS, WARPS = THREADS / 32;
  __shared__ Shared<WARPS> shared;
  __shared__ int offsets[MAX_TILES + 1];
  clear<THREADS>(shared);
  __syncthreads();
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();

  const int64_t r = blockIdx.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = threadIdx.x;
  const Guess guess = s.guesses ? s.guesses[r] : given_guess(s, r);
  if (s.tiles <= OWN * WARPS && refine_in_registers<T, OWN>(s, r, guess, shared)) return;

  const int limit = limit_of(s.row, r);
  int through = t < s.tiles ? s.counts[r * s.tiles + t] : 0;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(ALL, through, step);
    if (lane >= step) through += other;
  }
  if (lane == 31) shared.sums[warp] = through;
  __syncthreads();
  through += __reduce_add_sync(ALL, lane < warp ? shared.sums[lane] : 0);
  const int total = __reduce_add_sync(ALL, lane < WARPS ? shared.sums[lane] : 0);
  const bool bad = total > CAPACITY || (total < s.row.k && guess.key > 1);
  if (t == 0) s.fallback[r] = bad;
  if (bad) return fall_back<T, THREADS>(s, r, shared);
  offsets[t + 1] = through;
  if (t == 0) offsets[0] = 0;
  __syncthreads();
  uint2* list = s.lists + r * CAPACITY;
  for (int tile = warp; tile < s.tiles; tile += WARPS)
    gather_tile<T>(s, r, tile, offsets[tile + 1] - offsets[tile], list + offsets[tile], guess.key, limit);
  __syncthreads();
  finish<THREADS>([&](int i) { return list[i]; }, total, guess, s.row, r, shared);
}

}  // namespace sparse_prr
