// Batches of long sequences, cut for the ranks that share them (Axis::Sp). Local.
//
//   for (const auto& batch : loader) {   // the ranks of one sequence have the same batch: nn::Loader of an engine
//     const auto part = tessera::parallel::sequence_part({{"input_ids", batch.data}, {"labels", batch.data}}, *sp,
//                                                         tessera::parallel::Positions::Made);
//     ... part.at("input_ids"), part.at("shift_labels"), part.at("position_ids")
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera::parallel {

using SequenceTensors = std::map<std::string, at::Tensor>;

enum class Positions : uint8_t { Given, Made };  // the batch has position_ids; they count from 0 in each sequence

// The parts of `batch` for each of `ranks`. A part has its range of dim 1 of every tensor that is as long as input_ids [batch, sequence,
// ...], and all others whole. `labels` become `shift_labels`, moved by one token over the whole sequence (the last is -100), because a
// part of them cannot be moved; `attention_mask`, which a part could not use either, is left out: padding must be at the end.
// `position_ids` tell where a part lies, and packed sequences from each other. Value error for a batch without
// input_ids, or positions where they are to be given, a length that the ranks do not divide, padding elsewhere, and a tensor that is not
// dense. `others`: what else the batch holds, for messages.
std::vector<SequenceTensors> cut_batch(SequenceTensors batch, int ranks, Positions positions = Positions::Given,
                                       const std::vector<std::string>& others = {});
// The part of this rank of `sp`. Value errors of cut_batch().
SequenceTensors sequence_part(SequenceTensors batch, const comm::Group& sp, Positions positions = Positions::Given);
// Labels of the next token, for logits of each: moved by one along dim 1, -100 behind the last.
at::Tensor shifted_labels(const at::Tensor& labels);
// Value error for a tensor that is not dense.
void check_dense(const std::vector<at::Tensor>& tensors);

}  // namespace tessera::parallel
