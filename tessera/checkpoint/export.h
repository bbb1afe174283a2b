// Export: a checkpoint's weights as files that other tools load, whatever it was spread over.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/reader.h"
#include "tessera/checkpoint/weight_files.h"

namespace tessera::checkpoint {

struct ExportOptions {
  // Dtype of floating parameters; none: what the module computed in. Buffers keep theirs.
  std::optional<at::ScalarType> dtype;
  int64_t max_shard_bytes = 5'000'000'000;  // of a file, unless one tensor has more
  bool frozen = true;
};

struct ExportTensor : WeightTensor {
  std::optional<TensorRecord> record;  // a copy, which needs no Reader; none: without elements
};
// All parameters and buffers, the exact value where a parameter has a master.
std::vector<ExportTensor> list_export(const Reader& reader, const ExportOptions& options);
// Reads and checks a tensor, in its dtype and shape.
at::Tensor read_export(const Reader& reader, const ExportTensor& tensor);
// Writes all parameters and buffers (weight_files.h). Returns the names of the files.
std::vector<std::string> export_weights(const Reader& reader, const std::string& folder, const std::string& name,
                                        const ExportOptions& options);

}  // namespace tessera::checkpoint
