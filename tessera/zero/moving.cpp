#include "tessera/zero/moving.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/heap.h"
#include "tessera/zero/adoption.h"
#include "tessera/zero/memory_for.h"

namespace tessera::zero {

namespace {

void send(shard::Buffer& buffer, shard::Quantity what, const HomeMaker& home) {
  if (buffer.defined() && buffer.is_here()) buffer.send_to(home(what, buffer.size(), buffer.options()));
}

void send(FlatParams& flat, const HomeMaker& home) {
  if (flat.residence() != shard::Residence::Device) return;
  if (const auto made = home(shard::Quantity::Weight, flat.local_size(), flat.options())) flat.send_to(made);
}

// Freed blocks go back to the system, from the device and from the heap.
void return_memory(c10::Device device) {
  heap::return_free_pages();
  if (device.is_cpu()) return;
  auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  if (allocator != nullptr && allocator->initialized()) allocator->emptyCache();
}

}  // namespace

Moving::Moving(Units& units, BackwardDriver& driver) : units_(units), driver_(driver) {}

void Moving::check() const {
  TESSERA_CHECK_VALUE(!units_.shared().on(), "engine.offload_states",
                      "parameters that all ranks share (tessera.shared_parameters) cannot be moved; switch that off");
  for (const auto& unit : units_.all())
    TESSERA_CHECK(!unit->progress().pooled(), "engine.offload_states", "gradients of unit '", unit->name(),
                  "' are not reduced yet and lie in a buffer of their own (no_sync, or offload_optimizer in stage 1); "
                  "reduce them first: leave no_sync and run a backward that ends a step, or call step()");
}

void Moving::leave(Unit& unit, StateKind kind, const HomeMaker& home) {
  using shard::Quantity;
  unit.on_this_stream();
  const auto [master, residual, state0, state1] = unit.state_buffers();
  switch (kind) {
    case StateKind::OptimizerStates:
      send(*state0, Quantity::State0, home);
      send(*state1, Quantity::State1, home);
      break;
    case StateKind::Masters:
      send(*master, Quantity::Master, home);
      send(*residual, Quantity::Master, home);
      break;
    case StateKind::Weights:
      send(unit.flat(), home);
      break;
    case StateKind::Gradients:
      for (shard::Buffer* buffer : unit.grad_buffers())
        send(*buffer, Quantity::Gradient, home);
      if (unit.partial().defined() && !unit.grads().is_here()) {
        unit.give_partial();
        accumulating_.push_back(&unit);
      }
      break;
    case StateKind::Buckets:
      break;
  }
}

bool Moving::leave(const std::vector<StateKind>& kinds, const HomeMaker& home) {
  const std::lock_guard lock(driver_.hooks().mutex());
  driver_.hooks().run_kept();
  const c10::AutoGradMode no_grad(false);
  check();
  units_.unsharder().settle_before_update();
  adopt_params(units_, /*compare=*/true);
  const auto has = [&](StateKind kind) { return std::ranges::find(kinds, kind) != kinds.end(); };
  units_.set_away(true);  // also when this throws: some states may be
  for (const auto& unit : units_.all())
    for (const StateKind kind : kinds)
      leave(*unit, kind, home);
  if (has(StateKind::Weights))
    for (const auto& flat : units_.frozen())
      send(*flat, home);
  if (has(StateKind::Buckets)) {
    driver_.reducer().free_buckets();
    units_.unsharder().free_buckets();
  }
  const bool any = std::ranges::any_of(units_.all(), [](const auto& unit) {
    const auto gone = [](const shard::Buffer* buffer) { return buffer->is_sent(); };
    return std::ranges::any_of(unit->state_buffers(), gone) || std::ranges::any_of(unit->grad_buffers(), gone) ||
           unit->flat().is_sent();
  });
  units_.set_away(any || std::ranges::any_of(units_.frozen(), [](const auto& flat) { return flat->is_sent(); }));
  return_memory(units_.ranks().device);
  return units_.is_away();
}

void Moving::come_back() {
  const std::lock_guard lock(driver_.hooks().mutex());
  const c10::AutoGradMode no_grad(false);
  if (!units_.is_away()) return;
  for (const auto& unit : units_.all()) {
    const auto bring = [&](shard::Buffer* buffer) {
      memory_for([&] { buffer->bring_back(); }, "the states of unit '", unit->name(), "', which come back");
    };
    std::ranges::for_each(unit->state_buffers(), bring);
    std::ranges::for_each(unit->grad_buffers(), bring);
  }
  weights_come_back();
  for (const auto& unit : units_.all())
    unit->note_master();
  for (Unit* unit : std::exchange(accumulating_, {}))
    unit->put_partial(unit->grads().tensor());
  units_.set_away(false);
  return_memory(at::kCPU);
  units_.return_host_memory();
}

// Brings back all weights that can come, also when there is an error.
void Moving::weights_come_back() {
  std::exception_ptr failure;
  const auto bring = [&](FlatParams& flat) {
    try {
      memory_for([&] { flat.bring_back(); }, "the weights of unit '", flat.name(), "', which come back");
    } catch (...) {
      failure = std::current_exception();
    }
  };
  for (const auto& unit : units_.all())
    bring(unit->flat());
  for (const auto& flat : units_.frozen())
    bring(*flat);
  if (failure) std::rethrow_exception(failure);
}

}  // namespace tessera::zero
