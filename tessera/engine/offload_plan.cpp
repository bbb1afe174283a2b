#include "tessera/engine/offload_plan.h"

#include <ATen/ops/tensor.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/engine/device_share.h"
#include "tessera/engine/impl.h"
#include "tessera/shard/placement.h"
#include "tessera/zero/memory_for.h"
#include "tessera/zero/planner.h"
#include "tessera/zero/rank_guard.h"
#include "tessera/zero/tile.h"
#include "tessera/zero/update_lane.h"

namespace tessera::engine {

namespace {

constexpr int kTiles = 3, kBuckets = 3;  // of an update on its way; of gradients, and of gathered units

// Bytes of `device` that are free for who asks torch's allocator, and all bytes of it.
std::pair<double, double> free_and_all(c10::Device device) {
  auto* const allocator = c10::getDeviceAllocator(device.type());
  const auto [free, all] = allocator->getMemoryInfo(device.index());
  const auto stats = allocator->getDeviceStats(device.index());
  const auto kept = std::max<int64_t>(stats.reserved_bytes[0].current - stats.allocated_bytes[0].current, 0);
  return {static_cast<double>(free) + static_cast<double>(kept), static_cast<double>(all)};
}

// A rank's elements, of the parameters that go into units.
struct Counts {
  double trained = 0, held = 0, largest = 0;
  double bytes_now = 0;  // on the device, where the units' own memory replaces them
};

Counts counts_of(const zero::Options& options, const std::vector<zero::ParamSpec>& params) {
  Counts counts;
  std::map<std::string, double> units;
  for (const zero::ParamSpec& p : params) {
    if (!zero::Planner::holds(options, p)) continue;
    const auto numel = static_cast<double>(p.tensor.numel());
    counts.held += numel;
    counts.trained += p.group >= 0 ? numel : 0;
    counts.largest = std::max(counts.largest, units[p.unit] += numel);
    const bool here = p.tensor.has_storage() && p.tensor.storage().data() != nullptr;
    counts.bytes_now += here ? numel * static_cast<double>(p.tensor.element_size()) : 0;
  }
  return counts;
}

// See docs/offload.md, "Memory".
double ratio_of_memory(const OffloadOptions& asked, const zero::Options& options, const zero::Ranks& ranks,
                       const std::vector<zero::ParamSpec>& params, int moments) {
  const shard::StagePlacements& places = shard::placements_of_stage(options.stage);
  const amp::PrecisionPolicy& precision = options.precision;
  const Counts counts = counts_of(options, params);
  const double shards = ranks.shard->size();
  const auto weight = static_cast<double>(at::elementSize(precision.param));
  const double grad = static_cast<double>(at::elementSize(precision.grad));
  const bool partitioned = places.params == shard::Placement::Shard && (shards > 1 || options.weight_home);
  const double states = update_bytes(precision, moments, false, false).through;
  const bool every_backward = places.reduce_at == shard::ReduceAt::EveryBackward || !options.accumulates;

  Room room;
  room.elements = counts.trained / shards;
  // Gradients that last: from their reduction to the update, or on the host if they leave.
  const double lasting = options.update_in_backward || !every_backward ? 0 : grad;
  const double through = precision.states_are_narrow() ? 1 : options.device_share;
  room.stays = states + lasting;
  room.is_away = options.accumulates ? 0 : through * lasting;
  const auto [free, all] = free_and_all(ranks.device);
  room.bytes = free + counts.bytes_now - asked.reserve * all;
  room.bytes -= options.weight_home && partitioned ? 0 : counts.held * weight / (partitioned ? shards : 1);
  room.bytes -= kBuckets * counts.largest * (grad + (partitioned ? weight : 0));
  const bool held = options.update_in_backward && options.update_runs_on && through > 0;
  room.bytes -= held ? zero::UpdateLane::kHeld * counts.largest * grad : 0;
  room.bytes -= every_backward ? 0 : counts.trained * grad;
  room.bytes -= through > 0 ? kTiles * static_cast<double>(shard::kTile) * (states + grad) : 0;
  room.bytes -= counts.largest / shards * room.stays;  // whole units only
  return ratio_that_fits(room);
}

// The least, or the most, of all ranks' numbers.
double agreed(const zero::Ranks& ranks, double mine, comm::ReduceOp op, const char* what) {
  const at::Tensor number = at::tensor({mine}, at::kDouble);
  ranks.agree(number, op, what);
  return number.item<double>();
}

bool weights_are_away(const zero::Options& options) {
  return options.weight_home && shard::placements_of_stage(options.stage).params == shard::Placement::Shard;
}

template <class F>
void on_all_ranks(const zero::Ranks& ranks, const char* what, const F& f) {
  zero::RankGuard guard(true);
  guard.run([&] { zero::memory_for(f, what); });
  guard.agree(ranks).check(c10::str("[offload] ", what, " failed: "));
}

UpdatedBy updated_by(const zero::Unit& unit) {
  if (zero::lives_on_device(unit)) return UpdatedBy::Device;
  return zero::device_of_update(unit).is_cpu() ? UpdatedBy::Host : UpdatedBy::Through;
}

shard::Residence states_of(const zero::Unit& unit) {
  for (const shard::Buffer* buffer : unit.state_buffers())
    if (buffer->defined()) return buffer->residence();
  return shard::Residence::Device;
}

}  // namespace

offload::Rates measured_rates(const OffloadOptions& asked, const zero::Options& options, const zero::Ranks& ranks) {
  offload::Rates rates;
  on_all_ranks(ranks, "measuring how fast states move", [&] {
    rates = offload::measure_rates({.device = ranks.device, .pin_memory = options.pin_memory, .folder = asked.folder});
  });
  for (double* const rate : rates.all())
    *rate = agreed(ranks, *rate, comm::ReduceOp::Min, "how fast states move");
  return rates;
}

std::optional<offload::Rates> settle_offload(const OffloadOptions& asked, zero::Options& options,
                                             const zero::Ranks& ranks, const std::vector<zero::ParamSpec>& params,
                                             int moments) {
  if (!options.home || params.empty()) return {};
  const bool on_cpu = ranks.device.is_cpu();
  std::optional<offload::Rates> rates;
  if (asked.finds_share && !on_cpu && !options.precision.states_are_narrow()) {
    rates = measured_rates(asked, options, ranks);
    options.device_share =
        best_share(update_bytes(options.precision, moments, weights_are_away(options), !asked.folder.empty()), *rates);
  }
  if (!asked.finds_ratio) return rates;
  TESSERA_CHECK_VALUE(
      !on_cpu || asked.folder.empty(), "offload",
      "zero_optimization.offload_optimizer.ratio auto asks how much room a device has, and the model is "
      "on the CPU: give a number");
  if (on_cpu) return rates;
  double ratio = 0;
  on_all_ranks(ranks, "asking for the device's free memory",
               [&] { ratio = ratio_of_memory(asked, options, ranks, params, moments); });
  options.ratio = agreed(ranks, ratio, comm::ReduceOp::Max, "which states fit on the device");
  return rates;
}

std::string OffloadPlan::text() const {
  std::map<UpdatedBy, double> elements;
  for (const Row& row : units)
    elements[row.by] += static_cast<double>(row.elements);
  std::ostringstream text;
  text.precision(3);
  text << "states: ";
  for (const char* between = ""; const auto& [who, count] : elements) {
    text << between << count << " elements updated by " << (who == UpdatedBy::Host ? "the host" : "the device")
         << (who == UpdatedBy::Through  ? ", which they pass through"
             : who == UpdatedBy::Device ? ", where they live"
                                        : "");
    between = "; ";
  }
  if (!rates) return text.str();
  text << "; measured GB/s: host's update " << rates->host / 1e9;
  if (rates->bus > 0) text << ", bus " << rates->bus / 1e9 << " each way, copy on the device " << rates->device / 1e9;
  if (rates->disk > 0) text << ", disk " << rates->disk / 1e9;
  text << "; predicted for an update: " << milliseconds << " ms (bus " << bus << ", host " << std::max(host, memory);
  if (disk > 0) text << ", disk " << disk;
  text << ")";
  return text.str();
}

double OffloadPlan::step(double forward, double backward, int micro_batches) const {
  TESSERA_CHECK(rates, "offload_plan.step",
                "nothing was measured, so nothing is predicted: let all ranks ask for a plan that measures");
  TESSERA_CHECK_VALUE(forward >= 0 && backward >= 0 && micro_batches >= 1, "offload_plan.step", "forward is ", forward,
                      ", backward ", backward, " and micro_batches ", micro_batches,
                      "; they are milliseconds, 0 at least, and a number, 1 at least");
  return step_time({.forward = forward,
                    .backward = backward,
                    .micro_batches = micro_batches,
                    .in_backward = in_backward,
                    .runs_on = runs_on},
                   milliseconds);
}

void Engine::measure_offload() {
  const OneThread::Call call(impl_->thread, "offload_plan");
  const zero::ShardedModel& model = impl_->here("measure_offload");
  if (!impl_->options.zero.home || impl_->rates) return;
  finish_update();  // what is measured is a machine that does nothing else
  impl_->rates = measured_rates(impl_->options.offload, impl_->options.zero, model.units.ranks());
}

OffloadPlan Engine::offload_plan() const {
  const zero::ShardedModel& model = impl_->here("offload_plan");
  const zero::Options& options = impl_->options.zero;
  OffloadPlan plan;
  plan.in_backward = options.update_in_backward;
  plan.runs_on = options.update_runs_on;
  plan.ratio = options.ratio;
  plan.device_share = options.device_share;
  plan.rates = impl_->rates;
  double away = 0, through = 0;
  bool disk = false;
  for (const zero::Unit* unit : model.updater.in_order_of_update()) {
    const auto& row = plan.units.emplace_back(unit->name(), unit->owned().size(), states_of(*unit), updated_by(*unit));
    if (row.by == UpdatedBy::Device) continue;
    away += static_cast<double>(row.elements);
    through += row.by == UpdatedBy::Through ? static_cast<double>(row.elements) : 0;
    disk = disk || row.states == shard::Residence::Nvme;
  }
  if (!plan.rates || away == 0) return plan;
  const int moments = optim::state_names(impl_->options.rule, impl_->model->units.groups()).count;
  UpdateBytes bytes = update_bytes(options.precision, moments, weights_are_away(options), disk);
  if (model.units.ranks().device.is_cpu()) bytes.through = bytes.of_host = 0;
  const UpdateTime time = update_time(bytes, *plan.rates, through / away);
  const double scale = away * 1e3;
  plan.milliseconds = time.longest() * scale;
  plan.bus = time.bus * scale;
  plan.host = time.host * scale;
  plan.memory = time.memory * scale;
  plan.device = time.device * scale;
  plan.disk = time.disk * scale;
  return plan;
}

}  // namespace tessera::engine
