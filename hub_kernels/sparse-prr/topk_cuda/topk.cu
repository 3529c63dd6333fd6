// The ops: checks, one launch, no allocation, no synchronisation; they can be captured in a CUDA graph.
#ifndef USE_CUDA
#define USE_CUDA  // torch's stable C interface declares its CUDA part under it
#endif
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>

#include <climits>
#include <optional>

#include "topk.cuh"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

using sparse_prr::Arguments;

// Starts before the kernel ahead of it in the stream has ended and waits on the GPU: saves 0.5 to 0.8 us an edge.
template <typename T, int THREADS, int ITEMS, bool RESIDENT>
void launch(const Arguments& arguments, dim3 grid, cudaStream_t stream) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(THREADS);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, sparse_prr::select_row<T, THREADS, ITEMS, RESIDENT>, arguments));
}

// Rows of up to 16896 entries stay in registers. The limits are a quarter above powers of two: contexts are powers of two
// and a few tokens. 8256 entries: 512 x 17 5.3 us, 1024 x 10 5.8.
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
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(scores.get_device_index(), &stream));
  const dim3 grid(static_cast<unsigned>(heads), static_cast<unsigned>(batch));
  const auto on = static_cast<cudaStream_t>(stream);
  switch (scores.scalar_type()) {
    case ScalarType::Float: return launch_by_length<float>(arguments, grid, on);
    case ScalarType::BFloat16: return launch_by_length<__nv_bfloat16>(arguments, grid, on);
    case ScalarType::Half: return launch_by_length<__half>(arguments, grid, on);
    default: STD_TORCH_CHECK(false, "scores: expected float32, bfloat16 or float16");
  }
}

void check_output(const Tensor& output, const Tensor& scores, const char* name) {
  STD_TORCH_CHECK(output.scalar_type() == ScalarType::Int && output.is_contiguous(), name,
                  ": expected a contiguous int32 tensor");
  STD_TORCH_CHECK(output.is_cuda() && output.get_device_index() == scores.get_device_index(), name,
                  ": expected the device of the scores");
}

void check_scores(const Tensor& scores, int64_t dims) {
  STD_TORCH_CHECK(scores.is_cuda() && scores.dim() == dims, "scores: expected ", dims, " dimensions on a CUDA device");
  const int64_t N = scores.size(dims - 1);
  STD_TORCH_CHECK(N < INT_MAX / 2 && (N <= 1 || scores.stride(dims - 1) == 1), "scores: expected rows with stride 1");
}

}  // namespace

void gvr_topk(const Tensor& indices, const Tensor& candidates, const Tensor& scores, std::optional<Tensor> lengths) {
  check_scores(scores, 2);
  check_output(indices, scores, "indices");
  check_output(candidates, scores, "candidates");
  const int64_t rows = scores.size(0);
  STD_TORCH_CHECK(indices.dim() == 2 && indices.size(0) == rows && indices.size(1) < INT_MAX / 2 &&
                      candidates.numel() == rows,
                  "indices and candidates: expected [", rows, ", k] and [", rows, "]");
  Arguments arguments{};
  arguments.scores = scores.data_ptr();
  arguments.head_stride = scores.stride(0);
  arguments.N = static_cast<int>(scores.size(1));
  arguments.k = static_cast<int>(indices.size(1));
  arguments.free = static_cast<int*>(indices.data_ptr());
  arguments.candidates = static_cast<int*>(candidates.data_ptr());
  if (lengths) {
    arguments.wide_lengths = lengths->scalar_type() == ScalarType::Long;
    STD_TORCH_CHECK((arguments.wide_lengths || lengths->scalar_type() == ScalarType::Int) && lengths->numel() == rows &&
                        lengths->dim() == 1 && lengths->is_cuda() &&
                        lengths->get_device_index() == scores.get_device_index(),
                    "lengths: expected int32 or int64 [", rows, "] on the device of the scores");
    arguments.lengths = lengths->data_ptr();
    arguments.length_stride = lengths->stride(0);
  }
  run(arguments, scores, rows, 1);
}

void select_blocks(const Tensor& selected, const Tensor& free, const Tensor& scores, const Tensor& forced) {
  check_scores(scores, 3);
  check_output(selected, scores, "selected");
  check_output(free, scores, "free");
  const int64_t batch = scores.size(0), heads = scores.size(1);
  STD_TORCH_CHECK(forced.scalar_type() == ScalarType::Int && forced.dim() == 3 && forced.size(0) == batch &&
                      (forced.size(1) == heads || forced.size(1) == 1) && forced.is_cuda() &&
                      forced.get_device_index() == scores.get_device_index(),
                  "forced: expected int32 [", batch, ", 1 or ", heads, ", F] on the device of the scores");
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
