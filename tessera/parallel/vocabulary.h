// Embedding and cross entropy whose vocabulary, or whose sequence, is cut over the ranks of a group.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/parallel/layers.h"

namespace tessera::parallel {

// weight: rows [begin, begin + weight.size(0)) of an embedding of `vocabulary` rows. The sum over the ranks is the whole result;
// in a sequence region this rank's part of it (indices are whole). Index error for an index that no rank holds (on the CPU; torch's
// assertion on devices). padding_idx as torch's, in the whole's numbers; -1: none.
at::Tensor vocab_embedding(const at::Tensor& indices, const at::Tensor& weight, int64_t begin, int64_t vocabulary,
                           int64_t padding_idx, const Region& region);

// Cross entropy of logits whose last dim (the vocabulary) is cut: never gathered; one all-reduce of the maxima, one of the sums.
// logits [..., vocabulary of this rank], target [...] in the whole's numbers. Token losses [...], fp32 inside and out; 0 where
// target == ignore_index. `give_away`: the backward writes the gradient over the logits, which nobody may look at afterwards, and
// runs once; without it there is one tensor more of the logits' size. Not-implemented error for a second derivative.
at::Tensor vocab_cross_entropy(const at::Tensor& logits, const at::Tensor& target, int64_t begin, int64_t vocabulary,
                               const comm::GroupPtr& group, int64_t ignore_index = -100, bool give_away = false);

// Per-token loss of this rank's part of a sequence, gathered over the ranks: logits [s/P, b, vocabulary], target [s/P, b] -> [s, b].
// `sizes`: the ranks' parts of s; empty: equal ones.
at::Tensor sequence_cross_entropy(const at::Tensor& logits, const at::Tensor& target, const comm::GroupPtr& group,
                                  int64_t ignore_index = -100, const Sizes& sizes = {});

// The mean over all tokens of a sequence that ranks share, on every rank of the group, fp32: `loss` is this rank's mean over its
// tokens, those whose label is not `ignore_index` (of any value where there is none). The result's gradients, averaged over the
// ranks, are those of one rank with the whole sequence: backward() is called on every rank. Collective in forward only.
at::Tensor mean_over_sequence(const at::Tensor& loss, const at::Tensor& labels, const comm::GroupPtr& group,
                              int64_t ignore_index = -100);

}  // namespace tessera::parallel
