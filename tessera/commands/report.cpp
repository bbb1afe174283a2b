#include <ATen/DeviceAccelerator.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "tessera/base/env.h"
#include "tessera/base/version.h"
#include "tessera/commands/table.h"
#include "tessera/shard/device.h"

namespace tessera::commands {

namespace {

using nlohmann::ordered_json;

constexpr const char* kMissing = "missing for more";

double in_tenths(double value) {
  return std::round(value * 10) / 10;
}

ordered_json instruction_sets() {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line) && !line.starts_with("flags")) {
  }
  std::istringstream words(line);
  const std::vector<std::string> flags{std::istream_iterator<std::string>(words), {}};
  ordered_json found = ordered_json::array();
  for (const char* name : {"avx2", "f16c", "avx512f", "avx512_bf16", "amx_bf16"})
    if (std::find(flags.begin(), flags.end(), name) != flags.end()) found.push_back(name);
  return found;
}

ordered_json devices() {
  ordered_json found = ordered_json::array();
  const auto kind = at::accelerator::getAccelerator(false);
  if (!kind) return found;
  for (int i = 0; i < at::accelerator::deviceCount(); ++i)
    found.push_back(at::Device(*kind, static_cast<at::DeviceIndex>(i)).str());
  return found;
}

ordered_json free_space(const std::string& folder) {
  std::error_code error;
  const auto space = std::filesystem::space(folder, error);
  if (error) return {{"folder", folder}, {"free_gb", nullptr}};
  return {{"folder", folder},
          {"free_gb", in_tenths(static_cast<double>(space.available) / 1e9)},
          {"total_gb", in_tenths(static_cast<double>(space.capacity) / 1e9)}};
}

// What this machine lacks, and what it would be for.
ordered_json missing(const ordered_json& devices_found) {
  ordered_json found = ordered_json::array();
  const auto kind = at::accelerator::getAccelerator(false);
  if (devices_found.empty()) {
    found.push_back("no device that this torch sees: ranks train on the CPU");
  } else if (kind) {
    try {
      shard::check_device(at::Device(*kind, 0));
    } catch (const c10::Error& error) {
      found.push_back(error.what_without_backtrace());
    }
  }
#if defined(__x86_64__)
  const ordered_json sets = instruction_sets();
  for (const auto& [name, what] : {std::pair{"avx2", "updates run without vectors"},
                                   std::pair{"avx512_bf16", "matrix products of bf16 are emulated and slow"}})
    if (std::find(sets.begin(), sets.end(), name) == sets.end())
      found.push_back(std::string("no ") + name + ": " + what);
#endif
  constexpr double kSmall = 1e9;
  std::error_code error;
  const auto shared = std::filesystem::space("/dev/shm", error);
  if (error || static_cast<double>(shared.capacity) < kSmall)
    found.push_back(
        "less than 1 GB of /dev/shm: ranks of one host may need it to exchange large units (docker: --shm-size)");
  return found;
}

std::string machine() {
#if defined(__aarch64__)
  return "Linux aarch64";
#elif defined(__x86_64__)
  return "Linux x86_64";
#else
  return "Linux";
#endif
}

// Collects facts in the order of the report: a front end's stand behind the version of torch, or in place of ours of that name.
ordered_json collect(const FrontEnd& front) {
  const double pages = static_cast<double>(sysconf(_SC_PHYS_PAGES)), page = static_cast<double>(sysconf(_SC_PAGE_SIZE));
  std::error_code unreadable;
  const ordered_json ours{
      {"machine", machine()},
      {"cores", std::thread::hardware_concurrency()},
      {"memory_gb", in_tenths(pages * page / 1e9)},
      {"instruction sets", instruction_sets()},
      {"devices", devices()},
      {"transports", {"shared memory (ranks of one host)", "gloo"}},
      {"disk",
       {free_space(std::filesystem::current_path(unreadable).string()), free_space("/dev/shm"),
        free_space(env::get("TMPDIR").value_or("/tmp"))}},
  };
  ordered_json found{{"tessera", version()}, {"built for torch", TORCH_VERSION}};
  ordered_json given = ordered_json::object();
  for (const auto& [name, value] : front.facts) {
    given[name] = ordered_json::parse(value);
    if (!ours.contains(name) && name != kMissing) found[name] = given[name];
  }
  for (const auto& [name, value] : ours.items())
    found[name] = given.contains(name) ? given[name] : value;
  found[kMissing] = missing(found["devices"]);
  for (const ordered_json& line : given.value(kMissing, ordered_json::array()))
    found[kMissing].push_back(line);
  return found;
}

std::string text_of(const ordered_json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_structured()) return value.dump();
  if (value.is_object() && value.contains("folder"))
    return text_of(value["folder"]) +
           (value["free_gb"].is_null() ? ": none" : std::string(" ").append(text_of(value["free_gb"])) + " GB free");
  std::string text;
  for (const auto& [key, item] : value.items())
    text += (text.empty()        ? ""
             : value.is_object() ? ", "
                                 : "; ") +
            (value.is_object() ? key + " " : "") + text_of(item);
  return text.empty() ? "none" : text;
}

void report(const Arguments& given, const FrontEnd& front, Result& result) {
  constexpr size_t kColumn = 18;
  constexpr int kIndent = 2;
  const ordered_json found = collect(front);
  if (given.has("--json")) {
    result.output = found.dump(kIndent) + "\n";
    return;
  }
  for (const auto& [name, value] : found.items())
    if (name != kMissing)
      result.output += name + std::string(kColumn - std::min(kColumn, name.size()), ' ') + " " + text_of(value) + "\n";
  result.output += std::string(kMissing) + (found[kMissing].empty() ? std::string(3, ' ') + "nothing\n" : "\n");
  for (const ordered_json& line : found[kMissing])
    result.output += "  " + line.get<std::string>() + "\n";
}

}  // namespace

Command report_command() {
  return {{.command = "report",
           .summary = "What this machine has of all that Tessera uses, and what is missing for more.",
           .options = {{"--json", "for programs"}}},
          report};
}

}  // namespace tessera::commands
