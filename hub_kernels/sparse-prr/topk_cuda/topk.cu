// The ops of `topk.cuh`: a row is a block.
#include "host.h"
#include "topk.cuh"

using namespace sparse_prr;

namespace {

template <typename T, int THREADS, int ITEMS, bool RESIDENT>
void launch(const Arguments& arguments, dim3 grid, cudaStream_t stream) {
  launch_early(select_row<T, THREADS, ITEMS, RESIDENT>, grid, THREADS, 0, stream, arguments);
}

// Rows of up to 16896 entries stay in registers. The limits are a quarter above powers of two: contexts are powers of
// two and a few tokens. 8256 entries: 512 x 17 5.3 us, 1024 x 10 5.8.
template <typename T>
void launch_by_length(const Arguments& arguments, dim3 grid, cudaStream_t stream) {
  if (arguments.N <= 768) return launch<T, 256, 3, true>(arguments, grid, stream);
  if (arguments.N <= 1280) return launch<T, 256, 5, true>(arguments, grid, stream);
  if (arguments.N <= 2560) return launch<T, 512, 5, true>(arguments, grid, stream);
  if (arguments.N <= 5120) return launch<T, 512, 10, true>(arguments, grid, stream);
  if (arguments.N <= 8704) return launch<T, 512, 17, true>(arguments, grid, stream);
  if (arguments.N <= 16896) return launch<T, 512, 33, true>(arguments, grid, stream);
  return launch<T, 1024, 8, false>(arguments, grid, stream);
}

void run(const Arguments& arguments, const Tensor& scores, int64_t heads, int64_t batch) {
  STD_TORCH_CHECK(heads <= INT_MAX && batch <= 65535, "too many rows: ", heads, " x ", batch);
  if (heads == 0 || batch == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(scores.get_device_index());
  const dim3 grid(static_cast<unsigned>(heads), static_cast<unsigned>(batch));
  by_type(scores, [&](auto type) { launch_by_length<decltype(type)>(arguments, grid, stream_of(scores)); });
}

}  // namespace

void gvr_topk(const Tensor& indices, const Tensor& candidates, const Tensor& scores, std::optional<Tensor> lengths) {
  Arguments arguments = arguments_of(scores, lengths, indices.dim() == 2 ? indices.size(1) : -1);
  const int64_t rows = scores.size(0);
  check_output(indices, ScalarType::Int, scores, "indices");
  check_output(candidates, ScalarType::Int, scores, "candidates");
  STD_TORCH_CHECK(indices.size(0) == rows && candidates.numel() == rows, "indices and candidates: expected [", rows,
                  ", k] and [", rows, "]");
  arguments.free = static_cast<int*>(indices.data_ptr());
  arguments.candidates = static_cast<int*>(candidates.data_ptr());
  run(arguments, scores, rows, 1);
}

void select_blocks(const Tensor& selected, const Tensor& free, const Tensor& scores, const Tensor& forced) {
  check_scores(scores, 3);
  check_output(selected, ScalarType::Int, scores, "selected");
  check_output(free, ScalarType::Int, scores, "free");
  const int64_t batch = scores.size(0), heads = scores.size(1);
  STD_TORCH_CHECK(forced.scalar_type() == ScalarType::Int && forced.dim() == 3 && forced.size(0) == batch &&
                      (forced.size(1) == heads || forced.size(1) == 1),
                  "forced: expected int32 [", batch, ", 1 or ", heads, ", F]");
  check_beside(forced, scores, "forced");
  const int64_t F = forced.size(2), k = free.dim() == 3 ? free.size(2) : -1;
  STD_TORCH_CHECK(k >= 0 && F + k < INT_MAX / 2 && free.numel() == batch * heads * k && selected.dim() == 3 &&
                      selected.size(2) == F + k && selected.numel() == batch * heads * (F + k),
                  "free and selected: expected [", batch, ", ", heads, ", k] and [.., F + k]");
  Arguments arguments{};
  arguments.scores = scores.data_ptr();
  arguments.batch_stride = scores.stride(0);
  arguments.head_stride = scores.stride(1);
  arguments.N = static_cast<int>(scores.size(2));
  arguments.k = static_cast<int>(k);
  arguments.forced = static_cast<const int*>(forced.data_ptr());
  arguments.forced_batch = forced.stride(0);
  arguments.forced_head = forced.size(1) == 1 ? 0 : forced.stride(1);
  arguments.forced_slot = forced.stride(2);
  arguments.F = static_cast<int>(F);
  arguments.free = static_cast<int*>(free.data_ptr());
  arguments.selected = static_cast<int*>(selected.data_ptr());
  run(arguments, scores, heads, batch);
}
