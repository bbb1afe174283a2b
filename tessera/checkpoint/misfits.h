// What a state dict or weight files have and a module cannot take, for both front ends.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace tessera::checkpoint {

// Why `own`, a tensor of a module, cannot take values of its shape, of `value` or of a dtype; empty where it can.
std::string misfit(const at::Tensor& value, const at::Tensor& own);
std::string misfit(at::ScalarType dtype, const at::Tensor& own);

// All that a load finds before it changes anything.
class Misfits {
 public:
  void add(const std::string& name, const std::string& why);  // an empty `why` is none
  void list(const char* what, const std::vector<std::string>& names);
  void check() const;  // value error that has all of them

 private:
  std::string text_;
};

}  // namespace tessera::checkpoint
