// Batches of long sequences for ranks that share them, where each of these ranks has a loader of its own: all go through rank 0's
// batch first, then through rank 1's and so on, each with its part of the sequence.
//
//   tessera::nn::Loader own(dataset, world_rank, world_size, 1);   // of every rank another batch
//   tessera::nn::SequenceLoader loader(own, named, mesh.group(comm::Axis::Sp), engine.device());
//   while (const auto part = loader.next()) ... part->at("input_ids"), part->at("shift_labels")
//
// With an nn::Loader of an engine, whose ranks of one sequence have the same batch: parallel::sequence_part().
#pragma once

#include <deque>
#include <functional>
#include <optional>
#include <utility>

#include "tessera/comm/group.h"
#include "tessera/nn/data.h"
#include "tessera/parallel/sequence_batch.h"

namespace tessera::nn {

using parallel::Positions;
using parallel::SequenceTensors;

namespace detail {

// This rank's parts of what read() gives on each rank of `sp`, in their order, on `device`; nothing where a rank's has ended.
std::optional<std::deque<SequenceTensors>> deal_parts(const std::function<std::optional<SequenceTensors>()>& read,
                                                      comm::Group& sp, c10::Device device, Positions positions);

}  // namespace detail

template <class Dataset>
class SequenceLoader {
 public:
  using Batch = typename Loader<Dataset>::Batch;

  // `loader` must outlive it. `named`: a batch of it as cut_batch() takes it.
  SequenceLoader(Loader<Dataset>& loader, std::function<SequenceTensors(const Batch&)> named, comm::GroupPtr sp,
                 c10::Device device = c10::kCPU, Positions positions = Positions::Given)
      : loader_(loader), named_(std::move(named)), sp_(std::move(sp)), device_(device), positions_(positions) {
    TESSERA_CHECK_VALUE(named_ != nullptr && sp_ != nullptr, "SequenceLoader", "a function and a group are required");
  }
  // This rank's part of the next batch; nothing at the end of the pass, which is that of the rank that has the fewest batches, and
  // the next call begins another one. A collective over `sp` for the first of as many batches as it has ranks; the loader counts its
  // batch as done from there on. Value errors of cut_batch(), on all ranks; what else fails on one is pipeline::StageFailed on the
  // others.
  std::optional<SequenceTensors> next() {
    if (ready_.empty()) {
      auto dealt = detail::deal_parts([this] { return read(); }, *sp_, device_, positions_);
      if (!dealt) {
        at_.reset();
        return std::nullopt;
      }
      ready_ = std::move(*dealt);
    }
    SequenceTensors part = std::move(ready_.front());
    ready_.pop_front();
    return part;
  }

 private:
  std::optional<SequenceTensors> read() {
    if (at_)
      ++*at_;
    else
      at_ = loader_.begin();
    if (*at_ == loader_.end()) return std::nullopt;
    return named_(**at_);
  }

  Loader<Dataset>& loader_;
  std::function<SequenceTensors(const Batch&)> named_;
  comm::GroupPtr sp_;
  c10::Device device_;
  Positions positions_;
  std::optional<typename Loader<Dataset>::Iterator> at_;
  std::deque<SequenceTensors> ready_;
};

}  // namespace tessera::nn
