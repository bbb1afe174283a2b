// LastNorm: the norm of an update, which a device may not have computed yet.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

namespace c10 {
struct Event;
}  // namespace c10

namespace tessera::engine {

class LastNorm {
 public:
  LastNorm() = default;
  explicit LastNorm(std::optional<double> norm) : norm_(norm) {}
  // `squares`: their sum is the norm's square; undefined: the norm is `norm`. `asked`: somebody will ask, while the device has
  // other work: the squares are sent to the host now, and asking waits for no more than that.
  LastNorm(double norm, const at::Tensor& squares, bool asked);

  // The norm; waits for a device that has not computed it. None: there was no update.
  std::optional<double> get() const;

 private:
  mutable std::optional<double> norm_;
  mutable at::Tensor squares_;
  mutable std::shared_ptr<c10::Event> came_;
};

}  // namespace tessera::engine
