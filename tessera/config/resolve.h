// From the tree to the option structs of the layers below. All functions are pure and expect a
// validated Config.
#pragma once

#include <optional>
#include <string>

#include "tessera/amp/autocast.h"
#include "tessera/amp/grad_scaler.h"
#include "tessera/config/config.h"
#include "tessera/optim/schedule.h"
#include "tessera/optim/types.h"
#include "tessera/shard/placement.h"
#include "tessera/zero/options.h"

namespace tessera::config {

// What zero_optimization.stage means.
const shard::StagePlacements& placements(const Config& config);

// How losses are scaled: section fp16; in ZeRO (stages 1 to 3) with hysteresis and an error at the minimum, in stage 0
// without. torch_autocast in fp16 without the section: torch.amp's rules. No scaling otherwise.
amp::ScalerOptions scaler_options(const Config& config);

// The options of section torch_autocast; bf16 where it names no dtype.
amp::AutocastOptions autocast_options(const Config& config);

// What gradient_clipping holds for: the norm of all gradients, that of each unit's, or all, clipped by the norm of the step
// before.
enum class Clip { Global, Unit, Previous };
Clip clip_rule(const Config& config);

// Unset overlap_comm means true: results do not depend on it. With managed_gradient_accumulation
// false the reduction waits for step() in stages 0 and 1.
zero::Options zero_options(const Config& config);

// The configured optimizer where the table has it (optim/types.h), in any letter case. Empty when the configuration names
// none, or a class of torch.optim (also Adam with torch_adam and amsgrad).
std::optional<optim::OptimizerOptions> native_optimizer(const Config& config);

// The configured optimizer where the table does not have it and torch::optim has it in C++, too: RMSprop, Adam and AdamW with
// torch_adam and amsgrad. Empty for others. For the C++ front end.
std::optional<optim::OptimizerOptions> torch_optimizer(const Config& config);

// Rule and defaults of optimizer.type and adam_w_mode, whatever the other parameters ask for; empty as native_optimizer(), but
// not for Adam. For who builds the optimizer itself.
std::optional<optim::OptimizerOptions> optimizer_kind(const Config& config);

// The configured schedule where it is one of optim/schedule.h, which has some of torch.optim.lr_scheduler; empty for others, and
// when none is named.
std::optional<optim::ScheduleOptions> native_schedule(const Config& config);

// Value error for an engine without an optimizer at a stage that cuts what an optimizer has.
void check_without_optimizer(const Config& config);

// For an optimizer that is not known to update element by element: value error where the stage cuts its states, or `is_cut`, which
// says that tensor parallelism does; none where zero_allow_untested_optimizer is true. `name`: its class.
void refuse_slices(const Config& config, const std::string& name, bool is_cut);

// Not-implemented error for the classes of torch's optimizers that no engine can run: LBFGS and SparseAdam.
void refuse_class(const std::string& name);

// Value error for an optimizer, of the class `name`, that is to round at random: an engine rounds as its configuration says.
void refuse_rounding(const std::string& name);

// What a type is that C++ does not run, for messages: " (CyclicLR does in Python only)", " ('Adamm' is none: did you mean "Adam"?)".
std::string where_optimizer_runs(const std::string& type);
std::string where_schedule_runs(const std::string& type);
// The schedules that a configuration can name in C++, for messages.
std::string cpp_schedules();

}  // namespace tessera::config
