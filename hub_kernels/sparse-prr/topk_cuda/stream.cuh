// Exact top-k of long rows, each read once: guess, collect, refine.
//
//   collect  all blocks of a grid: each writes the entries of its tile at or above the guess, in index order
//   refine   a block a row: if k entries or more came out and they fit on chip, the k-th is sought among them alone;
//            if not, in the whole row. So the guess decides how long it takes and nothing else
//   stream_row  the same by one block a row, without a way through memory: where there are rows enough to fill the GPU
#pragma once

#include "guess.cuh"
#include "topk.cuh"

namespace sparse_prr {

constexpr int REFINE_THREADS = 1024, STREAM_THREADS = 512, MAX_TILES = 1024;

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

// Write the winners, where the k-th is the need-th of `inside` <= 32 entries in [low, high]: each warp ranks all of those
// by key and index, which tells it the cut and how many of them stand before its own entries, `first` on.
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
  list.each([&](uint32_t key, int index) {
    const bool chosen = ordered(key, index) >= cut;
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

// When the guess was bad, or the row has fewer than k entries above anything.
template <typename T, int THREADS>
__device__ void fall_back(const Stream& s, int64_t r, Shared<THREADS / 32>& shared) {
  select<T, THREADS, 8192 / THREADS, false>(s.row, 0, r, r, shared);
}

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
    cut = guess<T, THREADS, SAMPLES>(row, s.row.k, s.row.N, limit, s.threshold, [&] { return key_of(s.threshold[r]); },
                                     shared);
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

// Put a tile's candidates in their places in the list: by a warp, from `entries` or, if they don't hold all, from the row.
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
  if (s.fallback && threadIdx.x == 0) s.fallback[r] = bad;
  return true;
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
  const Guess guess = s.guesses[r];
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
  if (s.fallback && t == 0) s.fallback[r] = bad;
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

template <typename T, int SAMPLES>
__global__ void __launch_bounds__(STREAM_THREADS, 2) stream_row(const Stream s) {
  constexpr int THREADS = STREAM_THREADS, WARPS = THREADS / 32, ITEMS = 8, SLAB = THREADS * ITEMS;
  extern __shared__ uint32_t memory[];
  __shared__ Shared<WARPS> shared;
  __shared__ int counted[2][WARPS];
  uint32_t* keys = memory;
  int* columns = reinterpret_cast<int*>(memory + CAPACITY);
  clear<THREADS>(shared);
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();

  const int64_t r = blockIdx.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = warp * 32 * ITEMS + lane;
  const T* row = static_cast<const T*>(s.row.scores) + r * s.row.head_stride;
  const int limit = limit_of(s.row, r);
  const Guess cut = guess<T, THREADS, SAMPLES>(row, s.row.k, s.row.N, limit, s.threshold,
                                               [&] { return key_of(s.threshold[r]); }, shared);
  const float least = lowest(cut);
  T ahead[ITEMS];
#pragma unroll
  for (int j = 0; j < ITEMS; ++j) ahead[j] = own + 32 * j < limit ? row[own + 32 * j] : T(NAN);
  const unsigned below = (1u << lane) - 1;
  int total = 0;
  for (int from = 0, turn = 0; from < limit; from += SLAB, turn ^= 1) {
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
    if (total > CAPACITY) break;
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) {
      const unsigned votes = __ballot_sync(ALL, found[j] >= least);
      if (found[j] >= least) {
        const int mine = slot + __popc(votes & below);
        keys[mine] = key_of(found[j]);
        columns[mine] = from + own + 32 * j;
      }
      slot += __popc(votes);
    }
  }
  __syncthreads();
  const bool bad = total > CAPACITY || (total < s.row.k && cut.key > 1);
  if (s.fallback && threadIdx.x == 0) s.fallback[r] = bad;
  if (bad) return fall_back<T, THREADS>(s, r, shared);
  finish<THREADS>([&](int i) { return make_uint2(keys[i], columns[i]); }, total, cut, s.row, r, shared);
}

}  // namespace sparse_prr
