// What a pipeline is not built of, and what its stages must have alike: one rule for both front ends.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/config/config.h"
#include "tessera/pipeline/ranks.h"

namespace tessera::pipeline {

// Not-implemented error for stage 3 in several stages; value error without managed_gradient_accumulation. Local.
void check_served(const Config& config, int stages);
// Value error for chunks of a stage that are none, or several of the only stage. Local.
void check_chunks(int chunks, int stages);
// Not-implemented error where this stage has `tied` weights and updates would round at random. Local.
void check_ties(const Config& config, bool tied);
// Not-implemented error for a call that writes the whole model's weights into files of others, where no stage has them. Local.
void check_one_stage(const char* call, int stages);

using Named = std::pair<std::string, std::string>;  // a thing, and its value in JSON
// Of a configuration.
std::vector<Named> alike_of(const Config& config);
// Value error, on all ranks, that names what two of them have differently: "[pipeline] chunks is 1 on rank 0 and 2 on rank 1".
// Collective.
void check_alike(comm::Group& everyone, const std::vector<Named>& own, at::Device device = at::kCPU);

// An optimizer: a param group has one number and the same values on all stages, since a checkpoint has it once.
struct OptimizerForm {
  std::string kind;
  std::vector<std::vector<Named>> groups;
};
// Value error, on all ranks, that names what two of them have differently. Collective.
void check_optimizers(const Ranks& ranks, const std::optional<OptimizerForm>& own);
// `taken`: by param group, how many parameters of this stage it has. Value error, on all ranks, for one that has none on any stage.
// Collective; as many groups on all stages.
void check_groups_take(const Ranks& ranks, const std::vector<int64_t>& taken);

}  // namespace tessera::pipeline
