// Parts of flat memory as tensors, for kernels and copies of our own.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

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

// The first `size` elements of `dtype` in `bytes`, a row of them whose offset is a multiple of that dtype's.
inline at::Tensor elements_in(const at::Tensor& bytes, int64_t size, at::ScalarType dtype) {
  const auto type = c10::scalarTypeToTypeMeta(dtype);
  c10::Storage storage = bytes.storage();
  auto part = c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage), bytes.key_set(), type);
  part->set_storage_offset(bytes.storage_offset() / static_cast<int64_t>(type.itemsize()));
  part->set_sizes_contiguous({size});
  return at::Tensor(std::move(part));
}

}  // namespace tessera::shard
