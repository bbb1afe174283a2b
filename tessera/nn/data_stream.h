// What a Loader reads of: datasets of torch::data whose examples have numbers, and streams. Internal to data.h.
#pragma once

#include <torch/data/datasets/base.h>
#include <torch/data/samplers/base.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera::nn::detail {

// A dataset that is asked for a number of examples, not for certain ones: torch::data::datasets::StreamDataset, and ChunkDataset.
template <class Dataset>
inline constexpr bool kIsStream = std::is_same_v<typename Dataset::BatchRequestType, size_t>;
template <class Dataset>
inline constexpr bool kIsIndexed = std::is_convertible_v<std::vector<size_t>, typename Dataset::BatchRequestType>;

template <class Batch>
struct WithoutOptional {
  using Type = Batch;
};
template <class Batch>
struct WithoutOptional<std::optional<Batch>> {
  using Type = Batch;
};
template <class Dataset>
using BatchOf = typename WithoutOptional<typename Dataset::BatchType>::Type;

uint64_t batch_seed(uint64_t pass_seed, int64_t batch);
// Calls read(), and puts torch's default generator back to where it was.
void read_aside(const std::function<void()>& read);

struct StreamRequest {
  size_t count = 0;
  uint64_t seed = 0;
  size_t size() const { return count; }
};

// A batch of a stream; none where that has ended.
template <class Batch>
struct StreamBatch {
  std::optional<Batch> batch;
};

// Where a pass over a stream begins: so many of its batches, of `size` examples each, are read and left out.
struct StreamStart {
  int64_t batches = 0;
  size_t size = 1;
  uint64_t seed = 0;  // of the pass
  bool aside = true;  // torch's default generator stays where it is meanwhile
};

// Asks for the batches of a rank's pass.
class StreamSampler : public torch::data::samplers::Sampler<StreamRequest> {
 public:
  // `examples`: of the pass; nothing: without an end.
  StreamSampler(std::optional<size_t> examples, const StreamStart& start)
      : examples_(examples.value_or(std::numeric_limits<size_t>::max())), start_(start), next_(start.batches) {}
  void reset(std::optional<size_t> /*new_size*/ = std::nullopt) override { next_ = start_.batches; }
  std::optional<StreamRequest> next(size_t batch_size) override {
    const size_t begin = static_cast<size_t>(next_) * batch_size;
    if (begin >= examples_) return {};
    return StreamRequest{std::min(batch_size, examples_ - begin), batch_seed(start_.seed, next_++)};
  }
  void save(torch::serialize::OutputArchive& /*archive*/) const override {}
  void load(torch::serialize::InputArchive& /*archive*/) override {}

 private:
  size_t examples_;
  StreamStart start_;
  int64_t next_;
};

}  // namespace tessera::nn::detail
