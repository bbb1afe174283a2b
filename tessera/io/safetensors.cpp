#include "tessera/io/safetensors.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "tessera/base/error.h"
#include "tessera/io/json_depth.h"

namespace tessera::io {

namespace {

using Json = nlohmann::json;  // sorted: an ordered one looks through all names for each
using Ordered = nlohmann::ordered_json;

constexpr int64_t kLargestHeader = 100'000'000;  // the format's own limit
constexpr int kDeepest = 8;                      // levels of the header, which has 3
constexpr const char* kMetadata = "__metadata__";
constexpr size_t kAlignment = 64;  // of the first tensor's bytes

struct DtypeRow {
  at::ScalarType dtype;
  const char* name;
};
constexpr DtypeRow kDtypes[] = {
    {at::kFloat, "F32"},
    {at::kDouble, "F64"},
    {at::kHalf, "F16"},
    {at::kBFloat16, "BF16"},
    {at::kChar, "I8"},
    {at::kByte, "U8"},
    {at::kShort, "I16"},
    {at::kInt, "I32"},
    {at::kLong, "I64"},
    {at::kBool, "BOOL"},
    {at::kUInt16, "U16"},
    {at::kUInt32, "U32"},
    {at::kUInt64, "U64"},
    {at::kComplexFloat, "C64"},
    {at::kFloat8_e4m3fn, "F8_E4M3"},
    {at::kFloat8_e5m2, "F8_E5M2"},
    {at::kFloat8_e4m3fnuz, "F8_E4M3FNUZ"},
    {at::kFloat8_e5m2fnuz, "F8_E5M2FNUZ"},
    {at::kFloat8_e8m0fnu, "F8_E8M0"},
    {at::ScalarType::Float4_e2m1fn_x2, "F4"},
};

constexpr int64_t values_of(at::ScalarType dtype) {
  return dtype == at::ScalarType::Float4_e2m1fn_x2 ? 2 : 1;
}

// Bytes of `shape`, or nothing where that is no shape or more than a file can have.
std::optional<int64_t> bytes_of(const std::vector<int64_t>& shape, at::ScalarType dtype) {
  auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t size : shape)
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  return bytes;
}

TensorEntry entry_of(const std::string& path, const std::string& name, const Json& json, int64_t start) {
  const auto good = [&](bool condition, const char* what) {
    TESSERA_CHECK_IO(condition, "safetensors", "'", path, "', tensor '", name, "': ", what);
  };
  good(json.is_object() && json.size() == 3 && json.contains("dtype") && json.contains("shape") &&
           json.contains("data_offsets"),
       "the header must have dtype, shape and data_offsets");
  const Json& offsets = json["data_offsets"];
  const auto is_number = [](const Json& j) { return j.is_number_integer() && j >= 0 && j <= int64_t{1} << 60; };
  const auto are_numbers = [&](const Json& j) { return j.is_array() && std::all_of(j.begin(), j.end(), is_number); };
  good(json["dtype"].is_string() && are_numbers(json["shape"]) && are_numbers(offsets) && offsets.size() == 2,
       "the header is not of the form that the format has");
  const auto word = json["dtype"].get<std::string>();
  TensorEntry entry{name, dtype_of(word).value_or(at::ScalarType::Undefined), json["shape"].get<std::vector<int64_t>>(),
                    start + offsets[0].get<int64_t>(), start + offsets[1].get<int64_t>()};
  if (entry.dtype == at::ScalarType::Undefined) {
    good(entry.begin <= entry.end, "data_offsets end before they begin");
    entry.unknown = word;
    return entry;
  }
  if (const int64_t values = values_of(entry.dtype); values > 1) {
    good(!entry.shape.empty() && entry.shape.back() % values == 0,
         "two values of F4 share a byte, so the last dim must have an even number of them");
    entry.shape.back() /= values;
  }
  const auto bytes = bytes_of(entry.shape, entry.dtype);
  good(bytes && *bytes == entry.end - entry.begin,
       "shape and dtype need another number of bytes than data_offsets say");
  return entry;
}

}  // namespace

std::optional<at::ScalarType> dtype_of(const std::string& name) {
  for (const DtypeRow& row : kDtypes)
    if (name == row.name) return row.dtype;
  return std::nullopt;
}

const char* safetensors_dtype(at::ScalarType dtype) {
  for (const DtypeRow& row : kDtypes)
    if (row.dtype == dtype) return row.name;
  return nullptr;
}

std::string layout_safetensors(SafeTensors& file) {
  Ordered::object_t header_of;
  if (!file.metadata.empty()) header_of.emplace_back(kMetadata, file.metadata);
  std::set<std::string> taken{kMetadata};
  int64_t at = 0;
  for (TensorEntry& entry : file.tensors) {
    const char* name = safetensors_dtype(entry.dtype);
    const auto bytes = bytes_of(entry.shape, entry.dtype);
    TESSERA_CHECK_VALUE(taken.insert(entry.name).second, "safetensors", "the name '", entry.name,
                        "' is taken: each tensor of a file has one of its own, and '", kMetadata, "' is the format's");
    TESSERA_CHECK_VALUE(name != nullptr && bytes, "safetensors", "tensor '", entry.name, "' has dtype ", entry.dtype,
                        ", which the format does not know");
    std::vector<int64_t> shape = entry.shape;
    if (const int64_t values = values_of(entry.dtype); values > 1) {
      TESSERA_CHECK_VALUE(!shape.empty(), "safetensors", "tensor '", entry.name, "' has dtype ", entry.dtype,
                          " and no dims: the format counts its values along the last one");
      shape.back() *= values;
    }
    entry.begin = at;
    entry.end = at += *bytes;
    header_of.emplace_back(entry.name,
                           Ordered{{"dtype", name}, {"shape", shape}, {"data_offsets", {entry.begin, entry.end}}});
  }
  std::string text;
  try {
    text = Ordered(std::move(header_of)).dump();
  } catch (const Ordered::exception& error) {
    TESSERA_FAIL(c10::ValueError, "[safetensors] names and metadata must be UTF-8: ", error.what());
  }
  text.resize((text.size() + 8 + kAlignment - 1) / kAlignment * kAlignment - 8, ' ');
  const auto length = static_cast<uint64_t>(text.size());
  std::string header(8, '\0');
  std::memcpy(header.data(), &length, 8);
  for (TensorEntry& entry : file.tensors) {
    entry.begin += static_cast<int64_t>(text.size()) + 8;
    entry.end += static_cast<int64_t>(text.size()) + 8;
  }
  return header + text;
}

SafeTensors read_safetensors(const File& file) {
  const int64_t size = file.size();
  uint64_t length = 0;
  TESSERA_CHECK_IO(size >= 8, "safetensors", "'", file.path(), "' has ", size, " bytes: too few for a header");
  file.read(&length, 8, 0);
  TESSERA_CHECK_IO(length <= static_cast<uint64_t>(std::min(kLargestHeader, size - 8)), "safetensors", "'", file.path(),
                   "': a header of ", length, " bytes does not fit into the file of ", size, " bytes (or is over ",
                   kLargestHeader, ")");
  std::string text(length, '\0');
  file.read(text.data(), static_cast<int64_t>(length), 8);
  const Json json = is_deeper(text, kDeepest) ? Json() : Json::parse(text, nullptr, /*allow_exceptions=*/false);
  TESSERA_CHECK_IO(json.is_object(), "safetensors", "'", file.path(),
                   "': the header is not a JSON object, or nested too deep");
  SafeTensors result;
  const auto start = static_cast<int64_t>(length) + 8;
  for (const auto& [name, value] : json.items()) {
    if (name != kMetadata) {
      result.tensors.push_back(entry_of(file.path(), name, value, start));
      continue;
    }
    TESSERA_CHECK_IO(value.is_object() || value.is_null(), "safetensors", "'", file.path(),
                     "': the metadata is not a JSON object");
    for (const auto& [key, word] : value.items()) {
      TESSERA_CHECK_IO(word.is_string(), "safetensors", "'", file.path(), "': metadata '", key, "' is not a string");
      result.metadata[key] = word.get<std::string>();
    }
  }
  std::stable_sort(result.tensors.begin(), result.tensors.end(),
                   [](const auto& a, const auto& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  int64_t at = start;
  for (const TensorEntry& entry : result.tensors) {
    TESSERA_CHECK_IO(entry.begin == at, "safetensors", "'", file.path(), "', tensor '", entry.name, "' begins at byte ",
                     entry.begin, ", the one before it ends at ", at);
    at = entry.end;
  }
  TESSERA_CHECK_IO(at == size, "safetensors", "'", file.path(), "' has ", size, " bytes, its tensors end at ", at);
  return result;
}

}  // namespace tessera::io
