#include "tessera/engine/engine.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/phases.h"
#include "tessera/base/transforms.h"
#include "tessera/engine/impl.h"
#include "tessera/shard/side_stream.h"
#include "tessera/zero/update_lane.h"

namespace tessera::engine {
namespace {

// A loss on its way to where the host can read it: a device's is there once a step has waited for what came after it on its stream.
KeptLoss on_host(const at::Tensor& loss) {
  if (loss.is_cpu()) return {loss.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true)};
  const at::Tensor kept = at::empty({}, loss.options().device(at::kCPU).pinned_memory(true));
  kept.copy_(loss.reshape({}), /*non_blocking=*/true);
  return {kept, shard::mark(loss.device())};
}

}  // namespace

// ---------------------------------------------------------------- forward

bool Engine::pre_forward() {
  zero::ShardedModel& model = impl_->live("forward");
  // Other ranks would wait for what comes of it.
  if (impl_->needs_the_host()) impl_->check_beside("forward");
  OneThread::Call call(impl_->thread, "forward");
  model.units.check_not_away("forward");
  if (impl_->needs_the_host()) check_not_captured("forward");
  if (!c10::GradMode::is_enabled()) finish_update();
  Phases& phases = model.units.phases();
  {
    const transforms::Suspended plain;
    model.driver.follow_params();
  }
  if (!model.driver.hooks().in_forward()) {
    model.modules.end_stray();
    model.driver.forget_dropped();
    phases.drop(Phase::Forward);
  }
  model.driver.hooks().enter_forward();
  if (c10::GradMode::is_enabled()) model.driver.forward_begun();
  impl_->regions.emplace_back(impl_->options.autocast, impl_->device);
  const bool first = impl_->regions.back().switched_off() && !impl_->warned_of_region;
  impl_->warned_of_region = impl_->warned_of_region || first;
  phases.begin(Phase::Forward);
  call.go_on();
  return first;
}

void Engine::post_forward(const std::vector<at::Tensor>& outputs) {
  impl_->thread.leave();
  zero::ShardedModel& model = impl_->live("forward");
  model.units.lane().gather_rest();  // what no module has used
  impl_->leave_region();
  model.driver.hooks().leave_forward();
  model.driver.hooks().watch_outputs(outputs);
  model.units.phases().end(Phase::Forward);
}

void Engine::abort_forward() {
  impl_->thread.leave();
  impl_->leave_region();
  if (!impl_->model) return;
  impl_->model->driver.hooks().leave_forward();
  try {
    impl_->model->units.phases().end(Phase::Forward);
  } catch (const std::exception&) {
    // A device that fails: the error that ends the forward says it.
  }
}

// ---------------------------------------------------------------- backward

at::Tensor Engine::begin_backward(const at::Tensor& loss, bool scale_wrt_gas) {
  impl_->here("backward").units.check_not_captured("backward");
  TESSERA_CHECK_VALUE(loss.defined() && loss.numel() == 1 && loss.grad_fn(), "engine.backward",
                      "loss must be a scalar tensor with a graph (one element and a grad_fn); call forward with "
                      "gradients enabled, or use out.backward(gradient) for other shapes");
  OneThread::Call call(impl_->thread, "backward");
  at::Tensor scaled = impl_->scaling.scaled(loss);
  // From here on end_backward() will come: what is refused above leaves nothing behind.
  impl_->scale_by_accumulation = scale_wrt_gas;
  call.go_on();
  return scaled;
}

at::Tensor Engine::end_backward(const at::Tensor& loss) {
  impl_->thread.leave();
  const double scale = 1.0 / static_cast<double>(impl_->options.gradient_accumulation_steps);
  const bool scaled = std::exchange(impl_->scale_by_accumulation, true);
  const at::Tensor value = loss.detach();
  if (impl_->keeps_losses) impl_->losses.push_back(on_host(value));
  return scaled && scale != 1.0 ? value * scale : value;
}

void Engine::keep_losses() {
  impl_->keeps_losses = true;
}

std::optional<double> Engine::take_loss() {
  const std::vector<KeptLoss> losses = std::exchange(impl_->losses, {});
  const bool waited = impl_->device == at::kCPU || !impl_->options.zero.update_in_backward;
  if (losses.empty() || !waited) return {};
  double sum = 0;
  for (const auto& [value, came] : losses) {
    if (came && !came->query()) came->synchronize();  // of another stream than the step's
    sum += value.item<double>();
  }
  return sum / static_cast<double>(losses.size());
}

void Engine::set_loss(double loss) {
  if (impl_->keeps_losses) impl_->losses = {{at::scalar_tensor(loss, at::kDouble)}};
}

at::Tensor Engine::backward(const at::Tensor& loss, bool retain_graph, bool scale_wrt_gas) {
  const at::Tensor scaled = begin_backward(loss, scale_wrt_gas);
  try {
    scaled.backward({}, retain_graph);
  } catch (...) {
    end_backward(loss);
    throw;
  }
  return end_backward(loss);
}

}  // namespace tessera::engine
