#include "tessera/shard/storage.h"

#include <ATen/ops/clone.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>

#include <memory>

#include "tessera/base/error.h"
#include "tessera/shard/compat.h"

namespace tessera::shard {

namespace {

std::vector<int64_t> bound_strides(const at::Tensor& param) {
  if (param.is_non_overlapping_and_dense()) return param.strides().vec();
  std::vector<int64_t> strides(param.dim());
  int64_t step = 1;
  for (int64_t d = param.dim() - 1; d >= 0; --d) {
    strides[d] = step;
    step *= std::max<int64_t>(param.size(d), 1);
  }
  return strides;
}

char* address(const at::Tensor& flat, int64_t element) {
  return static_cast<char*>(flat.data_ptr()) + element * flat.element_size();
}

}  // namespace

void set_data(at::Tensor& param, const at::Tensor& value) {
  c10::TensorImpl& impl = *param.unsafeGetTensorImpl();
  if (impl.key_set().has(kOwnKey))
    set_keyed_data(param, value, impl.get_backend_meta_intrusive_ptr());
  else
    param.set_data(value);
}

void set_keyed_data(at::Tensor& param, const at::Tensor& value, c10::intrusive_ptr<c10::BackendMeta> meta) {
  c10::Storage storage = value.storage();
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), value.key_set().add(kOwnKey), value.dtype());
  impl->set_sizes_and_strides(value.sizes(), value.strides(), value.storage_offset());
  impl->set_backend_meta(std::move(meta));
  param.set_data(at::Tensor(std::move(impl)));
}

Form::Form(const at::Tensor& param) : sizes(param.sizes().vec()), strides(bound_strides(param)) {}

void bind(at::Tensor& param, const at::Tensor& flat, Range range, const Form& form) {
  TESSERA_ASSERT(param.numel() == range.size() && range.end <= flat.numel());
  // A tensor made inside inference_mode could never be trained.
  const c10::InferenceMode no_inference(false);
  const auto keep_alive = [flat](void*) {};
  at::Tensor alias = at::from_blob(address(flat, range.begin), form.sizes, form.strides, keep_alive,
                                   flat.options().requires_grad(false), flat.device());
  set_data(param, alias);
}

bool is_bound(const at::Tensor& param, const at::Tensor& flat, Range range, const Form& form) {
  if (param.scalar_type() != flat.scalar_type() || param.device() != flat.device()) return false;
  if (param.sizes() != form.sizes || param.strides() != form.strides) return false;
  return param.numel() == 0 || param.const_data_ptr() == address(flat, range.begin);
}

at::Tensor view_as_param(const at::Tensor& flat, Range range, const Form& form) {
  return flat.as_strided(form.sizes, form.strides, flat.storage_offset() + range.begin);
}

at::Tensor flatten_like_param(const at::Tensor& tensor, const Form& form) {
  TESSERA_ASSERT(tensor.sizes() == form.sizes);
  at::Tensor source = tensor.detach();
  if (source.strides() != form.strides && tensor.numel() > 1) {
    source = at::empty_strided(form.sizes, form.strides, tensor.options().requires_grad(false)).copy_(source);
  }
  return source.as_strided({tensor.numel()}, {1}, source.storage_offset());
}

c10::StorageImpl* storage_of(const at::Tensor& param) {
  return param.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

void point(c10::StorageImpl& storage, void* data) {
  compat::allow_access(storage);
  storage.set_data_ptr_noswap(c10::DataPtr(data, storage.device()));
}

void rebind(const at::Tensor& param, const at::Tensor& flat, Range range) {
  const auto drop = [](void* kept) { delete static_cast<at::Tensor*>(kept); };
  auto kept = std::make_unique<at::Tensor>(flat);
  c10::DataPtr data(address(flat, range.begin), kept.release(), drop, flat.device());
  compat::allow_access(*storage_of(param));
  storage_of(param)->set_data_ptr_noswap(std::move(data));
}

void release(c10::StorageImpl& storage, const std::string& message) {
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, storage.device()));
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

void release_again(c10::StorageImpl& storage) {
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, storage.device()));
  compat::forbid_access(storage);
}

WeakStorage weak_storage_of(const at::Tensor& param) {
  return param.unsafeGetTensorImpl()->unsafe_storage().getWeakStorageImpl();
}

void move_out(const WeakStorage& storage) {
  const auto held = storage.lock();
  if (!held || held->nbytes() == 0 || held->_mutable_data_ptr_no_checks().get() == nullptr) return;
  const c10::InferenceMode no_inference(false);
  struct Kept {
    at::Tensor own;
    c10::DataPtr before;
  };
  const auto drop = [](void* kept) { delete static_cast<Kept*>(kept); };
  const auto bytes = static_cast<int64_t>(held->nbytes());
  const auto options = at::TensorOptions(at::kByte).device(held->device());
  auto kept = std::make_unique<Kept>();
  const auto nothing = [](void*) {};
  kept->own = at::from_blob(held->mutable_data(), {bytes}, nothing, options, held->device()).clone();
  Kept* const context = kept.release();
  context->before = held->set_data_ptr(c10::DataPtr(context->own.mutable_data_ptr(), context, drop, held->device()));
}

c10::StorageImpl* make_released(at::Tensor& param, const Form& form, const at::TensorOptions& flat_options,
                                const std::string& message) {
  const c10::InferenceMode no_inference(false);
  // One byte of somebody's memory: from_blob wants an address, release() takes it away again.
  char nothing = 0;
  at::Tensor alias = at::from_blob(
      &nothing, form.sizes, form.strides, [](void*) {}, flat_options.requires_grad(false), flat_options.device());
  release(*storage_of(alias), message);
  set_data(param, alias);
  return storage_of(param);
}

}  // namespace tessera::shard
