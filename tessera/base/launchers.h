// Which launcher started this process, by the names of the variables that it sets: Note [Who started this process] in comm/launch.h.
// Needs no torch: tessera-run includes this file, too.
#pragma once

#include <charconv>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

namespace tessera {

// The number that decimal digits and nothing else give.
inline std::optional<uint64_t> digits_as_number(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

struct LauncherNames {
  const char *rank, *size, *local_rank, *local_size;
  bool slurm = false;
};
inline constexpr LauncherNames kTorchrun{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
inline constexpr LauncherNames kOpenMpi{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "OMPI_COMM_WORLD_LOCAL_SIZE"};
inline constexpr LauncherNames kPmi{"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};
inline constexpr LauncherNames kSlurm{"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", true};

// Below, get(name) is the value of a variable; nothing where it is unset or empty.

template <class Get>
std::optional<std::string> first_set(const Get& get, std::initializer_list<const char*> names) {
  for (const char* name : names)
    if (auto text = get(name)) return text;
  return std::nullopt;
}

// The names of a step of SLURM; nothing outside of a step. A job's script alone has ENVIRONMENT=BATCH, which its steps
// inherit: the variable decides where a container, say, has not passed on the number of the step.
template <class Get>
std::optional<LauncherNames> slurm_step(const Get& get) {
  constexpr uint64_t kNoStep = 0xfffffff0;  // from here on: a job's script, its shell and the like
  const auto number = [&](const char* name) { return digits_as_number(get(name).value_or("")).value_or(0); };
  LauncherNames names = kSlurm;
  if (get("SLURM_STEP_NUM_TASKS")) names.size = "SLURM_STEP_NUM_TASKS";
  if (number(kSlurm.rank) > 0) return names;  // the script's own process is number 0
  if (const auto step = first_set(get, {"SLURM_STEP_ID", "SLURM_STEPID"})) {
    const auto digits = digits_as_number(*step);
    return digits && *digits < kNoStep ? std::optional(names) : std::nullopt;
  }
  const bool of_step = first_set(get, {"SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"}) ||
                       get("ENVIRONMENT") != "BATCH";
  return get(kSlurm.rank) && number(names.size) > 1 && of_step ? std::optional(names) : std::nullopt;
}

// The launcher that started this process, where it is neither torchrun nor one that sets torchrun's names.
template <class Get>
std::optional<LauncherNames> other_launcher(const Get& get) {
  if (get(kOpenMpi.rank) || get(kOpenMpi.size)) return kOpenMpi;
  const auto slurm = slurm_step(get);
  const auto rank = get(kPmi.rank), size = get(kPmi.size);
  // srun --mpi=pmi2 sets PMI's names beside its own, which say more.
  const bool of_srun = slurm && rank == get(slurm->rank) && size == get(slurm->size);
  if ((rank || size) && !of_srun) return kPmi;
  return slurm;
}

// Why a process may not start ranks, where nobody has said which host of how many this is: several tasks of srun or mpirun, each
// of which starts some, are worlds of their own. Empty where it may.
template <class Get>
std::string why_not_started_here(const Get& get) {
  const auto by = other_launcher(get);
  const std::string count = by ? get(by->size).value_or("") : "";
  if (digits_as_number(count).value_or(1) < 2) return "";
  return std::string(by->size) + " is " + count +
         ": each of these processes would start a world of its own. Have the program itself started by srun or mpirun, "
         "or one "
         "launcher on each host with --num_nodes, --node_rank and --master_addr; --num_nodes 1 where such worlds are "
         "meant";
}

}  // namespace tessera
