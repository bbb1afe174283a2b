#include "tessera/comm/hosts/hosts.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>

#include "tessera/base/env.h"
#include "tessera/comm/c10d/fault_board.h"

namespace tessera::comm {

std::string host_id() {
  if (const auto id = env::get("TESSERA_HOST_ID")) return "TESSERA_HOST_ID " + *id;
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  struct stat processes{};
  if (!(file >> boot) || stat("/proc/self/ns/pid", &processes) != 0) {
    return "process " + std::to_string(getpid());  // nothing is known: shares with nobody
  }
  return boot + " " + std::to_string(processes.st_ino) + " " + std::to_string(geteuid());
}

// The fields of /proc/<pid>/stat: id, name in parentheses (may hold anything), state, then numbers; the start is the
// twentieth after the state.
uint64_t start_of_process(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return 0;
  const auto end = line.rfind(')');
  if (end == std::string::npos) return 0;
  std::istringstream fields(line.substr(end + 1));
  char state = 0;
  std::string skipped;
  fields >> state;
  if (state == 'Z' || state == 'X') return 0;
  for (int i = 0; i < 18; ++i)
    fields >> skipped;
  uint64_t start = 0;
  fields >> start;
  return fields ? start : 0;
}

int Hosts::count() const {
  return of_rank.empty() ? 0 : *std::max_element(of_rank.begin(), of_rank.end()) + 1;
}

std::vector<int> Hosts::ranks_on(int host) const {
  std::vector<int> ranks;
  for (int r = 0; r < static_cast<int>(of_rank.size()); ++r) {
    if (of_rank[r] == host) ranks.push_back(r);
  }
  return ranks;
}

Hosts group_by_host(const std::vector<std::string>& ids) {
  Hosts hosts;
  std::map<std::string, int> numbers;
  for (const std::string& id : ids)
    hosts.of_rank.push_back(numbers.try_emplace(id, static_cast<int>(numbers.size())).first->second);
  return hosts;
}

std::vector<std::string> exchange(c10d::Store& store, int rank, int size, const std::string& topic,
                                  const std::string& text) {
  const auto key = [&](int r) { return "tessera/" + topic + "/" + std::to_string(r); };
  store.set(key(rank), text);
  std::vector<std::string> all;
  all.reserve(size);
  for (int r = 0; r < size; ++r)
    all.push_back(announced_by(store, key(r), r));
  return all;
}

}  // namespace tessera::comm
