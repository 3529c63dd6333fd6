#include <torch/csrc/stable/library.h>

#include "registration.h"
#include "torch_binding.h"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("gvr_topk(Tensor! indices, Tensor! candidates, Tensor scores, Tensor? lengths) -> ()");
  ops.def("select_blocks(Tensor! selected, Tensor! free, Tensor scores, Tensor forced) -> ()");
}

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("gvr_topk", TORCH_BOX(&gvr_topk));
  ops.impl("select_blocks", TORCH_BOX(&select_blocks));
}
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
