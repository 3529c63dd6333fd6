#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

// Outputs come first and are written whole. The contracts are those of `gvr_topk` and `select_blocks` in Python.
void gvr_topk(const torch::stable::Tensor& indices, const torch::stable::Tensor& candidates,
              const torch::stable::Tensor& scores, std::optional<torch::stable::Tensor> lengths);
void select_blocks(const torch::stable::Tensor& selected, const torch::stable::Tensor& free,
                   const torch::stable::Tensor& scores, const torch::stable::Tensor& forced);
