#include "tessera/comm/launch.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/errors.h"

namespace tessera::comm {
namespace {

using Variables = std::map<std::string, std::string>;

// Exactly these variables of launchers while it lives.
struct Started {
  explicit Started(const Variables& values) : values_(values) {
    for (std::string entry : std::vector<std::string>(environ, environ + count())) {  // a job may run the tests
      entry.resize(entry.find('='));
      for (const char* prefix : {"RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "MPI_", "SLURM_",
                                 "ENVIRONMENT", "TORCHELASTIC_"})
        if (entry.starts_with(prefix)) unsetenv(entry.c_str());
    }
    for (const auto& [name, value] : values_)
      setenv(name.c_str(), value.c_str(), 1);
  }
  ~Started() {
    for (const auto& [name, value] : values_)
      unsetenv(name.c_str());
  }
  static int count() {
    int all = 0;
    while (environ[all] != nullptr)
      ++all;
    return all;
  }
  Variables values_;
};

Variables operator+(Variables values, const Variables& more) {
  for (const auto& [name, value] : more)
    values[name] = value;
  return values;
}

Variables torchrun(const char* rank, const char* size) {
  return {{"RANK", rank},       {"WORLD_SIZE", size}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"},
          {"MASTER_ADDR", "h"}, {"MASTER_PORT", "7"}};
}
Variables open_mpi(const char* rank, const char* size, const char* local_size) {
  return {{"OMPI_COMM_WORLD_RANK", rank},
          {"OMPI_COMM_WORLD_SIZE", size},
          {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
          {"OMPI_COMM_WORLD_LOCAL_SIZE", local_size}};
}
Variables pmi(const char* rank, const char* size, const char* local_size) {
  return {{"PMI_RANK", rank}, {"PMI_SIZE", size}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", local_size}};
}
// Of a job of 4 tasks on two hosts: all that its script has, and more of a step.
const Variables kScript = {{"ENVIRONMENT", "BATCH"},        {"SLURM_JOB_ID", "1234567"},
                           {"SLURM_NTASKS", "4"},           {"SLURM_PROCID", "0"},
                           {"SLURM_LOCALID", "0"},          {"SLURM_NODEID", "0"},
                           {"SLURM_TASKS_PER_NODE", "3,1"}, {"SLURM_JOB_NODELIST", "node[003-004]"}};
Variables step(const char* rank, const char* id = "0") {
  return kScript + Variables{{"SLURM_STEP_ID", id},
                             {"SLURM_PROCID", rank},
                             {"SLURM_LOCALID", "2"},
                             {"SLURM_STEP_NODELIST", "node[003-004]"}};
}
// What a container that passes on some of a job's variables may see.
const Variables kOutside = kScript + Variables{{"ENVIRONMENT", ""}};
const Variables kOneHost = {{"SLURM_STEP_NODELIST", "node7"}, {"SLURM_STEP_TASKS_PER_NODE", "4"}};
const Variables kOfStepOfTwo = {{"SLURM_STEP_NUM_TASKS", "2"}};

// Ranks of torch's agent.
Variables agent(const char* rank, const char* size, const char* id = "none") {
  return torchrun(rank, size) + Variables{{"TORCHELASTIC_RUN_ID", id}};
}

struct Row {
  const char* what;
  Variables variables;
  std::string expected;  // rank/size local/local_size address:port, or a part of the error
  LaunchRequest request = {};
};

const Row kRows[] = {
    {"nothing", {}, "0/1 0/0 :29500"},
    {"torchrun", torchrun("1", "2"), "1/2 0/1 h:7"},
    {"torchrun wins over Open MPI", torchrun("1", "2") + open_mpi("3", "4", "4"), "1/2 0/1 h:7"},
    {"torchrun wins under srun", torchrun("1", "2") + step("3"), "1/2 0/1 h:7"},
    {"by hand", {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}}, "1/2 0/0 h:29500"},
    {"a world of one by hand", {{"WORLD_SIZE", "1"}}, "0/1 0/0 :29500"},
    {"number 0 of unknown", {{"RANK", "0"}}, "WORLD_SIZE is not set; it must be the number of ranks, 1 at least"},
    {"number 0 of one of the caller's", {{"RANK", "0"}}, "0/1 0/0 :29500", {.size = 1}},
    {"no address",
     {{"RANK", "0"}, {"WORLD_SIZE", "2"}},
     "there are 2 ranks, but MASTER_ADDR, where rank 0 is, is not set; torchrun"},
    {"another meeting point", {{"RANK", "0"}, {"WORLD_SIZE", "2"}}, "0/2 0/0 :29500", {.rendezvous = false}},
    {"a port of the caller", {{"RANK", "0"}, {"WORLD_SIZE", "1"}}, "0/1 0/0 :81", {.port = 81}},
    {"no rank", {{"WORLD_SIZE", "2"}}, "WORLD_SIZE is 2, but RANK is not set"},
    {"no size", {{"RANK", "1"}}, "WORLD_SIZE is not set; it must be the number of ranks, 1 at least"},
    {"a rank too many", torchrun("2", "2"), "RANK is 2, but WORLD_SIZE is 2: ranks are 0 to 1"},
    {"a negative rank", torchrun("-1", "2"), "RANK is -1, but WORLD_SIZE is 2"},
    {"no ranks", torchrun("0", "0"), "WORLD_SIZE is 0; it must be"},
    {"no number", torchrun("x", "2"), "RANK must be an integer, got 'x'"},
    {"a negative local rank", torchrun("0", "1") + Variables{{"LOCAL_RANK", "-1"}},
     "LOCAL_RANK is -1; it numbers the ranks of a host, from 0"},
    {"a local rank too many", torchrun("0", "1") + Variables{{"LOCAL_RANK", "1"}},
     "LOCAL_RANK is 1, but LOCAL_WORLD_SIZE is 1: the ranks of a host are 0 to 0"},
    {"no port", torchrun("0", "2") + Variables{{"MASTER_PORT", "http"}},
     "MASTER_PORT is 'http'; it must be a port, 1 to 65535"},
    {"a port too high", torchrun("0", "2") + Variables{{"MASTER_PORT", "65536"}}, "MASTER_PORT is '65536'"},

    {"arguments win", torchrun("1", "2"), "2/3 0/1 h:7", {.rank = 2, .size = 3}},
    {"arguments alone", {{"MASTER_ADDR", "h"}}, "2/3 0/0 h:29500", {.rank = 2, .size = 3}},
    {"a rank too many of arguments", {}, "rank is 3, but world_size is 2", {.rank = 3, .size = 2}},
    {"a size alone", {}, "world_size is 2, but RANK is not set", {.size = 2}},
    {"a rank alone", torchrun("0", "2"), "rank is 3, but WORLD_SIZE is 2", {.rank = 3}},

    {"Open MPI", open_mpi("1", "2", "2"), "1/2 1/2 127.0.0.1:29500"},
    {"Open MPI's job", open_mpi("1", "2", "2") + Variables{{"PMIX_NAMESPACE", "prterun-a-17@1"}, {"PMIX_RANK", "1"}},
     "1/2 1/2 127.0.0.1:28393"},
    {"Open MPI with an address", open_mpi("3", "4", "2") + Variables{{"MASTER_ADDR", "h"}, {"MASTER_PORT", "9"}},
     "3/4 1/2 h:9"},
    {"Open MPI on two hosts", open_mpi("3", "4", "2"),
     "but MASTER_ADDR, where rank 0 is, is not set; set it for all ranks"},
    {"Open MPI in a job of SLURM", open_mpi("3", "4", "4") + kScript, "3/4 1/4 127.0.0.1:29500"},
    {"Open MPI, started by SLURM on other hosts", open_mpi("3", "4", "2") + step("1"), "MASTER_ADDR"},
    {"Open MPI without a size", {{"OMPI_COMM_WORLD_RANK", "0"}}, "OMPI_COMM_WORLD_SIZE is not set"},
    {"Open MPI without a rank",
     {{"OMPI_COMM_WORLD_SIZE", "2"}},
     "OMPI_COMM_WORLD_SIZE is 2, but OMPI_COMM_WORLD_RANK is not set"},
    {"a rank too many of Open MPI", open_mpi("2", "2", "2"),
     "OMPI_COMM_WORLD_RANK is 2, but OMPI_COMM_WORLD_SIZE is 2"},
    {"a part of torchrun's with Open MPI", open_mpi("1", "2", "2") + Variables{{"RANK", "1"}},
     "RANK is 1, but WORLD_SIZE is not set; OMPI_COMM_WORLD_SIZE is 2"},
    {"the other part", open_mpi("1", "2", "2") + Variables{{"WORLD_SIZE", "2"}},
     "WORLD_SIZE is 2, but RANK is not set; OMPI_COMM_WORLD_RANK is 1"},
    {"a part of torchrun's with SLURM", step("1") + Variables{{"WORLD_SIZE", "4"}}, "SLURM_PROCID is 1"},
    {"torchrun's only", open_mpi("1", "2", "2"), "0/1 0/0 :29500", {.discover = false}},
    {"torchrun's only, in part",
     open_mpi("1", "2", "2") + Variables{{"RANK", "1"}},
     "WORLD_SIZE is not set; it",
     {.discover = false}},

    {"PMI", pmi("1", "2", "2"), "1/2 1/2 127.0.0.1:29500"},
    {"PMI on two hosts", pmi("1", "4", "2"), "mpiexec -genv MASTER_ADDR HOST"},
    {"PMI without a rank", {{"PMI_SIZE", "2"}}, "PMI_SIZE is 2, but PMI_RANK is not set"},
    {"PMI of srun", pmi("1", "4", "2") + step("1"), "1/4 1/3 node003:30567"},
    {"PMI in a job of SLURM", pmi("1", "2", "2") + kScript, "1/2 1/2 127.0.0.1:29500"},
    {"PMIx alone", {{"PMIX_RANK", "0"}}, "PMIX_RANK is 0, but nothing says how many ranks there are"},
    {"PMIx and arguments", {{"PMIX_RANK", "0"}, {"MASTER_ADDR", "h"}}, "1/2 0/0 h:29500", {.rank = 1, .size = 2}},

    {"a script of SLURM", kScript, "0/1 0/0 :29500"},
    {"a script of SLURM that says so", kScript + Variables{{"SLURM_STEP_ID", "batch"}}, "0/1 0/0 :29500"},
    {"its number", kScript + Variables{{"SLURM_STEP_ID", "4294967291"}}, "0/1 0/0 :29500"},
    {"the shell of salloc", kScript + Variables{{"SLURM_STEP_ID", "4294967290"}}, "0/1 0/0 :29500"},
    {"a step", step("3"), "3/4 2/3 node003:30567"},
    {"its first", step("0"), "0/4 2/3 node003:30567"},
    {"the second host", step("3") + Variables{{"SLURM_NODEID", "1"}}, "3/4 2/1 node003:30567"},
    {"the next step", step("3", "1"), "3/4 2/3 node003:31576"},
    {"the next job", step("3") + Variables{{"SLURM_JOB_ID", "1234568"}}, "3/4 2/3 node003:30568"},
    {"a step of one host", step("3") + kOneHost, "3/4 2/4 127.0.0.1:30567"},
    {"a step of two tasks", step("1") + kOfStepOfTwo, "1/2 2/3 node003:30567"},
    {"a step of one task", step("0") + Variables{{"SLURM_STEP_NUM_TASKS", "1"}}, "0/1 2/3 :30567"},
    {"a step without a number", kOutside, "0/4 0/3 node003:30567"},
    {"its last task", kOutside + Variables{{"SLURM_PROCID", "3"}}, "3/4 0/3 node003:30567"},
    {"a lone task without a number", kOutside + Variables{{"SLURM_NTASKS", "1"}}, "0/1 0/0 :29500"},
    {"a task of an unknown number of tasks", kOutside + Variables{{"SLURM_NTASKS", ""}}, "0/1 0/0 :29500"},
    {"the shell of salloc, without a number", kOutside + Variables{{"SLURM_PROCID", ""}}, "0/1 0/0 :29500"},
    {"a step that names its hosts alone", kScript + Variables{{"SLURM_STEP_NODELIST", "node[005-006]"}},
     "0/4 0/3 node005:30567"},
    {"a step's hosts", kScript + Variables{{"SLURM_PROCID", "1"}, {"SLURM_JOB_NODELIST", "node[01-03,7],gpu-a"}},
     "1/4 0/3 node01:30567"},
    {"a task behind the first", kScript + Variables{{"SLURM_PROCID", "1"}}, "1/4 0/3 node003:30567"},
    {"a step with an address", step("3") + Variables{{"MASTER_ADDR", "h"}}, "3/4 2/3 h:30567"},
    {"a step with a port", step("3") + Variables{{"MASTER_PORT", "80"}}, "3/4 2/3 node003:80"},
    {"a step and a port of the caller", step("3"), "3/4 2/3 node003:81", {.port = 81}},
    {"a step with another local rank", step("3") + Variables{{"LOCAL_RANK", "5"}}, "3/4 5/3 node003:30567"},
    {"another world than the step's", step("3"), "MASTER_ADDR", {.rank = 0, .size = 2}},
    {"a step with a list that is none", step("3") + Variables{{"SLURM_STEP_NODELIST", "node[3"}},
     "SLURM_STEP_NODELIST is 'node[3'"},
    {"torchrun in each task of a step", agent("0", "1") + step("1"),
     "torchrun has set WORLD_SIZE to 1, but SLURM_NTASKS is 4: each of these tasks would be a world of its own"},
    {"a standalone one", agent("0", "1", "5f0e") + step("0") + kOfStepOfTwo, "but SLURM_STEP_NUM_TASKS is 2: each"},
    {"what to do", agent("0", "1") + step("0"), "without torchrun, or start one torchrun a host with --nnodes"},
    {"torchrun in each task of mpirun", agent("0", "1") + open_mpi("1", "2", "2"), "but OMPI_COMM_WORLD_SIZE is 2"},
    {"one torchrun on each of two hosts", agent("9", "16") + step("1") + kOfStepOfTwo, "9/16 0/1 h:7"},
    {"one of one rank on each", agent("1", "2") + step("1") + kOfStepOfTwo, "1/2 0/1 h:7"},
    {"torchrun in a step of one task", agent("0", "1") + step("0") + Variables{{"SLURM_STEP_NUM_TASKS", "1"}},
     "0/1 0/1 h:7"},
    {"torchrun in a script", agent("0", "1") + kScript, "0/1 0/1 h:7"},
    {"torchrun in the shell of salloc", agent("0", "1") + kScript + Variables{{"SLURM_STEP_ID", "4294967290"}},
     "0/1 0/1 h:7"},
    {"tessera launch --num-nodes 1 in each task", agent("0", "1", "tessera") + step("1"), "0/1 0/1 h:7"},
    {"worlds of one by hand in a step", torchrun("0", "1") + step("1"), "0/1 0/1 h:7"},
    {"worlds that are meant", agent("0", "1") + step("1"), "0/1 0/1 h:7", {.discover = false}},

    {"a step for torchrun's only", step("3"), "0/1 0/0 :29500", {.discover = false}},
};

std::string text_of(const Launch& own) {
  return c10::str(own.rank, "/", own.size, " ", own.local_rank, "/", own.local_size, " ", own.address, ":", own.port);
}

TEST(Launch, IsReadFromTheVariablesOfOneLauncher) {
  for (const Row& row : kRows) {
    SCOPED_TRACE(row.what);
    const Started started(row.variables);
    const bool fine = row.expected.find('/') < 3;
    if (fine)
      EXPECT_EQ(text_of(read_launch(row.request)), row.expected);
    else
      EXPECT_HAS(testing::message_of<c10::ValueError>([&] { read_launch(row.request); }), row.expected);
  }
}

TEST(Launch, OneOfSeveralTasksStartsNoWorldOfItsOwn) {
  for (const auto& [variables, says] : {std::pair(step("1"), "SLURM_NTASKS is 4"),
                                        {step("0") + kOfStepOfTwo, "SLURM_STEP_NUM_TASKS is 2"},
                                        {open_mpi("0", "2", "2"), "OMPI_COMM_WORLD_SIZE is 2"},
                                        {pmi("0", "3", "3"), "PMI_SIZE is 3"},
                                        {step("0") + Variables{{"SLURM_STEP_NUM_TASKS", "1"}}, ""},
                                        {kScript, ""},
                                        {torchrun("1", "2"), ""}}) {
    const Started started(variables);
    EXPECT_EQ(why_not_started_here().substr(0, std::string(says).size()), says);
    EXPECT_EQ(why_not_started_here().empty(), *says == 0) << why_not_started_here();
  }
}

TEST(Launch, TheLocalRankNeedsNoRanks) {
  const Started started(open_mpi("1", "2", "2") + Variables{{"RANK", "7"}});
  EXPECT_EQ(launched_local_rank(), 1);
  EXPECT_EQ(launched_local_rank(false), 0);
  setenv("LOCAL_RANK", "3", 1);
  EXPECT_EQ(launched_local_rank(), 3);
  unsetenv("LOCAL_RANK");
}

// All steps of all jobs that may be on one host at a time.
TEST(Launch, JobsOfOneHostHavePortsOfTheirOwn) {
  std::set<int> ports;
  for (int job = 0; job < 40; ++job) {
    for (const char* id : {"0", "1", "2", "11"}) {
      const Started started(step("3", id) + Variables{{"SLURM_JOB_ID", std::to_string(99'999'980 + job)}});
      const int port = read_launch().port;
      EXPECT_TRUE(20000 <= port && port < 32000) << port;
      EXPECT_TRUE(ports.insert(port).second) << port;
    }
  }
}

}  // namespace
}  // namespace tessera::comm
