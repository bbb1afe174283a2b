// EarlyParams: parameters that are partitioned while a model is being built, before there is an engine, so that a model
// larger than one rank's memory can be built. Each is a flat space of its own; an engine takes them over unit by unit.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/zero/flat_params.h"
#include "tessera/zero/options.h"

namespace tessera::zero {

// Calls marked collective are made by all ranks in one order, with the same numbers.
class EarlyParams {
 public:
  explicit EarlyParams(Ranks ranks);

  // Partitions `tensor`, whose values of rank 0, rounded to `dtype`, hold; returns its number. With one rank it stays
  // whole. Collective. Value error unless it is a floating-point leaf with data on a device that this build serves.
  int add(std::string name, at::Tensor tensor, at::ScalarType dtype);

  // Between the two the parameters are whole. Collective. State error for one that is whole already, and for in-place
  // edits with Writes::None (reported after all are partitioned again). Restored parameters pass through.
  void gather(const std::vector<int>& numbers);
  void release(const std::vector<int>& numbers, Writes writes, int writer);
  bool is_gathered(int number) const;
  // State error for a restored parameter.
  ParamPartition partition_of(int number) const;

  // Makes the tensor whole for good, in memory of its own. Collective. Doing it again does nothing.
  void restore(int number);
  // Forgets tensors that only this object still holds (parameters that were replaced while the model was built). Local.
  void prune();
  // Bytes of this rank's slices.
  int64_t bytes() const;
  int size() const { return ranks_.size(); }

 private:
  struct Entry {
    std::unique_ptr<FlatParams> flat;  // null: restored or forgotten
    bool open = false;
  };
  void take_replaced(Entry& entry);
  std::vector<Entry*> held(const std::vector<int>& numbers);

  Ranks ranks_;
  std::vector<Entry> entries_;
  int64_t freed_ = 0;  // bytes of whole parameters since the heap was trimmed
};

}  // namespace tessera::zero
