#include "tessera/zero/sharded_model.h"

#include "tessera/zero/update_lane.h"

namespace tessera::zero {

ShardedModel::ShardedModel(const Options& options, const comm::Mesh& mesh, const std::vector<ParamSpec>& params,
                           optim::Rule rule, const std::vector<optim::GroupOptions>& groups,
                           std::function<StepState()> step)
    : units(options, mesh, params, rule, groups),
      driver(units, std::move(step)),
      modules(units, driver),
      regions(units, driver),
      updater(units, driver),
      early(units, driver, updater),
      joining(units, driver, modules, regions, early),
      states(units, driver),
      accumulation(units, driver),
      moving(units, driver) {}

Memory ShardedModel::memory() const {
  Memory memory;
  const auto count = [&](shard::Residence where, int64_t bytes) {
    if (where == shard::Residence::Host) memory.host += bytes;
    if (where == shard::Residence::Nvme) memory.disk += bytes;
  };
  for (const auto& unit : units.all()) {
    memory.params += unit->flat().bytes();
    for (const shard::Buffer* buffer : unit->grad_buffers()) {
      memory.grads += buffer->bytes();
      count(buffer->residence(), buffer->bytes());
    }
    memory.master += unit->master().bytes() + unit->residual().bytes();
    for (const shard::Buffer& state : unit->states())
      memory.states += state.bytes();
    for (const shard::Buffer* buffer : unit->state_buffers())
      count(buffer->residence(), buffer->bytes());
    count(unit->flat().residence(), unit->flat().bytes());
  }
  for (const auto& flat : units.frozen()) {
    memory.params += flat->bytes();
    count(flat->residence(), flat->bytes());
  }
  memory.buckets = driver.reducer().pool_bytes() + units.unsharder().bytes();
  memory.peak_buckets = driver.reducer().peak_pool_bytes() + units.unsharder().peak_bytes();
  memory.shared = units.shared().bytes();
  return memory;
}

ShardedModel::~ShardedModel() {
  units.lane().stop();
  try {
    driver.remove();
    updater.abandon();
    units.release("its engine was destroyed; gather it before, or save a checkpoint");
  } catch (const std::exception&) {
    // A device that fails: its next use throws.
  }
}

}  // namespace tessera::zero
