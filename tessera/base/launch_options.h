// What both launchers go by: what they check of their options before a rank starts, what ranks get, and what is said of their end.
// Needs no torch: tessera-run includes this file, too.
#pragma once

#include <netdb.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace tessera {

inline constexpr int kLaunchPort = 29500;  // of several hosts, where nobody says another
inline constexpr int kHighestPort = 65535;
inline constexpr size_t kShownLines = 30;  // of a failed rank's errors, which are shown again

// ---- options

// The number that an option has; nothing where the text is none from `least` to `most`.
inline std::optional<int> option_number(std::string_view text, int least, std::optional<int> most) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least || (most && value > *most))
    return std::nullopt;
  return value;
}
inline std::string why_no_number(const std::string& option, const std::string& text, int least,
                                 std::optional<int> most) {
  return option + " must be a number from " + std::to_string(least) + (most ? " to " + std::to_string(*most) : "") +
         ", got '" + text + "'";
}

// Why host number `node` cannot start its ranks of a job of `nodes` hosts; empty where it can. `address`: where rank 0 is, or "".
inline std::string why_no_node(int nodes, int node, const std::string& address) {
  const std::string of = "--num_nodes " + std::to_string(nodes);
  if (node < 0 || node >= nodes)
    return of + " needs --node_rank 0 to " + std::to_string(nodes - 1) + ", got " + std::to_string(node);
  return nodes > 1 && address.empty() ? of + " needs --master_addr, where host number 0 is" : "";
}

// Why ranks would wait in vain for rank 0 at `host`, a name or an address; empty where it is known here.
inline std::string why_no_host(const std::string& host) {
  addrinfo kind{}, *found = nullptr;
  kind.ai_socktype = SOCK_STREAM;
  const int error = getaddrinfo(host.c_str(), nullptr, &kind, &found);
  if (error == 0) {
    freeaddrinfo(found);
    return "";
  }
  return "--master_addr " + host + " is no host that is known here (" + gai_strerror(error) +
         "): give the name or the address by which every host of the job reaches the host of rank 0";
}

// `option`: as the launcher spells --master_port.
inline std::string port_in_use(int port, const std::string& option, int nodes) {
  return "port " + std::to_string(port) + " is in use on this host; name another with " + option +
         (nodes == 1 ? ", or none" : ", the same on all hosts");
}

// Why nothing can be written into `folder`, which is made where it is missing; empty where that can be.
inline std::string why_no_logs(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (!error && access(folder.c_str(), W_OK | X_OK) != 0) error = std::error_code(errno, std::generic_category());
  if (!error) return "";
  return "--log_dir " + folder + " is no folder that can be written into (" + error.message() +
         "): name another, or leave it out";
}

// ---- ranks

// How many devices a value of CUDA_VISIBLE_DEVICES names; at least 1, of a host that has none.
inline int listed_devices(std::string_view visible) {
  int count = 0;
  while (!visible.empty()) {
    const size_t comma = std::min(visible.find(','), visible.size());
    count += visible.substr(0, comma).find_first_not_of(" \t") != std::string_view::npos;
    visible.remove_prefix(std::min(comma + 1, visible.size()));
  }
  return std::max(1, count);
}

// OMP_NUM_THREADS of each of several ranks of a host: its part of the cores that this process may use.
inline int threads_of_rank(int ranks) {
  cpu_set_t own;
  const int cores = sched_getaffinity(0, sizeof(own), &own) == 0 ? CPU_COUNT(&own) : 1;
  return std::max(1, cores / ranks);
}

// What a rank prints to stderr, but for tracebacks of Python that end in KeyboardInterrupt, which say only that the launcher was
// interrupted.
class Tracebacks {
 public:
  // Takes a line, with its end or without. Returns lines that are to be shown now.
  std::vector<std::string> take(std::string_view line) {
    const std::string_view text = without_own_prefix(line);
    std::vector<std::string> shown;
    if (text.starts_with("Traceback (most recent call last)")) {
      shown = rest();
      held_.emplace_back(line);
    } else if (held_.empty()) {
      shown.emplace_back(line);
    } else {
      held_.emplace_back(line);
      if (text.empty() || std::isspace(static_cast<unsigned char>(text.front())) != 0) return {};  // no exception yet
      shown = rest();
      if (text.starts_with("KeyboardInterrupt")) shown.clear();
    }
    return shown;
  }
  // The lines of a traceback that has not ended.
  std::vector<std::string> rest() { return std::exchange(held_, {}); }

 private:
  // Torch begins lines of a rank that has a process group with "[rank0]: ".
  static std::string_view without_own_prefix(std::string_view line) {
    constexpr std::string_view kBegin = "[rank";
    if (!line.starts_with(kBegin)) return line;
    const size_t end = line.find_first_not_of("0123456789", kBegin.size());
    if (end == kBegin.size() || end == std::string_view::npos || !line.substr(end).starts_with("]:")) return line;
    const std::string_view text = line.substr(end + 2);
    return text.starts_with(' ') ? text.substr(1) : text;
  }

  std::vector<std::string> held_;
};

// ---- their end. `code`: an exit code, or less than 0 the number of the signal that ended a process.

// A shell's exit code: 128 + the number of a signal.
inline int shell_code(int code) {
  return code >= 0 ? code : 128 - code;
}

inline std::string signal_name(int signal) {
  constexpr std::array<std::pair<int, const char*>, 31> kNames{
      {{SIGHUP, "SIGHUP"},   {SIGINT, "SIGINT"},   {SIGQUIT, "SIGQUIT"},     {SIGILL, "SIGILL"},
       {SIGTRAP, "SIGTRAP"}, {SIGABRT, "SIGABRT"}, {SIGBUS, "SIGBUS"},       {SIGFPE, "SIGFPE"},
       {SIGKILL, "SIGKILL"}, {SIGUSR1, "SIGUSR1"}, {SIGSEGV, "SIGSEGV"},     {SIGUSR2, "SIGUSR2"},
       {SIGPIPE, "SIGPIPE"}, {SIGALRM, "SIGALRM"}, {SIGTERM, "SIGTERM"},     {SIGSTKFLT, "SIGSTKFLT"},
       {SIGCHLD, "SIGCHLD"}, {SIGCONT, "SIGCONT"}, {SIGSTOP, "SIGSTOP"},     {SIGTSTP, "SIGTSTP"},
       {SIGTTIN, "SIGTTIN"}, {SIGTTOU, "SIGTTOU"}, {SIGURG, "SIGURG"},       {SIGXCPU, "SIGXCPU"},
       {SIGXFSZ, "SIGXFSZ"}, {SIGPROF, "SIGPROF"}, {SIGVTALRM, "SIGVTALRM"}, {SIGWINCH, "SIGWINCH"},
       {SIGIO, "SIGIO"},     {SIGPWR, "SIGPWR"},   {SIGSYS, "SIGSYS"}}};
  for (const auto& [number, name] : kNames)
    if (number == signal) return name;
  return std::to_string(signal);
}

// The line over the last lines of the rank that failed first.
inline std::string failed_first(int rank, int code) {
  return "[launch] rank " + std::to_string(rank) + " failed first (" +
         (code < 0 ? "signal " + signal_name(-code) : "exit code " + std::to_string(code)) + "):";
}

inline std::string interrupted_by(int signal) {
  return "[launch] interrupted by " + signal_name(signal) + "; all ranks have ended";
}

}  // namespace tessera
