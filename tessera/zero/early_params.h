// EarlyParams: parameters that are partitioned while a model is being built, before there is an engine, so that a model
// larger than one rank's memory can be built. Each is a flat space of its own; an engine takes them over unit by unit.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/zero/flat_params.h"
#include "tessera/zero/options.h"
#include "tessera/zero/rank_guard.h"

namespace tessera::zero {

// Calls marked collective are made by all ranks in one order, with the same numbers.
class EarlyParams {
 public:
  // `home`: where slices live; null: on the device.
  explicit EarlyParams(Ranks ranks, HomeMaker home = {});
  ~EarlyParams();
  EarlyParams(const EarlyParams&) = delete;
  EarlyParams& operator=(const EarlyParams&) = delete;

  // Partitions `tensor`, with rank 0's values rounded to `dtype`; returns the parameter's number. With one rank and no home it
  // stays whole. Collective. IoError, on all ranks, where a rank's slice cannot be brought to its home. Value error unless it is a floating-point leaf with data on a device that this build serves.
  int add(std::string name, at::Tensor tensor, at::ScalarType dtype);

  // Between the two the parameters are whole. Collective. State error for one that is whole already, and for in-place
  // edits with Writes::None (reported after all are partitioned again). Restored parameters pass through.
  // As of Regions::open() and close().
  void gather(const std::vector<int>& numbers, Writes writes = Writes::Own, int writer = 0);
  void release(const std::vector<int>& numbers, Writes writes, int writer);
  bool is_gathered(int number) const;
  // State error for a restored parameter.
  ParamPartition partition_of(int number) const;
  at::Tensor held_values(int number) const;  // see Regions

  // Makes the tensor whole for good, in memory of its own. Collective. Another call does nothing.
  void restore(int number);
  // Forgets tensors that only this object still holds (parameters that were replaced while the model was built). Local.
  void prune();
  // Bytes of this rank's slices on the device.
  int64_t bytes() const;
  int size() const { return ranks_.size(); }

 private:
  struct Entry {
    std::unique_ptr<FlatParams> flat;  // null: restored or forgotten
    bool open = false;
  };
  void take_replaced(Entry& entry);
  std::unique_ptr<FlatParams> partition(std::vector<FlatParams::Item> items, at::ScalarType dtype) const;
  void agree(const RankGuard& disks) const;
  std::vector<Entry*> held(const std::vector<int>& numbers);
  void check_writer(Writes writes, int writer) const;

  Ranks ranks_;
  HomeMaker home_;
  std::vector<Entry> entries_;
  int64_t freed_ = 0;  // bytes of whole parameters since the heap was trimmed
};

}  // namespace tessera::zero
