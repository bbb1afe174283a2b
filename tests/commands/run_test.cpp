// tessera-run as users start it.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tessera/base/free_port.h"
#include "tessera/base/version.h"
#include "tests/support/errors.h"

namespace {

using namespace std::chrono_literals;
using Words = std::vector<std::string>;
using Clock = std::chrono::steady_clock;

std::string contents(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

struct Folder {
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "tessera_run_XXXXXX").string();
    path = mkdtemp(name.data());
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::filesystem::path path;
};

// The launcher as a child, with its output in files.
class Launcher {
 public:
  explicit Launcher(Words words, const std::map<std::string, std::string>& environment = {}) {
    words.insert(words.begin(), TESSERA_RUN);
    pid_ = fork();
    if (pid_ != 0) return;
    for (const char* name : {"OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE"})
      unsetenv(name);
    for (const auto& [name, value] : environment)
      setenv(name.c_str(), value.c_str(), 1);
    dup2(open((folder_.path / "out").c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600), STDOUT_FILENO);
    dup2(open((folder_.path / "err").c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600), STDERR_FILENO);
    std::vector<char*> argv;
    for (std::string& word : words)
      argv.push_back(word.data());
    argv.push_back(nullptr);
    execv(argv[0], argv.data());
    _exit(99);
  }
  ~Launcher() {
    if (pid_ > 0) kill(pid_, SIGKILL);
    wait();
  }

  pid_t pid() const { return pid_; }
  std::string out() const { return contents(folder_.path / "out"); }
  std::string err() const { return contents(folder_.path / "err"); }
  // Its exit code, or minus the signal that ended it.
  int wait() {
    int status = 0;
    if (pid_ <= 0 || waitpid(pid_, &status, 0) != pid_) return code_;
    pid_ = 0;
    return code_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  // Until the ranks have printed so many lines.
  void await_lines(int count) const {
    const auto end = Clock::now() + 60s;
    while (lines().size() < static_cast<size_t>(count) && Clock::now() < end)
      std::this_thread::sleep_for(5ms);
  }
  // What ranks have printed, sorted.
  Words lines() const {
    std::istringstream text(out());
    Words all;
    for (std::string line; std::getline(text, line);)
      all.push_back(line);
    std::sort(all.begin(), all.end());
    return all;
  }

 private:
  Folder folder_;
  pid_t pid_ = 0;
  int code_ = -1000;
};

bool lives(pid_t pid) {
  const std::string stat = contents("/proc/" + std::to_string(pid) + "/stat");
  return !stat.empty() && stat.find(") Z ") == std::string::npos;
}

// The numbers of processes at the ends of lines.
std::vector<pid_t> pids_in(const Words& lines) {
  std::vector<pid_t> pids;
  for (const std::string& line : lines)
    pids.push_back(std::stoi(line.substr(line.rfind(' ') + 1)));
  return pids;
}

void expect_gone(const std::vector<pid_t>& pids) {
  const auto end = Clock::now() + 10s;
  for (const pid_t pid : pids) {
    while (lives(pid) && Clock::now() < end)
      std::this_thread::sleep_for(5ms);
    EXPECT_FALSE(lives(pid)) << pid;
  }
}

const std::string kShow =
    "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE $MASTER_ADDR";

const std::map<std::string, std::string> kOfSrun = {
    {"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}};

struct Row {
  Words words;
  int code;
  std::string out, err;  // parts of them
  std::map<std::string, std::string> environment = {};
};

TEST(Run, OptionsExitCodesAndWhatIsSaid) {
  const Row rows[] = {
      {{"sh", "-c", kShow}, 0, "[rank 0] 0/1 0/1 0/1 127.0.0.1\n", ""},
      {{"-n", "1", "--", "sh", "-c", kShow}, 0, "[rank 0] 0/1 0/1", ""},
      {{"-n2", "sh", "-c", kShow}, 0, "[rank 1] 1/2 1/2", ""},
      {{"--nproc_per_node=2", "sh", "-c", kShow}, 0, "[rank 1] 1/2 1/2 0/1 127.0.0.1\n", ""},
      {{"--num-gpus", "2", "--no_python", "sh", "-c", kShow}, 0, "[rank 1] 1/2 1/2", ""},
      {{"sh", "-c", kShow}, 0, "[rank 2] 2/3 2/3", "", {{"CUDA_VISIBLE_DEVICES", "4,5,7"}}},
      {{"sh", "-c", kShow}, 0, "[rank 0] 0/1 0/1", "", {{"CUDA_VISIBLE_DEVICES", ""}}},
      {{"-n", "2", "--num-nodes", "3", "--node_rank", "1", "--master-addr", "127.0.0.2", "sh", "-c",
        kShow + ":$MASTER_PORT"},
       0,
       "[rank 3] 3/6 1/2 1/3 127.0.0.2:29500\n",
       ""},
      {{"--master-port", "81", "sh", "-c", "echo $MASTER_PORT"}, 0, "[rank 0] 81\n", ""},
      {{"-n", "2", "sh", "-c", "echo omp $OMP_NUM_THREADS"}, 0, "[rank 1] omp 3\n", "", {{"OMP_NUM_THREADS", "3"}}},
      {{"-n", "1", "sh", "-c", "echo omp=$OMP_NUM_THREADS."}, 0, "[rank 0] omp=.\n", ""},
      {{"--version", "-n", "999"}, 0, TESSERA_VERSION "\n", ""},
      {{"sh", "-c", kShow}, 1, "", "[launch] SLURM_NTASKS is 2: each of these processes would start a world", kOfSrun},
      {{"-n", "4", "x"}, 1, "", "[launch] OMPI_COMM_WORLD_SIZE is 2: each", {{"OMPI_COMM_WORLD_SIZE", "2"}}},
      {{"--num-nodes", "1", "sh", "-c", kShow}, 0, "[rank 0] 0/1 0/1", "", kOfSrun},
      {{"-n", "999", "--help"}, 0, "usage: tessera-run", ""},
      {{"sh", "-c", "echo \"$@\" \"$#\"", "sh", "a b", "-n"}, 0, "[rank 0] a b -n 2\n", ""},
      {{"sh", "-c", "echo $TORCHELASTIC_USE_AGENT_STORE."}, 0, "] .\n", "", {{"TORCHELASTIC_USE_AGENT_STORE", "True"}}},
      {{"sh", "-c", "read line; echo $line."}, 0, "[rank 0] .\n", ""},

      {{"-n", "3", "sh", "-c", "test $RANK != 1 || { echo the reason >&2; exit 7; }; exec sleep 100"},
       7,
       "",
       "[rank 1] the reason\n[launch] rank 1 failed first (exit code 7):\nthe reason\n"},
      {{"-n", "2", "sh", "-c", "test $RANK = 1 || exec sleep 100; kill -SEGV $$"},
       128 + SIGSEGV,
       "",
       "[launch] rank 1 failed first (signal SIGSEGV):\n"},
      {{"/no/program", "x"}, 127, "", "[launch] cannot start /no/program: No such file or directory\n"},
      {{"-n", "2", "/"}, 126, "", "[launch] cannot start /: Permission denied\n"},
      {{"--log-dir", "/dev/null/x", "true"},
       1,
       "",
       "[launch] --log_dir /dev/null/x is no folder that can be written into (Not a directory)"},
      {{"--enable-each-rank-log", "/dev/null", "true"}, 1, "", "[launch] --log_dir /dev/null is no folder that"},
      {{"--master-addr", "no.such.host.invalid", "true"},
       1,
       "",
       "[launch] --master_addr no.such.host.invalid is no host that is known here ("},
      {{"--num_nodes", "2", "--node_rank", "1", "--master-addr", "no.such.host.invalid", "true"},
       1,
       "",
       "[launch] --master_addr no.such.host.invalid is no host"},
      {{}, 2, "", "[launch] the program is missing: tessera-run [options] program arguments..."},
      {{"-n"}, 2, "", "[launch] -n needs a value"},
      {{"--no-python=1"}, 2, "", "[launch] --no-python takes no value"},
      {{"--module", "x"}, 2, "", "[launch] unknown option --module; the program and its arguments come behind"},
      {{"-n", "0", "x"}, 1, "", "[launch] -n must be a number from 1 to 65536, got '0'"},
      {{"--master_port", "x", "x"}, 1, "", "[launch] --master_port must be a number from 1 to 65535, got 'x'"},
      {{"--master_port", "65536", "x"}, 1, "", "[launch] --master_port must be a number from 1 to 65535, got '65536'"},
      {{"--node_rank", "1", "x"}, 1, "", "[launch] --num_nodes 1 needs --node_rank 0 to 0, got 1"},
      {{"--num_nodes", "2", "--master_addr", "a", "x"},
       1,
       "",
       "[launch] --num_nodes 2 needs --node_rank 0 to 1, got -1"},
      {{"--num_nodes", "2", "--node_rank", "0", "x"}, 1, "", "[launch] --num_nodes 2 needs --master_addr, where host"},
  };
  for (const Row& row : rows) {
    Launcher launcher(row.words, row.environment);
    EXPECT_EQ(launcher.wait(), row.code) << testing::PrintToString(row.words);
    EXPECT_HAS(launcher.out(), row.out);
    EXPECT_HAS(launcher.err(), row.err);
    EXPECT_EQ(launcher.err().empty(), row.err.empty()) << launcher.err();
  }
}

TEST(Run, RanksOfOneHostHaveAFreePortAndTheirPartOfTheCores) {
  const Words words{"-n", "2", "sh", "-c", "echo $MASTER_PORT $OMP_NUM_THREADS"};
  Launcher one(words), other(words);
  EXPECT_EQ(one.wait(), 0);
  EXPECT_EQ(other.wait(), 0);
  const Words a = one.lines(), b = other.lines();
  ASSERT_EQ(a.size(), 2);
  EXPECT_EQ(a[0].substr(9), a[1].substr(9));
  EXPECT_NE(a[0].substr(9), b[0].substr(9));
  EXPECT_GE(std::stoi(a[0].substr(a[0].rfind(' '))), 1);
}

TEST(Run, LinesStayWholeAndStreamsApart) {
  // Each rank prints a line in pieces, and one that is longer than a pipe; the last has no end.
  Launcher launcher({"-n", "3", "sh", "-c",
                     "for i in 1 2 3 4 5 6 7 8 9; do printf 'a%s' $RANK; printf 'b%s' $RANK >&2; echo c$RANK; done; "
                     "head -c 100000 /dev/zero | tr '\\0' x$RANK; printf '\\nend'"});
  EXPECT_EQ(launcher.wait(), 0);
  const Words lines = launcher.lines();
  EXPECT_EQ(lines.size(), 3 * 11);
  for (const char* rank : {"0", "1", "2"}) {
    const std::string prefix = std::string("[rank ") + rank + "] ";
    EXPECT_EQ(std::count(lines.begin(), lines.end(), prefix + "a" + rank + "c" + rank), 9);
    EXPECT_EQ(std::count(lines.begin(), lines.end(), prefix + "end"), 1);
    EXPECT_EQ(std::count_if(lines.begin(), lines.end(),
                            [&](const std::string& line) {
                              return line.size() == prefix.size() + 100000 && line.starts_with(prefix + "x");
                            }),
              1);
    std::string errors = prefix;
    for (int i = 0; i < 9; ++i)
      errors += std::string("b") + rank;
    EXPECT_HAS(launcher.err(), errors + "\n");
  }
}

TEST(Run, TheLastLinesOfTheFirstThatFailedAreShownAgain) {
  Launcher launcher({"-n", "2", "sh", "-c",
                     "test $RANK = 1 || { echo mine >&2; exec sleep 100; }; i=0; while [ $i -lt 50 ]; do i=$((i+1)); "
                     "echo line $i >&2; done; printf last >&2; exit 3"});
  EXPECT_EQ(launcher.wait(), 3);
  const std::string err = launcher.err(), head = "[launch] rank 1 failed first (exit code 3):\n";
  EXPECT_HAS(err, "[rank 1] line 1\n");
  std::string shown;
  for (int i = 22; i <= 50; ++i)
    shown += "line " + std::to_string(i) + "\n";
  EXPECT_EQ(err.substr(err.find(head)), head + shown + "last\n");
}

TEST(Run, OutputOfEachRankGoesIntoFilesToo) {
  const Folder folder;
  Launcher launcher({"-n", "2", "--log-dir", folder.path / "new", "sh", "-c", "echo o$RANK; printf e$RANK >&2"});
  EXPECT_EQ(launcher.wait(), 0);
  EXPECT_EQ(launcher.lines(), (Words{"[rank 0] o0", "[rank 1] o1"}));
  EXPECT_EQ(contents(folder.path / "new/1/stdout.log"), "o1\n");
  EXPECT_EQ(contents(folder.path / "new/0/stderr.log"), "e0");
}

// Whether a rank listens or not, and what it has started.
TEST(Run, OneThatDiesEndsAllAndWhatTheyHaveStarted) {
  for (const char* trap : {"", "trap 'exit 0' TERM; ", "trap '' TERM; "}) {
    Launcher launcher(
        {"-n", "3", "--grace-seconds", "1", "sh", "-c",
         std::string(trap) + "echo self $$; sh -c 'echo child $$; exec sleep 1000' & while :; do wait; sleep 1; done"});
    launcher.await_lines(6);
    const Words lines = launcher.lines();
    ASSERT_EQ(lines.size(), 6);
    const auto pids = pids_in(lines);
    kill(pids[3], SIGKILL);  // rank 1: sorted, "child" comes before "self"
    const auto begin = Clock::now();
    EXPECT_EQ(launcher.wait(), 128 + SIGKILL);
    EXPECT_LT(Clock::now() - begin, 9s);
    EXPECT_HAS(launcher.err(), "[launch] rank 1 failed first (signal SIGKILL):");
    expect_gone(pids);
  }
}

TEST(Run, WhatIsLeftBehindEndsWithTheRanks) {
  Launcher launcher({"sh", "-c", "sleep 1000 > /dev/null 2>&1 & echo $!"});
  EXPECT_EQ(launcher.wait(), 0);
  expect_gone(pids_in(launcher.lines()));
}

TEST(Run, SignalsArePassedOn) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    Launcher launcher({"-n", "2", "sh", "-c",
                       "trap 'echo told; exit 5' INT TERM HUP QUIT; trap 'echo more' USR1; echo ready; while :; do "
                       "sleep 0.01; done"});
    launcher.await_lines(2);
    kill(launcher.pid(), SIGUSR1);
    launcher.await_lines(4);
    kill(launcher.pid(), signal);
    EXPECT_EQ(launcher.wait(), 128 + signal);
    EXPECT_EQ(launcher.lines(), (Words{"[rank 0] more", "[rank 0] ready", "[rank 0] told", "[rank 1] more",
                                       "[rank 1] ready", "[rank 1] told"}));
    const std::string name = signal == SIGINT ? "INT" : signal == SIGTERM ? "TERM" : signal == SIGHUP ? "HUP" : "QUIT";
    EXPECT_TRUE(launcher.err().ends_with("[launch] interrupted by SIG" + name + "; all ranks have ended\n"));
  }
}

// Through a shell, which closes what the launcher writes to, or passes it to one who stops to read.
TEST(Run, WhatNobodyReadsIsNoFaultOfTheRanks) {
  const std::string run = std::string(TESSERA_RUN) + " -n 2 ";
  const auto code_of = [](const std::string& line) {
    return WEXITSTATUS(std::system(("timeout 60 bash -c \"" + line + "\"").c_str()));
  };
  EXPECT_EQ(code_of(run + "sh -c 'echo e >&2' 2>&-"), 0);
  EXPECT_EQ(code_of(run + "sh -c 'echo e; exit 3' >&- 2>&-"), 3);
  EXPECT_EQ(code_of(run + "sh -c 'echo e; sleep 0.5; exit 3' 2>/dev/null | true; exit \\${PIPESTATUS[0]}"), 3);
  EXPECT_EQ(code_of(run + "sh -c 'while :; do echo e; done' 2>/dev/null | head -2 >/dev/null; exit \\${PIPESTATUS[0]}"),
            128 + SIGPIPE);
  EXPECT_EQ(code_of(run + "echo e >/dev/full 2>/dev/null"), 0);
  EXPECT_EQ(code_of(run + "echo e 2>&1 >/dev/full | grep -q 'cannot write to standard output: No space left'"), 0);
}

TEST(Run, AStopStopsTheRanksToo) {
  Launcher launcher({"-n", "1", "sh", "-c", "echo $$; while :; do sleep 0.01; done"});
  launcher.await_lines(1);
  const std::string rank = launcher.lines().at(0).substr(std::string("[rank 0] ").size());
  const auto state = [&](const std::string& pid) {
    const std::string stat = contents("/proc/" + pid + "/stat");
    return stat.at(stat.rfind(')') + 2);
  };
  const auto await = [&](bool stopped) {
    for (int i = 0;
         i < 500 && ((state(rank) == 'T') != stopped || (state(std::to_string(launcher.pid())) == 'T') != stopped); ++i)
      std::this_thread::sleep_for(10ms);
    return state(rank) == 'T';
  };
  kill(launcher.pid(), SIGTSTP);
  EXPECT_TRUE(await(true));
  kill(launcher.pid(), SIGCONT);
  EXPECT_FALSE(await(false));
  kill(launcher.pid(), SIGTERM);
  EXPECT_EQ(launcher.wait(), 128 + SIGTERM);
}

TEST(Run, TracebacksOfAnInterruptAreLeftOut) {
  // Torch begins lines of a rank that has a process group with its own number.
  const std::string frames = "Traceback (most recent call last):\n  File \"a.py\", line 1\n    f()\n",
                    of_torch = "[rank0]: Traceback (most recent call last):\n[rank0]:   File \"a.py\", line 1\n";
  for (const std::string end : {"KeyboardInterrupt\n", "KeyboardInterrupt: here\n", "ValueError: 1\n", ""}) {
    Launcher prefixed({"sh", "-c", "printf '" + of_torch + (end.empty() ? "" : "[rank0]: " + end) + "more\n' >&2"});
    EXPECT_EQ(prefixed.wait(), 0);
    const bool shown = !end.starts_with("Keyboard");
    EXPECT_EQ(prefixed.err().find("Traceback") != std::string::npos, shown) << end;
    Launcher launcher({"sh", "-c", "printf '" + frames + end + "more\n' >&2"});
    EXPECT_EQ(launcher.wait(), 0);
    EXPECT_EQ(launcher.err().find("Traceback") != std::string::npos, shown) << end;
    EXPECT_EQ(launcher.err().find("[rank 0]   File \"a.py\", line 1\n") != std::string::npos, shown) << end;
    EXPECT_TRUE(launcher.err().ends_with("more\n")) << launcher.err();
  }
}

TEST(Run, APortInUseIsNamed) {
  const tessera::HeldPort held = tessera::hold_free_port();
  ASSERT_EQ(listen(held.socket(), 1), 0);
  const std::string port = std::to_string(held.port());
  for (const Words& hosts : {Words{}, Words{"--num-nodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1"}}) {
    Words words{"--master-port", port, "true"};
    words.insert(words.begin(), hosts.begin(), hosts.end());
    Launcher launcher(words);
    EXPECT_EQ(launcher.wait(), 1);
    EXPECT_HAS(launcher.err(), "[launch] port " + port + " is in use on this host; name another with --master-port");
  }
}

TEST(Run, RanksDieWithTheLauncher) {
  Launcher launcher({"-n", "2", "sh", "-c", "echo $$; exec sleep 1000"});
  launcher.await_lines(2);
  const auto pids = pids_in(launcher.lines());
  ASSERT_EQ(pids.size(), 2);
  kill(launcher.pid(), SIGKILL);
  EXPECT_EQ(launcher.wait(), -SIGKILL);
  expect_gone(pids);
}

}  // namespace
