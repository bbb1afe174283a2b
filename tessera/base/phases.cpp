#include "tessera/base/phases.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <string>

namespace tessera {

const char* phase_name(Phase phase) {
  switch (phase) {
    case Phase::Forward:
      return "forward";
    case Phase::Backward:
      return "backward";
    case Phase::Step:
      return "step";
    case Phase::Gather:
      return "gather";
    case Phase::Reduce:
      return "reduce";
  }
  return "?";
}

void Phases::wait_for(c10::Device device) {
  if (device.is_cpu()) return;
  device_ = device;
}

void Phases::settle() const {
  if (device_) c10::impl::VirtualGuardImpl(device_->type()).synchronizeDevice(device_->index());
}

void Phases::begin(Phase phase) {
  Entry& entry = at(phase);
  if (entry.depth == 0) {
    settle();  // where it throws, the phase has not begun
    entry.began = Clock::now();
  }
  ++entry.depth;
}

void Phases::end(Phase phase) {
  Entry& entry = at(phase);
  if (entry.depth == 0 || --entry.depth > 0) return;
  settle();
  entry.total.time += Clock::now() - entry.began;
  ++entry.total.times;
}

PhaseScope::~PhaseScope() {
  try {
    phases_.end(phase_);
  } catch (const std::exception&) {
    // A device that fails, maybe while its error passes: its next use throws.
  }
}

NamedRange::NamedRange(std::string_view what, std::string_view of) : range_(at::RecordScope::USER_SCOPE) {
  if (!range_.isActive()) return;
  std::string name = "tessera::";
  name += what;
  if (!of.empty()) (name += ' ') += of;
  range_.before(std::string_view(name));
}

}  // namespace tessera
