#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

// Outputs come first and are written whole. The contracts are those of `gvr_topk` and `select_blocks` in Python.
void gvr_topk(const torch::stable::Tensor& indices, const torch::stable::Tensor& candidates,
              const torch::stable::Tensor& scores, std::optional<torch::stable::Tensor> lengths);
// way: 1 tiles of a row, each block samples for itself; 2 the guess is made first, by a block a row; 3 a block a row.
void topk_stream(const torch::stable::Tensor& indices, const torch::stable::Tensor& candidates,
                 const torch::stable::Tensor& fallback, const torch::stable::Tensor& scores,
                 std::optional<torch::stable::Tensor> lengths, std::optional<torch::stable::Tensor> threshold,
                 std::optional<torch::stable::Tensor> hint, int64_t way);
// counts, entries: what a scorer left of the scores at or above the threshold: how many in each tile, and keys and indices,
// in index order.
void topk_candidates(const torch::stable::Tensor& indices, const torch::stable::Tensor& candidates,
                     const torch::stable::Tensor& fallback, const torch::stable::Tensor& scores,
                     std::optional<torch::stable::Tensor> lengths, const torch::stable::Tensor& threshold,
                     const torch::stable::Tensor& counts, const torch::stable::Tensor& entries);
void topk_threshold(const torch::stable::Tensor& threshold, const torch::stable::Tensor& scores, int64_t k,
                    std::optional<torch::stable::Tensor> lengths);
void select_blocks(const torch::stable::Tensor& selected, const torch::stable::Tensor& free,
                   const torch::stable::Tensor& scores, const torch::stable::Tensor& forced);
