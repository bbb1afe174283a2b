// Checkpoints in DeepSpeed's layouts (those of version 0.19.8), written from any that can be read, without DeepSpeed.
#pragma once

#include <string>
#include <string_view>

#include "tessera/checkpoint/reader.h"

namespace tessera::checkpoint {

// The ZeRO stage and the number of ranks that files are written for: a run of DeepSpeed that loads them must have both.
struct DeepSpeedLayout {
  int stage = 2;
  int64_t ranks = 1;
};
// Writes the checkpoint `dir`/`tag` (empty: what `latest` names) into `out` under its own tag, which is returned, and `latest` beside
// it. `objects` of a client that are no plain data: Refused, or Kept as they came. Nothing is run. Value error for a layout that
// cannot be and for what DeepSpeed's files cannot hold, IoError for files. Local.
std::string to_deepspeed(const std::string& dir, const std::string& out, const std::string& tag, DeepSpeedLayout layout,
                         Objects objects = Objects::Refused);
// Does what to_deepspeed() does, in DeepSpeed's universal layout, which loads at any stage (1 to 3) and number of ranks, there
// with checkpoint.load_universal. The new tag is `name` (empty: the checkpoint's own with "_universal" behind it) and stands in
// `latest_universal`.
std::string to_universal(const std::string& dir, const std::string& out, const std::string& tag,
                         Objects objects = Objects::Refused, const std::string& name = {});

namespace deepspeed {

// Whether the key of a model-states file is DeepSpeed's own, which no client state can have.
bool is_own_key(std::string_view key);
// Value error for names of a program's own values that are such. Without `as_deepspeed`, in files of our own format, one of them
// alone is refused: checkpoint_parallel_dimensions.
void check_client_keys(const std::vector<std::string>& keys, bool as_deepspeed);
// Writes the files of ranks first, first + step, ... into the folder `made`, from the checkpoint `dir`/`tag` of our own format.
void write_ranks(const std::string& dir, const std::string& tag, const std::string& made, DeepSpeedLayout layout,
                 int64_t first, int64_t step);
// Moves the complete folder `made` to `dir`/`tag`, writes what belongs beside it, and leaves the keep_last newest (0: all).
void finish_folder(const std::string& made, const std::string& dir, const std::string& tag, int stage, bool latest,
                   int keep_last = 0);
// Writes `dir`/zero_to_fp32.py, by way of the file `part` on the same file system.
void put_script(const std::string& dir, const std::string& part);
// Returns the blob "python" of a run of C++: its configuration, a JSON object, and the names of its parameters by group.
std::string run_blob(const std::string& config, const std::vector<std::vector<std::string>>& group_names);

}  // namespace deepspeed

}  // namespace tessera::checkpoint
