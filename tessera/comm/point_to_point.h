// PointToPoint: messages from one rank to another, between stages of a pipeline and linked engines. What all ranks of a group do
// together is in group.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera::comm {

// One rank's way to the others. Used by one thread at a time. Tensors are contiguous, on device(), of any dtype. Messages of
// one tag (>= 0) between two ranks arrive in the order in which they were sent, those of different tags in any; over a back end
// without tags (NCCL) all in one order. Errors: DistBackendError that names the ranks, `label` and bytes, where a peer is lost
// or silent for longer than the timeout.
class PointToPoint {
 public:
  virtual ~PointToPoint() = default;  // waits for nobody: what is not taken by then may be lost
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // The CPU, or the device of a back end that takes nothing else.
  virtual at::Device device() const = 0;

  // Sends. Returns at once: the tensor is kept, and must stay as it is, until it has been taken and this rank has asked: by
  // settle(), by flush(), or by a later send(), where the back end tells by itself (Gloo does not). The message gets through
  // whatever this rank does meanwhile. Returns the message's number, for settle().
  virtual int64_t send(const at::Tensor& tensor, int to, int tag, Label label = {}) = 0;
  // Waits for the next message of `tag` from that rank, which must have as many bytes.
  virtual void receive(const at::Tensor& tensor, int from, int tag, Label label = {}) = 0;
  // Returns the next message as a new tensor, which is the caller's own.
  virtual at::Tensor take(at::IntArrayRef sizes, at::ScalarType dtype, int from, int tag, Label label = {});
  // A copy of a tensor, on device() and contiguous, for send(): made once for all who get it.
  virtual at::Tensor share(const at::Tensor& tensor);
  // Lets go of what was sent under this number, once it is taken: waits for that.
  virtual void settle(int64_t number) = 0;
  // Lets go of all that was sent, likewise.
  virtual void flush() = 0;

  // The number after the highest that a sibling of this way has had.
  int64_t siblings() const { return siblings_; }

 private:
  friend std::shared_ptr<PointToPoint> sibling(const std::shared_ptr<PointToPoint>& way, int64_t number);
  int64_t siblings_ = 0;
};
using PointToPointPtr = std::shared_ptr<PointToPoint>;

// The same ranks with tags (below kSiblingTags) and a list of what was sent of its own: it takes nothing that was sent elsewhere, and its
// flush() waits for nothing of that. Both ends have the same `number`, from 0. Sibling 0 has the tags of `way` itself; those from
// kSiblingTags to 2 * kSiblingTags are of no sibling. UsageError behind the last number. Local.
inline constexpr int kSiblingTags = 1 << 16;
PointToPointPtr sibling(const PointToPointPtr& way, int64_t number);

// `size` ranks that are threads of this process, over shared memory: element r is for the thread of rank r. `timeout`: longest
// wait for a peer. Value error in a build without TESSERA_TORCH_BACKEND.
std::vector<PointToPointPtr> thread_point_to_point(int size,
                                                   std::chrono::milliseconds timeout = std::chrono::minutes(10));

}  // namespace tessera::comm
