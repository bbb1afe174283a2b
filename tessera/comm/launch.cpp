#include "tessera/comm/launch.h"

#include <c10/util/StringUtil.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/launchers.h"
#include "tessera/comm/slurm_lists.h"

namespace tessera::comm {
namespace {

constexpr int kPort = 29500;                            // torchrun's
constexpr uint64_t kFirstPort = 20000, kPorts = 12000;  // below the ports that systems give out themselves
constexpr uint64_t kOfStep = 1009;                      // for a step's number; has no factor in common with kPorts

constexpr const char* kAgentOfTessera = "tessera";  // the run_id of python/tessera/launch.py

using Names = LauncherNames;
constexpr Names kDiscovered[] = {kOpenMpi, kPmi, kSlurm};

struct Chosen {
  Names names = kTorchrun;
  bool other = false;  // another launcher's than torchrun
};

// Chooses the variables. Value error where another launcher's would have to complete RANK or WORLD_SIZE.
Chosen choose(const LaunchRequest& request) {
  const auto rank = env::get(kTorchrun.rank), size = env::get(kTorchrun.size);
  const bool whole = (rank || request.rank >= 0) && (size || request.size > 0);
  const auto other = request.discover && !(whole && (rank || size)) ? other_launcher(env::get) : std::nullopt;
  const auto unknown = request.discover && !other && !whole && !rank && !size ? env::get("PMIX_RANK") : std::nullopt;
  TESSERA_CHECK_VALUE(!unknown, "comm", "PMIX_RANK is ", *unknown,
                      ", but nothing says how many ranks there are; set RANK and WORLD_SIZE");
  if (!other) return {};
  if (!rank && !size) return {*other, true};
  const char* const missing = rank ? kTorchrun.size : kTorchrun.rank;
  const char* const theirs = rank ? other->size : other->rank;
  TESSERA_CHECK_VALUE(false, "comm", rank ? kTorchrun.rank : kTorchrun.size, " is ", rank ? *rank : *size, ", but ",
                      missing, " is not set; ", theirs, " is ", env::get(theirs).value_or("not set"),
                      ", which is another launcher's and not mixed with it: set both RANK and WORLD_SIZE, or neither");
}

void read_ranks(Launch& own, const LaunchRequest& request, const Chosen& by) {
  const char *const rank = by.names.rank, *const size = by.names.size;
  const char* const rank_name = request.rank >= 0 ? "rank" : rank;
  const char* const size_name = request.size > 0 ? "world_size" : size;
  own.size = request.size;
  const auto given = env::get_int(rank);
  if (own.size <= 0) {
    const auto found = env::get_int(size);
    own.size = found.value_or(by.other || given ? 0 : 1);
    TESSERA_CHECK_VALUE(own.size >= 1, "comm", size, found ? c10::str(" is ", *found) : " is not set",
                        "; it must be the number of ranks, 1 at least");
  }
  TESSERA_CHECK_VALUE(request.rank >= 0 || given || (own.size == 1 && !by.other), "comm", size_name, " is ", own.size,
                      ", but ", rank, " is not set");
  own.rank = request.rank >= 0 ? request.rank : given.value_or(0);
  TESSERA_CHECK_VALUE(own.rank >= 0 && own.rank < own.size, "comm", rank_name, " is ", own.rank, ", but ", size_name,
                      " is ", own.size, ": ranks are 0 to ", own.size - 1);
}

// Value error where several tasks of another launcher have each started torchrun, which knows of no others: every rank would train
// alone. `tessera launch` has asked itself (why_not_started_here), and its ranks, like those numbered by hand, are meant.
void check_not_alone(const Launch& own, const LaunchRequest& request) {
  const auto agent = env::get("TORCHELASTIC_RUN_ID");
  if (own.size > 1 || request.size > 0 || !request.discover || !agent || *agent == kAgentOfTessera) return;
  const auto other = other_launcher(env::get);
  const std::string tasks = other ? env::get(other->size).value_or("") : "";
  TESSERA_CHECK_VALUE(digits_as_number(tasks).value_or(1) < 2, "comm", "torchrun has set WORLD_SIZE to 1, but ",
                      other ? other->size : "", " is ", tasks,
                      ": each of these tasks would be a world of its own. Have the program itself started by srun or "
                      "mpirun, without torchrun, or start one torchrun a host with --nnodes, --node-rank and "
                      "--master-addr; unset TORCHELASTIC_RUN_ID where such worlds are meant");
}

int ranks_of_host(const Names& by) {
  const auto counts =
      by.slurm ? first_set(env::get, {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"}) : std::nullopt;
  if (counts) return tasks_of_host(*counts, env::get_int("SLURM_NODEID").value_or(0));
  return env::get_int(by.local_size).value_or(0);
}

// A hash by FNV-1a: ranks of all hosts must agree.
uint64_t hash_of_name(std::string_view text) {
  uint64_t value = 0xcbf29ce484222325;
  for (const unsigned char byte : text)
    value = (value ^ byte) * 0x100000001b3;
  return value;
}

// Jobs that run on one host at a time have numbers near each other.
int port_of_job(const Names& by) {
  std::optional<uint64_t> job;
  if (by.slurm) {
    job = digits_as_number(first_set(env::get, {"SLURM_JOB_ID", "SLURM_JOBID"}).value_or(""));
    if (job)
      *job +=
          kOfStep * digits_as_number(first_set(env::get, {"SLURM_STEP_ID", "SLURM_STEPID"}).value_or("")).value_or(0);
  } else if (const auto name = env::get("PMIX_NAMESPACE")) {
    job = hash_of_name(*name);
  }
  return job ? static_cast<int>(kFirstPort + *job % kPorts) : kPort;
}

// The rendezvous of a job that is as its launcher started it; empty where nothing says it.
std::string address_of_job(const Launch& own, const Names& by) {
  if (!by.slurm) return own.local_size == own.size ? "127.0.0.1" : "";
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}) {
    const auto list = env::get(name);
    if (!list) continue;
    const auto hosts = expand_hosts(*list, name);
    return hosts.size() == 1 ? "127.0.0.1" : hosts.front();
  }
  return "";
}

}  // namespace

Launch read_launch(const LaunchRequest& request) {
  const Chosen by = choose(request);
  Launch own;
  own.local_rank = launched_local_rank(request.discover);
  TESSERA_CHECK_VALUE(own.local_rank >= 0, "comm", "LOCAL_RANK is ", own.local_rank,
                      "; it numbers the ranks of a host, from 0");
  read_ranks(own, request, by);
  if (!by.other) check_not_alone(own, request);
  own.local_size = ranks_of_host(by.names);
  TESSERA_CHECK_VALUE(by.other || own.local_size <= 0 || own.local_rank < own.local_size, "comm", "LOCAL_RANK is ",
                      own.local_rank, ", but LOCAL_WORLD_SIZE is ", own.local_size, ": the ranks of a host are 0 to ",
                      own.local_size - 1);
  const bool as_launched = by.other && own.size == env::get_int(by.names.size);
  own.address = env::get("MASTER_ADDR").value_or("");
  if (own.address.empty() && own.size > 1 && as_launched && request.rendezvous)
    own.address = address_of_job(own, by.names);
  TESSERA_CHECK_VALUE(own.size == 1 || !request.rendezvous || !own.address.empty(), "comm", "there are ", own.size,
                      " ranks, but MASTER_ADDR, where rank 0 is, is not set",
                      by.other && by.names.slurm ? "; srun sets SLURM_STEP_NODELIST for that, or export it yourself"
                      : by.other
                          ? "; set it for all ranks, as by mpirun -x MASTER_ADDR=HOST or mpiexec -genv MASTER_ADDR HOST"
                          : "; torchrun and tessera-run set it");
  const auto text = env::get("MASTER_PORT")
                        .value_or(std::to_string(request.port != 0 ? request.port
                                                 : as_launched     ? port_of_job(by.names)
                                                                   : kPort));
  const auto port = digits_as_number(text);
  TESSERA_CHECK_VALUE(port && *port > 0 && *port < 65536, "comm", "MASTER_PORT is '", text,
                      "'; it must be a port, 1 to 65535");
  own.port = static_cast<int>(*port);
  return own;
}

int launched_local_rank(bool discover) {
  if (const auto own = env::get_int(kTorchrun.local_rank); own || !discover) return own.value_or(0);
  for (const Names& names : kDiscovered)
    if (const auto own = env::get_int(names.local_rank)) return *own;
  return 0;
}

std::string why_not_started_here() {
  return tessera::why_not_started_here(env::get);
}

}  // namespace tessera::comm
