// Data for the ranks of an engine: datasets of torch::data, each rank another part of them, in an order that a resume goes on with.
//
//   tessera::nn::Loader loader(dataset.map(torch::data::transforms::Stack<>()), engine);
//   for (int64_t epoch = 0; epoch < 3; ++epoch)
//     for (const auto& batch : loader) { ...; engine.save_checkpoint("run", {}, {{"loader", loader.state()}}); }
//   ...
//   loader.load_state(found.client.at("loader"));   // the next pass goes on where the saved one was
//
// Note [What a dataset draws]
//   A run that goes on amid a pass draws what the one before would have drawn, on as many ranks, where a dataset draws from
//     * batch_generator(): the loader seeds it for every batch, with any number of workers;
//     * torch's default generator, or one that the engine keeps (keep_generators()): with checkpoint.random_state and without workers,
//       which would draw from it in whatever order they run. A loader without workers reads a batch when the loop comes to it.
#pragma once

#include <ATen/core/Generator.h>

#include <ATen/core/ivalue.h>
#include <torch/data/dataloader.h>
#include <torch/data/datasets/base.h>
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
  bool shuffle = true;  // another order in each pass
  uint64_t seed = 0;    // of the orders, the same on all ranks, and of batch_generator()
  // Leaves out examples that do not make a batch on every rank; else some come twice. Not given: as dataloader_drop_last of the engine's
  // configuration says.
  std::optional<bool> drop_last = std::nullopt;
  size_t workers = 0;  // threads that read ahead, each with a copy of the dataset; 0: none
};

// The generator for what a dataset draws while a Loader reads a batch: its draws are of LoaderOptions::seed, the pass, the rank and the
// batch's number, whatever was drawn before, in this thread or another. State error elsewhere.
at::Generator batch_generator();

namespace detail {

// Which batch a dataset reads: its examples, and the seed of batch_generator().
struct BatchRequest {
  std::vector<size_t> examples;
  uint64_t seed = 0;
  size_t size() const { return examples.size(); }
};

// While it lives, batch_generator() of this thread has this seed.
class BatchDraws {
 public:
  explicit BatchDraws(uint64_t seed);
  ~BatchDraws();
  BatchDraws(const BatchDraws&) = delete;
  BatchDraws& operator=(const BatchDraws&) = delete;

 private:
  at::Generator before_;
};

// A dataset of a loader's pass.
template <class Dataset>
class ReadDataset
    : public torch::data::datasets::BatchDataset<ReadDataset<Dataset>, typename Dataset::BatchType, BatchRequest> {
 public:
  explicit ReadDataset(Dataset dataset) : dataset_(std::move(dataset)) {}
  typename Dataset::BatchType get_batch(BatchRequest request) override {
    const BatchDraws draws(request.seed);
    return dataset_.get_batch(std::move(request.examples));
  }
  std::optional<size_t> size() const override { return dataset_.size(); }

 private:
  Dataset dataset_;
};

}  // namespace detail

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

namespace detail {

// The batches of a RankSampler, each with its seed.
class BatchSampler : public torch::data::samplers::Sampler<BatchRequest> {
 public:
  // Goes on behind `batches` of the pass.
  BatchSampler(RankSampler sampler, uint64_t seed, int64_t batches)
      : sampler_(std::move(sampler)), seed_(seed), first_(batches), next_(batches) {}
  void reset(std::optional<size_t> new_size = std::nullopt) override {
    sampler_.reset(new_size);
    next_ = first_;
  }
  std::optional<BatchRequest> next(size_t batch_size) override;
  void save(torch::serialize::OutputArchive& archive) const override { sampler_.save(archive); }
  void load(torch::serialize::InputArchive& archive) override { sampler_.load(archive); }

 private:
  RankSampler sampler_;
  uint64_t seed_;
  int64_t first_;
  int64_t next_;
};
// The seed of a rank's pass.
uint64_t pass_seed(uint64_t seed, int64_t epoch, int rank);

}  // namespace detail

c10::IValue to_value(DataPosition position);
// IoError for what is none; value error for a place in a larger dataset than one of `size` examples.
DataPosition data_position(const c10::IValue& value, int64_t size);

template <class E>
concept DealsBatches = requires(const E& engine) {
  engine.micro_batch_size() + engine.rank() + engine.size() + engine.drops_last_batch();
};

// A batch is what the dataset makes of its examples (BatchType). One pass at a time, on one thread. A loader moves and does not copy;
// a pass goes on where it was moved to.
template <class Dataset>
class Loader {
 public:
  using Batch = typename Dataset::BatchType;

  // Micro-batches of this rank, among those that share the batch's work; ranks of one sequence or one model see the same. Value error
  // for a dataset that is empty or does not say its size, a batch below 1 and a rank that is none.
  // `engine`: an nn::Engine or nn::Session, or an nn::Pipeline, whose stages all see what a rank's place among data-parallel ones has.
  template <DealsBatches E>
  Loader(Dataset dataset, const E& engine, const LoaderOptions& options = {})
      : Loader(std::move(dataset), engine.rank(), engine.size(), engine.micro_batch_size(), as_in(engine, options)) {}
  Loader(Dataset dataset, int rank, int ranks, int64_t batch_size, const LoaderOptions& options = {})
      : passes_(std::make_shared<Passes>(std::move(dataset), rank, ranks, batch_size, options)) {
    TESSERA_CHECK_VALUE(passes_->dataset.size().has_value(), "data", "the dataset does not say its size");
    io::check_loader(passes_->size(), rank, ranks, batch_size);
  }
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;
  Loader(Loader&&) noexcept = default;
  Loader& operator=(Loader&&) noexcept = default;

  class Iterator;
  // The next pass. A pass that is left early is over.
  Iterator begin() { return Iterator::of(live_passes()); }
  Iterator end() const { return {}; }

  // The position for checkpoints, in the middle of a pass too: the batch that the loop has counts as done.
  c10::IValue state() const {
    const Passes& at = passes();
    return to_value(at.under_way ? DataPosition{at.epoch - 1, std::min(at.given, at.size()), at.size()}
                                 : DataPosition{at.epoch, at.skip, at.skip > 0 ? at.size() : 0});
  }
  // For the next pass; the loop of one under way goes on from there, too. IoError for what is no state; value error for a place in
  // a larger dataset.
  void load_state(const c10::IValue& state) {
    Passes& at = *live_passes();
    const DataPosition position = data_position(state, at.size());
    at.epoch = position.epoch;
    at.skip = position.samples;
    at.under_way = false;
    ++at.loads;
  }
  int64_t epoch() const { return passes().under_way ? passes().epoch - 1 : passes().epoch; }

 private:
  template <DealsBatches E>
  static LoaderOptions as_in(const E& engine, LoaderOptions options) {
    options.drop_last = options.drop_last.value_or(engine.drops_last_batch());
    return options;
  }

  struct Passes {
    Dataset dataset;
    int rank, ranks;
    int64_t batch_size;
    LoaderOptions options;
    int64_t epoch = 0, skip = 0, given = 0;  // the next pass, what it leaves out; of the present one
    int64_t loads = 0;
    bool under_way = false;

    int64_t size() const { return static_cast<int64_t>(*dataset.size()); }
    void arrived(bool over) {
      under_way = !over;
      if (!over) given += batch_size * ranks;
    }
  };
  const std::shared_ptr<Passes>& live_passes() const {
    TESSERA_CHECK(passes_ != nullptr, "data", "this loader was moved from; use the one that it was moved to");
    return passes_;
  }
  const Passes& passes() const { return *live_passes(); }

  std::shared_ptr<Passes> passes_;
};

// A pass, at one of its batches. It goes on in one place: there are no copies.
template <class Dataset>
class Loader<Dataset>::Iterator {
 public:
  using value_type = Batch;
  using difference_type = std::ptrdiff_t;

  Iterator() = default;
  Iterator(const Iterator&) = delete;
  Iterator& operator=(const Iterator&) = delete;
  Iterator(Iterator&&) noexcept = default;
  Iterator& operator=(Iterator&&) noexcept = default;

  Batch& operator*() { return **batch_; }
  Batch* operator->() { return &**batch_; }
  // Where the loader has taken another position meanwhile, the first batch from there.
  Iterator& operator++() {
    if (loads_ != passes_->loads) return *this = of(passes_);
    ++*batch_;
    passes_->arrived(is_over());
    return *this;
  }
  bool operator==(const Iterator& other) const { return is_over() == other.is_over(); }

 private:
  friend class Loader;
  static Iterator of(std::shared_ptr<Passes> passes) {
    Passes& at = *passes;
    const DataPosition from{at.epoch++, std::exchange(at.skip, 0)};
    detail::BatchSampler sampler(RankSampler(at.size(), at.rank, at.ranks, at.options, from),
                                 detail::pass_seed(at.options.seed, from.epoch, at.rank),
                                 from.samples / (at.batch_size * at.ranks));
    auto options = torch::data::DataLoaderOptions(static_cast<size_t>(at.batch_size)).workers(at.options.workers);
    options.drop_last(at.options.drop_last.value_or(false));
    auto pass = std::shared_ptr(
        torch::data::make_data_loader(detail::ReadDataset<Dataset>(at.dataset), std::move(sampler), options));
    at.given = from.samples;
    Iterator iterator;
    iterator.loads_ = at.loads;
    iterator.batch_ = pass->begin();
    iterator.end_ = pass->end();
    iterator.pass_ = std::move(pass);
    iterator.passes_ = std::move(passes);
    at.arrived(iterator.is_over());
    return iterator;
  }
  bool is_over() const { return passes_ == nullptr || *batch_ == *end_; }

  std::shared_ptr<Passes> passes_;  // of the loader
  int64_t loads_ = 0;               // its positions, when the pass began
  std::shared_ptr<void> pass_;      // of the two below
  std::optional<torch::data::Iterator<Batch>> batch_, end_;
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
    // A loader whose position is the end of a pass has none of that one left.
    for (int passes = 0; passes < 2 && batch_ == loader_.end(); ++passes)
      batch_ = loader_.begin();
    TESSERA_CHECK(batch_ != loader_.end(), "data",
                  "a pass gives no batch: the dataset has less than one for every rank");
    return *batch_;
  }

 private:
  Loader<Dataset>& loader_;
  typename Loader<Dataset>::Iterator batch_;
};

}  // namespace tessera::nn
