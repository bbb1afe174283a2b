// Layout: where the parameters of a unit lie in one flat space, and which part of it a rank owns. Pure arithmetic: no
// tensors, no communication.
//
//   parameters a (40 elements) and b (3), 2 shards, alignment 32:
//     offset    0         40       64   67            128
//               |aaaaaaaaa|padding |bbb|padding ......|
//     rank 0 owns [0, 64), rank 1 owns [64, 128)
//
// Every start is a multiple of kAlignment elements (64 bytes for 2-byte elements), and so is every rank's slice. A
// slice may begin or end inside a parameter.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera::shard {

inline constexpr int64_t kAlignment = 32;

struct Range {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end > begin ? end - begin : 0; }
  bool empty() const { return end <= begin; }
  bool operator==(const Range&) const = default;
};
Range intersect(Range a, Range b);

class Layout {
 public:
  Layout() = default;
  // numels: elements of each parameter, >= 0, in order. shards >= 1. Value error otherwise.
  Layout(std::span<const int64_t> numels, int shards);

  int64_t size() const { return size_; }  // elements of the flat space, padding included
  int64_t shard_size() const { return size_ / shards_; }
  int shards() const { return shards_; }
  int count() const { return static_cast<int>(params_.size()); }

  Range param(int index) const { return params_[index]; }  // in the flat space
  Range shard(int rank) const { return {rank * shard_size(), (rank + 1) * shard_size()}; }
  // The part of parameter `index` that `rank` owns, in the flat space; empty if none.
  Range owned(int index, int rank) const { return intersect(params_[index], shard(rank)); }
  // The gaps between parameters and after the last, in the flat space.
  std::vector<Range> padding() const;

 private:
  std::vector<Range> params_;
  int64_t size_ = 0;
  int shards_ = 1;
};

}  // namespace tessera::shard
