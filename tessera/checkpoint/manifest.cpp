#include "tessera/checkpoint/manifest.h"

#include <algorithm>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/checkpoint/node.h"
#include "tessera/checkpoint/numbering.h"
#include "tessera/io/crc32c.h"
#include "tessera/io/safetensors.h"

namespace tessera::checkpoint {

namespace {

using Json = Node::Json;
using shard::Range;

constexpr const char* kFormat = "tessera";
constexpr int64_t kMostRuns = int64_t{1} << 26;  // runs of a tensor, which cuts along its last dims make
constexpr const char* kComplexDouble = "C128";   // in the files pairs of F64: safetensors has no word for it

// ---- the text's own checksum, of all that follows it: a flipped digit would be another number

const std::string kSealBefore = "{\"crc32c\": \"", kSealAfter = "\",";
constexpr size_t kHexDigits = 8;

std::string hex_of(uint32_t number) {
  std::string hex(kHexDigits, '0');
  for (size_t i = 0; i < kHexDigits; ++i)
    hex[kHexDigits - 1 - i] = "0123456789abcdef"[(number >> (4 * i)) & 15];
  return hex;
}

// Any bytes as a text that JSON can hold.
std::string hex_of(const std::string& bytes) {
  std::string hex;
  for (const char byte : bytes)
    for (const int shift : {4, 0})
      hex += "0123456789abcdef"[(static_cast<uint8_t>(byte) >> shift) & 15];
  return hex;
}

// The bytes of such a text; nothing where it is none.
std::optional<std::string> bytes_of(const std::string& hex) {
  std::string bytes;
  int high = -1;
  for (const char digit : hex) {
    const int value = digit >= '0' && digit <= '9' ? digit - '0' : digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
    if (value < 0) return std::nullopt;
    if (high >= 0) bytes += static_cast<char>(high << 4 | value);
    high = high >= 0 ? -1 : value;
  }
  return high >= 0 ? std::nullopt : std::optional(bytes);
}

void check_seal(const std::string& text, const std::string& path) {
  const size_t end = text.find_last_not_of(" \n");
  TESSERA_CHECK_IO(
      end != std::string::npos && text[end] == '}', "checkpoint", "'", path,
      end == std::string::npos ? "' is empty" : c10::str("' ends in the middle, after ", text.size(), " bytes"),
      ": a copy that ended early, or a disk that was full, has cut it off; copy the checkpoint again, or load "
      "another tag");
  const size_t start = kSealBefore.size() + kHexDigits + kSealAfter.size();
  const bool whole = text.size() > start && text.starts_with(kSealBefore) &&
                     text.compare(start - kSealAfter.size(), kSealAfter.size(), kSealAfter) == 0;
  const std::string expected =
      whole ? hex_of(io::crc32c(text.data() + start, static_cast<int64_t>(text.size() - start))) : "";
  TESSERA_CHECK_IO(whole && text.compare(kSealBefore.size(), kHexDigits, expected) == 0, "checkpoint", "'", path,
                   "' is damaged or was edited: its checksum is not that of its text");
}

// ---- writing

const char* dtype_name(at::ScalarType dtype) {
  return dtype == at::kComplexDouble ? kComplexDouble : io::safetensors_dtype(dtype);
}

Json pair_of(Range range) {
  return {range.begin, range.end};
}

Json json_of(const TensorRecord& record) {
  Json json{{"name", record.name}, {"kind", record.kind}, {"dtype", dtype_name(record.dtype)}, {"shape", record.shape}};
  if (!record.order.empty()) json["order"] = record.order;
  for (const Slice& slice : record.slices) {
    Json ranges = Json::array();
    for (const Range& range : slice.ranges)
      ranges.push_back(pair_of(range));
    json["slices"].push_back({{"dim", slice.dim}, {"ranges", ranges}});
  }
  json["pieces"] = Json::array();
  for (const Piece& piece : record.pieces) {
    Json one{{"file", piece.file}, {"offset", piece.offset}, {"range", pair_of(piece.range)}};
    if (piece.slice >= 0) one["slice"] = piece.slice;
    if (!piece.checksums.empty()) one["crc32c"] = piece.checksums;
    json["pieces"].push_back(one);
  }
  return json;
}

Json json_of(const ParamRecord& param) {
  Json json{{"name", param.name},
            {"shape", param.shape},
            {"dtype", dtype_name(param.dtype)},
            {"trained", param.trained},
            {"step", param.step}};
  if (!param.aliases.empty()) json["aliases"] = param.aliases;
  for (const Along& along : param.along)
    json["along"].push_back({{"axis", along.axis}, {"place", along.place}, {"of", along.of}});
  return json;
}

// ---- reading

Range read_range(const Node& node) {
  const std::vector<int64_t> pair = node.numbers();
  node.check(pair.size() == 2 && pair[0] <= pair[1], "is not a range");
  return {pair[0], pair[1]};
}

at::ScalarType read_dtype(const Node& node) {
  const std::string name = node.text();
  if (name == kComplexDouble) return at::kComplexDouble;
  if (const auto dtype = io::dtype_of(name)) return *dtype;
  node.fail("is no dtype");
}

// Reads a name: of a file where the manifest is, or (`deep`) in a folder below.
std::string read_file_name(const Node& node, bool deep) {
  std::string name = node.text();
  std::string part;
  std::istringstream parts(name + "/");
  bool good = name.find('\0') == std::string::npos && (deep || name.find('/') == std::string::npos);
  while (good && std::getline(parts, part, '/'))
    good = !part.empty() && part.size() < 256 && part[0] != '.';
  node.check(good, "is not the name of a file in this folder");
  return name;
}

std::vector<int64_t> read_shape(const Node& node) {
  std::vector<int64_t> shape = node.numbers();
  node.check(shape.size() <= 64, "has too many dims");
  int64_t numel = 1;
  for (const int64_t size : shape)
    node.check(!__builtin_mul_overflow(numel, size, &numel) && numel < int64_t{1} << 56, "has too many elements");
  return shape;
}

Slice read_slice(const Node& node, const TensorRecord& record) {
  node.check(record.order.empty() && !record.shape.empty(), "cannot be of this tensor");
  Slice slice{node.at("dim").number(static_cast<int64_t>(record.shape.size()) - 1), {}};
  int64_t rows = 0;
  node.at("ranges").each([&](const Node& range) {
    slice.ranges.push_back(read_range(range));
    range.check(slice.ranges.back().end <= record.shape[slice.dim], "is beyond the tensor");
    rows += slice.ranges.back().size();
    range.check(rows <= record.shape[slice.dim], "has elements that are there twice");
  });
  node.check(rows > 0, "has no elements");
  return slice;
}

Piece read_piece(const Node& node, const TensorRecord& record, const std::vector<FileRecord>& files) {
  Piece piece;
  piece.file = node.at("file").number<int>();
  node.check(std::cmp_less(piece.file, files.size()), "is in a file that is not listed");
  piece.offset = node.at("offset").number();
  piece.range = read_range(node.at("range"));
  if (node.has("slice")) piece.slice = node.at("slice").number<int>();
  node.check(std::cmp_less(piece.slice, record.slices.size()), "is of a slice that is not listed");
  const Slice* slice = piece.slice < 0 ? nullptr : &record.slices[piece.slice];
  node.check(!piece.range.empty() && piece.range.end <= numel_of(record.shape, slice), "is beyond the tensor");
  const int64_t bytes = piece.range.size() * static_cast<int64_t>(c10::elementSize(record.dtype));
  node.check(piece.offset + bytes <= files[piece.file].bytes, "is beyond its file");
  if (files[piece.file].raw) {
    const auto& blocks = files[piece.file].blocks;
    const auto next = std::upper_bound(blocks.begin(), blocks.end(), piece.offset,
                                       [](int64_t at, const Block& block) { return at < block.bytes.begin; });
    node.check(next != blocks.begin() && piece.offset + bytes <= std::prev(next)->bytes.end, "is in no block");
    return piece;
  }
  for (const int64_t sum : node.at("crc32c").numbers(UINT32_MAX))
    piece.checksums.push_back(static_cast<uint32_t>(sum));
  node.check(static_cast<int64_t>(piece.checksums.size()) == (bytes + kChecksumBlock - 1) / kChecksumBlock,
             "has another number of checksums than its bytes need");
  return piece;
}

TensorRecord read_tensor(const Node& node, const std::vector<FileRecord>& files) {
  TensorRecord record;
  record.name = node.at("name").text();
  record.kind = node.at("kind").text();
  const Node here{node.json, node.path, "tensor '" + record.name + "' (" + record.kind + ")"};
  record.dtype = read_dtype(here.at("dtype"));
  record.shape = read_shape(here.at("shape"));
  if (here.has("order")) {
    record.order = here.at("order").numbers();
    std::vector<int64_t> sorted = record.order;
    std::sort(sorted.begin(), sorted.end());
    bool all = sorted.size() == record.shape.size();
    for (size_t d = 0; all && d < sorted.size(); ++d)
      all = sorted[d] == static_cast<int64_t>(d);
    here.check(all, "'order' does not have every dim once");
  }
  if (here.has("slices"))
    here.at("slices").each([&](const Node& n) { record.slices.push_back(read_slice(n, record)); });
  here.at("pieces").each([&](const Node& n) { record.pieces.push_back(read_piece(n, record, files)); });
  return record;
}

ParamRecord read_param(const Node& node) {
  ParamRecord param{node.at("name").text(), read_shape(node.at("shape")), read_dtype(node.at("dtype"))};
  param.trained = node.at("trained").flag();
  param.step = node.at("step").counter();
  if (node.has("aliases")) node.at("aliases").each([&](const Node& alias) { param.aliases.push_back(alias.text()); });
  if (node.has("along"))
    node.at("along").each([&](const Node& n) {
      const int64_t of = n.at("of").number<int>();
      param.along.push_back({n.at("axis").text(), n.at("place").number(of - 1), of});
    });
  node.check(param.name.ends_with(suffix_of(param.along)), "has a name without its place");
  return param;
}

// How many runs a piece has; at most what runs_of() makes.
int64_t count_runs(const TensorRecord& record, const Piece& piece) {
  if (piece.slice < 0) return 1;
  const Slice& slice = record.slices[piece.slice];
  int64_t rows = 1;  // of the dims before the cut one, in all
  for (int64_t dim = 0; dim < slice.dim; ++dim)
    rows *= record.shape[dim];
  const int64_t length = numel_of(record.shape, &slice) / rows;
  const auto parts = static_cast<int64_t>(slice.ranges.size());
  return std::min(kMostRuns, piece.range.size() / length + 2) * parts;
}

// Checks that every element is in exactly one piece.
void check_cover(const TensorRecord& record, const std::string& path) {
  int64_t elements = 0, count = 0;
  for (const Piece& piece : record.pieces) {
    elements += piece.range.size();
    count += count_runs(record, piece);
    TESSERA_CHECK_IO(elements <= record.numel() && count <= kMostRuns, "checkpoint", "'", path, "', tensor '",
                     record.name, "' (", record.kind, "): its pieces have more elements than it, or lie in more than ",
                     kMostRuns, " parts of it");
  }
  TESSERA_CHECK_IO(elements == record.numel(), "checkpoint", "'", path, "', tensor '", record.name, "' (", record.kind,
                   "): its pieces have ", elements, " elements, it has ", record.numel());
  std::vector<Run> runs;
  for (const Piece& piece : record.pieces)
    for (const Run& run : runs_of(record.shape, piece.slice < 0 ? nullptr : &record.slices[piece.slice], piece.range))
      runs.push_back(run);
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.begin < b.begin; });
  int64_t at = 0;
  for (const Run& run : runs) {
    TESSERA_CHECK_IO(run.begin == at, "checkpoint", "'", path, "', tensor '", record.name, "' (", record.kind,
                     "): its pieces overlap or leave a gap at element ", std::min(at, run.begin));
    at += run.size;
  }
}

void check_files(const Manifest& manifest, const std::string& path) {
  // Pieces of one file do not overlap.
  std::vector<std::vector<Range>> used(manifest.files.size());
  for (const TensorRecord& record : manifest.tensors)
    for (const Piece& piece : record.pieces)
      if (!manifest.files[piece.file].raw)
        used[piece.file].push_back(
            {piece.offset, piece.offset + piece.range.size() * static_cast<int64_t>(c10::elementSize(record.dtype))});
  for (size_t i = 0; i < used.size(); ++i) {
    std::sort(used[i].begin(), used[i].end(), [](Range a, Range b) { return a.begin < b.begin; });
    for (size_t k = 1; k < used[i].size(); ++k)
      TESSERA_CHECK_IO(used[i][k - 1].end <= used[i][k].begin, "checkpoint", "'", path, "': two pieces of '",
                       manifest.files[i].name, "' overlap at byte ", used[i][k].begin);
  }
}

FileRecord read_file(const Node& node) {
  FileRecord file{read_file_name(node.at("name"), node.has("blocks")), node.at("bytes").number()};
  if (node.has("crc32c")) file.checksum = node.at("crc32c").number<uint32_t>();
  file.raw = node.has("blocks");
  int64_t end = 0;
  if (file.raw)
    node.at("blocks").each([&](const Node& one) {
      const std::vector<int64_t> numbers = one.numbers();
      one.check(numbers.size() == 3 && end <= numbers[0] && numbers[0] <= numbers[1] && numbers[1] <= file.bytes &&
                    numbers[2] <= UINT32_MAX,
                "is no block of this file");
      end = numbers[1];
      file.blocks.push_back({{numbers[0], numbers[1]}, static_cast<uint32_t>(numbers[2])});
    });
  return file;
}

FileRecord read_blob(const Node& node) {
  if (!node.has("hex")) return read_file(node);
  const std::optional<std::string> text = bytes_of(node.at("hex").text());
  node.check(text.has_value(), "is not hexadecimal");
  return {"", static_cast<int64_t>(text->size()), 0, *text};
}

Json json_of(const FileRecord& file) {
  Json json{{"name", file.name}, {"bytes", file.bytes}};
  if (file.raw) json["blocks"] = Json::array();
  for (const Block& block : file.blocks)
    json["blocks"].push_back({block.bytes.begin, block.bytes.end, block.checksum});
  return json;
}

}  // namespace

int64_t TensorRecord::numel() const {
  return numel_of(shape, nullptr);
}

std::string suffix_of(const std::vector<Along>& along) {
  std::string text;
  for (const Along& one : along)
    text += (text.empty() ? "@" : ",") + one.axis + "=" + std::to_string(one.place);
  return text;
}

std::string ParamRecord::base_name() const {
  return name.substr(0, name.size() - suffix_of(along).size());
}

std::string to_text(const Manifest& manifest) {
  Json json{{"format", kFormat}, {"version", kVersion}, {"id", manifest.id}};
  json["run"] = manifest.run.empty() ? Json::object() : Json::parse(manifest.run);
  json["files"] = Json::array();
  for (const FileRecord& file : manifest.files)
    json["files"].push_back(json_of(file));
  json["blobs"] = Json::object();
  for (const auto& [name, file] : manifest.blobs)
    if (file.name.empty())
      json["blobs"][name] = {{"hex", hex_of(file.text)}};
    else
      json["blobs"][name] = {{"name", file.name}, {"bytes", file.bytes}, {"crc32c", file.checksum}};
  json["params"] = Json::array();
  for (const ParamRecord& param : manifest.params)
    json["params"].push_back(json_of(param));
  json["tensors"] = Json::array();
  for (const TensorRecord& record : manifest.tensors)
    json["tensors"].push_back(json_of(record));
  return sealed(json.dump(1));
}

std::string sealed(const std::string& json) {
  const std::string rest = json.substr(json.find('{') + 1);
  return kSealBefore + hex_of(io::crc32c(rest.data(), static_cast<int64_t>(rest.size()))) + kSealAfter + rest;
}

Manifest parse_manifest(const std::string& text, const std::string& path) {
  check_seal(text, path);
  const Json json = parsed(text);
  const Node root{json, path, "the manifest"};
  root.check(root.at("format").text() == kFormat, "is of another format");
  const int64_t version = root.at("version").number();
  TESSERA_CHECK_IO(version == kVersion, "checkpoint", "'", path, "' has version ", version, ", this library reads ",
                   kVersion);
  Manifest manifest;
  manifest.id = root.at("id").text();
  manifest.run = root.at("run").object().json.dump();
  root.at("files").each([&](const Node& node) { manifest.files.push_back(read_file(node)); });
  const Node blobs = root.at("blobs");
  for (const auto& [name, value] : blobs.object().json.items())
    manifest.blobs[name] = read_blob({value, path, "blob '" + name + "'"});
  std::set<std::string> names;
  root.at("params").each([&](const Node& node) {
    ParamRecord param = read_param(node);
    node.check(names.insert(param.name).second, "has a name that another one has");
    manifest.params.push_back(std::move(param));
  });
  std::set<std::pair<std::string, std::string>> tensors;
  root.at("tensors").each([&](const Node& node) {
    manifest.tensors.push_back(read_tensor(node, manifest.files));
    const TensorRecord& record = manifest.tensors.back();
    node.check(tensors.insert({record.name, record.kind}).second, "is there twice");
    check_cover(record, path);
  });
  check_files(manifest, path);
  return manifest;
}

std::string params_text(const std::vector<ParamRecord>& params) {
  Json json = Json::array();
  for (const ParamRecord& param : params)
    json.push_back(json_of(param));
  return json.dump();
}

void merge_params(std::vector<ParamRecord>& all, const std::string& text) {
  const std::string path = "parameters of a rank";
  for (const Json& one : Json::parse(text)) {
    ParamRecord param = read_param({one, path, ""});
    const auto known = [&](const ParamRecord& other) { return other.name == param.name; };
    if (std::none_of(all.begin(), all.end(), known)) all.push_back(std::move(param));
  }
}

std::string records_text(const std::vector<TensorRecord>& records) {
  Json json = Json::array();
  for (const TensorRecord& record : records)
    json.push_back(json_of(record));
  return json.dump();
}

void merge_records(std::vector<TensorRecord>& all, const std::string& text, int file) {
  const std::string path = "records of a rank";
  const Json json = Json::parse(text);
  const std::vector<FileRecord> any{{"", int64_t{1} << 62}};
  std::map<std::pair<std::string, std::string>, size_t> index;
  for (size_t i = 0; i < all.size(); ++i)
    index[{all[i].name, all[i].kind}] = i;
  for (const Json& one : json) {
    TensorRecord record = read_tensor({one, path, ""}, any);
    const auto [place, is_new] = index.try_emplace({record.name, record.kind}, all.size());
    if (is_new) {
      all.push_back(record);
      all.back().pieces.clear();
      all.back().slices.clear();
    }
    TensorRecord& whole = all[place->second];
    TESSERA_CHECK_VALUE(whole.shape == record.shape && whole.order == record.order && whole.dtype == record.dtype,
                        "checkpoint", "ranks have tensor '", record.name, "' (", record.kind,
                        ") in other shapes, dtypes or orders of elements");
    for (Piece& piece : record.pieces) {
      piece.file = file;
      if (piece.slice >= 0) {
        const Slice& slice = record.slices[piece.slice];
        const auto known = std::find(whole.slices.begin(), whole.slices.end(), slice);
        piece.slice = static_cast<int>(known - whole.slices.begin());
        if (known == whole.slices.end()) whole.slices.push_back(slice);
      }
      whole.pieces.push_back(std::move(piece));
    }
  }
}

}  // namespace tessera::checkpoint
