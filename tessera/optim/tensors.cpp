#include "tessera/optim/tensors.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/optim/types.h"

namespace tessera::optim {
namespace {

void check(const at::Tensor& param, const at::Tensor& tensor, size_t number, const char* name) {
  TESSERA_CHECK_VALUE(tensor.defined(), "optim.update_tensors", "parameter ", number, " has no ", name);
  TESSERA_CHECK_VALUE(tensor.layout() == at::kStrided, "optim.update_tensors", "the ", name, " of parameter ", number,
                      " is ", tensor.layout(), ", not strided");
  TESSERA_CHECK_VALUE(tensor.device() == param.device(), "optim.update_tensors", "the ", name, " of parameter ", number,
                      " is on ", tensor.device(), ", the parameter on ", param.device());
  TESSERA_CHECK_VALUE(tensor.sizes() == param.sizes(), "optim.update_tensors", "the ", name, " of parameter ", number,
                      " has the shape ", tensor.sizes(), ", the parameter ", param.sizes());
}

bool is_half(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kHalf;
}

void check(const TensorUpdate& tensors, size_t number, int states) {
  const at::Tensor& param = tensors.param;
  check(param, param, number, "value");
  TESSERA_CHECK_VALUE(!param.unsafeGetTensorImpl()->is_python_dispatch(), "optim.update_tensors", "parameter ", number,
                      " is a tensor with operators of its own (a DTensor?), which has no elements here");
  check(param, tensors.grad, number, "gradient");
  for (const auto& tensor : {param, tensors.grad}) {
    TESSERA_CHECK_VALUE(tensor.scalar_type() == at::kFloat || is_half(tensor), "optim.update_tensors", "parameter ",
                        number, " or its gradient is ", tensor.scalar_type(), ", not float32, bfloat16 or float16");
  }
  for (int s = 0; s < states; ++s) {
    const at::Tensor& state = tensors.state.at(s);
    check(param, state, number, "state");
    const bool fits = state.scalar_type() == at::kFloat ||
                      (state.scalar_type() == at::kBFloat16 && param.scalar_type() != at::kHalf &&
                       tensors.state[0].scalar_type() == at::kBFloat16);
    TESSERA_CHECK_VALUE(fits, "optim.update_tensors", "a state of parameter ", number, " is ", state.scalar_type(),
                        ", not float32");
  }
}

// A tensor as one dimension, in the order that `strides` (without gaps) give its elements in memory.
class Flat {
 public:
  Flat(const at::Tensor& tensor, at::IntArrayRef strides) : tensor_(tensor), shaped_(tensor) {
    if (tensor.strides() == strides) return;
    shaped_ = at::empty_strided(tensor.sizes(), strides, tensor.options());
    shaped_.copy_(tensor);
  }
  at::Tensor view() const { return shaped_.as_strided({shaped_.numel()}, {1}); }
  bool is_copy() const { return !shaped_.is_same(tensor_); }
  void write_back() const {
    if (is_copy()) tensor_.copy_(shaped_);
  }

 private:
  at::Tensor tensor_, shaped_;
};

// A parameter's tensors as an update has them.
class Flats {
 public:
  Flats(const TensorUpdate& tensors, int states, kernels::Rounding rounding, uint64_t seed) {
    const auto strides = at::infer_dense_strides(tensors.param.sizes(), tensors.param.strides());
    const auto flat = [&](const at::Tensor& tensor) {
      flats_.emplace_back(tensor, strides);
      return flats_.back().view();
    };
    (is_half(tensors.param) ? slice_.weight : slice_.master) = flat(tensors.param);
    for (int s = 0; s < states; ++s)
      slice_.state.at(s) = flat(tensors.state.at(s));
    slice_.grad = flat(tensors.grad);
    slice_.rounding = rounding;
    slice_.random = {seed, static_cast<uint64_t>(tensors.step), tensors.first};
  }

  const UpdateSlice& slice() const { return slice_; }
  bool has_copies() const {
    return std::ranges::any_of(flats_, [](const Flat& flat) { return flat.is_copy(); });
  }
  void write_back() {
    flats_.pop_back();  // the gradient
    for (const Flat& flat : flats_)
      flat.write_back();
  }

 private:
  std::vector<Flat> flats_;
  UpdateSlice slice_;
};

}  // namespace

std::string wrong_param(Rule rule, bool on_cpu_only, const at::Tensor& param) {
  const at::ScalarType dtype = param.scalar_type();
  if (has_kernel(rule) && on_cpu_only && !param.is_cpu())
    return c10::str("is on ", param.device(),
                    ": outside an engine parameters on the CPU are updated, others by torch's optimizers");
  if (has_kernel(rule) && dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf)
    return c10::str("is ", dtype, "; served are Float, BFloat16 and Half");
  if (param.grad().layout() != at::kStrided)
    return "has a sparse gradient, which is not served: build its module without sparse gradients";
  return "";
}

void update_tensors(Rule rule, const GroupOptions& group, const std::vector<TensorUpdate>& tensors,
                    kernels::Rounding rounding, uint64_t seed) {
  const at::NoGradGuard no_grad;
  const int states = state_names(rule, {group}).count;
  for (size_t number = 0; number < tensors.size(); ++number)
    check(tensors[number], number, states);
  std::vector<Update> together;  // copies are made for one tensor at a time
  for (const TensorUpdate& one : tensors) {
    Flats flats(one, states, rounding, seed);
    if (flats.has_copies()) {
      update(rule, group, one.step, flats.slice(), 1);
      flats.write_back();
    } else {
      together.push_back({&group, one.step, flats.slice()});
    }
  }
  update(rule, together, 1);
  for (const TensorUpdate& one : tensors) {  // a backward that saved the value must notice
    if (!one.param.is_inference()) one.param.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace tessera::optim
