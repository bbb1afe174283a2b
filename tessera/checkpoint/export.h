// Export: a checkpoint's weights as files that other tools load, whatever it was spread over.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/reader.h"

namespace tessera::checkpoint {

struct ExportOptions {
  // Of parameters that are floating; none: what the module computed in. Buffers keep theirs.
  std::optional<at::ScalarType> dtype;
  int64_t max_shard_bytes = int64_t{5} << 30;  // of a file, unless one tensor has more
  bool frozen = true;
};

// One tensor of an export. Only its first name: a tied tensor is there once, as Transformers expects it.
struct ExportTensor {
  std::string name;
  const TensorRecord* record;
  at::ScalarType dtype;
  int64_t bytes() const;
};
// Of all parameters and buffers, the exact value where a parameter has a master; in files of at most max_shard_bytes.
std::vector<std::vector<ExportTensor>> plan_export(const Reader& reader, const ExportOptions& options);
// Read and checked, in its dtype and shape.
at::Tensor read_export(const Reader& reader, const ExportTensor& tensor);

// Writes `folder`/model.safetensors, or several files of the names that Transformers' from_pretrained knows with
// model.safetensors.index.json. One tensor is in memory at a time. Returns the names of the files.
std::vector<std::string> export_safetensors(const Reader& reader, const std::string& folder,
                                            const ExportOptions& options);

}  // namespace tessera::checkpoint
