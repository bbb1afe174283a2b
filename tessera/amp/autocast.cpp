#include "tessera/amp/autocast.h"

#include <ATen/autocast_mode.h>

#include "tessera/base/error.h"

namespace tessera::amp {

void check(const AutocastOptions& options, c10::DeviceType device) {
  if (!options.enabled || options.dtype == at::kFloat) return;
  TESSERA_CHECK_VALUE(options.dtype == at::kHalf || options.dtype == at::kBFloat16, "amp.autocast",
                      "the dtype must be fp16, bf16 or fp32, got ", options.dtype);
  TESSERA_CHECK_VALUE(at::autocast::is_autocast_available(device), "amp.autocast", "torch has no autocast for device '",
                      c10::DeviceTypeName(device, /*lower_case=*/true), "'");
}

AutocastRegion::AutocastRegion(const AutocastOptions& options, c10::DeviceType device) : device_(device) {
  const bool on = options.enabled && options.dtype != at::kFloat;
  if (!at::autocast::is_autocast_available(device)) {
    idle_ = true;
    return;
  }
  was_enabled_ = at::autocast::is_autocast_enabled(device);
  idle_ = !on && !was_enabled_;
  if (idle_) return;
  switched_off_ = was_enabled_ && !options.enabled;
  was_dtype_ = at::autocast::get_autocast_dtype(device);
  was_cached_ = at::autocast::is_autocast_cache_enabled();
  at::autocast::set_autocast_enabled(device, on);
  if (on) at::autocast::set_autocast_dtype(device, options.dtype);
  at::autocast::set_autocast_cache_enabled(false);
  at::autocast::increment_nesting();
  at::autocast::clear_cache();
}

void AutocastRegion::leave() const {
  if (idle_) return;
  at::autocast::decrement_nesting();
  at::autocast::clear_cache();
  at::autocast::set_autocast_cache_enabled(was_cached_);
  at::autocast::set_autocast_enabled(device_, was_enabled_);
  at::autocast::set_autocast_dtype(device_, was_dtype_);
}

}  // namespace tessera::amp
