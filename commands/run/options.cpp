#include "commands/run/options.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <optional>
#include <string_view>

#include "tessera/base/launch_options.h"
#include "tessera/base/launchers.h"
#include "tessera/base/version.h"

namespace tessera::run {

const char* const kUsage = R"(usage: tessera-run [options] program arguments...

Starts the ranks of this host, one process each, with the variables that torchrun sets. The first that fails ends all.

  -n N, --nproc-per-node N, --num-gpus N   ranks of each host; default: its devices (CUDA_VISIBLE_DEVICES), else 1
  --num-nodes M        hosts of the job, each of which starts its own ranks; default: this one
  --node-rank K        the number of this host, from 0
  --master-addr HOST   where rank 0 is; default on one host: 127.0.0.1
  --master-port PORT   where the ranks meet; default: a free port on one host, 29500 on several
  --log-dir DIR        what rank N prints goes into DIR/N/stdout.log and DIR/N/stderr.log, too
  --grace-seconds S    how long ranks may take to end before they are killed; default: 10
  --version            says the version, and no more

Names of options may have _ in place of -. Exit code: that of the first rank that failed (128 + number of a signal).
)";

namespace {

constexpr int kMostRanks = 1 << 16;

int number(const std::string& name, const std::string& text, int least, int most) {
  const std::optional<int> value = option_number(text, least, most);
  if (!value) throw std::invalid_argument("[launch] " + why_no_number(name, text, least, most));
  return *value;
}

struct Option {
  std::vector<std::string_view> names;
  bool has_value;
  std::function<void(Options&, const std::string& name, const std::string& value)> set;
};

// Options have the names of `tessera launch`.
const std::vector<Option>& table() {
  static const std::vector<Option> all = {
      {{"-h", "--help"}, false, [](Options& o, const std::string&, const std::string&) { o.help = true; }},
      {{"--version"}, false, [](Options& o, const std::string&, const std::string&) { o.version = true; }},
      {{"-n", "--nproc-per-node", "--num-gpus", "--num-accelerators"},
       true,
       [](Options& o, const std::string& name, const std::string& value) {
         o.ranks = number(name, value, 1, kMostRanks);
       }},
      {{"--num-nodes"},
       true,
       [](Options& o, const std::string& name, const std::string& value) {
         o.nodes = number(name, value, 1, kMostRanks);
       }},
      {{"--node-rank"},
       true,
       [](Options& o, const std::string& name, const std::string& value) {
         o.node = number(name, value, 0, kMostRanks);
       }},
      {{"--master-addr"},
       true,
       [](Options& o, const std::string&, const std::string& value) { o.master_addr = value; }},
      {{"--master-port"},
       true,
       [](Options& o, const std::string& name, const std::string& value) {
         o.master_port = number(name, value, 1, kHighestPort);
       }},
      {{"--log-dir", "--enable-each-rank-log"},
       true,
       [](Options& o, const std::string&, const std::string& value) { o.log_dir = value; }},
      {{"--no-python"}, false, [](Options&, const std::string&, const std::string&) {}},  // nothing else is served here
      {{"--grace-seconds"},
       true,
       [](Options& o, const std::string& name, const std::string& value) {
         o.grace_seconds = number(name, value, 0, 1 << 20);
       }},
  };
  return all;
}

const Option& option_of(std::string name) {
  if (name.starts_with("--")) std::replace(name.begin(), name.end(), '_', '-');
  for (const Option& option : table())
    if (std::find(option.names.begin(), option.names.end(), name) != option.names.end()) return option;
  throw UsageError("[launch] unknown option " + name + "; the program and its arguments come behind the options");
}

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? std::nullopt : std::optional<std::string>(value);
}

void check(Options& options) {
  if (options.command.empty())
    throw UsageError("[launch] the program is missing: tessera-run [options] program arguments...");
  if (options.nodes == 0) {
    if (const std::string why = why_not_started_here(variable); !why.empty())
      throw std::invalid_argument("[launch] " + why);
    options.nodes = 1;
  }
  if (options.nodes == 1 && options.node < 0) options.node = 0;
  if (const std::string why = why_no_node(options.nodes, options.node, options.master_addr); !why.empty())
    throw std::invalid_argument("[launch] " + why);
  if (options.nodes > 1 && options.master_port == 0) options.master_port = kLaunchPort;
  if (options.master_addr.empty()) options.master_addr = "127.0.0.1";
  if (options.ranks == 0) options.ranks = own_devices();
  if (const std::string why = why_no_host(options.master_addr); !why.empty())
    throw std::invalid_argument("[launch] " + why);
  if (options.log_dir.empty()) return;
  if (const std::string why = why_no_logs(options.log_dir); !why.empty())
    throw std::invalid_argument("[launch] " + why);
}

}  // namespace

int own_devices() {
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES")) return listed_devices(visible);
  int count = 0;
  std::error_code unreadable;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", unreadable)) {
    const std::string name = entry.path().filename().string();
    count += name.starts_with("nvidia") && name.size() > 6 && name.find_first_not_of("0123456789", 6) == name.npos;
  }
  return std::max(1, count);
}

Options parse(const std::vector<std::string>& arguments) {
  Options options;
  size_t at = 0;
  for (; at < arguments.size() && arguments[at].starts_with('-'); ++at) {
    if (arguments[at] == "--") {
      ++at;
      break;
    }
    const size_t equals = arguments[at].starts_with("--") ? arguments[at].find('=') : std::string::npos;
    const bool joined = arguments[at].starts_with("-n") && arguments[at].size() > 2;  // -n2, as mpirun has it
    const std::string name = joined ? "-n" : arguments[at].substr(0, equals);
    const Option& option = option_of(name);
    std::string value;
    if (joined) {
      value = arguments[at].substr(2);
    } else if (option.has_value && equals == std::string::npos) {
      if (++at == arguments.size()) throw UsageError("[launch] " + name + " needs a value");
      value = arguments[at];
    } else if (equals != std::string::npos) {
      if (!option.has_value) throw UsageError("[launch] " + name + " takes no value");
      value = arguments[at].substr(equals + 1);
    }
    option.set(options, name, value);
  }
  options.command.assign(arguments.begin() + static_cast<std::ptrdiff_t>(at), arguments.end());
  if (!options.help && !options.version) check(options);
  return options;
}

}  // namespace tessera::run
