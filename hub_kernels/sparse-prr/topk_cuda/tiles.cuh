// Exact top-k of long rows by a whole grid, each row read once: guess, collect, refine.
//
//   collect  all blocks of a grid: each writes the entries of its tile at or above the guess, in index order
//   refine   a block a row: if k entries or more came out and they fit on chip, the k-th is sought among them alone;
//            if not, in the row. So the guess decides how long it takes and nothing else
#pragma once

#include "stream.cuh"

namespace sparse_prr {

constexpr int REFINE_THREADS = 1024, MAX_TILES = 1024;

// Candidates of a warp into `entries`, `slot` on: scores[j] of a lane is entry from + 32 * j, votes[j] says which
// lanes' are candidates.
template <int ITEMS>
__device__ void put(const float (&scores)[ITEMS], const unsigned (&votes)[ITEMS], int from, int slot, int kept,
                    uint2* entries) {
  const unsigned below = (1u << threadIdx.x % 32) - 1;
#pragma unroll
  for (int j = 0; j < ITEMS; ++j) {
    const int mine = slot + __popc(votes[j] & below);
    if (votes[j] >> threadIdx.x % 32 & 1 && mine < kept) entries[mine] = make_uint2(key_of(scores[j]), from + 32 * j);
    slot += __popc(votes[j]);
  }
}

// The same by a lane for each chunk of 32 entries, its first one `from`: as many rounds as the fullest chunk has
// candidates, whose scores are read again.
template <typename T>
__device__ void put_chunk(const T* row, unsigned vote, int from, int slot, int kept, uint2* entries) {
  int through = __popc(vote);
  slot -= through;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(ALL, through, step);
    if (threadIdx.x % 32 >= step) through += other;
  }
  for (slot += through; vote && slot < kept; vote &= vote - 1, ++slot) {
    const int i = from + __ffs(vote) - 1;
    entries[slot] = make_uint2(key_of(value(row[i])), i);
  }
}

// SAMPLES = 0: the guess is there. Else each block samples for itself: as fast as reading what another kernel found.
// A block is a tile, of up to ITEMS chunks a warp.
template <typename T, int THREADS, int ITEMS, int SAMPLES>
__global__ void __launch_bounds__(THREADS) collect(const __grid_constant__ Stream s) {
  constexpr int WARPS = THREADS / 32;
  // Many rows are bound by instructions; few, by latency
  constexpr bool BY_CHUNK = SAMPLES == 0 && THREADS == 256 && ITEMS >= 8 && ITEMS <= 32;
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
  unsigned votes[ITEMS], own = 0;  // own: the vote on the lane's chunk
  int count = 0;
#pragma unroll
  for (int j = 0; j < ITEMS; ++j) {
    votes[j] = __ballot_sync(ALL, scores[j] >= least);
    if (BY_CHUNK) own = lane == j ? votes[j] : own;
    else count += __popc(votes[j]);
  }
  if (BY_CHUNK) count = __reduce_add_sync(ALL, __popc(own));
  if (lane == 0) sums[warp] = count;
  __syncthreads();
  const int slot = __reduce_add_sync(ALL, lane < warp ? sums[lane] : 0);
  const int total = __reduce_add_sync(ALL, lane < WARPS ? sums[lane] : 0);
  if (threadIdx.x == 0) s.counts[at] = total;
  uint2* entries = s.entries + at * s.kept;
  if (BY_CHUNK) put_chunk(row, own, from - lane + 32 * lane, slot, s.kept, entries);
  else put(scores, votes, from, slot, s.kept, entries);
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

// What row r was collected by.
__device__ inline Guess guess_of(const Stream& s, int64_t r) {
  if (s.guesses) return s.guesses[r];
  const float* given = s.threshold + r * s.threshold_stride;
  float low = given[0], high = given[s.reaches];
  asm volatile("" : "+f"(low), "+f"(high));  // both are loaded by now: the compiler puts a branch between them
  const uint32_t key = at_least(low), top = s.reaches ? max(key_of(high), key) : 0u;
  return {key, s.reaches && key > 1 ? shift_of(key, top) : 32, top};
}

// Candidates as `collect` left them, up to OWN tiles a warp. Returns false, with the histogram empty, if a warp has
// more than fit in its registers.
template <typename T, int OWN>
__device__ bool refine_in_registers(const Stream& s, int64_t r, Shared<REFINE_THREADS / 32>& shared) {
  constexpr int THREADS = REFINE_THREADS, WARPS = THREADS / 32, ITEMS = CAPACITY / THREADS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = warp * s.tiles / WARPS, next = (warp + 1) * s.tiles / WARPS;
  const int64_t at = r * s.tiles + first;
  const int count = first + lane < next ? s.counts[at + lane] : 0;
  const Guess guess = guess_of(s, r);  // read after the counts: what they point at is what takes long
  int begin[OWN], skipped[OWN], own = 0;  // of each tile: its place in the warp's list, and the unused room before it
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    begin[i] = own;
    skipped[i] = i * s.kept - own;
    own += __shfl_sync(ALL, count, i);
  }
  const bool fits = own <= 32 * ITEMS && __all_sync(ALL, count <= s.kept);
  const uint2* entries = s.entries + at * s.kept;
  asm("" : "+l"(entries));  // computed once: the compiler would do it again for each load
  List<ITEMS> list;
  list.load(fits ? own : 0, [&](int i) {
    int skip = 0;
#pragma unroll
    for (int t = 1; t < OWN; ++t) skip = i >= begin[t] ? skipped[t] : skip;
    return __ldcg(entries + (i + skip));
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
    fall_back<T, THREADS>(s, r, false, s.lists + r * CAPACITY, shared);
  } else {
    settle<THREADS>(list, first * s.tile, guess, total, s.row, r, shared);
  }
  if (threadIdx.x == 0) s.fallback[r] = bad;
  return true;
}

// OWN: tiles of a warp whose entries stay in registers.
template <typename T, int OWN>
__global__ void __launch_bounds__(REFINE_THREADS, 1) refine(const __grid_constant__ Stream s) {
  constexpr int THREADS = REFINE_THREADS, WARPS = THREADS / 32;
  __shared__ Shared<WARPS> shared;
  __shared__ int offsets[MAX_TILES + 1];
  clear<THREADS>(shared);
  __syncthreads();
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();

  const int64_t r = blockIdx.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = threadIdx.x;
  if (s.tiles <= OWN * WARPS && refine_in_registers<T, OWN>(s, r, shared)) return;

  const int limit = limit_of(s.row, r);
  const Guess guess = guess_of(s, r);
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
  if (bad) return fall_back<T, THREADS>(s, r, false, s.lists + r * CAPACITY, shared);
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
