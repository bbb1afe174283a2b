// Reading a checkpoint: any elements of any of its tensors, wherever they lie.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/checkpoint/manifest.h"
#include "tessera/io/file.h"

namespace tessera::checkpoint {

// What a loader needs of a tensor, in its own terms.
struct Want {
  std::vector<Slice> slice;    // one, or none: of the whole tensor
  std::vector<int64_t> order;  // of its elements, as in TensorRecord
  shard::Range range;          // of the slice
};

// UsageError for one that was moved from.
class Reader {
 public:
  // `manifest_text`: of `folder`; files are opened when they are needed.
  Reader(std::string folder, const std::string& manifest_text);
  const std::string& folder() const {
    check_live();
    return folder_;
  }
  Reader(Reader&&) noexcept;
  ~Reader();

  const Manifest& manifest() const {
    check_live();
    return manifest_;
  }
  // The record of a tensor; null where there is none.
  const TensorRecord* find(const std::string& name, const std::string& kind) const;

  // Reads all that read() would need and compares checksums; for raw files see verify_blocks(). IoError that names file and
  // tensor. By any thread.
  void verify(const TensorRecord& record, const Want& want) const;
  // Reads elements: 1-D, on the CPU, in the record's dtype.
  at::Tensor read(const TensorRecord& record, const Want& want) const;
  // Reads elements to where they belong: contiguous, on the CPU, in that dtype. By any thread.
  void read_to(const at::Tensor& result, const TensorRecord& record, const Want& want) const;
  // Reads the whole tensor, in its shape.
  at::Tensor read_whole(const TensorRecord& record) const;
  // Read by name and kind ("weight", "master", "exp_avg", "buffer"), checked; read_range(): 1-D, elements of the flattened
  // tensor in the usual order of its dims. Value error where there is none.
  at::Tensor read_whole(const std::string& name, const std::string& kind) const;
  at::Tensor read_range(const std::string& name, const std::string& kind, shard::Range range) const;
  // Reads and checks a blob.
  std::string blob(const std::string& name) const;
  // Checks the blocks of raw files that hold elements of `needed` records, but of all of them only part number `part` of `parts`:
  // several readers divide the work.
  void verify_blocks(const std::function<bool(const TensorRecord&)>& needed, int part, int parts) const;
  // Checks everything: every file, every piece.
  void verify_all() const;

 private:
  void check_live() const;
  struct Copy;
  std::vector<Copy> copies(const TensorRecord& record, const std::vector<Slice>& slice, shard::Range range) const;
  const TensorRecord& named(const std::string& name, const std::string& kind) const;
  std::shared_ptr<const io::File> file(int number) const;
  void verify_piece(const TensorRecord& record, const Piece& piece, shard::Range elements) const;
  bool reorders(const TensorRecord& record, const Want& want) const;
  at::Tensor read_in_order(const TensorRecord& record, const Want& want) const;

  std::string folder_;
  Manifest manifest_;
  std::map<std::pair<std::string, std::string>, size_t> index_;
  struct Files;
  std::unique_ptr<Files> files_;
};

// What becomes of objects in files of DeepSpeed, of classes that only Python has. Nothing ever makes such an object here.
enum class Objects : uint8_t {
  Inert,    // dicts with the name of their class under "__class__"
  Refused,  // IoError that names the object
  Kept,     // objects stay in blobs as they came, for a program in Python that trusts the files
};
// What files of DeepSpeed do not say, and who loads them knows.
struct DeepSpeedHints {
  // The optimizer's parameters by group, in order, with whether they are trained: files of stage 0 have no names.
  using Groups = std::vector<std::vector<std::pair<std::string, bool>>>;
  std::optional<Groups> groups = {};
  std::optional<int64_t> accumulation = {};
  bool optimizer = false;  // the optimizer's states are needed: IoError where the files that hold them are missing
  Objects objects = Objects::Inert;
};
// The manifest of `dir`/`tag`, made in memory where DeepSpeed saved it. IoError that says what is missing, value error
// for a text that is no tag.
std::string manifest_text(const std::string& dir, const std::string& tag, const DeepSpeedHints& hints = {});
// Where `dir` has no file `latest`: what there is instead, and what to give.
// Whether `dir` is there and is none that a save was called with: a file, or one checkpoint.
bool is_other_than_folder(const std::string& dir);
std::string why_no_latest(const std::string& dir, const std::string& latest = "latest");
// Opens a checkpoint without an engine, for reading, DeepSpeed's too; `tag` empty: the tag that `latest` names. `dir` is what
// save_checkpoint() was called with. Errors as of manifest_text(). Local.
Reader open(const std::string& dir, const std::string& tag = "", const DeepSpeedHints& hints = {});
// Tags of the complete checkpoints of this library in `dir`, the newest first; none where there is no such folder. Local.
std::vector<std::string> tags(const std::string& dir);
// The program's own values that save_checkpoint() was given, Python's client_state too. Of that, what C++ has no value for (objects,
// integers of more than 64 bits, dicts with such keys as tuples) is left out, with a warning where `warns`; lists, sets and bytes are
// lists and texts. IoError where it is damaged.
using ClientValues = std::map<std::string, c10::IValue>;
ClientValues client_values(const Reader& reader, bool warns = true);

// Whether `text` names one folder and has no other meaning.
bool is_tag(const std::string& text);
// The tag that `dir`/latest (or a file of another name) names; empty where there is no such file. IoError where it holds
// anything else.
std::string latest_tag(const std::string& dir, const std::string& file = "latest");

}  // namespace tessera::checkpoint
