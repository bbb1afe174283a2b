// Messages of CPU tensors between pairs of ranks of a torch process group.
//
// Note [Tags]
//   The tag of a message says which group it belongs to, which round, what call it is part of (its number there, and a
//   hash of what ranks must agree on) and how long it is. So messages of several calls in flight cannot be mixed up, and
//   those of different calls are never matched: see Note [Different calls] in call_log.h. Numbers repeat after kCallTags calls;
//   messages with one tag between two ranks arrive in the order in which they were sent.
// Note [Marks]
//   When a peer dies, Gloo fails the messages that are posted but not the one that is just arriving: waiting for that one
//   would take until the timeout. So a long message is followed by a mark of one byte, and marks are waited for first.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/comm/c10d/core.h"

namespace tessera::comm {

// The elements [begin, begin + count) of a flat tensor.
struct Span {
  int64_t begin = 0, count = 0;
};

// The messages of one call. A failure to post one fails the core.
class Messages {
 public:
  Messages(C10dCore& core, const C10dCall& call, bool second_round = false);

  void receive(const at::Tensor& flat, Span span, int peer) { add(flat, span, peer, false); }
  void send(const at::Tensor& flat, Span span, int peer) { add(flat, span, peer, true); }
  // The transfers in the order in which to wait.
  std::vector<Transfer> take();

 private:
  void add(const at::Tensor& flat, Span span, int peer, bool out);
  int tag_of(int64_t bytes) const;
  Transfer start(const at::Tensor& tensor, int peer, bool out, int tag);

  C10dCore& core_;
  const OpInfo& info_;
  const int tag_;
  const uint64_t hash_;
  std::vector<Transfer> transfers_, marks_;
};

}  // namespace tessera::comm
