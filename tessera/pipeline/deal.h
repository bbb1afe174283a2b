// What each rank of a group has for each of the others, as batches of a sequence that they share.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/pipeline/wire.h"

namespace tessera::pipeline {

struct Hand {
  std::vector<Message> parts = {};  // by rank; empty where this rank has none left, or has failed
  std::string problem = {};         // why it has failed
  bool of_values = false;           // a value error is one on all ranks
};

// Returns what each rank has for this one, by rank, in memory of `device`; nothing where a rank has none left. Dense tensors of any
// dtypes and sizes. Where a rank has failed: nothing there, which throws what it has; on the others a value error with the same
// text, or StageFailed. `what`, `origin`: of whom and of what, in that. Collective.
std::optional<std::vector<Message>> deal(comm::Group& group, const Hand& own, const std::string& origin,
                                         const std::string& what, at::Device device);

}  // namespace tessera::pipeline
