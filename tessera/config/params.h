// Turns optimizer.params and scheduler.params into the option structs of optim/. Internal to config/.
#pragma once

#include <optional>
#include <string>

#include "tessera/config/config.h"
#include "tessera/config/text.h"
#include "tessera/optim/schedule.h"
#include "tessera/optim/types.h"

namespace tessera::config {

// All names that optimizer.type may have, but for those that only torch.optim has.
std::vector<std::string> optimizer_types();

// Rule and defaults of the type, with adam_w_mode; empty for a type that only torch.optim has. Other parameters are not
// looked at.
std::optional<optim::OptimizerOptions> kind_of(const Optimizer& optimizer);

// Reads the optimizer. Empty for no type, for a type of torch.optim and for what a rule does not do (amsgrad with
// torch_adam); the parameters of such a type are not looked at, except max_grad_norm.
std::optional<optim::OptimizerOptions> read_optimizer(const Optimizer& optimizer, Report& report);

// Reads an optimizer that read_optimizer() leaves to torch.optim and that torch::optim has in C++, too; empty for others.
std::optional<optim::OptimizerOptions> read_torch_optimizer(const Optimizer& optimizer, Report& report);

// The schedules of optim/schedule.h.
std::vector<std::string> schedule_types();

// Reads the schedule. Empty for no type and for one that optim/schedule.h has not. Types of torch.optim.lr_scheduler have their
// exact names, others any letter case.
std::optional<optim::ScheduleOptions> read_schedule(const Scheduler& scheduler, Report& report);

}  // namespace tessera::config
