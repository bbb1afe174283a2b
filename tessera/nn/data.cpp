#include "tessera/nn/data.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randperm.h>
#include <torch/serialize/archive.h>

#include <algorithm>

namespace tessera::nn {

void check_loader(int64_t size, int rank, int ranks, int64_t batch_size) {
  TESSERA_CHECK_VALUE(size > 0, "data", "the dataset is empty");
  TESSERA_CHECK_VALUE(0 <= rank && rank < ranks, "data", "rank ", rank, " of ", ranks, " ranks");
  TESSERA_CHECK_VALUE(batch_size >= 1, "data", "a batch must have 1 example at least, got ", batch_size);
}

RankSampler::RankSampler(int64_t size, int rank, int ranks, const LoaderOptions& options, DataPosition position) {
  check_loader(size, rank, ranks, 1);
  TESSERA_CHECK_VALUE(position.epoch >= 0 && position.samples >= 0, "data", "pass ", position.epoch, ", example ",
                      position.samples);
  at::Tensor order = at::arange(size, at::kLong);
  if (options.shuffle) {
    const auto generator = at::detail::createCPUGenerator(options.seed + static_cast<uint64_t>(position.epoch));
    order = at::randperm(size, generator, at::kLong);
  }
  const int64_t left = std::max<int64_t>(0, size - position.samples);
  const int64_t each = options.drop_last ? left / ranks : (left + ranks - 1) / ranks;
  const auto* const examples = order.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < each; ++i)
    mine_.push_back(static_cast<size_t>(examples[(position.samples + i * ranks + rank) % size]));
}

std::optional<std::vector<size_t>> RankSampler::next(size_t batch_size) {
  if (next_ == mine_.size()) return {};
  const size_t end = std::min(mine_.size(), next_ + batch_size);
  std::vector<size_t> batch(mine_.begin() + static_cast<std::ptrdiff_t>(next_),
                            mine_.begin() + static_cast<std::ptrdiff_t>(end));
  next_ = end;
  return batch;
}

void RankSampler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("next", c10::IValue(static_cast<int64_t>(next_)));
}

void RankSampler::load(torch::serialize::InputArchive& archive) {
  c10::IValue next;
  archive.read("next", next);
  next_ = std::min(mine_.size(), static_cast<size_t>(std::max<int64_t>(0, next.toInt())));
}

c10::IValue to_value(DataPosition position) {
  c10::impl::GenericDict value(c10::StringType::get(), c10::AnyType::get());
  value.insert("epoch", position.epoch);
  value.insert("samples", position.samples);
  if (position.size > 0) value.insert("size", position.size);
  return value;
}

DataPosition data_position(const c10::IValue& value, int64_t size) {
  const auto count = [&](const char* key) {
    TESSERA_CHECK_IO(value.isGenericDict() && value.toGenericDict().contains(key) &&
                         value.toGenericDict().at(key).isInt() && value.toGenericDict().at(key).toInt() >= 0,
                     "data", "the state of a loader has no '", key, "' that can be");
    return value.toGenericDict().at(key).toInt();
  };
  DataPosition position{count("epoch"), count("samples")};
  if (value.toGenericDict().contains("size")) position.size = count("size");
  TESSERA_CHECK_VALUE(position.samples == 0 || position.size <= size, "data",
                      "the state is of a place in a dataset of ", position.size, " examples, and this one has ", size,
                      ": give the loader the dataset of that run, or begin without its state");
  return position;
}

}  // namespace tessera::nn
