#include "tessera/checkpoint/deepspeed/pieces.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <iterator>

#include "tessera/base/error.h"
#include "tessera/checkpoint/deepspeed/save.h"

namespace tessera::checkpoint::deepspeed {

namespace {

constexpr int64_t kMostRanks = int64_t{1} << 20;
constexpr int64_t kMostPieces = int64_t{1} << 16;  // of a tensor whose elements do not lie one after the other
constexpr size_t kShownRanks = 8;

}  // namespace

bool is_own_key(std::string_view key) {
  constexpr std::array<std::string_view, 22> kOwn{
      "module",
      "buffer_names",
      "optimizer",
      "param_shapes",
      "frozen_param_shapes",
      "shared_params",
      "frozen_param_fragments",
      "lr_scheduler",
      "data_sampler",
      "random_ltd",
      "sparse_tensor_module_names",
      "csr_tensor_module_names",
      "skipped_steps",
      "global_steps",
      "global_samples",
      "dp_world_size",
      "mp_world_size",
      "checkpoint_parallel_dimensions",
      "ds_config",
      "ds_version",
      "universal_checkpoint_info",
      "num_experts",
  };
  return std::ranges::find(kOwn, key) != kOwn.end();
}

void check_client_keys(const std::vector<std::string>& keys, bool as_deepspeed) {
  std::vector<std::string> own;
  std::ranges::copy_if(keys, std::back_inserter(own), [&](const std::string& key) {
    return as_deepspeed ? is_own_key(key) : key == "checkpoint_parallel_dimensions";
  });
  std::ranges::sort(own);
  TESSERA_CHECK_VALUE(own.empty(), "engine.save_checkpoint",
                      "the program's values (client_state) have keys that are DeepSpeed's own: ", c10::Join(", ", own));
}

void add_piece(Held& held, const TensorRef& tensor, int64_t at, int64_t low, int64_t high) {
  if (low >= high) return;
  Piece piece;
  piece.file = tensor.storage->file->number();
  piece.offset = tensor.begin() + at * tensor.itemsize();
  piece.range = {low, high};
  held.pieces.push_back(std::move(piece));
}

Held whole(const TensorRef& tensor) {
  Held held{tensor.dtype(), {}, {}};
  const int64_t numel = tensor.numel();
  if (numel == 0) return held;
  std::vector<int64_t> order;
  if (dense_order(tensor, order)) {
    if (!std::ranges::is_sorted(order)) held.order = order;
    add_piece(held, tensor, 0, 0, numel);
    return held;
  }
  // The last dims whose elements lie one after the other form a run, and each run is a piece.
  size_t last = tensor.shape.size();
  int64_t run = 1;
  while (last > 0 && (tensor.shape[last - 1] == 1 || tensor.strides[last - 1] == run))
    run *= tensor.shape[--last];
  if (numel / run > kMostPieces)
    tensor.storage->file->fail("has a tensor of shape ", at::IntArrayRef(tensor.shape), " and strides ",
                               at::IntArrayRef(tensor.strides), ", in more than ", kMostPieces, " pieces");
  std::vector<int64_t> index(last, 0);
  for (int64_t number = 0; number < numel / run; ++number) {
    int64_t place = 0;
    for (size_t dim = 0; dim < last; ++dim)
      place += index[dim] * tensor.strides[dim];
    add_piece(held, tensor, place, number * run, (number + 1) * run);
    for (size_t dim = last; dim > 0 && ++index[dim - 1] == tensor.shape[dim - 1]; --dim)
      index[dim - 1] = 0;
  }
  return held;
}

Held sharded(const std::vector<const TensorRef*>& parts, int64_t at, int64_t numel) {
  if (parts.empty()) unfit("parts of no rank");
  const auto world = static_cast<int64_t>(parts.size());
  const int64_t part = (numel + world - 1) / world;
  Held held{parts[0]->dtype(), {}, {}};
  for (int64_t rank = 0; rank < world; ++rank) {
    const TensorRef& tensor = *parts[rank];
    const int64_t low = std::min(rank * part, numel), high = std::min((rank + 1) * part, numel);
    if (high - low + at > tensor.numel() || !tensor.is_contiguous())
      tensor.storage->file->fail("has ", tensor.numel(), " elements where ", high - low + at, " are needed");
    add_piece(held, tensor, at, low, high);
  }
  return held;
}

int64_t ranks_of(const PtFile& file) try {
  return number_of(at(file.value(), "dp_world_size"), kMostRanks);
} catch (const Unfit& error) {
  file.fail("does not say how many ranks wrote it: ", error.what());
}

std::string ranks_text(int64_t world) {
  return world > 1 ? c10::str(world, ": dp_shard ", world) : "1: ";
}

std::string shown(const std::vector<int64_t>& ranks) {
  const size_t some = std::min(ranks.size(), kShownRanks);
  const std::string text = c10::str(at::IntArrayRef(ranks.data(), some));
  return some == ranks.size() ? text : c10::str(text, " and ", ranks.size() - some, " more");
}

}  // namespace tessera::checkpoint::deepspeed
