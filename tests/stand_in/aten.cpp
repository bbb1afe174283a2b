// Operators of the stand-in accelerator: those that make, view and copy its memory. The rest runs on the CPU.
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <atomic>

#include "tests/stand_in/memory.h"
#include "tests/stand_in/stand_in.h"

namespace tessera::stand_in {
namespace {

using at::IntArrayRef;
using at::Tensor;
template <class T>
using Maybe = std::optional<T>;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::ScalarType checked_dtype(Maybe<c10::ScalarType> dtype, Maybe<c10::Layout> layout, Maybe<bool> pinned) {
  TORCH_CHECK(layout.value_or(c10::kStrided) == c10::kStrided, "[stand_in] only strided tensors are supported");
  TORCH_CHECK(!pinned.value_or(false), "[stand_in] only host memory can be pinned");
  return c10::dtype_or_default(dtype);
}

Tensor empty(IntArrayRef size, Maybe<c10::ScalarType> dtype, Maybe<c10::Layout> layout, Maybe<c10::Device> device,
             Maybe<bool> pinned, Maybe<c10::MemoryFormat> format) {
  const c10::ScalarType type = checked_dtype(dtype, layout, pinned);
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, c10::GetAllocator(c10::kPrivateUse1), kKeys, type, format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, Maybe<c10::ScalarType> dtype, Maybe<c10::Layout> layout,
                     Maybe<c10::Device> device, Maybe<bool> pinned) {
  const c10::ScalarType type = checked_dtype(dtype, layout, pinned);
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(c10::kPrivateUse1), kKeys, type);
}

// The same memory as a tensor of the host: what copies read and write. A tensor of the host is itself.
Tensor host_view(const Tensor& t) {
  if (t.is_cpu()) return t;
  TORCH_CHECK(t.is_privateuseone(), "[stand_in] no copies from or to ", t.device());
  const at::TensorOptions options = t.options().device(c10::kCPU);
  if (t.numel() == 0) return at::empty(t.sizes(), options);
  TORCH_CHECK(t.data_ptr() != nullptr, "[stand_in] the tensor has no memory");
  Tensor view = at::from_blob(to_host(t.data_ptr()), t.sizes(), t.strides(), options);
  if (t.is_complex()) view._set_conj(t.is_conj());
  view._set_neg(t.is_neg());
  return view;
}

std::atomic<void (*)(bool to_host, int64_t bytes)> on_copy{nullptr};

void copy_now(const Tensor& src, const Tensor& dst) {
  if (const auto notice = on_copy.load(); notice != nullptr && src.is_cpu() != dst.is_cpu())
    notice(dst.is_cpu(), static_cast<int64_t>(src.nbytes()));
  host_view(dst).copy_(host_view(src));
}

Tensor copy_from(const Tensor& src, const Tensor& dst, bool non_blocking) {
  const Tensor &there = src.is_cpu() ? dst : src, &other = src.is_cpu() ? src : dst;
  const bool pageable = other.is_cpu() && !other.is_pinned();
  copy_on_current_stream(there.device().index(), !non_blocking || pageable, [src, dst] { copy_now(src, dst); });
  return dst;
}

Tensor copy_from_and_resize(const Tensor& src, const Tensor& dst) {
  if (dst.sizes() != src.sizes()) dst.resize_(src.sizes());
  return copy_from(src, dst, false);
}

at::Scalar local_scalar_dense(const Tensor& t) {
  return at::native::_local_scalar_dense_cpu(host_view(t));
}

// Sets the shape, and enlarges the memory where it is too small for it.
void reshape(const Tensor& t, IntArrayRef size, Maybe<IntArrayRef> stride) {
  c10::TensorImpl* impl = t.unsafeGetTensorImpl();
  if (stride) {
    impl->set_sizes_and_strides(size, *stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  if (impl->numel() == 0) return;
  const size_t bytes = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize(), t.storage_offset());
  if (bytes > t.storage().nbytes()) at::native::resize_bytes_nocuda(t.storage(), static_cast<int64_t>(bytes));
}

const Tensor& resize_(const Tensor& t, IntArrayRef size, Maybe<c10::MemoryFormat> format) {
  if (t.sizes() != size) reshape(t, size, std::nullopt);
  if (format) {
    TORCH_CHECK(*format != c10::MemoryFormat::Preserve, "[stand_in] resize_ to no memory format");
    t.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return t;
}

Tensor& set_storage(Tensor& t, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  at::native::checkSetStorage(t, std::move(source), offset, size, stride);
  t.unsafeGetTensorImpl()->set_storage_offset(offset);
  reshape(t, size, stride.data() == nullptr ? Maybe<IntArrayRef>() : stride);
  return t;
}

Tensor& set_empty(Tensor& t) {
  const c10::DeviceGuard guard(t.device());
  at::Storage none(c10::Storage::use_byte_size_t(), 0, c10::GetAllocator(c10::kPrivateUse1), true);
  return set_storage(t, std::move(none), 0, {0}, {});
}

// Torch has a door of its own for the convolutions of devices that it does not know.
Tensor convolution(const Tensor& input, const Tensor& weight, const Maybe<Tensor>& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                   int64_t groups) {
  const Maybe<Tensor> host_bias = bias && bias->defined() ? Maybe<Tensor>(bias->cpu()) : std::nullopt;
  return at::convolution(input.cpu(), weight.cpu(), host_bias, stride, padding, dilation, transposed, output_padding,
                         groups)
      .to(input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                        IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                                                        bool transposed, IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> wanted) {
  const int64_t outputs = grad.size(1);
  const auto grads = at::convolution_backward(grad.cpu(), input.cpu(), weight.cpu(), IntArrayRef(outputs), stride,
                                              padding, dilation, transposed, output_padding, groups, wanted);
  const auto back = [&](const Tensor& t) { return t.defined() ? t.to(input.device()) : t; };
  return {back(std::get<0>(grads)), back(std::get<1>(grads)), back(std::get<2>(grads))};
}

// Attention as the CPU chooses it, its backward included: for a device that torch does not know it takes a formula of
// other operators, with other bits.
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const Maybe<Tensor>& mask, double dropout,
                 bool causal, Maybe<double> scale, bool gqa) {
  const Maybe<Tensor> host_mask = mask && mask->defined() ? Maybe<Tensor>(mask->cpu()) : std::nullopt;
  return at::scaled_dot_product_attention(q.cpu(), k.cpu(), v.cpu(), host_mask, dropout, causal, scale, gqa)
      .to(q.device());
}

void record_stream(Tensor&, c10::Stream) {}  // memory is never in use by work that is not done

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);  // a view of a copy is no view
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_", TORCH_FN(set_empty));
  m.impl("set_.source_Storage", TORCH_FN(static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_)));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("is_set_to", TORCH_FN(at::native::is_set_to));
  m.impl("record_stream", TORCH_FN(record_stream));
  // Torch would compose these of other operators, which gives other bits than the CPU's kernels.
  for (const char* name : {"native_layer_norm", "native_group_norm", "silu_backward", "mish_backward", "addr"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
  m.impl("convolution_overrideable", TORCH_FN(convolution));
  m.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
  m.impl("scaled_dot_product_attention", TORCH_FN(attention));
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("scaled_dot_product_attention", TORCH_FN(attention));
}

// Copies resolve conjugates and negatives (host_view); by torch's fallback that would itself take a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

}  // namespace tessera::stand_in

void tessera_stand_in_on_copy(void (*notice)(bool to_host, int64_t bytes)) {
  tessera::stand_in::on_copy = notice;
}
