// The random generators that a computation on a device draws from: the CPU's, and the device's.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera {

class Generators {
 public:
  explicit Generators(at::Device device);
  std::vector<at::Tensor> states() const;
  void set(const std::vector<at::Tensor>& states);  // as states() gave them

 private:
  std::vector<at::Generator> all_;
};

}  // namespace tessera
