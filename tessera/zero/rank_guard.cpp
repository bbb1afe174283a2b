#include "tessera/zero/rank_guard.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::zero {

bool states_on_device(const Unit& unit) {
  return std::ranges::all_of(unit.state_buffers(),
                             [](const shard::Buffer* b) { return !b->defined() || b->is_here(); });
}

bool lives_on_device(const Unit& unit) {
  return states_on_device(unit) && unit.flat().residence() == shard::Residence::Device;
}

void end_groups(const c10::OutOfMemoryError& error, const Ranks& ranks) {
  if (dynamic_cast<const AgreedOutOfMemory*>(&error) != nullptr) return;
  for (const comm::GroupPtr& group : {ranks.shard, ranks.replicate, ranks.model})
    if (group->size() > 1) group->abort(error.what_without_backtrace());
}

void Failure::check(const std::string& what) const {
  if (text.empty()) return;
  if (of_memory) TESSERA_FAIL(AgreedOutOfMemory, what, text);
  TESSERA_FAIL(IoError, what, text);
}

// Ranks reduce the failing rank's place with, in the last bit, whether its memory failed: the largest number is one rank's.
Failure RankGuard::agree(const Ranks& ranks) const {
  at::Tensor failed = at::zeros({1}, at::kDouble);
  if (!mine_.text.empty()) failed.fill_(2 * (ranks.place() + 1) + (mine_.of_memory ? 1 : 0));
  ranks.agree(failed, comm::ReduceOp::Max, "outcome of what each rank does");
  const int found = static_cast<int>(failed.item<double>());
  if (found == 0) return {};
  const bool of_memory = found % 2 == 1;
  if (!mine_.text.empty()) return {mine_.text, of_memory};
  return {c10::str("rank ", found / 2 - 1, " of this engine ", of_memory ? "ran out of memory" : "failed",
                   "; see its error"),
          of_memory};
}

}  // namespace tessera::zero
