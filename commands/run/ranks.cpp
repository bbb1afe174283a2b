#include "commands/run/ranks.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace tessera::run {
namespace {

using std::chrono::milliseconds;

constexpr auto kLook = milliseconds(20), kLeftBehind = milliseconds(2000), kEver = milliseconds(60'000);
constexpr int kNotFound = 127, kNotStarted = 126;  // exit codes as a shell has them
constexpr int kEnding[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT}, kPassedOn[] = {SIGUSR1, SIGUSR2, SIGCONT, SIGTSTP};

void set(const char* name, const std::string& value) {
  setenv(name, value.c_str(), 1);
}
void set(const char* name, int value) {
  set(name, std::to_string(value));
}

// Sets the variables of torchrun and `tessera launch`, whose agent is not there.
void set_variables(const Options& options, int local, int number, int port) {
  set("RANK", number);
  set("WORLD_SIZE", options.nodes * options.ranks);
  set("LOCAL_RANK", local);
  set("LOCAL_WORLD_SIZE", options.ranks);
  set("GROUP_RANK", options.node);
  set("GROUP_WORLD_SIZE", options.nodes);
  set("MASTER_ADDR", options.master_addr);
  set("MASTER_PORT", port);
  unsetenv("TORCHELASTIC_USE_AGENT_STORE");
  unsetenv("TORCHELASTIC_RESTART_COUNT");
  if (options.ranks > 1 && std::getenv("OMP_NUM_THREADS") == nullptr)
    set("OMP_NUM_THREADS", threads_of_rank(options.ranks));
  setenv("PYTHONUNBUFFERED", "1", 0);  // lines of Python programs come as they are printed
}

}  // namespace

Ranks::Ranks(const Options& options) : options_(options), own_pid_(getpid()), port_(options.master_port) {
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  if (options_.node == 0) {  // the host of rank 0, which listens there
    try {
      held_port_ = hold_free_port(port_);
      port_ = held_port_->port();
    } catch (const std::system_error& error) {
      if (port_ == 0) throw;
      if (error.code() == std::errc::address_in_use)
        throw std::runtime_error("[launch] " + port_in_use(port_, "--master-port", options_.nodes));
    }
  }
  ranks_.resize(static_cast<size_t>(options_.ranks));
  // Signals that are ignored, as SIGHUP under nohup, stay so, here and in the ranks.
  sigemptyset(&read_);
  const auto add = [&](int signal) {
    struct sigaction now{};
    if (sigaction(signal, nullptr, &now) != 0 || now.sa_handler != SIG_IGN) sigaddset(&read_, signal);
  };
  std::for_each(std::begin(kEnding), std::end(kEnding), add);
  std::for_each(std::begin(kPassedOn), std::end(kPassedOn), add);
  std::signal(SIGCHLD, SIG_DFL);
  sigaddset(&read_, SIGCHLD);
  struct sigaction ignored{};
  ignored.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignored, &pipe_before_);  // broken pipes are errors of write()
  sigprocmask(SIG_BLOCK, &read_, &before_);
  signals_ = signalfd(-1, &read_, SFD_CLOEXEC | SFD_NONBLOCK);
  if (signals_ < 0) throw std::runtime_error(std::string("[launch] signalfd: ") + std::strerror(errno));
}

Ranks::~Ranks() {
  close(signals_);
  sigprocmask(SIG_SETMASK, &before_, nullptr);
}

// ---- starting

void Ranks::become(int local, int number, const int (&out)[2], const int (&err)[2], int failed) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != own_pid_) _exit(kNotStarted);  // the launcher died before that
  setpgid(0, 0);
  dup2(out[1], STDOUT_FILENO);
  dup2(err[1], STDERR_FILENO);
  if (local != 0 || isatty(STDIN_FILENO) == 1) {  // a terminal stops processes of other groups that read there
    const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    dup2(nothing, STDIN_FILENO);
  }
  set_variables(options_, local, number, port_);
  std::vector<std::string> words = options_.command;
  std::vector<char*> argv;
  for (std::string& word : words)
    argv.push_back(word.data());
  argv.push_back(nullptr);
  sigaction(SIGPIPE, &pipe_before_, nullptr);
  sigprocmask(SIG_SETMASK, &before_, nullptr);
  execvp(argv[0], argv.data());
  const int reason = errno;
  [[maybe_unused]] const ssize_t sent = write(failed, &reason, sizeof(reason));
  _exit(kNotStarted);
}

void Ranks::start(int local) {
  Rank& rank = ranks_[static_cast<size_t>(local)];
  rank.number = options_.node * options_.ranks + local;
  int out[2], err[2], failed[2];
  if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0 || pipe2(failed, O_CLOEXEC) != 0)
    throw std::runtime_error(std::string("[launch] no pipe: ") + std::strerror(errno));
  const auto file = [&](const char* name) {
    if (options_.log_dir.empty()) return std::string();
    const auto folder = std::filesystem::path(options_.log_dir) / std::to_string(rank.number);
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error) throw std::runtime_error("[launch] cannot write " + folder.string() + ": " + error.message());
    return (folder / name).string();
  };
  const std::string prefix = "[rank " + std::to_string(rank.number) + "] ";
  rank.out = std::make_unique<Output>(out[0], STDOUT_FILENO, prefix, file("stdout.log"));
  rank.err = std::make_unique<Output>(err[0], STDERR_FILENO, prefix, file("stderr.log"));
  rank.pid = fork();
  if (rank.pid == 0) become(local, rank.number, out, err, failed[1]);
  for (const int end : {out[1], err[1], failed[1]})
    close(end);
  if (rank.pid < 0) throw std::runtime_error(std::string("[launch] fork: ") + std::strerror(errno));
  setpgid(rank.pid, rank.pid);  // parent and child both do it: whichever comes first
  rank.running = true;
  int reason = 0;
  const bool started = read(failed[0], &reason, sizeof(reason)) != sizeof(reason);
  close(failed[0]);
  if (started) return;
  code_of_start_ = reason == ENOENT ? kNotFound : kNotStarted;
  throw std::runtime_error("[launch] cannot start " + options_.command.front() + ": " + std::strerror(reason));
}

// ---- while they run

void Ranks::signal_all(int signal) {
  for (const Rank& rank : ranks_)
    if (rank.pid > 0) kill(-rank.pid, signal);
}

// A second signal is passed on, too; the grace goes on.
void Ranks::end_all(int signal) {
  signal_all(signal);
  signal_all(SIGCONT);
  if (!kill_at_) kill_at_ = Clock::now() + std::chrono::seconds(options_.grace_seconds);
}

bool Ranks::any_running() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.running; });
}

bool Ranks::any_left() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) {
    while (rank.pid > 0 && waitpid(-rank.pid, nullptr, WNOHANG) > 0) {  // this process is the parent of orphans
    }
    return rank.pid > 0 && kill(-rank.pid, 0) == 0;
  });
}

void Ranks::reap() {
  for (Rank& rank : ranks_) {
    int status = 0;
    if (!rank.running || waitpid(rank.pid, &status, WNOHANG) != rank.pid) continue;
    rank.running = false;
    // Where several ranks end at a time, one that a signal ended is the cause.
    const bool first = failed_ == nullptr || (!kill_at_ && WIFEXITED(status_) && WIFSIGNALED(status));
    if (status == 0 || ended_by_ != 0 || !first || kill_at_) continue;
    failed_ = &rank;
    status_ = status;
  }
  if (failed_ != nullptr && !kill_at_) end_all(SIGTERM);
}

void Ranks::read_signals() {
  signalfd_siginfo info{};
  while (read(signals_, &info, sizeof(info)) == sizeof(info)) {
    const int signal = static_cast<int>(info.ssi_signo);
    if (signal == SIGCHLD) continue;
    if (signal == SIGTSTP) {  // groups without a parent in their session do not stop by it
      signal_all(SIGSTOP);
      raise(SIGSTOP);
      continue;
    }
    if (std::find(std::begin(kEnding), std::end(kEnding), signal) == std::end(kEnding)) {
      signal_all(signal);
      continue;
    }
    if (failed_ == nullptr && ended_by_ == 0) ended_by_ = signal;
    end_all(signal);
  }
  reap();
}

void Ranks::wait_and_pass(milliseconds longest) {
  std::vector<pollfd> all{{signals_, POLLIN, 0}};
  std::vector<Output*> outputs;
  for (const Rank& rank : ranks_)
    for (Output* output : {rank.out.get(), rank.err.get()})
      if (output != nullptr && output->fd() >= 0) {
        outputs.push_back(output);
        all.push_back({output->fd(), POLLIN, 0});
      }
  if (poll(all.data(), all.size(), static_cast<int>(longest.count())) <= 0) return;
  for (size_t at = 0; at < outputs.size(); ++at)
    if (all[at + 1].revents != 0) outputs[at]->read();
  if (all[0].revents != 0) read_signals();
}

// Ends processes that ranks have left behind, after a moment to end by themselves, as Python's trackers of resources do.
void Ranks::end_rest() {
  const auto end = Clock::now() + kLeftBehind;
  while (any_left() && Clock::now() < end)
    wait_and_pass(kLook);
  signal_all(SIGKILL);
  while (any_left() && Clock::now() < end + kLeftBehind)
    wait_and_pass(kLook);
  for (const Rank& rank : ranks_)
    for (Output* output : {rank.out.get(), rank.err.get()}) {
      if (output == nullptr) continue;
      pollfd ready{output->fd(), POLLIN, 0};
      while (output->fd() >= 0 && poll(&ready, 1, 0) == 1)
        output->read();
      output->finish();
    }
}

int Ranks::report() const {
  if (ended_by_ != 0) {
    write_all(STDERR_FILENO, interrupted_by(ended_by_) + "\n");
    return 128 + ended_by_;
  }
  if (failed_ == nullptr) return 0;
  const int code = WIFSIGNALED(status_) ? -WTERMSIG(status_) : WEXITSTATUS(status_);
  std::string text = failed_first(failed_->number, code) + "\n";
  for (const std::string& line : failed_->err->tail())
    text += line + "\n";
  write_all(STDERR_FILENO, text);
  return shell_code(code);
}

int Ranks::run() {
  try {
    for (int local = 0; local < options_.ranks; ++local)
      start(local);
  } catch (...) {
    signal_all(SIGKILL);
    for (const Rank& rank : ranks_)
      if (rank.pid > 0) waitpid(rank.pid, nullptr, 0);
    throw;
  }
  while (any_running()) {
    auto longest = kEver;
    if (kill_at_) {
      longest = std::max(milliseconds(0), std::chrono::ceil<milliseconds>(*kill_at_ - Clock::now()));
      if (longest == milliseconds(0)) {
        signal_all(SIGKILL);
        longest = kLook;
      }
    }
    wait_and_pass(std::min(longest, kEver));
  }
  end_rest();
  return report();
}

}  // namespace tessera::run
