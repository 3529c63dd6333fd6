// Exact top-k of what a scorer left of a row: candidates of each of its programs, in order. A block a row does it, the
// row's first; a few more wait beside it for a guess that was bad.
//
//   list   candidates of all programs, one after the other, in shared memory
//   bins   counted from the guess up, until at most 32 candidates are in the one that holds the k-th
//   write  those 32 are ranked by key and index, a warp each, which gives the cut; winners in order
//
//   again  of a bad guess: all blocks of the row collect by a sample of the row itself, and the last one to be done
//          refines. By one block that took 53 us of 128K entries
//
// They wait on chip while the scorer ends: 1024 threads of 48 registers have room beside one of the scorer's programs.
// What isn't the rule is a call.
#pragma once

#include "tiles.cuh"

namespace sparse_prr {

constexpr int SCORED_THREADS = 1024;

// The part of row r that a warp of block `part` of `parts` collects: entries [start, end), in order of part and warp.
struct Share {
  int start, end;

  __device__ Share(int part, int parts, int warp, int N) {
    constexpr int WARPS = SCORED_THREADS / 32;
    const int64_t chunks = (N + 31) / 32;
    const int at = part * WARPS + warp, all = parts * WARPS;
    start = min(static_cast<int>(chunks * at / all) * 32, N);
    end = min(static_cast<int>(chunks * (at + 1) / all) * 32, N);
  }
};

// Candidates of this block's part of row r, by a sample of the row, to where the scorer left its own: a warp's in order
// from its first entry on. Every block of the row makes the same guess.
template <typename T>
__device__ Guess collect_again(const Stream& s, int64_t r, int part, int parts, Shared<SCORED_THREADS / 32>& shared) {
  constexpr int THREADS = SCORED_THREADS, WARPS = THREADS / 32, ITEMS = 8;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, limit = limit_of(s.row, r);
  const T* scores = static_cast<const T*>(s.row.scores) + r * s.row.head_stride;
  const Guess cut = guess<T, THREADS, 4>(scores, s.row.k, s.row.N, limit, false, Given{s, r}, shared);
  const Share share(part, parts, warp, s.row.N);
  Segment<T, ITEMS, false> row;
  row.row = scores;
  row.start = share.start;
  row.end = share.end;
  row.limit = limit;
  row.lane = lane;
  uint2* mine = s.entries + (r * s.tiles * s.kept + share.start);
  int count = 0;
  row.each([&](uint32_t key, int index) {
    const unsigned votes = __ballot_sync(ALL, key >= cut.key);
    if (key >= cut.key) mine[count + __popc(votes & ((1u << lane) - 1))] = make_uint2(key, index);
    count += __popc(votes);
  });
  if (lane == 0) s.again[(r * parts + part) * WARPS + warp] = count;
  return cut;
}

// The best k of what all blocks of row r have collected, by one of them; of ties that are too many, in the row.
template <typename T>
__device__ void refine_again(const Stream& s, int64_t r, int parts, Guess cut, int* offsets,
                             Shared<SCORED_THREADS / 32>& shared) {
  constexpr int THREADS = SCORED_THREADS, WARPS = THREADS / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = threadIdx.x, shares = parts * WARPS;  // <= THREADS
  int through = t < shares ? __ldcg(s.again + (r * shares + t)) : 0;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(ALL, through, step);
    if (lane >= step) through += other;
  }
  if (lane == 31) shared.sums[warp] = through;
  __syncthreads();
  through += __reduce_add_sync(ALL, lane < warp ? shared.sums[lane] : 0);
  const int total = __reduce_add_sync(ALL, shared.sums[lane]);
  if (t < shares) offsets[t + 1] = through;
  if (t == 0) offsets[0] = 0;
  __syncthreads();
  if (total > CAPACITY || (total < s.row.k && cut.key > 1))
    return select<T, THREADS, 8192 / THREADS, false>(s.row, 0, r, r, shared);
  uint2* list = s.lists + r * CAPACITY;
  for (int at = warp; at < shares; at += WARPS) {
    const Share share(at / WARPS, parts, at % WARPS, s.row.N);
    const uint2* entries = s.entries + (r * s.tiles * s.kept + share.start);
    for (int i = lane; i < offsets[at + 1] - offsets[at]; i += 32) list[offsets[at] + i] = __ldcg(entries + i);
  }
  __syncthreads();
  finish<THREADS>([&](int i) { return list[i]; }, total, cut, s.row, r, shared);
}

// What every block of a row does where its guess was bad. The counter behind the row's counts is 0 before.
template <typename T>
__device__ __noinline__ void do_again(const Stream& s, int64_t r, int part, int parts, int* offsets,
                                      Shared<SCORED_THREADS / 32>& shared) {
  const Guess cut = collect_again<T>(s, r, part, parts, shared);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) shared.total = atomicAdd(s.counts + (r * (s.tiles + 1) + s.tiles), 1);
  __syncthreads();
  if (shared.total != parts - 1) return;
  __threadfence();
  if (threadIdx.x == 0) s.fallback[r] = true;
  refine_again<T>(s, r, parts, cut, offsets, shared);
}

// Whether so many candidates are no answer.
__device__ inline bool is_bad(int total, Guess guess, const Stream& s) {
  return total > CAPACITY || (total < s.row.k && guess.key > 1);
}

// What the other blocks of a row do.
template <typename T>
__device__ __noinline__ void wait_for_bad(const Stream& s, int64_t r, int part, int* offsets,
                                          Shared<SCORED_THREADS / 32>& shared) {
  const Guess guess = guess_of(s, r);
  int own = 0;
  for (int t = threadIdx.x; t < s.tiles; t += SCORED_THREADS) own += __ldcg(s.counts + (r * (s.tiles + 1) + t));
  const int total = total_of<SCORED_THREADS>(own, shared);
  if (is_bad(total, guess, s)) do_again<T>(s, r, part, gridDim.x, offsets, shared);
}

// From the start, by the counts: candidates into `lists`, or, of a bad guess, the row.
template <typename T, int THREADS>
__device__ __noinline__ void refine_anyhow(const Stream& s, int64_t r, int* offsets, Shared<THREADS / 32>& shared) {
  constexpr int WARPS = THREADS / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = threadIdx.x;
  __syncthreads();
  clear<THREADS>(shared);
  if (t == 0) offsets[0] = 0;
  const Guess guess = guess_of(s, r);
  int total = 0;
  for (int from = 0; from < s.tiles; from += THREADS) {
    int through = from + t < s.tiles ? s.counts[r * (s.tiles + 1) + from + t] : 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(ALL, through, step);
      if (lane >= step) through += other;
    }
    if (lane == 31) shared.sums[warp] = through;
    __syncthreads();
    through += total + __reduce_add_sync(ALL, lane < warp ? shared.sums[lane] : 0);
    total += __reduce_add_sync(ALL, lane < WARPS ? shared.sums[lane] : 0);
    if (from + t < s.tiles) offsets[from + t + 1] = through;
    __syncthreads();
  }
  if (is_bad(total, guess, s)) return do_again<T>(s, r, 0, gridDim.x, offsets, shared);
  if (t == 0) s.fallback[r] = false;
  uint2* list = s.lists + r * CAPACITY;
  for (int tile = warp; tile < s.tiles; tile += WARPS)
    gather_tile<T>(s, r, tile, offsets[tile + 1] - offsets[tile], list + offsets[tile], guess.key, s.row.N);
  __syncthreads();
  finish<THREADS>([&](int i) { return list[i]; }, total, guess, s.row, r, shared);
}

// Ask for what will be read or written, before it may be: its address is looked up meanwhile.
__device__ inline void ask_for(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// Those beyond 32 of a tile.
__device__ __noinline__ inline void store_more(const uint2* entries, int kept, uint2* list, int count) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 32; ++i) {
    const int all = __shfl_sync(ALL, count, i);
    for (int slot = 32 + lane; slot < all; slot += 32) list[slot] = __ldcg(entries + (i * kept + slot));
    list += all;
  }
}

// A thread's candidates, in the order of lanes, then of items; key 0: none.
struct Held {
  static constexpr int ITEMS = CAPACITY / SCORED_THREADS;
  bool many;
  uint2 entries[ITEMS];

  // One branch: with one an item, their predicates were spilled.
  template <typename Visit>
  __device__ void each(Visit visit) {
#pragma unroll
    for (int j = 0; j < ITEMS / 2; ++j) visit(entries[j], 32 * j);
    if (!many) return;
#pragma unroll
    for (int j = ITEMS / 2; j < ITEMS; ++j) visit(entries[j], 32 * j);
  }

  __device__ void load(const uint2* list, int total) {
    const int items = (total + SCORED_THREADS - 1) / SCORED_THREADS;
    const int from = threadIdx.x / 32 * 32 * items + threadIdx.x % 32, end = min(from + 32 * items, total);
    many = items > ITEMS / 2;
    each([&](uint2& entry, int at) { entry = from + at < end ? list[from + at] : make_uint2(0, INT_MAX); });
  }
};

// From [low, high] to the bin in it that holds the need-th from the top, which `need` then counts in the bin. Returns how
// many the bin holds: more than 32 only where they are equal.
__device__ inline int find_bin(Held& held, int shift, uint32_t& low, uint32_t& high, int& need,
                               Shared<SCORED_THREADS / 32>& shared) {
  for (;;) {
    held.each([&](uint2 entry, int) {
      if (entry.x >= low && entry.x <= high)
        atomicAdd(&shared.histogram[BINS - 1 - min((entry.x - low) >> shift, BINS - 1u)], 1);
    });
    __syncthreads();
    crossing<SCORED_THREADS>(need, shared);
    need -= shared.before;
    low += static_cast<uint32_t>(BINS - 1 - shared.slot) << shift;
    if (shared.slot > 0) high = low + ((1u << shift) - 1);
    if (shared.inside <= 32 || low == high) return shared.inside;
    shift = shift_of(low, high);
  }
}

// Write the winners, where the k-th is the need-th of `inside` <= 32 entries in [low, high].
__device__ inline void write_held(Held& held, int need, int inside, uint32_t low, uint32_t high, int* winners,
                                  Shared<SCORED_THREADS / 32>& shared) {
  __shared__ uint64_t cut_at;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto* members = reinterpret_cast<uint64_t*>(shared.members);
  auto ordered = [](uint2 entry) { return uint64_t{entry.x} << 32 | ~entry.y; };
  int above = 0;
  held.each([&](uint2 entry, int) {
    above += entry.x > high;
    if (entry.x >= low && entry.x <= high) members[atomicAdd(&shared.gathered, 1)] = ordered(entry);
  });
  above = __reduce_add_sync(ALL, above);
  if (lane == 0) shared.above[warp] = above;
  __syncthreads();
  const uint64_t member = lane < inside ? members[lane] : 0;
  if (warp < inside) {
    const uint64_t other = members[warp];
    if (__popc(__ballot_sync(ALL, member > other)) == need - 1) cut_at = other;
  }
  int slot = __reduce_add_sync(ALL, lane < warp ? shared.above[lane] : 0);
  const uint32_t start = __shfl_sync(ALL, held.entries[0].y, 0);
  __syncthreads();
  const uint64_t cut = cut_at;
  slot += __popc(__ballot_sync(ALL, member >= cut && ~static_cast<uint32_t>(member) < start));
  const unsigned below = (1u << lane) - 1;
  held.each([&](uint2 entry, int) {
    const bool chosen = ordered(entry) >= cut;
    const unsigned votes = __ballot_sync(ALL, chosen);
    if (chosen) winners[slot + __popc(votes & below)] = static_cast<int>(entry.y);
    slot += __popc(votes);
  });
}

// OWN: tiles of a warp, of each of which up to 32 candidates go through registers.
template <typename T, int OWN>
__global__ void __maxnreg__(48) refine_scored(const __grid_constant__ Stream s) {
  constexpr int THREADS = SCORED_THREADS, WARPS = THREADS / 32;
  __shared__ Shared<WARPS> shared;
  extern __shared__ uint2 list[];  // CAPACITY of them
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t r = blockIdx.y;
  const int first = warp * s.tiles / WARPS, tiles = (warp + 1) * s.tiles / WARPS - first;
  const int* counts = s.counts + (r * (s.tiles + 1) + first);
  const uint2* entries = s.entries + (r * s.tiles + first) * s.kept;
  int* winners = s.row.free + r * s.row.k;
  clear<THREADS>(shared);
  if (lane == 0) {
    ask_for(counts);
    ask_for(entries);
    ask_for(winners);
  }
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  if (blockIdx.x > 0) return wait_for_bad<T>(s, r, blockIdx.x, reinterpret_cast<int*>(list), shared);

  const int count = lane < tiles ? __ldcg(counts + lane) : 0;
  uint2 found[OWN];  // key 0: none
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    found[i].x = 0;
    if (lane < __shfl_sync(ALL, count, i)) found[i] = __ldcg(entries + (i * s.kept + lane));
  }
  const Guess guess = guess_of(s, r);  // while the entries are on their way
  const int own = __reduce_add_sync(ALL, count);
  if (lane == 0) shared.sums[warp] = own;
  __syncthreads();
  const int slot = __reduce_add_sync(ALL, lane < warp ? shared.sums[lane] : 0);
  const int total = __reduce_add_sync(ALL, shared.sums[lane]);
  if (total <= s.row.k || total > CAPACITY || guess.shift >= 32)
    return refine_anyhow<T, THREADS>(s, r, reinterpret_cast<int*>(list), shared);
#pragma unroll
  for (int i = 0, at = slot + lane; i < OWN; ++i) {
    if (found[i].x) list[at] = found[i];
    at += __shfl_sync(ALL, count, i);
  }
  if (__any_sync(ALL, count > 32)) store_more(entries, s.kept, list + slot, count);
  __syncthreads();

  Held held;
  held.load(list, total);
  uint32_t low = guess.key, high = ALL;
  int need = s.row.k;
  const int inside = find_bin(held, guess.shift, low, high, need, shared);
  if (inside > 32) return refine_anyhow<T, THREADS>(s, r, reinterpret_cast<int*>(list), shared);
  write_held(held, need, inside, low, high, winners, shared);
  if (threadIdx.x == 0) {
    s.row.candidates[r] = total;
    s.fallback[r] = false;
  }
}

}  // namespace sparse_prr
