#include "tessera/engine/scaling.h"

#include "tessera/base/error.h"

namespace tessera::engine {

Scaling::Scaling(const amp::ScalerOptions& options) : scaler_(options) {}

zero::BackwardDriver& Scaling::live(const char* call) const {
  TESSERA_CHECK(driver_ != nullptr, "engine", call, ": the engine was destroyed; build a new one");
  return *driver_;
}

void Scaling::attach(zero::BackwardDriver* driver) {
  driver_ = driver;
  if (driver_ != nullptr) settle();
}

// Guards backwards as the scale needs; gradients that are there keep their scale.
void Scaling::settle() {
  driver_->hooks().guard(scaler_.needed());
  if (!driver_->has_gradients()) gradient_scale_ = scaler_.scale();
}

at::Tensor Scaling::scaled(const at::Tensor& loss) {
  zero::BackwardDriver& driver = live("scale");
  return scaler_.needed() ? driver.hooks().scale(loss, scaler_.scale()) : loss;
}

at::Tensor Scaling::scale(const at::Tensor& x) {
  live("scale");
  TESSERA_CHECK_VALUE(x.defined() && at::isFloatingType(x.scalar_type()) && x.grad_fn(), "engine.scale",
                      "scale() takes a scalar tensor with a graph (a loss), or any other floating tensor with a graph; "
                      "call forward with gradients enabled");
  return scaled(x);
}

void Scaling::set_scale(double scale) {
  live("set_loss_scale");
  scaler_.set_scale(scale);
  settle();
}

void Scaling::override_scale(double scale) {
  live("override_loss_scale");
  scaler_.override_scale(scale);
  settle();
}

void Scaling::restore(const amp::GradScaler::State& state) {
  live("restore_scaler");
  scaler_.restore(state);
  settle();
}

void Scaling::gradients_dropped() {
  settle();
}

void Scaling::step_done(bool finite) {
  scaler_.update(!finite);
  settle();
}

}  // namespace tessera::engine
