// Scaling: the loss scale of one engine, and what its gradients carry of it; see Note [Loss scaling] in zero/hooks.h.
#pragma once

#include "tessera/amp/grad_scaler.h"
#include "tessera/zero/backward_driver.h"

namespace tessera::engine {

class Scaling {
 public:
  explicit Scaling(const amp::ScalerOptions& options);

  // For a direct backward: returns `x` (a loss, or an output to call backward(gradient) on) times the loss scale; `x` itself
  // where no scale is needed. Allows one backward. Where a scale is needed, a backward through outputs of this engine without it
  // is a runtime error of that backward ("Loss scaling is required"), on every rank; the engine stays usable.
  // Value error for a tensor without a graph.
  at::Tensor scale(const at::Tensor& x);
  // The loss scale and its counters.
  const amp::GradScaler& scaler() const { return scaler_; }
  // Sets the scale. Accumulated gradients (get_full, p.grad) keep the scale that held when the optimizer step began, whatever is
  // set meanwhile; step() divides by that. All ranks set the same.
  void set_scale(double scale);
  void override_scale(double scale);  // the scale is fixed and guarded from here on, in every mode
  void restore(const amp::GradScaler::State& state);
  // The factor that accumulated gradients carry now.
  double gradient_scale() const { return gradient_scale_; }

  // ---- for the engine
  // `driver`: null once the engine is destroyed; calls that need it are state errors then.
  void attach(zero::BackwardDriver* driver);
  // Returns `loss` times the loss scale, without a check of it.
  at::Tensor scaled(const at::Tensor& loss);
  // Gradients were multiplied by `factor`, or dropped.
  void gradients_times(double factor) { gradient_scale_ *= factor; }
  void gradients_dropped();
  void step_done(bool finite);  // may report that the scale is at its minimum

 private:
  zero::BackwardDriver& live(const char* call) const;
  void settle();

  amp::GradScaler scaler_;
  double gradient_scale_ = 1;
  zero::BackwardDriver* driver_ = nullptr;
};

}  // namespace tessera::engine
