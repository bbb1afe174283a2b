// ModuleParams: the module's own tensors of one unit, in the order of its flat space, and which memory they show. A tensor that the
// user gave other data (p.data = ...) does not follow any more, until take_back().
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/shard/layout.h"
#include "tessera/shard/storage.h"
#include "tessera/zero/hooks/write_count.h"

namespace tessera::zero {

class ModuleParams {
 public:
  struct Item {
    std::string name;
    at::Tensor tensor;  // the module's own leaf
    shard::Range range{};
    shard::Form form{};
  };

  // Forms are those of the tensors now, ranges those of layout().
  ModuleParams(std::vector<Item> items, int shards);

  const std::vector<Item>& items() const { return items_; }
  const shard::Layout& layout() const { return layout_; }
  // Copies the elements that lie in `held` of the flat space to `to`, which begins at `origin` of it.
  void copy_to(const at::Tensor& to, shard::Range held, int64_t origin) const;

  // ---- all of them
  // Give each tensor a new storage: in `flat`, or without data (Note [Released parameters]).
  void bind(const at::Tensor& flat);
  void make_released(const at::TensorOptions& options);
  // Point the tensors that follow to their places in `flat`, which they do not keep alive, or away from there.
  void point(const at::Tensor& flat);
  void release();
  // Releases the tensors that lie in `old`: they have no data, and an access says `message` after the name.
  void release_from(const at::Tensor& old, const std::string& message);
  // Move the tensors that follow, or those that lie in `old`, to `flat`, which they keep alive from here on.
  void rebind(const at::Tensor& flat);
  void rebind_from(const at::Tensor& old, const at::Tensor& flat);
  // End this object's use: the tensors live in `flat`, or without data say `message`, and follow no more.
  void leave(const at::Tensor& flat);
  void abandon(const std::string& message);
  void forget() { items_.clear(), storages_.clear(), writes_.clear(); }
  // Throws a state error that names the first tensor with other data.
  void check_none_replaced() const;
  // The name of a tensor that was written to since mark(); empty: none was.
  std::string written() const;

  // ---- one of them
  bool is_replaced(int index) const;
  bool is_bound(int index, const at::Tensor& flat, shard::Range range) const;
  // Copies the values that the tensor shows to its place, flat[range], where it lies again, `pointed` or bound. State
  // error for another shape or dtype. Who holds what was there keeps it (Note [Memory that somebody else holds]).
  void take_back(int index, const at::Tensor& flat, shard::Range range, bool pointed);
  // Notes the tensor's new storage, which follows from here on.
  void note_storage(int index) { storages_[index] = shard::weak_storage_of(items_[index].tensor); }
  at::Tensor& tensor(int index) { return items_[index].tensor; }
  void mark(int index) { writes_[index].forget(items_[index].tensor); }
  bool was_written(int index) const { return writes_[index].any(items_[index].tensor); }
  // Whether nobody else holds the tensor.
  bool is_alone(int index) const { return items_[index].tensor.use_count() == (writes_[index].holds() ? 2 : 1); }

 private:
  // Whether the item has the storage that we gave it.
  bool follows(size_t index) const {
    return shard::storage_of(items_[index].tensor) == storages_[index]._unsafe_get_target();
  }
  c10::StorageImpl* release_first(Item& item, const at::TensorOptions& options);

  std::vector<Item> items_;
  std::vector<shard::WeakStorage> storages_;  // that we gave them
  std::vector<WriteCount> writes_;            // since the last gather
  shard::Layout layout_;
};

}  // namespace tessera::zero
