#include "tessera/checkpoint/export.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/io/safetensors.h"

namespace tessera::checkpoint {

namespace {

namespace fs = std::filesystem;

std::string shard_name(size_t number, size_t count) {
  if (count == 1) return "model.safetensors";
  char name[64];
  std::snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", number + 1, count);
  return name;
}

// Under another name until it is whole.
void write_shard(const Reader& reader, const std::string& path, const std::vector<ExportTensor>& tensors) {
  io::SafeTensors header{{}, {{"format", "pt"}}};
  for (const ExportTensor& tensor : tensors)
    header.tensors.push_back({tensor.name, tensor.dtype, tensor.record->shape});
  const std::string text = io::layout_safetensors(header);
  const std::string part = path + ".part";
  ::unlink(part.c_str());
  try {
    io::File file = io::File::create(part);
    file.write(text.data(), static_cast<int64_t>(text.size()), 0);
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor values = read_export(reader, tensors[i]);
      file.write(values.const_data_ptr(), static_cast<int64_t>(values.nbytes()), header.tensors[i].begin);
    }
    file.sync();
    file.close();
    TESSERA_CHECK_IO(::rename(part.c_str(), path.c_str()) == 0, "export", "cannot rename '", part, "' to '", path,
                     "': ", std::strerror(errno));
  } catch (...) {
    ::unlink(part.c_str());
    throw;
  }
}

}  // namespace

int64_t ExportTensor::bytes() const {
  return record->numel() * static_cast<int64_t>(c10::elementSize(dtype));
}

std::vector<std::vector<ExportTensor>> plan_export(const Reader& reader, const ExportOptions& options) {
  std::vector<ExportTensor> all;
  for (const ParamRecord& param : reader.manifest().params) {
    if (!param.trained && !options.frozen) continue;
    const TensorRecord* record = reader.find(param.name, "master");
    if (record == nullptr) record = reader.find(param.name, "weight");
    if (record == nullptr) continue;  // without elements
    const bool casts = options.dtype && c10::isFloatingType(param.dtype);
    all.push_back({param.name, record, casts ? *options.dtype : param.dtype});
  }
  for (const TensorRecord& record : reader.manifest().tensors)
    if (record.kind == "buffer") all.push_back({record.name, &record, record.dtype});
  std::vector<std::vector<ExportTensor>> shards;
  int64_t bytes = 0;
  for (const ExportTensor& tensor : all) {
    if (shards.empty() || bytes + tensor.bytes() > options.max_shard_bytes) {
      shards.emplace_back();
      bytes = 0;
    }
    shards.back().push_back(tensor);
    bytes += tensor.bytes();
  }
  return shards;
}

at::Tensor read_export(const Reader& reader, const ExportTensor& tensor) {
  const TensorRecord& record = *tensor.record;
  reader.verify(record, {{}, record.order, {0, record.numel()}});
  return reader.read_whole(record).to(tensor.dtype).contiguous();
}

std::vector<std::string> export_safetensors(const Reader& reader, const std::string& folder,
                                            const ExportOptions& options) {
  io::make_folder(folder);
  const auto shards = plan_export(reader, options);
  std::vector<std::string> names;
  nlohmann::ordered_json index{{"metadata", {{"total_size", 0}}}, {"weight_map", nlohmann::ordered_json::object()}};
  int64_t total = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    names.push_back(shard_name(i, shards.size()));
    write_shard(reader, (fs::path(folder) / names.back()).string(), shards[i]);
    for (const ExportTensor& tensor : shards[i]) {
      total += tensor.bytes();
      index["weight_map"][tensor.name] = names.back();
    }
  }
  index["metadata"]["total_size"] = total;
  if (shards.size() > 1) {
    names.emplace_back("model.safetensors.index.json");
    io::replace_text((fs::path(folder) / names.back()).string(), index.dump(2) + "\n");
  }
  return names;
}

}  // namespace tessera::checkpoint
