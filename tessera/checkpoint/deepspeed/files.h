// The files of a checkpoint as DeepSpeed has them, for a stage and a number of ranks. Tensors pass through memory in pieces.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/checkpoint/deepspeed/source.h"

namespace tessera::checkpoint::deepspeed {

class Files {
 public:
  // Value error for a stage or a number of ranks that cannot be.
  Files(Source& source, int64_t stage, int64_t world);

  // Writes the files of rank `rank`, through to the disk, into a folder that exists.
  void write(const std::string& folder, int64_t rank);

 private:
  friend void write_universal(Source& source, const std::string& folder);
  // What DeepSpeed's optim-states hold as one flat tensor: a param group, or in stage 3 a part of one.
  struct Group {
    size_t number = 0;  // the number of the param group
    Names names;
  };
  Values& values() { return source_.values(); }
  using Part = std::function<Value(const std::string& kind)>;
  void add_sub_groups(size_t number, const Names& names);
  int64_t part(const std::string& name) const { return (source_.numel(name) + world_ - 1) / world_; }
  int64_t numel(const Group& group) const;
  std::vector<Names> names() const;
  Value dict(std::initializer_list<std::pair<const char*, Value>> items);
  Value list(const Items& items) { return values().items(Kind::List, items); }

  Value model_states(int64_t rank);
  Value param_shapes();
  Value shapes(const Names& names);
  Value sharded_module(int64_t rank);
  Value frozen(int64_t rank);
  Value whole_optimizer();
  Value clip();
  Value optim_states(int64_t rank);
  Value flat_group_state(int64_t rank);
  Value sharded_state(int64_t rank);
  Value flat_state(const Group& group, const Part& part);
  Value mapping(const Group& group, shard::Range range);
  // Elements `range` of the group's parameters, laid one after the other, then zeros up to `size`.
  Value elements(const Group& group, shard::Range range, int64_t size, const std::string& kind);
  // Stage 3: a rank's part of every parameter, padded with zeros.
  Value parts(const Names& names, const std::string& kind, at::ScalarType dtype, int64_t rank);
  std::string kind_of(const std::string& name, const std::string& kind) const;

  Source& source_;
  const int64_t stage_, world_;
  std::vector<Group> groups_;
};

// Writes whole tensors, which DeepSpeed loads at any stage (1 to 3) and number of ranks, into a folder that exists, and
// model-states under the two names that stages 1 and 2, and stage 3, look for.
void write_universal(Source& source, const std::string& folder);

}  // namespace tessera::checkpoint::deepspeed
