#include "tessera/zero/module_params.h"

#include <utility>

#include "tessera/base/error.h"

namespace tessera::zero {
namespace {

shard::Layout layout_of(const std::vector<ModuleParams::Item>& items, int shards) {
  std::vector<int64_t> numels;
  numels.reserve(items.size());
  for (const auto& item : items)
    numels.push_back(item.tensor.numel());
  return shard::Layout(numels, shards);
}

}  // namespace

ModuleParams::ModuleParams(std::vector<Item> items, int shards)
    : items_(std::move(items)), writes_(items_.size()), layout_(layout_of(items_, shards)) {
  storages_.reserve(items_.size());
  for (size_t i = 0; i < items_.size(); ++i) {
    items_[i].form = items_[i].tensor;
    items_[i].range = layout_.param(static_cast<int>(i));
    storages_.push_back(shard::weak_storage_of(items_[i].tensor));
  }
}

void ModuleParams::copy_to(const at::Tensor& to, shard::Range held, int64_t origin) const {
  for (const Item& item : items_) {
    const shard::Range part = shard::intersect(item.range, held);
    if (part.empty()) continue;
    const at::Tensor values = shard::flatten_like_param(item.tensor, item.form);
    to.narrow(0, part.begin - origin, part.size()).copy_(values.narrow(0, part.begin - item.range.begin, part.size()));
  }
}

void ModuleParams::bind(const at::Tensor& flat) {
  for (size_t i = 0; i < items_.size(); ++i) {
    shard::bind(items_[i].tensor, flat, items_[i].range, items_[i].form);
    note_storage(static_cast<int>(i));
  }
}

c10::StorageImpl* ModuleParams::release_first(Item& item, const at::TensorOptions& options) {
  return shard::make_released(
      item.tensor, item.form, options,
      "[zero] parameter '" + item.name +
          "' is partitioned over the ranks and not gathered now; read or edit it inside GatheredParameters, or use it "
          "in "
          "the forward of the module that owns it (register_external_parameter for another module; of a module that "
          "was built partitioned after the engine add_param_group makes it whole). In a backward: the forward must "
          "return what its gradients come from; a tensor kept elsewhere (in the module, in a closure) cannot be seen");
}

void ModuleParams::make_released(const at::TensorOptions& options) {
  for (size_t i = 0; i < items_.size(); ++i) {
    release_first(items_[i], options);
    note_storage(static_cast<int>(i));
  }
}

void ModuleParams::point(const at::Tensor& flat) {
  char* base = static_cast<char*>(flat.mutable_data_ptr());
  const auto width = static_cast<int64_t>(flat.element_size());
  for (size_t i = 0; i < items_.size(); ++i) {
    if (const auto storage = storages_[i].lock()) shard::point(*storage, base + items_[i].range.begin * width);
    mark(static_cast<int>(i));
  }
}

void ModuleParams::release() {
  for (size_t i = 0; i < items_.size(); ++i) {
    if (follows(i)) shard::release_again(*shard::storage_of(items_[i].tensor));
  }
}

void ModuleParams::release_from(const at::Tensor& old, const std::string& message) {
  for (size_t i = 0; i < items_.size(); ++i) {
    const Item& item = items_[i];
    if (!shard::is_bound(item.tensor, old, item.range, item.form)) continue;
    note_storage(static_cast<int>(i));
    shard::release(*shard::storage_of(item.tensor), "[zero] parameter '" + item.name + "' " + message);
  }
}

void ModuleParams::rebind(const at::Tensor& flat) {
  for (size_t i = 0; i < items_.size(); ++i) {
    if (follows(i)) shard::rebind(items_[i].tensor, flat, items_[i].range);
  }
}

void ModuleParams::rebind_from(const at::Tensor& old, const at::Tensor& flat) {
  for (const Item& item : items_) {
    if (shard::is_bound(item.tensor, old, item.range, item.form)) shard::rebind(item.tensor, flat, item.range);
  }
}

void ModuleParams::leave(const at::Tensor& flat) {
  for (size_t i = 0; i < items_.size(); ++i) {
    shard::bind(items_[i].tensor, flat, items_[i].range, items_[i].form);
    storages_[i].reset();
  }
}

void ModuleParams::abandon(const std::string& message) {
  for (size_t i = 0; i < items_.size(); ++i) {
    if (!follows(i)) continue;
    shard::release(*shard::storage_of(items_[i].tensor),
                   "[zero] parameter '" + items_[i].name + "' is partitioned: " + message);
  }
}

void ModuleParams::check_none_replaced() const {
  for (size_t i = 0; i < items_.size(); ++i) {
    TESSERA_CHECK(
        !is_replaced(static_cast<int>(i)), "zero", "the data of parameter '", items_[i].name,
        "' was replaced (by setting its data, or by to() of a module) while it was partitioned; write to it inside "
        "GatheredParameters with modifier_rank 0 instead");
  }
}

std::string ModuleParams::written() const {
  std::string name;
  for (size_t i = 0; i < items_.size(); ++i) {
    if (was_written(static_cast<int>(i))) name = items_[i].name;
  }
  return name;
}

bool ModuleParams::is_replaced(int index) const {
  const Item& item = items_[index];
  return !follows(index) || item.tensor.sizes() != item.form.sizes || item.tensor.strides() != item.form.strides ||
         item.tensor.storage_offset() != 0;
}

bool ModuleParams::is_bound(int index, const at::Tensor& flat, shard::Range range) const {
  return shard::is_bound(items_[index].tensor, flat, range, items_[index].form);
}

// The tensor's storage is replaced by a new one of ours.
void ModuleParams::take_back(int index, const at::Tensor& flat, shard::Range range, bool pointed) {
  Item& item = items_[index];
  TESSERA_CHECK(item.tensor.sizes() == item.form.sizes && item.tensor.scalar_type() == flat.scalar_type(), "zero",
                "the data of parameter '", item.name, "' was replaced by a tensor of shape ", item.tensor.sizes(),
                " and dtype ", item.tensor.scalar_type(), "; it is ", at::IntArrayRef(item.form.sizes), " and ",
                flat.scalar_type());
  shard::move_out(storages_[index]);
  shard::view_as_param(flat, range, item.form).copy_(item.tensor.detach());
  if (pointed) {
    auto* const data = static_cast<char*>(flat.mutable_data_ptr());
    shard::point(*release_first(item, flat.options()), data + range.begin * static_cast<int64_t>(flat.element_size()));
  } else {
    shard::bind(item.tensor, flat, range, item.form);
  }
  note_storage(index);
}

}  // namespace tessera::zero
