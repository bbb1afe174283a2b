#include "tessera/io/data_order.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randperm.h>

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::io {

void check_position(const DataPosition& position, int64_t size, std::optional<int64_t> workers) {
  const bool none_below_0 =
      position.epoch >= 0 && position.samples >= 0 && position.size >= 0 && position.workers.value_or(0) >= 0;
  TESSERA_CHECK_VALUE(none_below_0 && (position.size == 0 || position.samples <= position.size), "data",
                      "the state says pass ", position.epoch, ", example ", position.samples, " of ", position.size,
                      ", which no loader has given: load what its state was, unchanged");
  TESSERA_CHECK_VALUE(position.samples == 0 || size == 0 || position.size <= size, "data",
                      "the state is of a place in a dataset of ", position.size, " examples, and this one has ", size,
                      ": give the loader the dataset of that run, or begin without its state");
  if (position.samples == 0 || !position.workers) return;
  TESSERA_CHECK_VALUE(workers, "data",
                      "the state is of a place in a stream (IterableDataset), and the dataset here is none: give the "
                      "loader the dataset of that run, or begin without its state");
  TESSERA_CHECK_VALUE(*workers == *position.workers, "data", "the state is of a place in a stream that ",
                      *position.workers, " workers shared, and here num_workers is ", *workers,
                      ", which would give other samples: make the loader with num_workers=", *position.workers,
                      ", or begin without its state");
}

void check_loader(int64_t size, int rank, int ranks, int64_t batch_size) {
  TESSERA_CHECK_VALUE(size > 0, "data", "the dataset is empty");
  TESSERA_CHECK_VALUE(0 <= rank && rank < ranks, "data", "rank ", rank, " of ", ranks, " ranks");
  TESSERA_CHECK_VALUE(batch_size >= 1, "data", "a batch must have 1 example at least, got ", batch_size);
}

std::vector<int64_t> dealt(std::span<const int64_t> order, int rank, int ranks, bool drop_last, int64_t samples) {
  const auto size = static_cast<int64_t>(order.size());
  check_loader(size, rank, ranks, 1);
  const int64_t left = std::max<int64_t>(0, size - samples);
  const int64_t each = drop_last ? left / ranks : (left + ranks - 1) / ranks;
  std::vector<int64_t> mine;
  for (int64_t i = 0; i < each; ++i)
    mine.push_back(order[static_cast<size_t>((samples + i * ranks + rank) % size)]);
  return mine;
}

std::vector<int64_t> rank_order(int64_t size, int rank, int ranks, const DataOrder& how, const DataPosition& position) {
  check_loader(size, rank, ranks, 1);
  check_position(position, 0);
  at::Tensor order = at::arange(size, at::kLong);
  if (how.shuffle) {
    const auto generator = at::detail::createCPUGenerator(how.seed + static_cast<uint64_t>(position.epoch));
    order = at::randperm(size, generator, at::kLong);
  }
  return dealt({order.const_data_ptr<int64_t>(), static_cast<size_t>(size)}, rank, ranks, how.drop_last,
               position.samples);
}

}  // namespace tessera::io
