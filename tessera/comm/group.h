// Group: the ranks that take part in a collective, and the collectives. The only view of
// communication that the rest of Tessera has; backends.h has the factories: any torch process group,
// shared memory, ranks as threads of one process, one rank.
//
// Note [Order of summation]
//   Every back end that adds on the CPU adds the ranks' contributions in rank order 0, 1, ..., n-1,
//   in fp32 for fp32, bf16 and fp16 (double for double), and rounds once. The result of an element
//   depends neither on its place in a buffer, on the bucket size, on timing, nor on whether it
//   travelled by reduce_scatter or all_reduce: stages 0, 1 and 2 get the same bits, and threads as
//   ranks get those of processes. NCCL keeps its own order; so do ranks of several hosts that share memory
//   within each (Note [Order of summation over hosts] in hosts/group.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm {

enum class ReduceOp { Sum, Avg, Min, Max, Product, BitAnd, BitOr, BitXor };

// What a collective is for, e.g. "reduce gradients of unit 'blocks.3'". Every error message has it as
// a part.
using Label = std::string_view;

// A collective in flight. wait() makes the result usable by the caller (CPU: blocks; accelerator:
// orders the current stream) and throws DistBackendError naming this rank, the operation and its
// label when the collective failed or timed out. Dropping a Pending waits and swallows the error,
// so that buffers never outlive their use; release() does not wait, nor does an exception that drops it:
// other ranks may never make the call.
class Pending {
 public:
  class Work {
   public:
    virtual ~Work() = default;
    virtual void wait() = 0;
    // Waits so long at most; true when wait() would wait for no other rank. False as well where that cannot be known.
    virtual bool wait_for(std::chrono::milliseconds limit) = 0;
    // Releases as Pending does: takes what has come. `self`: this. Without a way to keep what others may still use, it waits.
    virtual void release(std::unique_ptr<Work> self) { self->wait(); }
  };

  Pending() = default;  // already complete
  explicit Pending(std::unique_ptr<Work> work) : work_(std::move(work)) {}
  Pending(Pending&& other) noexcept : work_(std::move(other.work_)) {}
  Pending& operator=(Pending&& other) noexcept;
  ~Pending();

  void wait();
  // Waits so long at most; wait() still has to come. True when wait() would not wait for another rank any more; false as
  // well where that cannot be known (small messages of a torch process group). Throws as wait() does.
  bool wait_for(std::chrono::milliseconds limit) { return !work_ || work_->wait_for(limit); }
  bool done() const { return work_ == nullptr; }
  // For who leaves while another rank may never make its call: neither host nor stream waits, and the call is complete, no error.
  // The contents of the tensors are undefined from here on, and their memory lives as long as somebody uses it. A part of the
  // collective that only this rank could do is not done, which the others learn when its process or group ends; a device's
  // collectives are done when the others come (Note [Left collectives] in c10d/own_group.h).
  void release() noexcept;

 private:
  std::unique_ptr<Work> work_;
  int exceptions_ = std::uncaught_exceptions();  // with more of them as this is dropped, one passes
};

// Calls and payload bytes of this rank since the last reset. `bytes` counts what a rank must at
// least send: all_gather and reduce_scatter (n-1)/n of the full buffer, all_reduce twice that,
// broadcast the buffer, all_to_all (n-1)/n of the buffer.
struct OpStats {
  int64_t calls = 0;
  int64_t bytes = 0;
};
struct CommStats {
  OpStats all_gather, reduce_scatter, all_reduce, broadcast, all_to_all, barrier;
};

// All calls are collective: every rank of the group makes the same calls in the same order, and
// calls wait() on several collectives in flight in one order. Tensors are contiguous, on one
// device, and stay alive and untouched until wait(). A Group is used by one thread at a time
// (abort() by any). Wrong arguments are value errors that name the operation and its label, thrown
// before anything is sent. After the first failure every later collective fails at once with the
// cause of that first one. Sum, Product, Min and Max take floating and integer tensors (Min and Max bool
// too; NaN wins), Avg floating ones, bit operations integers and bool.
class Group;
using GroupPtr = std::shared_ptr<Group>;

class Group {
 public:
  virtual ~Group() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string name() const = 0;  // "gloo", "threads", "single", ...

  // out: size() * in.numel() elements, rank r's part at offset r * in.numel(). `in` may be that
  // very part of `out`.
  Pending all_gather(at::Tensor out, at::Tensor in, Label label = {});
  // in: size() * out.numel() elements; out gets the reduction of part rank(). `out` may be that
  // very part of `in`; the other parts of `in` are undefined afterwards.
  Pending reduce_scatter(at::Tensor out, at::Tensor in, ReduceOp op, Label label = {});
  Pending all_reduce(at::Tensor tensor, ReduceOp op, Label label = {});  // in place
  Pending broadcast(at::Tensor tensor, int root, Label label = {});      // in place
  // Part r of `in` goes to rank r; part r of `out` comes from rank r. Splits count rows of dim 0
  // (elements of a 1-d tensor), one number per rank; empty splits: equal parts of the flattened
  // tensor. `in` and `out` must not overlap.
  Pending all_to_all(at::Tensor out, at::Tensor in, std::vector<int64_t> out_splits = {},
                     std::vector<int64_t> in_splits = {}, Label label = {});
  void barrier(Label label = {});

  // `bytes` zero bytes (a 1-D uint8 tensor) that are the same memory on all ranks, for as long as any rank keeps the
  // tensor. All of it is reserved. Undefined on all ranks where the group cannot: ranks of several hosts, or talking
  // through a torch process group. DistBackendError on all ranks, after which the group is well, when one of them cannot
  // have that much. Nothing orders accesses but collectives: what was written before one is seen after it.
  at::Tensor shared_memory(int64_t bytes, Label label = {});

  // Makes a group of the same ranks whose calls are ordered on their own, so that work of two kinds need not agree on one
  // order. It is for tensors of `device`. It counts into this group's stats and fails with it. Collective: every rank makes
  // its siblings in the same order, and waits for the others where a back end needs a communicator more, see Note [Siblings
  // of a device] in c10d/own_group.h.
  GroupPtr sibling(c10::Device device = c10::kCPU);

  // Makes every pending and future collective of this group fail, on the other ranks too where the
  // back end can tell them, with `reason` in their message. Local, never blocks.
  virtual void abort(const std::string& reason) = 0;

  // Calls may come from another thread than the group's, too.
  CommStats stats() const;
  void reset_stats();

 protected:
  virtual Pending do_all_gather(at::Tensor out, at::Tensor in, Label label) = 0;
  virtual Pending do_reduce_scatter(at::Tensor out, at::Tensor in, ReduceOp op, Label label) = 0;
  virtual Pending do_all_reduce(at::Tensor tensor, ReduceOp op, Label label) = 0;
  virtual Pending do_broadcast(at::Tensor tensor, int root, Label label) = 0;
  virtual Pending do_all_to_all(at::Tensor out, at::Tensor in, std::vector<int64_t> out_splits,
                                std::vector<int64_t> in_splits, Label label) = 0;
  virtual void do_barrier(Label label) = 0;
  virtual GroupPtr do_sibling(c10::Device device) = 0;
  virtual at::Tensor do_shared_memory(int64_t, Label) { return {}; }

 private:
  struct Counts {  // of a group and its siblings, which may have threads of their own
    std::mutex mutex;
    CommStats stats;
  };
  void count(OpStats CommStats::* op, int64_t bytes);

  std::shared_ptr<Counts> counts_ = std::make_shared<Counts>();
};

}  // namespace tessera::comm
