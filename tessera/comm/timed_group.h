// TimedGroup: a group that notes how long its collectives take.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/comm/mesh.h"

namespace tessera::comm {

// One collective of this rank.
struct CallTime {
  std::string op;     // "all_reduce"
  std::string label;  // what it was for
  int64_t bytes = 0;  // of the whole message: what all_gather gives, reduce_scatter and the others take
  int ranks = 1;
  double seconds = 0;  // from the call to the end of its wait: with what ran meanwhile
};

// Calls of one kind and size.
struct CallTimes {
  std::string op;
  int64_t bytes = 0;
  int ranks = 1;
  int64_t calls = 0;
  double seconds = 0;  // of all calls together

  // Bytes a second: of the message, and over each rank's link as nccl-tests count them (all_reduce 2 (n-1)/n of the message,
  // all_gather, reduce_scatter and all_to_all (n-1)/n, broadcast all of it). 0 before any time has passed.
  double algorithm_bandwidth() const;
  double bus_bandwidth() const;
};

// The calls of a rank's groups. Any thread.
class CallRecord {
 public:
  // `ops`: operations to note; empty: all. Value error for an unknown name.
  explicit CallRecord(std::vector<std::string> ops = {});
  bool wants(std::string_view op) const;
  void add(CallTime call);
  std::vector<CallTimes> totals() const;  // by op and size
  std::vector<CallTime> take_calls();     // the most recent ones since the last time
  void reset();

 private:
  std::vector<std::string> ops_;
  mutable std::mutex mutex_;
  std::vector<CallTimes> totals_;
  std::vector<CallTime> calls_;
};

// Wraps `group`, whose calls from here on are noted.
GroupPtr timed_group(GroupPtr group, std::shared_ptr<CallRecord> record);
// A mesh of such groups along every axis that has several ranks.
Mesh timed_mesh(const Mesh& mesh, const std::shared_ptr<CallRecord>& record);

}  // namespace tessera::comm
