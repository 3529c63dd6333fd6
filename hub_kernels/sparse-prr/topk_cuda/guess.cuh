// Guess and verify (GVR, arXiv 2604.22312), before the one pass over a row: a threshold that leaves somewhat more than
// k entries, from whatever is known. Neither what is known nor the sample can change the result: see `refine`.
//
//   given    a threshold on the device, or the mean of the scores that a hint points at: kept if, by half a sample, it
//            leaves somewhat more than k entries and less than CAPACITY. GVR counts it over the whole row for that, and
//            moves it by secants
//   sample   four neighbours each (half a sector: all blocks read the same ones), evenly over the row; the threshold is
//            one of its order statistics
#pragma once

#include "search.cuh"

namespace sparse_prr {

constexpr int CAPACITY = 8192;  // candidates that a block refines on chip

struct Guess {
  uint32_t key;  // what is at or above it is a candidate; 1: every entry is
  int shift;     // slots of 2^shift keys above it reach beyond most candidates; 32: not known
  uint32_t top;  // of the sample
};

// The key that a threshold from elsewhere stands for. NaN is above everything.
__device__ inline uint32_t at_least(float threshold) {
  return threshold == -INFINITY ? 1u : threshold == threshold ? key_of(threshold) : ALL;
}

// The lowest score that is a candidate. The edge of a bin may lie below -inf, where keys are those of no score. NaN is
// none.
__device__ inline float lowest(Guess guess) {
  const uint32_t nothing_below = key_of(-INFINITY);
  return guess.key <= nothing_below ? -INFINITY : score_of(guess.key);
}

struct Stream {
  Arguments row;           // selected and forced are null; batch_stride is 0
  const float* threshold;  // [rows, 1 or 2], or null
  int64_t threshold_stride;
  bool reaches;         // the second number says how far up its candidates lie
  const int64_t* hint;  // [rows, M], or null
  int64_t hint_stride;
  int M;
  float* aim;      // [rows, 2]: of `threshold_row`, the threshold as a score and the best of the sample
  Guess* guesses;  // [rows], or null: made where they are needed
  int tile, tiles, kept;
  int* counts;     // [rows, tiles]: a tile's candidates, also those that `entries` has no room for
  uint2* entries;  // [rows, tiles, kept]: key and index of a tile's first candidates, in index order
  uint2* lists;    // [rows, CAPACITY]: of all candidates, where they don't fit in registers as they come
  int* again;      // [rows, parts, warps]: candidates of each warp of a row's blocks, where these collect again
  bool* fallback;  // [rows]: the guess was bad, and the row was read again
};

// What is known before: the key of a threshold, 0 if there is none after all, and how far up candidates are said to
// lie, 0 if that isn't known.
struct Known {
  uint32_t key, reach;
};

// Row r's threshold.
struct Given {
  const Stream& s;
  int64_t r;

  __device__ Known operator()() const {
    const float* given = s.threshold + r * s.threshold_stride;
    const float low = given[0], high = s.reaches ? given[1] : NAN;  // both loads before either is looked at
    return {key_of(low), key_of(high)};
  }
};

// THREADS * ITEMS entries of a row, in fours.
template <typename T, int THREADS, int ITEMS>
struct Sample {
  static constexpr int SIZE = THREADS * ITEMS;
  T scores[ITEMS];
  uint32_t keys[ITEMS];

  __device__ static int where(int j, int N) {
    const unsigned at = j * THREADS + threadIdx.x;
    return static_cast<int>((uint64_t{at / 4} * static_cast<unsigned>(N) / (SIZE / 4)) & ~3ull) + at % 4;
  }

  __device__ void load(const T* row, int N) {  // does not wait for the row's length
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) scores[j] = where(j, N) < N ? row[where(j, N)] : T(0.0f);
  }

  __device__ void rank(int N, int limit) {
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) keys[j] = where(j, N) < limit ? key_of(value(scores[j])) : 0u;
  }

  template <typename Visit>
  __device__ void each(Visit visit) {
#pragma unroll
    for (int j = 0; j < ITEMS; ++j) visit(keys[j], j);
  }
};

// Entries to aim at, so that SIGMAS standard deviations of what a sample of every spacing-th entry says still leave k:
// a threshold with the share p of the sample above it has N p +- sqrt(N p spacing) entries above it. At 3.5 one row in
// 4300 has too few.
__device__ inline float target_of(int k, float spacing) {
  constexpr float SIGMAS = 3.5f;
  const float half = 0.5f * SIGMAS * sqrtf(spacing), root = half + sqrtf(half * half + static_cast<float>(k));
  return fminf(root * root, 0.5f * (k + CAPACITY));  // a k near the capacity: as far from either end
}

// The sum of `own` over the block.
template <int THREADS>
__device__ int total_of(int own, Shared<THREADS / 32>& shared) {
  own = __reduce_add_sync(ALL, own);
  if (threadIdx.x % 32 == 0) shared.above[threadIdx.x / 32] = own;
  __syncthreads();
  return __reduce_add_sync(ALL, threadIdx.x % 32 < THREADS / 32 ? shared.above[threadIdx.x % 32] : 0);
}

// Slots from the guess up. Where the k-th entry is a rare one, it may lie beyond all of the sample.
__device__ inline int shift_beyond(uint32_t low, uint32_t top, int k, float spacing) {
  return shift_of(low, top) + (static_cast<float>(k) < 4.0f * spacing);
}

// The key of the sample that leaves about `target` entries: the lower edge of a bin that holds few of the sample. 1 if
// the sample has too few entries.
template <int THREADS, typename Row>
__device__ Guess order_statistic(Row& sample, float target, int k, int N, Shared<THREADS / 32>& shared) {
  const float spacing = static_cast<float>(N) / Row::SIZE;  // below 1 where entries come several times
  int need = max(static_cast<int>(target / spacing), 1);
  uint32_t low, high;
  bound<THREADS>(sample, need, shared, low, high);
  if (high == 0) return {1, 32, 0};
  const uint32_t top = high;
  for (const int enough = max(need / 8, 1);;) {
    const int shift = shift_of(low, high);
    fill<THREADS>(sample, shift, low, high, shared);
    crossing<THREADS>(need, shared);
    const int inside = shared.inside;
    enter_slot(shared.slot, shift, low, high);
    need -= shared.before;
    __syncthreads();
    if (threadIdx.x == 0) shared.inside = 0;
    if (inside == 0) return {1, 32, top};
    if (inside <= enough || low == high) return {low, shift_beyond(low, top, k, spacing), top};
  }
}

// What a sample says of a given key: the guess that it is, if it leaves between k and CAPACITY entries; else key 0. The
// sample is too small to tell k from 1.2 k, and what is given is as a rule better than it.
template <int THREADS, typename Row>
__device__ Guess verified(Row& sample, Known given, int k, int N, Shared<THREADS / 32>& shared) {
  int own = 0;
  uint32_t top = max(given.key, given.reach);
  sample.each([&](uint32_t key, int) {
    own += key >= given.key;
    top = max(top, key);
  });
  top = __reduce_max_sync(ALL, top);
  if (threadIdx.x % 32 == 0) shared.high[threadIdx.x / 32] = top;
  const float spacing = static_cast<float>(N) / Row::SIZE, left = spacing * total_of<THREADS>(own, shared);
  top = __reduce_max_sync(ALL, threadIdx.x % 32 < THREADS / 32 ? shared.high[threadIdx.x % 32] : 0u);
  const bool good = left >= k && left <= 0.85f * CAPACITY;
  return {good ? given.key : 0u, shift_beyond(given.key, top, k, spacing), top};
}

// The guess for a row by a block of THREADS that samples ITEMS entries a thread, half of them to verify what is known.
// `given()` is called where there is `something`. Ends with the histogram empty.
template <typename T, int THREADS, int ITEMS, typename Get>
__device__ Guess guess(const T* row, int k, int N, int limit, bool something, Get given,
                       Shared<THREADS / 32>& shared) {
  if (something) {
    Sample<T, THREADS, ITEMS / 2> few;
    few.load(row, N);
    const Known known = given();
    few.rank(N, limit);
    if (known.key) {
      const Guess found = verified<THREADS>(few, known, k, N, shared);
      if (found.key) return found;
      __syncthreads();
    }
  }
  Sample<T, THREADS, ITEMS> sample;
  sample.load(row, N);
  sample.rank(N, limit);
  return order_statistic<THREADS>(sample, target_of(k, static_cast<float>(N) / sample.SIZE), k, N, shared);
}

// The mean of the finite scores that row r's hint points at, if there are any.
template <typename T, int THREADS>
__device__ Known mean_of_hint(const Stream& s, int64_t r, const T* row, int limit, Shared<THREADS / 32>& shared) {
  float own = 0.0f;
  int valid = 0;
  for (int m = threadIdx.x; m < s.M; m += THREADS) {
    const int64_t at = s.hint[r * s.hint_stride + m];
    const float score = at >= 0 && at < limit ? value(row[at]) : NAN;
    if (fabsf(score) < INFINITY) {
      own += score;
      ++valid;
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) own += __shfl_xor_sync(ALL, own, step);
  if (threadIdx.x % 32 == 0) shared.low[threadIdx.x / 32] = __float_as_uint(own);
  valid = total_of<THREADS>(valid, shared);  // its barrier is theirs
  float sum = 0.0f;
  for (int warp = 0; warp < THREADS / 32; ++warp) sum += __uint_as_float(shared.low[warp]);
  __syncthreads();
  return {valid ? key_of(sum / valid) : 0u, 0u};
}

// One block a row writes the row's guess, where there are too many rows for each block of `collect` to sample for
// itself.
template <typename T, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS, 1) guess_row(const __grid_constant__ Stream s) {
  __shared__ Shared<THREADS / 32> shared;
  clear<THREADS>(shared);
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();

  const int64_t r = blockIdx.x;
  const T* row = static_cast<const T*>(s.row.scores) + r * s.row.head_stride;
  const int limit = limit_of(s.row, r);
  const Guess found = guess<T, THREADS, ITEMS>(
      row, s.row.k, s.row.N, limit, s.threshold || s.hint,
      [&] { return s.threshold ? Given{s, r}() : mean_of_hint<T, THREADS>(s, r, row, limit, shared); }, shared);
  if (threadIdx.x == 0) s.guesses[r] = found;
}

// The same for scores to come, as scores. Beside attention there is time for a larger sample than a guess has, which
// leaves its error out of the margin; what remains is for what changes until then.
template <typename T, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS, 1) threshold_row(const __grid_constant__ Stream s) {
  __shared__ Shared<THREADS / 32> shared;
  clear<THREADS>(shared);
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();

  const int64_t r = blockIdx.x;
  Sample<T, THREADS, ITEMS> sample;
  sample.load(static_cast<const T*>(s.row.scores) + r * s.row.head_stride, s.row.N);
  sample.rank(s.row.N, limit_of(s.row, r));
  const float spacing = fminf(s.row.N / 2048.0f, 48.0f);  // of samples that verify it
  const Guess found = order_statistic<THREADS>(sample, target_of(s.row.k, spacing), s.row.k, s.row.N, shared);
  if (threadIdx.x != 0) return;
  s.aim[2 * r] = lowest(found);
  s.aim[2 * r + 1] = found.top ? score_of(found.top) : -INFINITY;
}

}  // namespace sparse_prr
