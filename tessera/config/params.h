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
// torch_adam); read_torch_optimizer() looks at the parameters of such a type, max_grad_norm excepted.
std::optional<optim::OptimizerOptions> read_optimizer(const Optimizer& optimizer, Report& report);

// Reads an optimizer that read_optimizer() leaves to torch.optim and that torch::optim has in C++, too; empty for others.
std::optional<optim::OptimizerOptions> read_torch_optimizer(const Optimizer& optimizer, Report& report);
// Reports what the class of such a type has in Python only.
void refuse_outside_python(const Optimizer& optimizer, const optim::Type& type, Report& report);

// Reads the schedule. Empty for no type and for a type of torch.optim.lr_scheduler.
std::optional<optim::ScheduleOptions> read_schedule(const Scheduler& scheduler, Report& report,
                                                    const std::string& path = "scheduler.params");
// The schedule of arguments that a program gives it. Value error that lists what is wrong.
optim::ScheduleOptions schedule_of(const std::string& type, const Params& arguments);

}  // namespace tessera::config
