// What both front ends say of optimizers that cannot do what is asked for (types.cpp).
#pragma once

#include <string>

#include "tessera/optim/schedule.h"

namespace tessera::optim {

// What to do where an optimizer that updates by itself is refused: "name one of ... in the configuration, or pass ...".
std::string use_native();
// The warning of a schedule that cycles betas, of an optimizer (by name) without; empty for other schedules.
std::string warn_of_betas(const ScheduleOptions& schedule, bool has_betas, const std::string& optimizer);

}  // namespace tessera::optim
