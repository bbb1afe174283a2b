// Test support: one tensor written in pieces, as several ranks would.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "tessera/checkpoint/reader.h"
#include "tessera/checkpoint/writer.h"
#include "tests/io/temp_folder.h"

namespace tessera::checkpoint {

inline at::Tensor select(const at::Tensor& whole, const Slice& slice) {
  std::vector<at::Tensor> parts;
  for (const shard::Range& r : slice.ranges)
    parts.push_back(whole.slice(slice.dim, r.begin, r.end));
  return at::cat(parts, slice.dim).contiguous();
}

// Elements [begin, end) of `slice` of `whole`, in `order` of the dims.
inline Item item_of(const std::string& name, const at::Tensor& whole, std::vector<Slice> slice, shard::Range range,
                    std::vector<int64_t> order = {}) {
  const at::Tensor part = slice.empty() ? whole : select(whole, slice[0]);
  const at::Tensor flat = (order.empty() ? part : part.permute(order)).contiguous().view(-1);
  return {name,
          "weight",
          whole.sizes().vec(),
          std::move(order),
          whole.scalar_type(),
          std::move(slice),
          range,
          [flat](shard::Range piece) { return flat.narrow(0, piece.begin, piece.size()); }};
}

// A complete checkpoint of one file for each list of items.
inline void write_checkpoint(const std::string& folder, const std::vector<std::vector<Item>>& ranks) {
  Manifest manifest;
  manifest.id = new_id();
  for (size_t r = 0; r < ranks.size(); ++r) {
    FileRecord file;
    const std::string path = folder + "/" + file_name(manifest.id, static_cast<int>(r));
    merge_records(manifest.tensors, records_text(write_items(path, manifest.id, ranks[r], file)), static_cast<int>(r));
    manifest.files.push_back(file);
  }
  commit(folder, manifest);
}

inline Reader open_folder(const std::string& folder) {
  return Reader(folder, io::read_text(folder + "/" + kManifestName, 1 << 30));
}

}  // namespace tessera::checkpoint
