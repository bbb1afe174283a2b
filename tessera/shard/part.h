// Parts of flat memory as tensors, for kernels and copies of our own.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/shard/layout.h"

namespace tessera::shard {

// Elements `range` of `flat`, 1-D and contiguous: narrow() of a plain tensor, past torch's dispatcher, which takes ten times
// as long as a small kernel. No view for autograd: writes to it are not counted as writes to `flat`.
inline at::Tensor part_of(const at::Tensor& flat, Range range) {
  if (range.begin == 0 && range.size() == flat.numel()) return flat;
  c10::Storage storage = flat.storage();
  auto part =
      c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage), flat.key_set(), flat.dtype());
  part->set_storage_offset(flat.storage_offset() + range.begin);
  part->set_sizes_contiguous({range.size()});
  return at::Tensor(std::move(part));
}

}  // namespace tessera::shard
