#include "tessera/engine/device_share.h"

#include <algorithm>
#include <array>
#include <vector>

namespace tessera::engine {

namespace {

double size_of(at::ScalarType dtype) {
  return static_cast<double>(at::elementSize(dtype));
}

double ratio_of(double bytes, double rate) {
  return rate > 0 ? bytes / rate : 0;
}

}  // namespace

UpdateBytes update_bytes(const amp::PrecisionPolicy& precision, int moments, bool weights, bool disk) {
  const double weight = size_of(precision.param);
  const double master = precision.master == amp::Master::Fp32 ? 4 : precision.master == amp::Master::Split ? 2 : 0;
  const double states = master + moments * size_of(precision.state);
  return {.through = states + (weights ? weight : 0),
          .of_host = weights ? 0 : weight,
          .kernel = size_of(precision.grad) + 2 * (weight + states),
          .disk = disk ? 2 * states : 0};
}

double UpdateTime::longest() const {
  return std::max({bus, host, memory, device, disk});
}

UpdateTime update_time(const UpdateBytes& bytes, const offload::Rates& rates, double share) {
  const double bus = share * bytes.through + (1 - share) * bytes.of_host;
  const double kernel = (1 - share) * bytes.kernel;
  return {.bus = ratio_of(bus, rates.bus),
          .host = ratio_of(kernel, rates.host),
          .memory = ratio_of(kernel + 2 * bus, rates.memory),
          .device = ratio_of(share * (bytes.kernel + 2 * bytes.through), rates.device),
          .disk = ratio_of(bytes.disk, rates.disk)};
}

double step_time(const StepTime& step, double update) {
  const double beside = (step.in_backward ? step.backward : 0) + (step.runs_on ? step.forward : 0);
  return step.micro_batches * (step.forward + step.backward) + std::max(update - beside, 0.0);
}

// Each time is a line over the share, so the least of the longest time is at an end or where two lines cross.
double best_share(const UpdateBytes& bytes, const offload::Rates& rates) {
  const auto lines = [&](double share) {
    const UpdateTime time = update_time(bytes, rates, share);
    return std::array{time.bus, time.host, time.memory, time.device};
  };
  const auto none = lines(0), all = lines(1);
  std::vector<double> shares{0, 1};
  for (size_t a = 0; a < none.size(); ++a)
    for (size_t b = 0; b < a; ++b) {
      const double apart = none[a] - none[b], apart_then = all[a] - all[b];
      const double crossing = apart == apart_then ? 0 : apart / (apart - apart_then);
      if (crossing > 0 && crossing < 1) shares.push_back(crossing);
    }
  std::ranges::sort(shares);
  return *std::ranges::min_element(shares, {}, [&](double share) { return std::ranges::max(lines(share)); });
}

double ratio_that_fits(const Room& room) {
  const double each = room.elements * (room.stays - room.is_away);
  if (each <= 0) return 0;
  return 1 - std::clamp((room.bytes - room.elements * room.is_away) / each, 0.0, 1.0);
}

}  // namespace tessera::engine
