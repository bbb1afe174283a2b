// Modules on the stand-in accelerator.
#pragma once

#include <torch/nn/module.h>

namespace tessera::stand_in {

// Moves a tensor in place, so that all who hold it see it on the device: what Module::to() does for devices that torch
// knows. For this one it throws, because set_data() takes the type for one with tensors of another kind. Before the
// tensor's first backward.
inline void move_to_device(const at::Tensor& t) {
  const at::Tensor there = t.detach().to(at::kPrivateUse1);
  c10::TensorImpl* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(there.storage());
  impl->set_sizes_and_strides(there.sizes(), there.strides(), there.storage_offset());
  impl->_change_backend_component_keys(there.device());
}

inline void move_to_device(const torch::nn::Module& module) {
  for (const at::Tensor& t : module.parameters())
    move_to_device(t);
  for (const at::Tensor& t : module.buffers())
    move_to_device(t);
}

}  // namespace tessera::stand_in
