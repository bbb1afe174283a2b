#include "tessera/parallel/sequence_batch.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::parallel {
namespace {

constexpr int64_t kNoLabel = -100;  // of tokens that do not count

void require(const SequenceTensors& batch, const char* key, const std::vector<std::string>& others, const char* why) {
  if (batch.contains(key)) return;
  std::vector<std::string> names = others;
  for (const auto& [name, value] : batch)
    names.push_back(name);
  std::ranges::sort(names);
  std::string all;
  for (const std::string& name : names)
    all += (all.empty() ? "" : ", ") + name;
  TESSERA_CHECK_VALUE(false, "SequenceLoader", "the batch has no ", key, ", only ", all, why);
}

void check_padding(const at::Tensor& mask) {
  if (mask.dim() != 2 || mask.size(1) < 2) return;
  const at::Tensor real = mask.to(at::kBool);
  const int64_t rest = mask.size(1) - 1;
  const at::Tensor after_none = real.narrow(1, 1, rest).logical_and(real.narrow(1, 0, rest).logical_not());
  TESSERA_CHECK_VALUE(!after_none.any().item<bool>(), "SequenceLoader",
                      "attention_mask has zeros before ones; with sequence parallelism padding must be at the end "
                      "(padding_side='right'), packed sequences are told by position_ids");
}

}  // namespace

at::Tensor shifted_labels(const at::Tensor& labels) {
  TESSERA_CHECK_VALUE(labels.dim() >= 2, "SequenceLoader", "labels must be [batch, sequence, ...], got ",
                      labels.sizes());
  std::vector<int64_t> pad(static_cast<size_t>(2 * (labels.dim() - 1)), 0);  // of dims from the last one to dim 1
  pad.back() = 1;
  return at::constant_pad_nd(labels.narrow(1, 1, labels.size(1) - 1), pad, kNoLabel);
}

void check_dense(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& each : tensors)
    TESSERA_CHECK_VALUE(each.layout() == at::kStrided, "SequenceLoader", "the batch holds a tensor of the layout ",
                        each.layout(), "; make it dense");
}

std::vector<SequenceTensors> cut_batch(SequenceTensors batch, int ranks, Positions positions,
                                       const std::vector<std::string>& others) {
  require(batch, "input_ids", others, "");
  const at::Tensor ids = batch.at("input_ids");
  TESSERA_CHECK_VALUE(ids.dim() >= 2, "SequenceLoader", "input_ids must be [batch, sequence, ...], got ", ids.sizes());
  const int64_t length = ids.size(1), step = length / ranks;
  if (positions == Positions::Made && !batch.contains("position_ids"))
    batch["position_ids"] = at::arange(length, ids.options().dtype(at::kLong)).expand({ids.size(0), length});
  require(batch, "position_ids", others, "; a part of a sequence cannot know where it lies without them");
  TESSERA_CHECK_VALUE(length % ranks == 0, "SequenceLoader", "a batch of ", length,
                      " tokens a sequence is not divisible by the ", ranks,
                      " ranks of sequence_parallel_size; pad it to ", (step + 1) * ranks);
  if (const auto mask = batch.find("attention_mask"); mask != batch.end()) {
    check_padding(mask->second);
    batch.erase(mask);
  }
  if (const auto labels = batch.find("labels"); labels != batch.end()) {
    batch["shift_labels"] = shifted_labels(labels->second);
    batch.erase("labels");
  }
  std::vector<SequenceTensors> parts(static_cast<size_t>(ranks));
  for (const auto& [name, value] : batch) {
    check_dense({value});
    const bool cut = value.dim() > 1 && value.size(1) == length;
    for (int rank = 0; rank < ranks; ++rank)
      parts[static_cast<size_t>(rank)][name] = cut ? value.narrow(1, rank * step, step) : value;
  }
  return parts;
}

SequenceTensors sequence_part(SequenceTensors batch, const comm::Group& sp, Positions positions) {
  return cut_batch(std::move(batch), sp.size(), positions)[static_cast<size_t>(sp.rank())];
}

}  // namespace tessera::parallel
