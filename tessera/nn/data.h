// Data for the ranks of an engine: datasets of torch::data, each rank another part of them, in an order that a resume goes on with.
//
//   tessera::nn::Loader loader(dataset.map(torch::data::transforms::Stack<>()), engine);
//   for (int64_t epoch = 0; epoch < 3; ++epoch)
//     for (const auto& batch : loader) { ...; engine.save_checkpoint("run", {}, {{"loader", loader.state()}}); }
//   ...
//   loader.load_state(found.client.at("loader"));   // the next pass goes on where the saved one was
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/data/dataloader.h>
#include <torch/data/samplers/base.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/io/data_order.h"
#include "tessera/nn/session.h"

namespace tessera::nn {

struct LoaderOptions {
  bool shuffle = true;     // another order in each pass
  uint64_t seed = 0;       // of the orders, the same on all ranks
  bool drop_last = false;  // leaves out examples that do not make a batch on every rank; else some come twice
  size_t workers = 0;      // threads that read ahead, each with a copy of the dataset; 0: none
};

using io::DataPosition;

// The examples of one rank in one pass: those of torch.utils.data.DistributedSampler for the same seed and epoch, so that C++ and Python
// see the same order. A pass that goes on after `position.samples` gives every other example once, for any number of ranks.
class RankSampler : public torch::data::samplers::Sampler<> {
 public:
  RankSampler(int64_t size, int rank, int ranks, const LoaderOptions& options, DataPosition position);
  void reset(std::optional<size_t> /*new_size*/ = std::nullopt) override { next_ = 0; }
  std::optional<std::vector<size_t>> next(size_t batch_size) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  int64_t size() const { return static_cast<int64_t>(mine_.size()); }

 private:
  std::vector<size_t> mine_;
  size_t next_ = 0;
};

c10::IValue to_value(DataPosition position);
// IoError for what is none; value error for a place in a larger dataset than one of `size` examples.
DataPosition data_position(const c10::IValue& value, int64_t size);

// A batch is what the dataset makes of its examples (BatchType). One pass at a time, on one thread.
template <class Dataset>
class Loader {
 public:
  using Batch = typename Dataset::BatchType;

  // Micro-batches of this rank, among those that share the batch's work; ranks of one sequence or one model see the same. Value error
  // for a dataset that is empty or does not say its size, a batch below 1 and a rank that is none.
  Loader(Dataset dataset, const Session& engine, const LoaderOptions& options = {})
      : Loader(std::move(dataset), engine.rank(), engine.size(), engine.core().options().micro_batch_size, options) {}
  Loader(Dataset dataset, int rank, int ranks, int64_t batch_size, const LoaderOptions& options = {})
      : dataset_(std::move(dataset)), rank_(rank), ranks_(ranks), batch_size_(batch_size), options_(options) {
    TESSERA_CHECK_VALUE(dataset_.size().has_value(), "data", "the dataset does not say its size");
    io::check_loader(size(), rank, ranks, batch_size);
  }

  class Iterator {
   public:
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    Batch& operator*() { return **batch_; }
    Batch* operator->() { return &**batch_; }
    Iterator& operator++() {
      ++*batch_;
      loader_->arrived(*batch_ == *end_);
      return *this;
    }
    bool operator==(const Iterator& other) const { return is_over() == other.is_over(); }

   private:
    friend class Loader;
    bool is_over() const { return loader_ == nullptr || *batch_ == *end_; }

    Loader* loader_ = nullptr;
    std::shared_ptr<void> pass_;  // of the two below
    std::optional<torch::data::Iterator<Batch>> batch_, end_;
  };

  // The next pass. A pass that is left early is over.
  Iterator begin() {
    const DataPosition from{epoch_++, std::exchange(skip_, 0)};
    RankSampler sampler(size(), rank_, ranks_, options_, from);
    auto options = torch::data::DataLoaderOptions(static_cast<size_t>(batch_size_)).workers(options_.workers);
    options.drop_last(options_.drop_last);
    auto pass = std::shared_ptr(torch::data::make_data_loader(dataset_, std::move(sampler), options));
    given_ = from.samples;
    Iterator iterator;
    iterator.loader_ = this;
    iterator.batch_ = pass->begin();
    iterator.end_ = pass->end();
    iterator.pass_ = std::move(pass);
    arrived(*iterator.batch_ == *iterator.end_);
    return iterator;
  }
  Iterator end() const { return {}; }

  // The position for checkpoints, in the middle of a pass too: the batch that the loop has counts as done.
  c10::IValue state() const {
    return to_value(under_way_ ? DataPosition{epoch_ - 1, std::min(given_, size()), size()}
                               : DataPosition{epoch_, skip_, skip_ > 0 ? size() : 0});
  }
  void load_state(const c10::IValue& state) {
    const DataPosition position = data_position(state, size());
    epoch_ = position.epoch;
    skip_ = position.samples;
    under_way_ = false;
  }
  int64_t epoch() const { return under_way_ ? epoch_ - 1 : epoch_; }

 private:
  int64_t size() const { return static_cast<int64_t>(*dataset_.size()); }
  void arrived(bool over) {
    under_way_ = !over;
    if (!over) given_ += batch_size_ * ranks_;
  }

  Dataset dataset_;
  int rank_, ranks_;
  int64_t batch_size_;
  LoaderOptions options_;
  int64_t epoch_ = 0, skip_ = 0, given_ = 0;  // the next pass, what it leaves out; of the present one
  bool under_way_ = false;
};

// Passes without an end: next() begins another pass where one is over. The loader's state() is the position.
template <class Dataset>
class RepeatingLoader {
 public:
  using Batch = typename Loader<Dataset>::Batch;

  // `loader` must outlive it.
  explicit RepeatingLoader(Loader<Dataset>& loader) : loader_(loader) {}
  // State error for a pass that gives no batch.
  Batch next() {
    if (batch_ != loader_.end()) ++batch_;
    if (batch_ == loader_.end()) batch_ = loader_.begin();
    TESSERA_CHECK(batch_ != loader_.end(), "data",
                  "a pass gives no batch: the dataset has less than one for every rank");
    return *batch_;
  }

 private:
  Loader<Dataset>& loader_;
  typename Loader<Dataset>::Iterator batch_;
};

}  // namespace tessera::nn
