// Writing one rank's part of a checkpoint, and making a checkpoint complete.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/manifest.h"
#include "tessera/io/lock.h"
#include "tessera/shard/buffer.h"
#include "tessera/shard/cut.h"

namespace tessera::checkpoint {

// Elements of a tensor that this rank writes.
struct Item {
  std::string name, kind;
  std::vector<int64_t> shape;  // of the whole tensor
  std::vector<int64_t> order;  // as in TensorRecord
  at::ScalarType dtype = at::kFloat;
  std::vector<Slice> slice;  // one, or none: of the whole tensor
  shard::Range range;        // of the slice
  // Elements `part` of `range`: 1-D, of dtype, on any device. Called for parts of at most shard::kTile elements, in order,
  // each shortly before it is written.
  std::function<at::Tensor(shard::Range part)> values;
};

// Writes a new safetensors file `path`, through to the disk, and returns what is where (file 0). Nothing is left when
// that fails. `id` stands in the file: it tells files of several saves apart.
std::vector<TensorRecord> write_items(const std::string& path, const std::string& id, std::vector<Item> items,
                                      FileRecord& file);
FileRecord write_blob(const std::string& path, const std::string& bytes);

// Folders and names of a checkpoint in `dir`.
// Value error for a tag that is not the name of one folder.
void check_tag(const std::string& tag);
std::string folder_of(const std::string& dir, const std::string& tag);
std::string file_name(const std::string& id, int rank);
std::string blob_name(const std::string& id, const std::string& name);
std::string new_id();
bool is_id(const std::string& text);  // whether it has new_id()'s form

// Note [Saves at the same time]
//   Engines, threads, processes may save into one folder at the same time, under one tag too. While a save lasts, its first
//   rank, which alone can complete it, holds the lock of the file "<id>.saving" beside the save's files. clean() removes
//   files of an id only where that lock is gone or nobody holds it. It looks at the lock before the manifest, and a save
//   lets go of the lock after its manifest is there: so what it removes neither is nor becomes a part of a checkpoint.
class SaveMark {
 public:
  // Makes the folder as well; to be made before any rank writes.
  SaveMark(const std::string& folder, const std::string& id);
  ~SaveMark();

 private:
  std::optional<io::Lock> lock_;
};

// Whether the save of that id in `folder` may still be on its way. Removes the mark of a save that was cut off.
bool is_held(const std::string& folder, const std::string& id);

// Puts the manifest in place: from here on the checkpoint is complete; until then the one that was there is.
void commit(const std::string& folder, const Manifest& manifest);
// The id of the complete checkpoint in `folder`; empty where there is none that can be read.
std::string complete_id(const std::string& folder);
// `file`: another name for the file, of another layout.
void set_latest(const std::string& dir, const std::string& tag, const std::string& file = "latest");
// Makes the folder `from` become `folder`, in one step: what was there before is whole until then and gone after.
void put_in_place(const std::string& from, const std::string& folder);
// Removes what saves that were cut off have left in `dir`, and with keep_last > 0 all checkpoints but the newest ones,
// `tag` and the one that `latest` names. Touches only files that a save of ours has made, and none of a save that may still
// be on its way. Files that cannot be removed stay.
void clean(const std::string& dir, const std::string& tag, int keep_last);

}  // namespace tessera::checkpoint
