// SharedSpace: memory that all ranks of the shard group have mapped, with the one copy of a unit's parameters, and what one rank has
// apart from it.
//
// Note [Shared parameters]
//   There is one copy of the parameters for all ranks. Every rank owns the slice it owns otherwise, and is the only one that
//   writes there. Whole parameters (stages 1, 2) lie in the space always; gathering sharded ones moves their pointers there,
//   and copies nothing. Private copies are made of what is to be written to on one rank (regions with a writer) and of values
//   that are rounded on the way.
//   Note [Phases of shared parameters] in shared_params.h says why nobody writes while another rank reads.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/shard/layout.h"
#include "tessera/shard/storage.h"

namespace tessera::zero {

class SharedSpace {
 public:
  // `memory` of all ranks, undefined where there is none, holds `count` parameters.
  SharedSpace(at::Tensor memory, size_t count) : memory_(std::move(memory)), copies_(memory_.defined() ? count : 0) {}

  bool defined() const { return memory_.defined(); }
  const at::Tensor& memory() const { return memory_; }
  // Copies the whole space into `bucket`; with `staging`, of any size, by way of its dtype.
  void copy_to(const at::Tensor& bucket, const at::Tensor& staging = {}) const;

  // The private copy of a parameter that lies in the space, or undefined.
  at::Tensor copy_of(int index) const { return copies_.empty() ? at::Tensor() : copies_[index]; }
  void make_copy(int index, const at::Tensor& param, shard::Range range);
  // Binds `param` to its place again, with a storage of its own. False where it has other data than its private copy.
  bool end_copy(int index, at::Tensor& param, shard::Range range, const shard::Form& form);
  // Ends this object's use of the memory; copies stay with their parameters.
  void reset();

 private:
  at::Tensor memory_;
  std::vector<at::Tensor> copies_;
};

}  // namespace tessera::zero
