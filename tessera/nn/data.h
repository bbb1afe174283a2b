// Data for the ranks of an engine: datasets of torch::data, each rank another part of them, in an order that a resume goes on with.
//
//   tessera::nn::Loader loader(dataset.map(torch::data::transforms::Stack<>()), engine);
//   for (int64_t epoch = 0; epoch < 3; ++epoch)
//     for (const auto& batch : loader) { ...; engine.save_checkpoint("run", {}, {{"loader", loader.state()}}); }
//   ...
//   loader.load_state(found.client.at("loader"));   // the next pass goes on where the saved one was
//
// Note [Streams]
//   A dataset that is asked for a number of examples (torch::data::datasets::StreamDataset) is not dealt out, as in Python: each rank
//   reads what its own dataset gives. A pass reads a copy of it, after reset() where it is a StatefulDataset (ChunkDataset, behind
//   make_shared_dataset), and ends after as many examples as its size() says, or where it returns an empty std::optional; else it has
//   no end. A run that goes on amid a pass reads the batches before its place once more and leaves them out; what they draw must be of
//   batch_generator(), if what comes after depends on it. At most one worker reads a stream.
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
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/io/data_order.h"
#include "tessera/nn/data_order.h"
#include "tessera/nn/data_stream.h"
#include "tessera/nn/session.h"

namespace tessera::nn {

struct LoaderOptions {
  bool shuffle = true;  // another order in each pass
  uint64_t seed = 0;    // of the orders, the same on all ranks, and of batch_generator()
  // Leaves out examples that do not make a batch on every rank; else some come twice. Not given: as dataloader_drop_last of the engine's
  // configuration says.
  std::optional<bool> drop_last = std::nullopt;
  size_t workers = 0;  // threads that read ahead, each with a copy of the dataset; 0: none
  // The program's own order, in place of `shuffle` and `seed`, for one loader. What changes it goes into its state. The ranks of a
  // loader that was made of an engine compare it in each pass, so that begin() is collective: value error where it differs.
  std::shared_ptr<PassOrder> order = nullptr;
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

// A stream of a loader's pass.
template <class Dataset>
class ReadStream
    : public torch::data::datasets::BatchDataset<ReadStream<Dataset>, StreamBatch<BatchOf<Dataset>>, StreamRequest> {
 public:
  ReadStream(Dataset dataset, const StreamStart& start) : dataset_(std::move(dataset)), start_(start) {}
  StreamBatch<BatchOf<Dataset>> get_batch(StreamRequest request) override {
    if (!std::exchange(has_begun_, true)) begin();
    const BatchDraws draws(request.seed);
    return {dataset_.get_batch(request.count)};
  }
  std::optional<size_t> size() const override { return dataset_.size(); }

 private:
  void begin() {
    if constexpr (Dataset::is_stateful) dataset_.reset();
    const auto leave_out = [this] {
      for (int64_t batch = 0; batch < start_.batches; ++batch) {
        const BatchDraws draws(batch_seed(start_.seed, batch));
        dataset_.get_batch(start_.size);
      }
    };
    start_.aside ? read_aside(leave_out) : leave_out();
  }

  Dataset dataset_;
  StreamStart start_;
  bool has_begun_ = false;
};

}  // namespace detail

using io::DataPosition;

// The examples of one rank in one pass; without an order of the program's own those of torch.utils.data.DistributedSampler for the same seed and epoch, so that C++ and Python
// see the same order. A pass that goes on after `position.samples` gives every other example once, for any number of ranks.
class RankSampler : public torch::data::samplers::Sampler<> {
 public:
  RankSampler(int64_t size, int rank, int ranks, const LoaderOptions& options, DataPosition position);
  // Of an order over all ranks, of which `samples` have been given.
  RankSampler(const std::vector<int64_t>& order, int rank, int ranks, bool drop_last, int64_t samples);
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
// IoError for what is none; value error for a place in a larger dataset than one of `size` examples (0: not known), and for one in a
// stream that other `workers` read, or where there is none.
DataPosition data_position(const c10::IValue& value, int64_t size, std::optional<int64_t> workers = std::nullopt);

namespace detail {

// The order of the pass that begins. Value error where it is not the saved one's, or not the same on all ranks. Collective where `agree`
// is something.
std::vector<int64_t> begin_order(PassOrder& order, int64_t epoch, int64_t size, int64_t saved_size,
                                 const std::function<void(const std::string&)>& agree);
// The state of a loader with an order, or one without.
c10::IValue with_order(const c10::IValue& state, const c10::IValue& order);
void load_order(PassOrder* order, const c10::IValue& state);
// Compares what all ranks of an engine have. Collective.
void check_orders(const comm::Mesh& mesh, c10::Device device, const std::string& line);

}  // namespace detail

template <class E>
concept DealsBatches = requires(const E& engine) {
  engine.micro_batch_size() + engine.rank() + engine.size() + engine.drops_last_batch();
};

// A batch is what the dataset makes of its examples (BatchType). One pass at a time, on one thread. A loader moves and does not copy;
// a pass goes on where it was moved to.
template <class Dataset>
class Loader {
  static constexpr bool kIsStream = detail::kIsStream<Dataset>;
  static_assert(kIsStream || detail::kIsIndexed<Dataset>,
                "nn::Loader reads a dataset of torch::data that takes the numbers of examples (Dataset, BatchDataset) "
                "or how many "
                "there shall be (StreamDataset); make one of them that asks this one");
  static_assert(
      kIsStream || !Dataset::is_stateful,
      "a dataset that takes the numbers of examples returns a batch, not an std::optional of one: a pass ends "
      "with its order");
  static_assert(std::is_copy_constructible_v<Dataset>,
                "each pass of an nn::Loader reads a copy of the dataset, and this one has none: give it "
                "torch::data::datasets::make_shared_dataset<...>(...)");

 public:
  using Batch = detail::BatchOf<Dataset>;

  // Micro-batches of this rank, among those that share the batch's work; ranks of one sequence or one model see the same. Value error
  // for a dataset that is empty or does not say its size, a batch below 1, a rank that is none, and a stream with an order or several
  // workers.
  // `engine`: an nn::Engine or nn::Session, or an nn::Pipeline, whose stages all see what a rank's place among data-parallel ones has.
  template <DealsBatches E>
  Loader(Dataset dataset, const E& engine, const LoaderOptions& options = {})
      : Loader(std::move(dataset), engine.rank(), engine.size(), engine.micro_batch_size(), as_in(engine, options)) {
    if (options.order != nullptr)
      passes_->agree = [mesh = engine.mesh(), device = engine.device()](const std::string& line) {
        detail::check_orders(mesh, device, line);
      };
  }
  Loader(Dataset dataset, int rank, int ranks, int64_t batch_size, const LoaderOptions& options = {})
      : passes_(std::make_shared<Passes>(std::move(dataset), rank, ranks, batch_size, options)) {
    if constexpr (kIsStream) {
      TESSERA_CHECK_VALUE(options.order == nullptr, "data",
                          "the examples of a stream have no numbers, and come in its own order: leave out "
                          "LoaderOptions::order");
      TESSERA_CHECK_VALUE(options.workers <= 1, "data", "a stream is read by one worker at most, got ", options.workers,
                          ": each of them would read a copy of it from its beginning");
    } else {
      TESSERA_CHECK_VALUE(passes_->dataset.size().has_value(), "data", "the dataset does not say its size");
    }
    io::check_loader(static_cast<int64_t>(passes_->dataset.size().value_or(1)), rank, ranks, batch_size);
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
    DataPosition position{at.under_way ? at.epoch - 1 : at.epoch, at.under_way ? at.given : at.skip};
    if constexpr (kIsStream) {
      if (position.samples > 0) position.workers = 0;
    } else if (at.under_way || at.skip > 0) {
      position.size = at.length;
      position.samples = std::min(position.samples, position.size);
    }
    if (at.options.order == nullptr) return to_value(position);
    return detail::with_order(to_value(position), at.under_way ? at.began : at.options.order->state());
  }
  // For the next pass; the loop of one under way goes on from there, too. IoError for what is no state; value error for a place in
  // a larger dataset, or in another kind of order.
  void load_state(const c10::IValue& state) {
    Passes& at = *live_passes();
    const bool has_size = !kIsStream && at.options.order == nullptr;
    const DataPosition position =
        data_position(state, has_size ? at.size() : 0, kIsStream ? std::optional<int64_t>(0) : std::nullopt);
    detail::load_order(at.options.order.get(), state);
    at.epoch = position.epoch;
    at.skip = position.samples;
    at.length = has_size ? at.size() : position.size;
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
    std::function<void(const std::string&)> agree = {};  // compares what all ranks have
    int64_t epoch = 0, skip = 0, given = 0;              // the next pass, what it leaves out; of the present one
    int64_t length = 0;      // examples of the present pass, over all ranks, or of the saved one
    c10::IValue began = {};  // of the order, where the present pass began
    int64_t loads = 0;
    bool under_way = false;

    int64_t size() const { return static_cast<int64_t>(*dataset.size()); }
    int64_t round() const { return batch_size * ranks; }
    void arrived(bool over) {
      under_way = !over;
      if (!over) given += round();
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

  Batch& operator*() {
    if constexpr (kIsStream)
      return *(*batch_)->batch;
    else
      return **batch_;
  }
  Batch* operator->() { return &**this; }
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
  using Read = std::conditional_t<kIsStream, detail::StreamBatch<Batch>, Batch>;

  static Iterator of(std::shared_ptr<Passes> passes) {
    Passes& at = *passes;
    const DataPosition from{at.epoch++, std::exchange(at.skip, 0)};
    Iterator iterator;
    iterator.loads_ = at.loads;
    iterator.read(at, from);
    iterator.passes_ = std::move(passes);
    at.arrived(iterator.is_over());
    return iterator;
  }
  void read(Passes& at, const DataPosition& from) {
    const uint64_t seed = detail::pass_seed(at.options.seed, from.epoch, at.rank);
    const int64_t batches = from.samples / at.round();
    auto options = torch::data::DataLoaderOptions(static_cast<size_t>(at.batch_size)).workers(at.options.workers);
    options.drop_last(at.options.drop_last.value_or(false));
    at.given = from.samples;
    const auto keep = [&](auto made) {
      auto pass = std::shared_ptr(std::move(made));
      batch_ = pass->begin();
      end_ = pass->end();
      pass_ = std::move(pass);
    };
    if constexpr (kIsStream) {
      at.given = batches * at.round();
      const detail::StreamStart start{batches, static_cast<size_t>(at.batch_size), seed, at.options.workers == 0};
      keep(torch::data::make_data_loader(detail::ReadStream<Dataset>(at.dataset, start),
                                         detail::StreamSampler(at.dataset.size(), start), options));
    } else {
      detail::BatchSampler sampler(sampler_of(at, from), seed, batches);
      keep(torch::data::make_data_loader(detail::ReadDataset<Dataset>(at.dataset), std::move(sampler), options));
    }
  }
  static RankSampler sampler_of(Passes& at, const DataPosition& from) {
    if (at.options.order == nullptr) {
      at.length = at.size();
      return {at.size(), at.rank, at.ranks, at.options, from};
    }
    at.began = at.options.order->state();
    const auto order =
        detail::begin_order(*at.options.order, from.epoch, at.size(), from.samples > 0 ? at.length : 0, at.agree);
    at.length = static_cast<int64_t>(order.size());
    return {order, at.rank, at.ranks, at.options.drop_last.value_or(false), from.samples};
  }
  bool is_over() const {
    if (passes_ == nullptr && pass_ == nullptr) return true;
    if (*batch_ == *end_) return true;
    if constexpr (kIsStream) return !(**batch_).batch.has_value();
    return false;
  }

  std::shared_ptr<Passes> passes_;  // of the loader
  int64_t loads_ = 0;               // its positions, when the pass began
  std::shared_ptr<void> pass_;      // of the two below
  mutable std::optional<torch::data::Iterator<Read>> batch_, end_;
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
