#include <c10/core/ScalarType.h>

#include <array>
#include <cctype>
#include <charconv>
#include <cstdio>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/checkpoint/deepspeed/save.h"
#include "tessera/checkpoint/export.h"
#include "tessera/checkpoint/reader.h"
#include "tessera/commands/table.h"
#include "tessera/engine/saved_run.h"

namespace tessera::commands {

namespace {

using checkpoint::Reader;
using nlohmann::ordered_json;

constexpr double kMega = 1e6;

Reader open(const Arguments& given) {
  return checkpoint::open(given.text("dir"), given.text("--tag"));
}

// The number with commas: 1234567 as 1,234,567.
std::string with_commas(int64_t value) {
  const std::string digits = std::to_string(value);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

std::string megabytes(int64_t bytes) {
  char tenths[8];
  const auto rounded = static_cast<int64_t>(static_cast<double>(bytes) / kMega * 10 + 0.5);
  std::snprintf(tenths, sizeof tenths, ".%d", static_cast<int>(rounded % 10));
  return with_commas(rounded / 10) + tenths;
}

std::string padded(const std::string& text, size_t width, bool left = false) {
  const std::string gap(width > text.size() ? width - text.size() : 0, ' ');
  return left ? text + gap : gap + text;
}

std::string counters_of(const Reader& reader) {
  engine::SavedRun(reader.manifest().run, reader.folder());  // throws where the values cannot be
  const ordered_json run = ordered_json::parse(reader.manifest().run);
  std::string lines;
  for (const char* section : {"source", "counters"}) {
    if (!run.contains(section)) continue;
    for (const auto& [key, value] : run[section].items())
      lines += key + ": " + (value.is_string() ? value.get<std::string>() : value.dump()) + "\n";
  }
  return lines;
}

std::string kinds_of(const Reader& reader) {
  struct Total {
    std::string kind;
    int64_t tensors = 0, elements = 0, bytes = 0;
  };
  std::vector<Total> totals;
  for (const checkpoint::TensorRecord& record : reader.manifest().tensors) {
    const std::string kind = record.kind + " (" + std::string(c10::getDtypeNames(record.dtype).first) + ")";
    auto total = std::find_if(totals.begin(), totals.end(), [&](const Total& t) { return t.kind == kind; });
    if (total == totals.end()) total = totals.insert(total, {kind});
    ++total->tensors;
    total->elements += record.numel();
    total->bytes += record.numel() * static_cast<int64_t>(c10::elementSize(record.dtype));
  }
  std::string lines;
  for (const Total& total : totals)
    lines += "  " + padded(total.kind, 28, true) + " " + padded(std::to_string(total.tensors), 6) + " tensors " +
             padded(with_commas(total.elements), 15) + " elements " + padded(megabytes(total.bytes), 12) + " MB\n";
  return lines;
}

std::string describe(const Reader& reader) {
  const checkpoint::Manifest& manifest = reader.manifest();
  int64_t trained = 0, bytes = 0;
  for (const auto& param : manifest.params)
    trained += param.trained ? 1 : 0;
  for (const auto& file : manifest.files)
    bytes += file.bytes;
  std::string blobs;
  for (const auto& [name, file] : manifest.blobs)
    blobs += (blobs.empty() ? "" : ", ") + name;
  return counters_of(reader) + "parameters: " + std::to_string(manifest.params.size()) + ", of them " +
         std::to_string(trained) + " trained\n" + kinds_of(reader) + "files: " + std::to_string(manifest.files.size()) +
         ", " + megabytes(bytes) + " MB\nalso: " + (blobs.empty() ? "nothing" : blobs) + "\n";
}

void inspect(const Arguments& given, const FrontEnd&, Result& result) {
  const Reader reader = open(given);
  result.output = describe(reader);
  if (!given.has("--verify")) return;
  reader.verify_all();
  result.output += "every byte is as it was written\n";
}

void write_weights(const Arguments& given, const FrontEnd&, Result& result) {
  constexpr std::array<std::optional<at::ScalarType>, 4> kDtypes{at::kFloat, at::kBFloat16, at::kHalf, std::nullopt};
  constexpr std::array<const char*, 2> kNames{"model.safetensors", "pytorch_model.bin"};
  const checkpoint::ExportOptions options{
      .dtype = kDtypes.at(given.choice("--dtype", {"fp32", "bf16", "fp16", "saved"})),
      .max_shard_bytes = shard_bytes(given.text("--max-shard-size")),
      .frozen = !given.has("--exclude-frozen")};
  const char* name = kNames.at(given.choice("--format", {"safetensors", "bin"}));
  const Reader reader = open(given);
  for (const std::string& file : checkpoint::export_weights(reader, given.text("out"), name, options))
    result.output += file + "\n";
}

checkpoint::Objects objects_of(const Arguments& given) {
  return given.has("--trusted") ? checkpoint::Objects::Kept : checkpoint::Objects::Refused;
}

void write_deepspeed(const Arguments& given, const FrontEnd&, Result& result) {
  const checkpoint::DeepSpeedLayout layout{static_cast<int>(given.choice("--stage", {"0", "1", "2", "3"})),
                                           given.has("--world-size") ? given.number("--world-size", 1) : 1};
  result.output =
      checkpoint::to_deepspeed(given.text("dir"), given.text("out"), given.text("--tag"), layout, objects_of(given)) +
      "\n";
}

void write_universal(const Arguments& given, const FrontEnd&, Result& result) {
  result.output =
      checkpoint::to_universal(given.text("dir"), given.text("out"), given.text("--tag"), objects_of(given)) + "\n";
}

}  // namespace

int64_t shard_bytes(const std::string& size) {
  static const std::map<std::string, int64_t> units{
      {"", 1},          {"KB", 1'000},    {"MB", 1'000'000}, {"GB", 1'000'000'000},
      {"KIB", 1 << 10}, {"MIB", 1 << 20}, {"GIB", 1 << 30}};
  std::string text;
  for (const char c : size)
    text += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  const size_t from = text.find_first_not_of(" \t\n"), to = text.find_last_not_of(" \t\n");
  if (from != std::string::npos) text = text.substr(from, to - from + 1);
  int64_t count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  std::string unit = text.substr(static_cast<size_t>(end - text.data()));
  unit.erase(0, unit.find_first_not_of(" \t\n"));
  const auto known = units.find(unit);
  const bool good =
      error == std::errc() && count > 0 && known != units.end() && count <= (int64_t{1} << 62) / known->second;
  TESSERA_CHECK_VALUE(good, "checkpoints", "max_shard_size must be like 500MB, 5GB or 4GiB, got '", size, "'");
  return count * known->second;
}

Command inspect_command() {
  return {{.command = "inspect",
           .summary = "What a checkpoint holds.",
           .needed = {{"dir", "the folder that save_checkpoint() was called with"}},
           .options = {{"--tag", "default: what its file `latest` names", "TAG"},
                       {"--verify", "read every byte and compare checksums"}}},
          inspect};
}

Command deepspeed_command() {
  return {
      {.command = "deepspeed",
       .summary = "A checkpoint as DeepSpeed would have written it.",
       .needed = {{"dir", "the folder that save_checkpoint() was called with"}, {"out", "the folder for the new one"}},
       .options = {{"--tag", "default: what its file `latest` names", "TAG"},
                   {"--stage", "of ZeRO, 0 to 3", "STAGE", false, "2"},
                   {"--world-size", "how many ranks will load it", "RANKS"},
                   {"--trusted", "write objects of any kind, as they came"}}},
      write_deepspeed};
}

Command universal_command() {
  return {
      {.command = "universal",
       .summary = "A checkpoint in DeepSpeed's universal layout.",
       .needed = {{"dir", "the folder that save_checkpoint() was called with"}, {"out", "the folder for the new one"}},
       .options = {{"--tag", "default: what its file `latest` names", "TAG"},
                   {"--trusted", "write objects of any kind, as they came"}}},
      write_universal};
}

Command export_command() {
  return {
      {.command = "export",
       .summary = "A checkpoint's weights for other tools.",
       .needed = {{"dir", "the folder that save_checkpoint() was called with"}, {"out", "the folder for the weights"}},
       .options = {{"--tag", "default: what its file `latest` names", "TAG"},
                   {"--dtype", "of parameters: fp32, bf16, fp16, or saved (what the module computed in)", "DTYPE",
                    false, "fp32"},
                   {"--max-shard-size", "of a file", "SIZE", false, "5GB"},
                   {"--exclude-frozen", "without parameters that are not trained"},
                   {"--format", "safetensors or bin", "FORMAT", false, "safetensors"}}},
      write_weights};
}

}  // namespace tessera::commands
