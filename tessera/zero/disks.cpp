#include "tessera/zero/disks.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

namespace tessera::zero {

bool states_on_device(const Unit& unit) {
  return std::ranges::all_of(unit.state_buffers(),
                             [](const shard::Buffer* b) { return !b->defined() || b->is_here(); });
}

bool lives_on_device(const Unit& unit) {
  return states_on_device(unit) && unit.flat->residence() == shard::Residence::Device;
}

std::string DiskGuard::agree(const Ranks& ranks) const {
  at::Tensor failed = at::zeros({1}, at::kDouble);
  if (!failure_.empty()) failed.fill_(ranks.place() + 1);
  ranks.agree(failed, comm::ReduceOp::Max, "state of the disks");
  const int who = static_cast<int>(failed.item<double>());
  if (who == 0 || !failure_.empty()) return failure_;
  return c10::str("rank ", who - 1, " of this engine could not move its model states; see its error");
}

}  // namespace tessera::zero
