#include "tessera/optim/optimizer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "tessera/base/error.h"
#include "tessera/base/parallel.h"
#include "tessera/kernels/update.h"
#include "tessera/shard/device.h"
#include "tessera/shard/dtype.h"

namespace tessera::optim {
namespace {

constexpr int64_t kGrain = 32768;  // elements per thread at least: about 30 us of work
constexpr int64_t kAlign = 64;     // elements; keeps threads off each other's cache lines

int states_of(Rule rule, const GroupOptions& group) {
  switch (rule) {
    case Rule::Adam:
      return 2;
    case Rule::Lion:
    case Rule::Adagrad:
      return 1;
    case Rule::Sgd:
      return group.momentum != 0 ? 1 : 0;
    case Rule::External:
    case Rule::Lamb:
    case Rule::Muon:
    case Rule::Adafactor:
      return 0;  // there are no kernels
  }
  TESSERA_ASSERT(false, "unknown rule");
}

void check_tensor(const UpdateSlice& slice, const at::Tensor& tensor, int64_t n, const char* name) {
  TESSERA_CHECK_VALUE(tensor.defined(), "optim.update", name, " is missing");
  TESSERA_CHECK_VALUE(tensor.dim() == 1 && tensor.is_contiguous(), "optim.update", name,
                      " must be a contiguous 1-D tensor");
  TESSERA_CHECK_VALUE(tensor.numel() == n, "optim.update", name, " has ", tensor.numel(),
                      " elements, the master weights have ", n);
  TESSERA_CHECK_VALUE(tensor.device() == slice.grad.device(), "optim.update", name, " is on device ", tensor.device(),
                      ", the gradient on ", slice.grad.device());
}

void check_dtype(const at::Tensor& tensor, at::ScalarType dtype, const char* name) {
  TESSERA_CHECK_VALUE(tensor.scalar_type() == dtype, "optim.update", name, " must be ", dtype, ", got ",
                      tensor.scalar_type());
}

// Sets the tensors that hold the master weights, and a copy for compute.
void add_weights(const UpdateSlice& slice, kernels::UpdateRange& range) {
  TESSERA_CHECK_VALUE(slice.master.defined() || slice.weight.defined(), "optim.update", "master is missing");
  range.n = slice.master.defined() ? slice.master.numel() : slice.weight.numel();
  if (slice.master.defined()) {
    check_tensor(slice, slice.master, range.n, "master");
    check_dtype(slice.master, at::kFloat, "master");
    TESSERA_CHECK_VALUE(!slice.residual.defined(), "optim.update", "a residual goes without a master");
    range.master = static_cast<float*>(slice.master.mutable_data_ptr());
  }
  if (slice.weight.defined()) {
    check_tensor(slice, slice.weight, range.n, "weight");
    range.weight = slice.weight.mutable_data_ptr();
    range.adopts = slice.adopts && slice.master.defined();
    range.weight_dtype = shard::kernel_dtype(slice.weight.scalar_type());
    TESSERA_CHECK_VALUE(range.weight_dtype != kernels::DType::F32, "optim.update",
                        "weight must be bfloat16 or float16; an fp32 compute weight is the master");
  }
  if (slice.residual.defined()) {
    check_tensor(slice, slice.residual, range.n, "residual");
    check_dtype(slice.residual, at::kShort, "residual");
    check_dtype(slice.weight, at::kBFloat16, "the weight beside a residual");
    range.residual = slice.residual.mutable_data_ptr();
  }
}

// Checks the slice and returns it as pointers.
kernels::UpdateRange range_of(const UpdateSlice& slice, int states) {
  kernels::UpdateRange range;
  TESSERA_CHECK_VALUE(slice.grad.defined(), "optim.update", "grad is missing");
  add_weights(slice, range);
  check_tensor(slice, slice.grad, range.n, "grad");
  range.grad = slice.grad.const_data_ptr();
  range.grad_dtype = shard::kernel_dtype(slice.grad.scalar_type());
  const bool fp16 = range.weight != nullptr && range.weight_dtype == kernels::DType::F16;
  for (int s = 0; s < states; ++s) {
    check_tensor(slice, slice.state[s], range.n, "state");
    const auto dtype = slice.state[s].scalar_type();
    TESSERA_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16, "optim.update",
                        "state must be float32 or bfloat16, got ", dtype);
    TESSERA_CHECK_VALUE(dtype == slice.state[0].scalar_type(), "optim.update", "states must have one dtype");
    TESSERA_CHECK_VALUE(dtype == at::kFloat || !fp16, "optim.update", "beside float16 weights states must be float32");
    range.state_dtype = shard::kernel_dtype(dtype);
    (s == 0 ? range.state0 : range.state1) = slice.state[s].mutable_data_ptr();
  }
  range.rounding = slice.rounding;
  range.random = slice.random;
  return range;
}

auto entry(const kernels::DeviceTable& table, const kernels::AdamRule&) {
  return table.adam;
}
auto entry(const kernels::DeviceTable& table, const kernels::SgdRule&) {
  return table.sgd;
}
auto entry(const kernels::DeviceTable& table, const kernels::LionRule&) {
  return table.lion;
}
auto entry(const kernels::DeviceTable& table, const kernels::AdagradRule&) {
  return table.adagrad;
}

template <class KernelRule>
void update_on_cpu(const kernels::UpdateSegment<KernelRule>& segment) {
  const kernels::UpdateRange& whole = segment.range;
  const int64_t run = segment.run > 0 ? segment.run : whole.n;
  parallel_ranges(whole.n, kGrain, kAlign, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t run_end = std::min(end, (begin / run + 1) * run);
      kernels::UpdateRange range = kernels::part(whole, begin, run_end);
      range.random.first += static_cast<uint64_t>(begin / run * (segment.stride - run));
      kernels::update(segment.rule, range, segment.grad_scale);
      begin = run_end;
    }
  });
}

template <class KernelRule>
void update_on_device(c10::Device device, const std::vector<kernels::UpdateSegment<KernelRule>>& segments) {
  if (segments.empty()) return;
  shard::on_device(device, [&](const kernels::DeviceTable& table, void* stream) {
    entry(table, segments[0].rule)(segments.data(), static_cast<int64_t>(segments.size()), stream);
  });
}

// Powers are made in double, as torch.optim does.
kernels::AdamRule adam_rule(const GroupOptions& g, int64_t step) {
  kernels::AdamRule rule{g.lr, g.beta1, g.beta2, g.eps, g.weight_decay, g.decoupled};
  if (g.bias_correction) {
    const auto t = static_cast<double>(step);
    rule.bias1 = 1 - std::pow(g.beta1, t);
    rule.sqrt_bias2 = std::sqrt(1 - std::pow(g.beta2, t));
  }
  return rule;
}

kernels::SgdRule sgd_rule(const GroupOptions& g, int64_t step) {
  return {g.lr, g.momentum, g.dampening, g.weight_decay, g.nesterov, step == 1};
}
kernels::LionRule lion_rule(const GroupOptions& g, int64_t) {
  return {g.lr, g.beta1, g.beta2, g.weight_decay};
}
kernels::AdagradRule adagrad_rule(const GroupOptions& g, int64_t step) {
  return {g.lr / (1 + static_cast<double>(step - 1) * g.lr_decay), g.eps, g.weight_decay};
}

// `make_rule`: a group's hyper-parameters at a step, as the kernels have them.
template <class KernelRule>
void update_all(Rule rule, const std::vector<Update>& updates, double grad_scale,
                KernelRule (*make_rule)(const GroupOptions&, int64_t)) {
  std::vector<kernels::UpdateSegment<KernelRule>> on_cpu;
  std::map<c10::DeviceIndex, std::vector<kernels::UpdateSegment<KernelRule>>> on_devices;
  c10::Device device = at::kCPU;
  for (const auto& [group, step, slice] : updates) {
    TESSERA_CHECK_VALUE(step >= 1, "optim.update", "steps count from 1, got ", step);
    const kernels::UpdateRange range = range_of(slice, states_of(rule, *group));
    if (range.n == 0) continue;
    const auto scale = static_cast<float>(group->maximize ? -grad_scale : grad_scale);
    if (!slice.grad.is_cpu()) device = slice.grad.device();
    auto& segments = slice.grad.is_cpu() ? on_cpu : on_devices[device.index()];
    segments.push_back({make_rule(*group, step), range, scale, slice.run, slice.stride});
  }
  for (const auto& segment : on_cpu)
    update_on_cpu(segment);
  for (const auto& [index, segments] : on_devices)
    update_on_device({device.type(), index}, segments);
}

}  // namespace

StateNames state_names(Rule rule, const std::vector<GroupOptions>& groups) {
  switch (rule) {
    case Rule::Muon:
      if (!groups.empty() && groups.front().use_muon) return {{"momentum_buffer"}, 1};
      [[fallthrough]];
    case Rule::Lamb:
    case Rule::Adam:
      return {{"exp_avg", "exp_avg_sq"}, 2};
    case Rule::Lion:
      return {{"exp_avg"}, 1};
    case Rule::Adagrad:
      return {{"sum"}, 1};
    case Rule::Sgd:
      for (const GroupOptions& group : groups) {
        if (group.momentum != 0) return {{"momentum_buffer"}, 1};
      }
      return {};
    case Rule::External:
    case Rule::Adafactor:  // they differ from parameter to parameter: whole_states()
      return {};
  }
  TESSERA_ASSERT(false, "unknown rule");
}

double initial_state(Rule rule, const GroupOptions& group) {
  return rule == Rule::Adagrad ? group.initial_accumulator_value : 0;
}

void update(Rule rule, const std::vector<Update>& updates, double grad_scale) {
  switch (rule) {
    case Rule::Adam:
      return update_all(rule, updates, grad_scale, adam_rule);
    case Rule::Sgd:
      return update_all(rule, updates, grad_scale, sgd_rule);
    case Rule::Lion:
      return update_all(rule, updates, grad_scale, lion_rule);
    case Rule::Adagrad:
      return update_all(rule, updates, grad_scale, adagrad_rule);
    case Rule::External:
    case Rule::Lamb:
    case Rule::Muon:
    case Rule::Adafactor:
      TESSERA_ASSERT(false, "[optim.update] this rule has no kernel");
  }
}

void update(Rule rule, const GroupOptions& group, int64_t step, const UpdateSlice& slice, double grad_scale) {
  update(rule, {Update{&group, step, slice}}, grad_scale);
}

}  // namespace tessera::optim
