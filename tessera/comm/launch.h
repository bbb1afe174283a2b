// How this process was started: which rank of how many it is, and where their rendezvous is.
#pragma once

#include <string>

namespace tessera::comm {

// Note [Who started this process]
// The variables of one launcher say rank and number of ranks, never those of two: RANK and WORLD_SIZE (torchrun's, or set by
// hand), else Open MPI's, else PMI's (MPICH, Intel MPI), else those of a step of SLURM. Without any the process is a world of
// its own. SLURM sets most of its variables for the script of a job, too, and for the shell of salloc, where they tell of
// ranks that are yet to be started: only a step (srun) has ranks, which SLURM_STEP_ID shows, or, where that is not passed on, that there
// are a number among several tasks and no ENVIRONMENT=BATCH.
// A world of one that torchrun made inside one of several tasks is an error: each task would train alone.
// LOCAL_RANK, MASTER_ADDR and MASTER_PORT win over what a launcher knows by other names. Where they are not set, ranks of a step
// have their rendezvous at the first host of its list (127.0.0.1 where that is the only one), at a port from the numbers of job and step; ranks
// that Open MPI or PMI started, and which are all on one host, at 127.0.0.1.

// What a caller says in place of the environment.
struct LaunchRequest {
  int rank = -1, size = -1;  // from 0, from 1
  bool discover = true;      // whether other launchers than torchrun are asked
  bool rendezvous = true;    // whether the ranks have their rendezvous at `address`; else it may be missing
  int port = 0;              // port where there is no MASTER_PORT; 0: see Launch
};

struct Launch {
  int rank = 0, size = 1;
  int local_rank = 0;   // among the ranks of this host
  int local_size = 0;   // how many ranks this host has; 0: not known
  std::string address;  // of the host of rank 0; empty where there is one rank
  int port = 0;         // 20000 to 31999 where it comes from the name of a job (SLURM's, PMIx's), else 29500
};

// The environment's launch, see Note [Who started this process]. Local. Value errors name the impossible or missing variable.
Launch read_launch(const LaunchRequest& request = {});

// LOCAL_RANK, or another launcher's variable for it; 0 without any. It may be negative: read_launch() checks it.
int launched_local_rank(bool discover = true);

// The text of base/launchers.h, for the environment: empty where this process may start ranks.
std::string why_not_started_here();

}  // namespace tessera::comm
