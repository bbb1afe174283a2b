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
      unit->send(kind, home);
  if (has(StateKind::Weights))
    for (const auto& flat : units_.frozen())
      flat->send(home);
  if (has(StateKind::Buckets)) {
    driver_.reducer().free_buckets();
    units_.unsharder().free_buckets();
  }
  const bool any = std::ranges::any_of(units_.all(), [](const auto& unit) { return unit->is_sent(); });
  units_.set_away(any || std::ranges::any_of(units_.frozen(), [](const auto& flat) { return flat->is_sent(); }));
  return_memory(units_.ranks().device);
  return units_.is_away();
}

void Moving::come_back() {
  const std::lock_guard lock(driver_.hooks().mutex());
  const c10::AutoGradMode no_grad(false);
  if (!units_.is_away()) return;
  for (const auto& unit : units_.all())
    unit->bring_back();
  weights_come_back();
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
