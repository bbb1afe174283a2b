// WriteCount: whether a tensor was written to since it was last looked at.
//
// Note [set_ is no write]
//   p.set_(p), which torch's register_parametrization() calls, moves the version counter and changes nothing. It differs
//   from a write in that torch forgets the gradient accumulator of the tensor, so a frozen one is given one to forget. A write
//   beside a set_() is not seen then, as none through p.data is; set_() of another tensor shows in the storage.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace tessera::zero {

class WriteCount {
 public:
  // Forgets what was written until now.
  void forget(const at::Tensor& tensor) {
    if (accumulator_ == nullptr || tensor._version() != version_) look(tensor);
  }
  // Does the same for a tensor that only we have written to since it was looked at.
  void forget_own(const at::Tensor& tensor) { version_ = tensor._version(); }
  bool any(const at::Tensor& tensor) const { return tensor._version() != version_ && !was_set(tensor); }
  // Whether this object holds a reference to the tensor.
  bool holds() const { return accumulator_ != nullptr; }

 private:
  void look(const at::Tensor& tensor);
  bool was_set(const at::Tensor& tensor) const;

  std::shared_ptr<const void> accumulator_;  // an autograd node
  int64_t version_ = 0;
};

}  // namespace tessera::zero
