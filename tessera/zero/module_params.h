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
  // Each has a new storage: in `flat`, or without data (Note [Released parameters]).
  void bind(const at::Tensor& flat);
  void make_released(const at::TensorOptions& options);
  // Those that follow: to their places in `flat`, which they do not keep alive, and away from there.
  void point(const at::Tensor& flat);
  void release();
  // Those that lie in `old` say `message` after their name, and have no data.
  void release_from(const at::Tensor& old, const std::string& message);
  // Those that follow come to `flat`, which they keep alive from here on; or those alone that lie in `old`.
  void rebind(const at::Tensor& flat);
  void rebind_from(const at::Tensor& old, const at::Tensor& flat);
  // For good: they live in `flat`, or without data say `message`, and follow no more.
  void leave(const at::Tensor& flat);
  void abandon(const std::string& message);
  void forget() { items_.clear(), storages_.clear(), writes_.clear(); }
  // State error that names the first with other data.
  void check_none_replaced() const;
  // The name of one that was written to since mark(); empty: none was.
  std::string written() const;

  // ---- one of them
  bool is_replaced(int index) const;
  bool is_bound(int index, const at::Tensor& flat, shard::Range range) const;
  // The values that it shows come to `place`, a view with its shape of flat[range]; it lies there again, `pointed` or bound. State
  // error for another shape or dtype. Who holds what was there keeps it (Note [Memory that somebody else holds]).
  void take_back(int index, const at::Tensor& flat, shard::Range range, bool pointed);
  // Its storage is a new one, which follows from here on.
  void note_storage(int index) { storages_[index] = shard::weak_storage_of(items_[index].tensor); }
  at::Tensor& tensor(int index) { return items_[index].tensor; }
  void mark(int index) { writes_[index].forget(items_[index].tensor); }
  bool was_written(int index) const { return writes_[index].any(items_[index].tensor); }
  // Nobody else holds the tensor.
  bool is_alone(int index) const { return items_[index].tensor.use_count() == (writes_[index].holds() ? 2 : 1); }

 private:
  // The item has the storage that we gave it.
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
