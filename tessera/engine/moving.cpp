// States that leave the device for a while.
#include "tessera/base/error.h"
#include "tessera/engine/checkpoint.h"
#include "tessera/engine/impl.h"
#include "tessera/offload/states.h"
#include "tessera/optim/advice.h"
#include "tessera/shard/placement.h"

namespace tessera::engine {

void Engine::offload_states(const std::vector<zero::StateKind>& kinds, shard::Residence to, bool pin_memory) try {
  const OneThread::Call call(impl_->thread, "offload_states");
  Impl& m = *impl_;
  zero::ShardedModel& model = m.live("offload_states");
  const zero::Options& zero = m.options.zero;
  TESSERA_CHECK_VALUE(shard::placements_of_stage(zero.stage).shards_states(), "engine.offload_states",
                      "needs zero_optimization.stage 1, 2 or 3");
  TESSERA_CHECK_VALUE(!zero.weight_home, "engine.offload_states",
                      "zero_optimization.offload_param is configured: parameters do not live on the device anyway");
  TESSERA_CHECK_VALUE(m.options.rule != optim::Rule::External, "engine.offload_states",
                      "a client's own optimizer holds tensors of its own; ", optim::use_native());
  TESSERA_CHECK_VALUE(to != shard::Residence::Nvme || !m.options.nvme_path.empty(), "engine.offload_states",
                      "device nvme needs a folder: set zero_optimization.offload_optimizer.nvme_path");
  model.regions.check_none_open();
  if (m.checkpointer) m.checkpointer->wait();
  finish_update();
  zero::HomeMaker& home = m.homes[{to, pin_memory}];
  if (!home)
    home = offload::state_homes(
        {.residence = to, .folder = m.options.nvme_path, .pin_memory = pin_memory, .what = "states"});
  model.moving.leave(kinds, home);
} catch (c10::OutOfMemoryError& error) {
  impl_->model->units.fail_alone(error);
}

void Engine::reload_states() try {
  const OneThread::Call call(impl_->thread, "reload_states");
  impl_->live("reload_states").moving.come_back();
} catch (c10::OutOfMemoryError& error) {
  impl_->model->units.fail_alone(error);
}

bool Engine::states_are_away() const {
  return impl_->model != nullptr && impl_->model->units.is_away();
}

}  // namespace tessera::engine
