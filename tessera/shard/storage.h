// Storage of parameters inside a flat buffer.
//
// Note [Parameter storage]
//   A parameter of a unit keeps a StorageImpl of its own, with its own size and offset 0, whose data pointer lies in the
//   unit's flat buffer. So torch.save, deepcopy and safetensors see one tensor of its own bytes, aliases saved by
//   autograd share the StorageImpl, and moving the pointer moves them all (stage 3). The StorageImpl holds a reference
//   to the buffer: a parameter outlives its engine.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/shard/layout.h"

namespace tessera::shard {

// Makes `param` (any strides; kept when dense and non-overlapping, else contiguous) live at flat[range], with the dtype
// of `flat`, without touching the bytes there. Keeps the tensor's identity; does not bump its version.
void bind(at::Tensor& param, const at::Tensor& flat, Range range);

// True while `param`'s data still is flat[range]; false after a user's `p.data = t` or module.to(...).
bool is_bound(const at::Tensor& param, const at::Tensor& flat, Range range);

// flat[range] with the sizes and strides that a bound `param` has. An ordinary view of `flat`.
at::Tensor view_as_param(const at::Tensor& flat, Range range, const at::Tensor& param);

// `tensor` as contiguous memory in the order a bound parameter would have it (1-D view if possible, else a copy).
at::Tensor flatten_like_param(const at::Tensor& tensor, const at::Tensor& param);

}  // namespace tessera::shard
