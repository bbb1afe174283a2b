#include "tessera/base/generators.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <mutex>

namespace tessera {

Generators::Generators(at::Device device) : all_{at::detail::getDefaultCPUGenerator()} {
  if (!device.is_cpu()) all_.push_back(at::globalContext().defaultGenerator(device));
}

std::vector<at::Tensor> Generators::states() const {
  std::vector<at::Tensor> states;
  for (at::Generator generator : all_) {
    const std::scoped_lock lock(generator.mutex());
    states.push_back(generator.get_state());
  }
  return states;
}

void Generators::set(const std::vector<at::Tensor>& states) {
  for (size_t i = 0; i < all_.size(); ++i) {
    const std::scoped_lock lock(all_[i].mutex());
    all_[i].set_state(states[i]);
  }
}

}  // namespace tessera
