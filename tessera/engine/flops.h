// FlopCounter: operations of this thread's products of matrices, convolutions and attentions while it lives, a multiplication and an
// addition as two. What else a model computes takes little beside these. The formulas are those of torch.utils.flop_counter, and as
// there what a counted operation is made of is not counted again. Only torch's own operators are seen: kernels of others
// (Triton, fused attention of a package) count nothing.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <memory>

namespace tessera::engine {

class FlopCounter {
 public:
  // Is called in the thread of its counter.
  class Listener {
   public:
    virtual ~Listener() = default;
    // An operation is counted. `inputs` hold for this call. `in_backward`: it is part of a backward, or of what is recomputed there.
    virtual void counted(double operations, c10::ArrayRef<const c10::IValue> inputs, bool in_backward) = 0;
    // The values of `from` were cast or copied, as autocast does with a weight.
    virtual void copied(const at::Tensor& from, const at::Tensor& to) = 0;
  };

  // Inside another one, that one's total stays; listeners of both are called. `listener`: null, or lives longer than the counter.
  explicit FlopCounter(Listener* listener = nullptr);
  ~FlopCounter();
  FlopCounter(const FlopCounter&) = delete;
  FlopCounter& operator=(const FlopCounter&) = delete;

  double total() const;
  // Whether this thread is in a backward, which only counters see.
  static bool in_backward();

 private:
  struct State;
  struct Thread;
  static Thread& this_thread();

  std::shared_ptr<State> state_;
};

}  // namespace tessera::engine
