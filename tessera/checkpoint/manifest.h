// Manifest: what a checkpoint holds and where. It names tensors of the model, their elements by number, and files;
// no ranks, stages, units or meshes, so that any of them may load it.
//
//   <dir>/latest                         the tag of the newest complete checkpoint
//   <dir>/<tag>/manifest.json            complete exactly when it is there: it is renamed to its place last
//   <dir>/<tag>/<id>-00000.safetensors   what one rank wrote, by any of its quantities
//   <dir>/<tag>/<id>-client_state.bin    a blob of the front end's
//
// A checkpoint of another program can be read in place: a manifest made for it in memory says where its tensors lie in files
// of other formats (FileRecord::raw).
//
// `id` is new for every save, so a save over an old one never touches the old one's files before it is complete.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/shard/layout.h"

namespace tessera::checkpoint {

inline constexpr int kVersion = 1;
inline constexpr int64_t kChecksumBlock = 4 << 20;  // bytes of a piece that have one checksum
inline constexpr const char* kManifestName = "manifest.json";

// Part of a tensor along one dim, as tensor parallelism cuts it. Example: dim 0, ranges [0, 2) and [6, 8) of 12 rows.
struct Slice {
  int64_t dim = 0;
  std::vector<shard::Range> ranges;  // of that dim, joined in this order
  bool operator==(const Slice&) const = default;
};

// Elements that lie one after the other in a file.
struct Piece {
  int file = 0;                     // in Manifest::files
  int64_t offset = 0;               // of the first one, in bytes
  int slice = -1;                   // in TensorRecord::slices; -1: of the whole tensor
  shard::Range range;               // of the elements of that slice, in the order of TensorRecord
  std::vector<uint32_t> checksums;  // CRC-32C of every kChecksumBlock bytes
};

// A tensor. Its kind: "weight" (what the module computes with, where it is all that there is), "master" (the fp32 value behind a
// 16-bit weight), a state of the optimizer by torch's name ("exp_avg"), or "buffer" of a module.
struct TensorRecord {
  std::string name;
  std::string kind;
  std::vector<int64_t> shape;
  std::vector<int64_t> order;  // dims from the slowest to the fastest in memory; empty: 0, 1, 2, ...
  at::ScalarType dtype = at::kFloat;
  std::vector<Slice> slices;
  std::vector<Piece> pieces;

  int64_t numel() const;
};

// Where along an axis of ranks a parameter is another tensor on each (an expert).
struct Along {
  std::string axis;
  int64_t place = 0, of = 1;
  bool operator==(const Along&) const = default;
};
// The suffix that makes a name of one tensor: "experts.w@dp_shard=1".
std::string suffix_of(const std::vector<Along>& along);

struct ParamRecord {
  std::string name;  // with the suffix of `along`
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;  // the dtype that the module computed in
  bool trained = true;
  int64_t step = 0;                       // updates of the optimizer that the parameter saw
  std::vector<std::string> aliases = {};  // other names of a tied parameter
  std::vector<Along> along = {};

  std::string base_name() const;  // without the suffix
};

// Bytes of a raw file that have one checksum.
struct Block {
  shard::Range bytes;
  uint32_t checksum = 0;  // CRC-32, as in zip archives; 0: none
};

struct FileRecord {
  std::string name;
  int64_t bytes = 0;
  uint32_t checksum = 0;  // of blobs only
  std::string text = {};  // a blob's contents, where the manifest itself has them; then no file has them
  // A file of another program: its name may have folders, it has no id, its pieces no checksums of their own. They lie in
  // `blocks`, ascending, and may overlap: tensors of torch share memory.
  bool raw = false;
  std::vector<Block> blocks = {};
};

struct Manifest {
  std::string id;
  std::vector<FileRecord> files;
  std::vector<ParamRecord> params;
  std::vector<TensorRecord> tensors;
  std::map<std::string, FileRecord> blobs;
  std::string run;  // JSON object: counters, scaler, groups, schedule
};

std::string to_text(const Manifest& manifest);
// The text of a manifest around the JSON object `json`, which nothing has been checked of.
std::string sealed(const std::string& json);
// Parses and checks: types, names without folders, pieces inside their files, every element of every tensor in exactly one piece.
// IoError that names `path` and the tensor.
Manifest parse_manifest(const std::string& text, const std::string& path);

// Parameters that only one rank knows, for the rank that writes the manifest; merging leaves out those in `all`.
std::string params_text(const std::vector<ParamRecord>& params);
void merge_params(std::vector<ParamRecord>& all, const std::string& text);

// The list of records that one rank wrote, for the rank that writes the manifest; merging adds them to `all`, their pieces as
// those of file `file`.
std::string records_text(const std::vector<TensorRecord>& records);
void merge_records(std::vector<TensorRecord>& all, const std::string& text, int file);

}  // namespace tessera::checkpoint
