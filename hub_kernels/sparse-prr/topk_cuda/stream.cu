// The ops of long rows, each read once: `guess.cuh`, `stream.cuh`, `tiles.cuh`.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <mutex>

#include "host.h"
#include "scored.cuh"
#include "tiles.cuh"

using namespace sparse_prr;

namespace {

constexpr int64_t FEW_ROWS = 8, LONGEST_SAMPLED = 512 << 10;  // longer rows want a larger sample than a block's
constexpr int LISTS = CAPACITY * 8;  // bytes of a row's candidates

// More than 48 KB of shared memory has to be asked for, once a kernel and device.
template <auto kernel>
void launch_with_lists(const Stream& s, dim3 grid, int threads, int device, cudaStream_t stream) {
  static std::mutex mutex;
  static uint64_t allowed = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!(allowed >> device & 1))
      STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, LISTS));
    allowed |= uint64_t{1} << device;
  }
  launch_early(kernel, grid, threads, LISTS, stream, s);
}

template <typename T>
void launch_guess(const Stream& s, int64_t rows, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(rows));
  const int N = s.row.N;
  if (N <= 192 << 10) return launch_early(guess_row<T, 512, 4>, grid, 512, 0, stream, s);
  if (N <= 384 << 10) return launch_early(guess_row<T, 512, 8>, grid, 512, 0, stream, s);
  if (N <= 1536 << 10) return launch_early(guess_row<T, 1024, 8>, grid, 1024, 0, stream, s);
  return launch_early(guess_row<T, 1024, 32>, grid, 1024, 0, stream, s);
}

template <typename T>
void launch_threshold(const Stream& s, int64_t rows, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(rows));
  if (s.row.N <= 384 << 10) return launch_early(threshold_row<T, 512, 8>, grid, 512, 0, stream, s);
  if (s.row.N <= 1536 << 10) return launch_early(threshold_row<T, 1024, 8>, grid, 1024, 0, stream, s);
  return launch_early(threshold_row<T, 1024, 32>, grid, 1024, 0, stream, s);
}

// Tiles of few rows are worked on by more threads: a block's latency counts, not its instructions. They sample 2048
// entries: all blocks read the same ones, and 4096 took 0.3 us longer than the candidates more that the smaller one
// leaves.
template <typename T>
void launch_collect(const Stream& s, bool samples, int64_t rows, cudaStream_t stream) {
  const dim3 grid(s.tiles, static_cast<unsigned>(rows));
  auto go = [&](auto kernel, int threads) { launch_early(kernel, grid, threads, 0, stream, s); };
  switch (s.tile) {
    case 256: return samples ? go(collect<T, 256, 1, 8>, 256) : go(collect<T, 256, 1, 0>, 256);
    case 512: return samples ? go(collect<T, 512, 1, 4>, 512) : go(collect<T, 256, 2, 0>, 256);
    case 1024: return samples ? go(collect<T, 512, 2, 4>, 512) : go(collect<T, 256, 4, 0>, 256);
    case 2048: return samples ? go(collect<T, 512, 4, 4>, 512) : go(collect<T, 256, 8, 0>, 256);
    case 4096: return samples ? go(collect<T, 512, 8, 4>, 512) : go(collect<T, 256, 16, 0>, 256);
    default: return go(collect<T, 1024, 8, 0>, 1024);
  }
}

template <typename T>
void launch_refine(const Stream& s, int64_t rows, cudaStream_t stream) {
  auto go = [&](auto kernel) { launch_early(kernel, dim3(static_cast<unsigned>(rows)), REFINE_THREADS, 0, stream, s); };
  if (s.tiles <= 32) return go(refine<T, 1>);
  if (s.tiles <= 128) return go(refine<T, 4>);
  return go(refine<T, 8>);
}

template <typename T>
void launch_stream(const Stream& s, int64_t rows, int device, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(rows));
  if (s.row.N <= 384 << 10) return launch_with_lists<stream_row<T, 8>>(s, grid, STREAM_THREADS, device, stream);
  return launch_with_lists<stream_row<T, 32>>(s, grid, STREAM_THREADS, device, stream);
}

template <typename T>
void launch_refine_scored(const Stream& s, int64_t rows, int parts, int device, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(rows));
  if (s.tiles > SCORED_THREADS / 8)
    return launch_with_lists<refine_scored<T, 8>>(s, grid, SCORED_THREADS, device, stream);
  return launch_with_lists<refine_scored<T, 4>>(s, grid, SCORED_THREADS, device, stream);
}

// Blocks of a row of N scores, should its guess be bad: none stands in the way of another row's first one.
int parts_of(int64_t rows, int64_t N) {
  return rows > FEW_ROWS ? 1 : static_cast<int>(std::clamp(N >> 13, int64_t{1}, int64_t{16}));
}

// Entries of a tile, a power of two: what a block has threads for. 32 tiles a row, of which `refine` keeps more
// candidates each in registers; few rows alone are shared by all multiprocessors.
int tile_of(int64_t rows, int64_t N) {
  const bool few = rows <= FEW_ROWS;
  const int64_t most = few ? 8192 : 4096;
  int64_t tile = 256;
  while (tile < most && tile * (few && tile >= 1024 ? 128 : 32) < N) tile *= 2;
  return static_cast<int>(tile);
}

Stream into(const Tensor& indices, const Tensor& candidates, const Tensor& fallback, const Tensor& scores,
            const std::optional<Tensor>& lengths) {
  Stream s{};
  s.row = arguments_of(scores, lengths, indices.dim() == 2 ? indices.size(1) : -1);
  const int64_t rows = scores.size(0);
  check_output(indices, ScalarType::Int, scores, "indices");
  check_output(candidates, ScalarType::Int, scores, "candidates");
  check_output(fallback, ScalarType::Bool, scores, "fallback");
  STD_TORCH_CHECK(indices.size(0) == rows && candidates.numel() == rows && fallback.numel() == rows,
                  "outputs: expected [", rows, ", k], [", rows, "] and [", rows, "]");
  STD_TORCH_CHECK(s.row.k >= 1 && s.row.k <= CAPACITY, "k: expected 1 to ", CAPACITY, ", got ", s.row.k);
  s.row.free = static_cast<int*>(indices.data_ptr());
  s.row.candidates = static_cast<int*>(candidates.data_ptr());
  s.fallback = static_cast<bool*>(fallback.data_ptr());
  return s;
}

void take_threshold(Stream& s, const Tensor& threshold, const Tensor& scores) {
  const int64_t width = threshold.dim() == 2 ? threshold.size(1) : 1;
  STD_TORCH_CHECK((threshold.dim() == 1 || threshold.dim() == 2) && threshold.size(0) == scores.size(0) &&
                      (width == 1 || (width == 2 && threshold.stride(1) == 1)) &&
                      threshold.scalar_type() == ScalarType::Float,
                  "threshold: expected float32 [", scores.size(0), "] or [", scores.size(0), ", 2]");
  check_beside(threshold, scores, "threshold");
  s.threshold = static_cast<const float*>(threshold.data_ptr());
  s.threshold_stride = threshold.stride(0);
  s.reaches = width == 2;
}

}  // namespace

void topk_stream(const Tensor& indices, const Tensor& candidates, const Tensor& fallback, const Tensor& scores,
                 std::optional<Tensor> lengths, std::optional<Tensor> threshold, std::optional<Tensor> hint,
                 int64_t way) {
  const int64_t rows = scores.size(0), N = scores.size(1);
  Stream s = into(indices, candidates, fallback, scores, lengths);
  const bool tiled = way != 3, apart = way == 2 || N > LONGEST_SAMPLED;
  STD_TORCH_CHECK(way >= 1 && way <= 3, "way: expected 1 to 3, got ", way);
  STD_TORCH_CHECK(!tiled || (rows <= 65535 && N <= int64_t{4096} * MAX_TILES), "too many rows or entries: ", rows,
                  " x ", N);
  if (rows == 0) return;
  if (threshold) take_threshold(s, *threshold, scores);
  if (hint) {
    STD_TORCH_CHECK(apart && hint->dim() == 2 && hint->size(0) == rows && hint->scalar_type() == ScalarType::Long &&
                        (hint->size(1) <= 1 || hint->stride(1) == 1),
                    "hint: expected int64 [", rows, ", M] and the way 2");
    check_beside(*hint, scores, "hint");
    s.hint = static_cast<const int64_t*>(hint->data_ptr());
    s.hint_stride = hint->stride(0);
    s.M = static_cast<int>(hint->size(1));
  }
  const torch::stable::accelerator::DeviceGuard guard(scores.get_device_index());
  const cudaStream_t stream = stream_of(scores);
  const int device = scores.get_device_index();
  if (!tiled) return by_type(scores, [&](auto type) { launch_stream<decltype(type)>(s, rows, device, stream); });

  // From the allocator of the current stream, and back to it on return: what runs there next comes after these kernels.
  s.tile = tile_of(rows, N);
  s.tiles = static_cast<int>(std::max((N + s.tile - 1) / s.tile, int64_t{1}));
  // All of a tile, while that is 32 MB or less
  s.kept = rows > FEW_ROWS || rows * N > 4 << 20 ? std::min(s.tile, 512) : s.tile;
  const int64_t slots = rows * s.tiles * s.kept, lists = rows * CAPACITY, counts = (rows * s.tiles + 1) / 2;
  const Tensor workspace = torch::stable::new_empty(scores, {slots + lists + 2 * rows + counts}, ScalarType::Long);
  s.entries = static_cast<uint2*>(workspace.data_ptr());
  s.lists = s.entries + slots;
  static_assert(sizeof(Guess) <= 2 * sizeof(uint2));
  s.guesses = reinterpret_cast<Guess*>(s.lists + lists);
  s.counts = reinterpret_cast<int*>(s.lists + lists + 2 * rows);
  by_type(scores, [&](auto type) {
    using T = decltype(type);
    if (apart) launch_guess<T>(s, rows, stream);
    launch_collect<T>(s, !apart, rows, stream);
    launch_refine<T>(s, rows, stream);
  });
}

void topk_candidates(const Tensor& indices, const Tensor& candidates, const Tensor& fallback, const Tensor& scores,
                     std::optional<Tensor> lengths, const Tensor& threshold, const Tensor& counts,
                     const Tensor& entries) {
  const int64_t rows = scores.size(0), N = scores.size(1), tiles = counts.dim() == 2 ? counts.size(1) - 1 : -1;
  Stream s = into(indices, candidates, fallback, scores, lengths);
  take_threshold(s, threshold, scores);
  check_output(counts, ScalarType::Int, scores, "counts");
  check_output(entries, ScalarType::Int, scores, "entries");
  STD_TORCH_CHECK(counts.size(0) == rows && tiles >= 1 && tiles <= SCORED_THREADS / 4 && rows <= 65535 && entries.dim() == 4 &&
                      entries.size(0) == rows && entries.size(1) == tiles && entries.size(2) * tiles >= N &&
                      entries.size(3) == 2,
                  "counts and entries: expected [", rows, ", tiles + 1] and [", rows, ", tiles, tile, 2] of up to ",
                  SCORED_THREADS / 4, " tiles that hold the row");
  if (rows == 0) return;
  s.counts = static_cast<int*>(counts.data_ptr());
  s.entries = static_cast<uint2*>(entries.data_ptr());
  s.tiles = static_cast<int>(tiles);
  s.tile = s.kept = static_cast<int>(entries.size(2));
  const torch::stable::accelerator::DeviceGuard guard(scores.get_device_index());
  const int parts = parts_of(rows, N);
  const int64_t again = parts * (SCORED_THREADS / 32) / 2;  // int32s in int64s
  const Tensor lists = torch::stable::new_empty(scores, {rows * (CAPACITY + again)}, ScalarType::Long);
  s.lists = static_cast<uint2*>(lists.data_ptr());
  s.again = reinterpret_cast<int*>(s.lists + rows * CAPACITY);
  const int device = scores.get_device_index();
  by_type(scores, [&](auto type) {
    launch_refine_scored<decltype(type)>(s, rows, parts, device, stream_of(scores));
  });
}

void topk_threshold(const Tensor& threshold, const Tensor& scores, int64_t k, std::optional<Tensor> lengths) {
  Stream s{};
  s.row = arguments_of(scores, lengths, k);
  check_output(threshold, ScalarType::Float, scores, "threshold");
  STD_TORCH_CHECK(threshold.numel() == 2 * scores.size(0), "threshold: expected [", scores.size(0), ", 2]");
  if (scores.size(0) == 0) return;
  s.aim = static_cast<float*>(threshold.data_ptr());
  const torch::stable::accelerator::DeviceGuard guard(scores.get_device_index());
  by_type(scores, [&](auto type) { launch_threshold<decltype(type)>(s, scores.size(0), stream_of(scores)); });
}
