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

#include <algorithm>
#include <atomic>
#include <functional>
#include <utility>
#include <vector>

#include "tests/stand_in/allocators.h"
#include "tests/stand_in/late_copies.h"
#include "tests/stand_in/memory.h"
#include "tests/stand_in/stand_in.h"
#include "tests/stand_in/uses.h"

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

// The same memory as a tensor of the host that does not keep it: what copies read and write.
Tensor host_view(const Tensor& t) {
  TORCH_CHECK(t.is_privateuseone() || t.is_cpu(), "[stand_in] no copies from or to ", t.device());
  const at::TensorOptions options = t.options().device(c10::kCPU).pinned_memory(false);
  if (t.numel() == 0) return at::empty(t.sizes(), options);
  TORCH_CHECK(t.data_ptr() != nullptr, "[stand_in] the tensor has no memory");
  void* memory = t.is_cpu() ? t.data_ptr() : to_host(t.data_ptr());
  Tensor view = at::from_blob(memory, t.sizes(), t.strides(), options);
  if (t.is_complex()) view._set_conj(t.is_conj());
  view._set_neg(t.is_neg());
  return view;
}

// An operator that runs on the CPU, with copies there and back that a device would not make. What it uses is its
// arguments; operators inside count for nothing.
thread_local bool inside = false;
class Operator {
 public:
  Operator() : outermost_(!std::exchange(inside, true)) {}
  ~Operator() { inside = !outermost_; }
  Operator(const Operator&) = delete;
  Operator& operator=(const Operator&) = delete;

  Operator& reads(const Tensor& t, const char* part) { return uses(t, false, part); }
  Operator& writes(const Tensor& t, const char* part) { return uses(t, true, part); }
  Operator& uses(const Tensor& t, bool writes, const char* part) {
    if (outermost_ && t.defined() && t.is_privateuseone() && !is_named(t)) {
      if (uses_.empty()) stream_ = current_stream(t.device().index());
      if (writes) written_.push_back(t.unsafeGetTensorImpl());
      add_uses(uses_, t, writes, part);
    }
    return *this;
  }
  // What was named so far is one piece of work.
  void give(const char* name) {
    if (!uses_.empty()) stand_in::give(stream_, name, uses_);
    uses_.clear();
  }
  Tensor results(const char* name, const Tensor& t) {
    writes(t, "result").give(name);
    return t;
  }
  // The operator's result is one of the host.
  void wait() {
    if (outermost_) host_waits_for(stream_);
  }

 private:
  bool is_named(const Tensor& t) const {  // a result that is an argument
    return std::find(written_.begin(), written_.end(), t.unsafeGetTensorImpl()) != written_.end();
  }

  const bool outermost_;
  std::vector<const c10::TensorImpl*> written_;
  Stream stream_ = 0;
  std::vector<Use> uses_;
};

std::atomic<void (*)(bool to_host, int64_t bytes)> on_copy{nullptr};

std::function<void()> copy_of(const Tensor& src, const Tensor& dst) {
  return [from = host_view(src), to = host_view(dst)] { to.copy_(from); };
}

void copy_to_device(const Tensor& src, const Tensor& dst) {
  const Stream from = current_stream(src.device().index()), to = current_stream(dst.device().index());
  order(from, clock_of(to));
  Operator().reads(src, "src").writes(dst, "dst").give("aten::copy_");
  order(to, clock_of(from));
  copy_of(src, dst)();
}

// As torch does it on CUDA: page-locked memory is used later where nothing has to be converted on the host.
Tensor copy_from(const Tensor& src, const Tensor& dst, bool non_blocking) {
  if (inside) {
    host_view(dst).copy_(host_view(src));
    return dst;
  }
  if (!src.is_cpu() && !dst.is_cpu()) {
    copy_to_device(src, dst);
    return dst;
  }
  const bool to_host = dst.is_cpu();
  const Tensor &there = to_host ? src : dst, &host = to_host ? dst : src;
  const bool at_once = !host.is_contiguous() || (!to_host && src.scalar_type() != dst.scalar_type());
  const bool direct = !at_once && host.numel() > 0 && is_pinned(host.data_ptr()), late = direct && non_blocking;
  std::vector<Use> uses;  // not of other memory of the host, which has no stream
  if (!to_host || direct) add_uses(uses, dst, true, "dst");
  if (to_host || direct) add_uses(uses, src, false, "src");
  const Stream stream = current_stream(there.device().index());
  if (const auto notice = on_copy.load(); notice != nullptr) notice(to_host, static_cast<int64_t>(src.nbytes()));
  const uint64_t number = give(stream, to_host ? "copy to the host" : "copy from the host", uses);
  if (late) {
    do_late({stream, number, whole(there), whole(host), to_host, copy_of(src, dst)});
  } else {
    copy_of(src, dst)();
    notice_wait();
    if (!non_blocking || to_host) host_waits_for(stream);
  }
  return dst;
}

Tensor copy_from_and_resize(const Tensor& src, const Tensor& dst) {
  if (dst.sizes() != src.sizes()) dst.resize_(src.sizes());
  return copy_from(src, dst, false);
}

at::Scalar local_scalar_dense(const Tensor& t) {
  Operator op;
  op.reads(t, "self").give("aten::item");
  op.wait();
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
  Operator op;
  op.reads(input, "input").reads(weight, "weight").reads(bias.value_or(Tensor()), "bias").give("aten::convolution");
  const Maybe<Tensor> host_bias = bias && bias->defined() ? Maybe<Tensor>(bias->cpu()) : std::nullopt;
  const Tensor out = at::convolution(input.cpu(), weight.cpu(), host_bias, stride, padding, dilation, transposed,
                                     output_padding, groups);
  return op.results("aten::convolution", out.to(input.device()));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                        IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                                                        bool transposed, IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> wanted) {
  Operator op;
  op.reads(grad, "grad").reads(input, "input").reads(weight, "weight").give("aten::convolution_backward");
  const int64_t outputs = grad.size(1);
  const auto grads = at::convolution_backward(grad.cpu(), input.cpu(), weight.cpu(), IntArrayRef(outputs), stride,
                                              padding, dilation, transposed, output_padding, groups, wanted);
  const auto back = [&](const Tensor& t) {
    return t.defined() ? op.results("aten::convolution_backward", t.to(input.device())) : t;
  };
  return {back(std::get<0>(grads)), back(std::get<1>(grads)), back(std::get<2>(grads))};
}

// Attention as the CPU chooses it, its backward included: for a device that torch does not know it takes a formula of
// other operators, with other bits.
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const Maybe<Tensor>& mask, double dropout,
                 bool causal, Maybe<double> scale, bool gqa) {
  Operator op;
  const char* name = "aten::scaled_dot_product_attention";
  op.reads(q, "query").reads(k, "key").reads(v, "value").reads(mask.value_or(Tensor()), "attn_mask").give(name);
  const Maybe<Tensor> host_mask = mask && mask->defined() ? Maybe<Tensor>(mask->cpu()) : std::nullopt;
  const Tensor out =
      at::scaled_dot_product_attention(q.cpu(), k.cpu(), v.cpu(), host_mask, dropout, causal, scale, gqa);
  return op.results(name, out.to(q.device()));
}

void record_stream(Tensor& t, c10::Stream stream) {
  device_allocator().recordStream(t.storage().data_ptr(), stream);
}

void add_values(Operator& op, const at::IValue& value, bool writes, const char* part) {
  if (value.isTensor()) {
    op.uses(value.toTensor(), writes, part);
  } else if (value.isList()) {
    for (const at::IValue& element : value.toListRef())
      add_values(op, element, writes, part);
  }
}

void on_cpu(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = handle.schema();
  const char* name = schema.name().c_str();
  Operator op;
  size_t i = stack->size() - schema.arguments().size();
  for (const c10::Argument& argument : schema.arguments()) {
    const bool writes = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    add_values(op, (*stack)[i++], writes, argument.name().c_str());
  }
  op.give(name);
  at::native::cpu_fallback(handle, stack, /*error_on_views=*/true);  // a view of a copy is no view
  i = stack->size() - schema.returns().size();
  bool of_the_host = false;
  for (; i < stack->size(); ++i) {
    const at::IValue& result = (*stack)[i];
    add_values(op, result, true, "result");
    of_the_host |= !result.isTensor() && !result.isList();
  }
  op.give(name);
  if (of_the_host) op.wait();
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
