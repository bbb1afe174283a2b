// Ranks: the processes of a host's ranks.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <csignal>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "commands/run/options.h"
#include "commands/run/output.h"
#include "tessera/base/free_port.h"

namespace tessera::run {

// Note [Ends of ranks]
// Each rank leads a process group. When one fails, or a signal ends the launcher, all groups get that signal (SIGTERM for a rank
// that fails) and are killed after the grace; so are processes of a group that its rank has left behind. The system kills ranks
// whose launcher has died. Signals are read from a file: nothing here runs inside a handler.
class Ranks {
 public:
  explicit Ranks(const Options& options);
  ~Ranks();

  // Starts all ranks, passes on what they print, until all have ended. Returns the exit code of the first that failed, whose last
  // lines are shown again; 128 and its number for a signal, the ranks' or the launcher's. std::runtime_error, with nothing left
  // running, where the program cannot be started: exit code `code_of_start()`.
  int run();
  int code_of_start() const { return code_of_start_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Rank {
    int number = 0;
    pid_t pid = 0;
    bool running = false;
    std::unique_ptr<Output> out, err;
  };

  void start(int local);
  [[noreturn]] void become(int local, int number, const int (&out)[2], const int (&err)[2], int failed);
  void wait_and_pass(std::chrono::milliseconds longest);
  void read_signals();
  void reap();
  void signal_all(int signal);
  void end_all(int signal);
  bool any_running() const;
  bool any_left() const;
  void end_rest();
  int report() const;

  const Options options_;
  const pid_t own_pid_;
  int port_ = 0;
  std::optional<HeldPort> held_port_;  // on the host of rank 0
  sigset_t before_{}, read_{};
  struct sigaction pipe_before_{};  // of SIGPIPE
  int signals_ = -1;
  std::vector<Rank> ranks_;
  std::optional<Clock::time_point> kill_at_;
  int ended_by_ = 0;              // the signal that ended the launcher
  const Rank* failed_ = nullptr;  // the first rank that failed
  int status_ = 0;                // its status
  int code_of_start_ = 1;
};

}  // namespace tessera::run
