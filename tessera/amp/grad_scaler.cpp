#include "tessera/amp/grad_scaler.h"

#include <algorithm>
#include <cmath>

#include "tessera/base/error.h"

namespace tessera::amp {

namespace {

// Gradients are divided in fp32.
constexpr double kLargest = std::numeric_limits<float>::max();

void check_scale(double scale) {
  TESSERA_CHECK_VALUE(std::isfinite(scale) && scale > 0 && scale <= kLargest, "amp.scaler",
                      "a loss scale must be a finite number > 0, got ", scale);
}

}  // namespace

GradScaler::GradScaler(const ScalerOptions& options) : options_(options) {
  check_scale(options.initial);
  TESSERA_CHECK_VALUE(options.factor > 1, "amp.scaler", "factor must be > 1, got ", options.factor);
  TESSERA_CHECK_VALUE(options.window >= 1, "amp.scaler", "window must be >= 1, got ", options.window);
  TESSERA_CHECK_VALUE(options.hysteresis >= 1, "amp.scaler", "hysteresis must be >= 1, got ", options.hysteresis);
  state_.scale = options.initial;
  state_.budget = options.hysteresis;
}

void GradScaler::update(bool overflow) {
  if (!dynamic()) {
    ++state_.steps;
    return;
  }
  if (overflow) {
    if (state_.budget <= 1) {
      TESSERA_CHECK(!(options_.error_at_minimum && state_.scale <= options_.minimum), "amp.scaler",
                    "the loss scale is already at minimum (", options_.minimum,
                    ") and gradients still have inf or NaN: the run has diverged");
      const double lowered = std::max(state_.scale / options_.factor, options_.minimum);
      if (lowered > 0) state_.scale = lowered;
    } else {
      --state_.budget;
    }
    state_.good_steps = 0;
  } else {
    ++state_.good_steps;
    const int64_t counted = state_.good_steps - (options_.late_growth ? 1 : 0);
    const bool grows = counted > 0 && counted % options_.window == 0;
    if (grows || options_.refill_on_good) state_.budget = options_.hysteresis;
    if (grows && state_.scale * options_.factor <= kLargest) state_.scale *= options_.factor;
  }
  ++state_.steps;
}

void GradScaler::set_scale(double scale) {
  check_scale(scale);
  state_.scale = scale;
}

void GradScaler::override_scale(double scale) {
  set_scale(scale);
  state_.overridden = true;
}

void GradScaler::restore(const State& state) {
  check_scale(state.scale);
  TESSERA_CHECK_VALUE(state.steps >= 0 && state.good_steps >= 0 && state.budget >= 1, "amp.scaler",
                      "a saved state has counters >= 0 and a budget >= 1");
  state_ = state;
}

}  // namespace tessera::amp
