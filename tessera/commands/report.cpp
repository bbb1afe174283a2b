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

namespace tessera::commands {

namespace {

using nlohmann::ordered_json;

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

std::string machine() {
#if defined(__aarch64__)
  return "Linux aarch64";
#elif defined(__x86_64__)
  return "Linux x86_64";
#else
  return "Linux";
#endif
}

// In the order of the report: a front end's facts stand behind the version of torch, or in place of ours of that name.
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
    if (!ours.contains(name)) found[name] = given[name];
  }
  for (const auto& [name, value] : ours.items())
    found[name] = given.contains(name) ? given[name] : value;
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
    result.output += name + std::string(kColumn - std::min(kColumn, name.size()), ' ') + " " + text_of(value) + "\n";
}

}  // namespace

Command report_command() {
  return {{.command = "report",
           .summary = "What this machine has of all that Tessera uses.",
           .options = {{"--json", "for programs"}}},
          report};
}

}  // namespace tessera::commands
