// FlopCounter: operations of this thread's products of matrices, convolutions and attentions while it lives, a multiplication and an
// addition as two. What else a model computes takes little beside these. The formulas are those of torch.utils.flop_counter.
#pragma once

#include <ATen/record_function.h>

#include <memory>
#include <optional>

namespace tessera::engine {

class FlopCounter {
 public:
  // Inside another one, that one counts nothing.
  FlopCounter();
  ~FlopCounter();
  FlopCounter(const FlopCounter&) = delete;
  FlopCounter& operator=(const FlopCounter&) = delete;

  double total() const { return total_; }

 private:
  static std::unique_ptr<at::ObserverContext> count(const at::RecordFunction& call);

  double total_ = 0;
  FlopCounter* outer_;                        // that counted before
  std::optional<at::CallbackHandle> handle_;  // the outermost one's
};

}  // namespace tessera::engine
