// OwnGroup: a process group that a sibling has for itself, for tensors that a back end's own collectives carry.
//
// Note [Siblings of a device]
//   Messages between pairs of ranks have tags, so siblings share a process group for tensors of the CPU. A back end's own
//   collectives (NCCL; Gloo's own) have none: they are matched in the order in which each rank calls them, whoever calls. Two
//   siblings over one communicator would need one order, and give each other's data, or hang, without it. So a sibling for
//   such tensors has communicators of its own, split off the group's.
//   They are made and connected where sibling() is called, which all ranks do at the same place. At the first call they
//   would be made in the order of first calls, which is what differs: connecting waits for the other ranks.
//   A sibling ends without the other ranks' help: they may be anywhere. It waits for the last collective that its rank has
//   waited for, announces that to the others, and gives those that still read its memory a moment, before the communicator is
//   aborted.
//
// Note [Left collectives]
//   A collective that was released (Pending::release) may need a rank that never makes the call. No sibling waits for it as it
//   ends: the communicator, the work and the tensors become the core's, and a rank that makes the call later gets the result.
//   As the core ends, the other ranks get a moment for that, none where the group has failed or was aborted. Then the
//   communicator is aborted, which ends NCCL's collectives. Gloo's have no abort(): they end when a peer goes or at the group's
//   timeout, and the communicator's destructor waits for them. So a thread of its own calls that.
#pragma once

#include <c10/core/Event.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "tessera/comm/c10d/core.h"

namespace tessera::comm {

// Made by make_owned().
class OwnGroup {
 public:
  // Collective over the ranks of `core`; `instance` is the sibling's number there. NotImplementedError where the back end
  // for `device` cannot be split; DistBackendError, here and soon on the other ranks, where it fails.
  OwnGroup(std::shared_ptr<C10dCore> core, int64_t instance, c10::Device device);
  // Local; bounded by the group's timeout, and never throws.
  ~OwnGroup();
  OwnGroup(const OwnGroup&) = delete;
  OwnGroup& operator=(const OwnGroup&) = delete;

  c10d::ProcessGroup& group() { return *group_; }
  c10::Device device() const { return device_; }
  // After a wait: the sibling does not end before what the current stream has been given.
  void mark_end();
  // Keeps the transfers of a collective that was released.
  void keep(LeftTransfers left);

 private:
  void split();
  void connect();
  bool ended();
  void await_others();
  void leave();  // gives the core what was released and has not come

  const std::shared_ptr<C10dCore> core_;
  c10::Device device_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<c10d::ProcessGroup> group_;  // the last to hold the back end: see HoldProcessGroup
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::mutex mutex_;
  std::optional<c10::Event> end_;  // a device's
  std::vector<LeftTransfers> left_;
};

}  // namespace tessera::comm
