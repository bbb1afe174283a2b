#include "tessera/config/estimate.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/config/precision.h"
#include "tessera/config/resolve.h"
#include "tessera/config/served.h"
#include "tessera/parallel/plan.h"

namespace tessera::config {

namespace {

constexpr int64_t kTile = 1 << 22;  // elements of an update on the host, of which three are under way

int64_t largest_two(std::vector<int64_t> units) {
  std::sort(units.begin(), units.end(), std::greater<>());
  if (units.size() > 2) units.resize(2);
  return std::accumulate(units.begin(), units.end(), int64_t{0});
}

bool accumulates(const Config& config) {
  const int64_t unknown = config.train_batch_size ? 2 : 1;
  return config.gradient_accumulation_steps.value_or(unknown) > 1 || !config.managed_gradient_accumulation;
}

// Gradients are reduced in the backward that makes them; else they are whole until the accumulation boundary.
bool reduced_at_once(const Config& config) {
  const shard::StagePlacements& places = placements(config);
  return places.reduce_at == shard::ReduceAt::EveryBackward || (places.shards_states() && !accumulates(config));
}

int64_t part_of(int64_t count, double share) {
  return static_cast<int64_t>(static_cast<double>(count) * share);
}

// Bytes of one element.
struct Widths {
  int64_t param, grad, states;
  bool narrow;  // nothing of the states has more than 16 bits
};

Widths widths_of(const Config& config) {
  const auto mode = precision(config);
  const auto size = [](at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); };
  auto optimizer = native_optimizer(config);
  if (!optimizer) optimizer = torch_optimizer(config);
  const int64_t states = optimizer ? optim::state_count(*optimizer) : 2;
  return {size(mode.param), size(mode.grad), mode.bytes_per_parameter(states) - size(mode.param) - size(mode.grad),
          mode.states_are_narrow()};
}

// Moves states by offload_optimizer. `own`: elements that this rank updates; `most`: of the two largest units.
void put_states_away(Estimate& found, const Config& config, int64_t own, int64_t most, const Widths& widths) {
  const OffloadOptimizer& offload = config.zero_optimization.offload_optimizer;
  if (offload.device == OffloadDevice::None) return;
  const bool on_disk = offload.device == OffloadDevice::Nvme;
  const int64_t away = part_of(own, offload.ratio.value_or(1));
  // The device updates states of 16 bits and a share of others; gradients stay with it where one backward makes them.
  const double through = widths.narrow ? 1 : config.tessera.device_share.value_or(0);
  const int64_t leave = accumulates(config) ? away : away - part_of(away, through);
  // Two buckets of a unit's gradients go through, and the rest stays. Stage 1 adds up on the device instead.
  if (reduced_at_once(config)) found.grads = std::min(found.grads, (own - leave + most) * widths.grad);
  found.states -= away * widths.states;
  found.host += leave * widths.grad + (on_disk ? std::min(away, 3 * kTile) : away) * widths.states;
  if (on_disk) found.disk += away * widths.states;
}

// Moves parameters by offload_param, which is for partitioned parameters only.
void put_params_away(Estimate& found, const Config& config, const Widths& widths) {
  const OffloadParam& offload = config.zero_optimization.offload_param;
  if (offload.device == OffloadDevice::None || !placements(config).shards_params()) return;
  int64_t kept = found.params;
  if (offload.device == OffloadDevice::Nvme) {  // the first units stay in host memory, the others pass in tiles
    const int64_t first = std::min(found.params, offload.max_in_cpu * widths.param);
    kept = first + std::min(found.params - first, 3 * kTile * widths.param);
    found.disk += found.params - first;
  }
  found.host += kept;
  found.params = 0;
}

}  // namespace

ModelSizes sizes_of(const std::vector<SizedParam>& params, const parallel::Plan* plan) {
  std::map<std::string, std::pair<int64_t, int64_t>> slices;  // the longest slice, and of how much
  for (const parallel::Decision& cut : plan == nullptr ? std::vector<parallel::Decision>() : plan->decisions) {
    if (cut.partition == parallel::Partition::Skip) continue;
    const std::pair slice(std::ranges::max(cut.sizes()), cut.total);
    slices[cut.path + "." + cut.param] = slice;
    if (cut.partition == parallel::Partition::Column) slices[cut.path + ".bias"] = slice;
  }
  ModelSizes sizes;
  std::map<std::string, int64_t> units;
  for (const SizedParam& param : params) {
    const auto slice = slices.find(param.name);
    const auto [most, whole] = slice == slices.end() ? std::pair<int64_t, int64_t>(1, 1) : slice->second;
    const int64_t count = param.elements * most / whole;
    units[param.unit] += count;
    (param.trained ? sizes.trained : sizes.frozen) += count;
  }
  for (const auto& [unit, count] : units)
    sizes.units.push_back(count);
  return sizes;
}

ModelSizes sizes_of(int64_t count, const Config& config) {
  TESSERA_CHECK_VALUE(count >= 0, "estimate", "a model has no ", count, " parameters");
  const int64_t ranks = tensor_parallel_ranks(config);
  return {.trained = (count + ranks - 1) / ranks};
}

int64_t tensor_parallel_ranks(const Config& config) {
  return std::max<int64_t>(1, config.tensor_parallel.autotp_size);
}

Config with_stage(const Config& config, int64_t stage) {
  Config other = config;
  other.zero_optimization.stage = stage;
  other.given.try_emplace("zero_optimization.stage", "zero_optimization.stage");
  other.validate();
  check_served(other);
  return other;
}

Estimate estimate(const ModelSizes& sizes, const Config& config, int ranks) {
  return estimate(sizes, config,
                  comm::mesh_shape(ranks, static_cast<int>(config.zero_optimization.mics_shard_size),
                                   static_cast<int>(config.sequence_parallel_size),
                                   static_cast<int>(tensor_parallel_ranks(config))));
}

Estimate estimate(const ModelSizes& sizes, const Config& config, const comm::MeshShape& mesh) {
  const shard::StagePlacements& places = placements(config);
  const ZeroOptimization& zero = config.zero_optimization;
  const int64_t sharing = mesh.size(comm::kStateAxes), most = largest_two(sizes.units);
  const Widths widths = widths_of(config);
  const auto share = [&](int64_t count, bool sharded) { return sharded ? (count + sharing - 1) / sharing : count; };
  const bool slices = sharing > 1 || zero.offload_param.device != OffloadDevice::None;  // offload: for one rank, too
  Estimate found{
      .stage = zero.stage,
      .params = share(sizes.trained + sizes.frozen, places.shards_params()) * widths.param,
      .grads = share(sizes.trained, reduced_at_once(config)) * widths.grad,
      .states = share(sizes.trained, places.shards_states()) * widths.states,
      .gathered = places.shards_params() && slices ? most * widths.param : 0,
  };
  put_states_away(found, config, share(sizes.trained, true), most, widths);
  put_params_away(found, config, widths);
  return found;
}

}  // namespace tessera::config
