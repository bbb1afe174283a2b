#include "tessera/comm/wait_cycle.h"

#include "tessera/comm/op_info.h"

namespace tessera::comm {

std::string cycle_text(std::vector<std::pair<int, std::string>> waits) {
  std::rotate(waits.begin(), std::min_element(waits.begin(), waits.end()), waits.end());
  std::string text(kDisagreement);
  std::string before = ": rank ", after = " is in ";
  for (const auto& [rank, call] : waits) {
    text.append(before).append(std::to_string(rank)).append(after).append(call);
    before = ", rank ";
    after = " in ";
  }
  return text.append(", and each waits for a call that the next one never makes; ").append(kCountsQuestion);
}

}  // namespace tessera::comm
