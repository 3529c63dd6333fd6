#include <torch/csrc/stable/library.h>

#include "registration.h"
#include "torch_binding.h"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("gvr_topk(Tensor! indices, Tensor! candidates, Tensor scores, Tensor? lengths) -> ()");
  ops.def(
      "topk_stream(Tensor! indices, Tensor! candidates, Tensor! fallback, Tensor scores, Tensor? lengths, "
      "Tensor? threshold, Tensor? hint, int way) -> ()");
  ops.def(
      "topk_candidates(Tensor! indices, Tensor! candidates, Tensor! fallback, Tensor scores, Tensor? lengths, "
      "Tensor threshold, Tensor counts, Tensor entries) -> ()");
  ops.def("topk_threshold(Tensor! threshold, Tensor scores, int k, Tensor? lengths) -> ()");
  ops.def("select_blocks(Tensor! selected, Tensor! free, Tensor scores, Tensor forced) -> ()");
}

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("gvr_topk", TORCH_BOX(&gvr_topk));
  ops.impl("topk_stream", TORCH_BOX(&topk_stream));
  ops.impl("topk_candidates", TORCH_BOX(&topk_candidates));
  ops.impl("topk_threshold", TORCH_BOX(&topk_threshold));
  ops.impl("select_blocks", TORCH_BOX(&select_blocks));
}
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
