// Checkpoints in DeepSpeed's layouts (those of version 0.19.8), written from any that can be read, without DeepSpeed.
#pragma once

#include <string>
#include <string_view>

#include "tessera/checkpoint/reader.h"

namespace tessera::checkpoint {

// Whose files: of DeepSpeed at that ZeRO stage on that many ranks; what loads them there must have both.
struct DeepSpeedLayout {
  int stage = 2;
  int64_t ranks = 1;
};
// Writes the checkpoint `dir`/`tag` (empty: what `latest` names) into `out` under its own tag, which is returned, and `latest` beside
// it. `objects` of a client that are no plain data: Refused, or Kept as they came. Nothing is run. Value error for a layout that
// cannot be and for what DeepSpeed's files cannot hold, IoError for files. Local.
std::string to_deepspeed(const std::string& dir, const std::string& out, const std::string& tag, DeepSpeedLayout layout,
                         Objects objects = Objects::Refused);
// The same in its universal layout, which loads at any stage (1 to 3) and number of ranks, there with checkpoint.load_universal.
// Under the tag with "_universal" behind it, which is returned and stands in `latest_universal`.
std::string to_universal(const std::string& dir, const std::string& out, const std::string& tag,
                         Objects objects = Objects::Refused);

namespace deepspeed {

// Keys of a model-states file that are DeepSpeed's own, which no client state can have.
bool is_own_key(std::string_view key);
// The files of the ranks first, first + step, ... into the folder `made`, from the checkpoint `dir`/`tag`, which is ours.
void write_ranks(const std::string& dir, const std::string& tag, const std::string& made, DeepSpeedLayout layout,
                 int64_t first, int64_t step);
// Puts the complete folder `made` into `dir`/`tag`, and beside it what belongs there.
void finish_folder(const std::string& made, const std::string& dir, const std::string& tag, int stage, bool latest,
                   int keep_last = 0);
// zero_to_fp32.py, by way of the file `part` on the same file system.
void put_script(const std::string& dir, const std::string& part);
// The blob "python" of a run of C++: its configuration, a JSON object, and the names of its parameters by group.
std::string run_blob(const std::string& config, const std::vector<std::vector<std::string>>& group_names);

}  // namespace deepspeed

}  // namespace tessera::checkpoint
