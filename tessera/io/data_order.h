// Which examples of a dataset a rank gets, in which order, and where in them a run is: of the loaders of both front ends.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace tessera::io {

// Where in the data a run is: which pass, and how many examples of all ranks the pass has given.
struct DataPosition {
  int64_t epoch = 0, samples = 0;
  int64_t size = 0;                               // of the dataset that it is of; 0: not known
  std::optional<int64_t> workers = std::nullopt;  // that share a stream, each a part of it; nothing where it is none
};
// Value error for numbers below 0, for a place behind the end of its dataset, for one in a larger dataset than one of `size`
// examples (0: not known), and for one in a stream where `workers` here are others or the dataset is none.
void check_position(const DataPosition& position, int64_t size, std::optional<int64_t> workers = std::nullopt);

// Value error for a dataset that is empty, a batch below 1, and a rank that is none.
void check_loader(int64_t size, int rank, int ranks, int64_t batch_size);

// The examples of one rank in the rest of a pass that has `order` over all ranks: every `ranks`-th of what `samples` have left over.
// Those that do not make one on every rank are left out where `drop_last` says so; else some of the first come again. Value error for
// a rank that is none.
std::vector<int64_t> dealt(std::span<const int64_t> order, int rank, int ranks, bool drop_last, int64_t samples);

struct DataOrder {
  bool shuffle = true;     // another order in each pass
  uint64_t seed = 0;       // of the orders, the same on all ranks
  bool drop_last = false;  // leaves out examples that do not make one on every rank; else some come twice
};
// The examples of one rank in the rest of a pass, by number: those of torch.utils.data.DistributedSampler for the same seed and pass.
// After `position.samples` every other example comes once, for any number of ranks. Value errors of the two above.
std::vector<int64_t> rank_order(int64_t size, int rank, int ranks, const DataOrder& order,
                                const DataPosition& position);

}  // namespace tessera::io
