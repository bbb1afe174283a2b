#include "tessera/checkpoint/export.h"

#include <ATen/Functions.h>

namespace tessera::checkpoint {

std::vector<ExportTensor> list_export(const Reader& reader, const ExportOptions& options) {
  std::vector<ExportTensor> all;
  for (const ParamRecord& param : reader.manifest().params) {
    if (!param.trained && !options.frozen) continue;
    const TensorRecord* record = reader.find(param.name, "master");
    if (record == nullptr) record = reader.find(param.name, "weight");
    const bool packed = param.dtype == at::ScalarType::Float4_e2m1fn_x2;  // torch converts it to nothing
    const bool casts = options.dtype && c10::isFloatingType(param.dtype) && !packed;
    std::vector<std::string> names{param.name};
    names.insert(names.end(), param.aliases.begin(), param.aliases.end());
    all.push_back({{names, casts ? *options.dtype : param.dtype, param.shape}, {}});
    if (record != nullptr) all.back().record = *record;
  }
  for (const TensorRecord& record : reader.manifest().tensors)
    if (record.kind == "buffer") all.push_back({{{record.name}, record.dtype, record.shape}, record});
  return all;
}

at::Tensor read_export(const Reader& reader, const ExportTensor& tensor) {
  if (!tensor.record) return at::empty(tensor.shape, at::TensorOptions(tensor.dtype));
  const TensorRecord& record = *tensor.record;
  reader.verify(record, {{}, record.order, {0, record.numel()}});
  return reader.read_whole(record).to(tensor.dtype).contiguous();
}

std::vector<std::string> export_weights(const Reader& reader, const std::string& folder, const std::string& name,
                                        const ExportOptions& options) {
  const std::vector<ExportTensor> all = list_export(reader, options);
  WeightFiles files(folder, name, {all.begin(), all.end()}, options.max_shard_bytes);
  for (const ExportTensor& tensor : all)
    files.write(read_export(reader, tensor));
  return files.finish();
}

}  // namespace tessera::checkpoint
