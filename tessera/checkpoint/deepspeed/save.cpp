#include "tessera/checkpoint/deepspeed/save.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/checkpoint/deepspeed/files.h"
#include "tessera/checkpoint/deepspeed/pt_writer.h"
#include "tessera/checkpoint/writer.h"
#include "tessera/io/file.h"

namespace tessera::checkpoint {

namespace fs = std::filesystem;

namespace deepspeed {

namespace {

constexpr const char* kScript = R"(#!/usr/bin/env python
"""Full fp32 weights of the checkpoint in this folder: zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR [--help]"""

import argparse

from tessera.checkpoints import export

parser = argparse.ArgumentParser(description="Full fp32 weights of a checkpoint.")
parser.add_argument("checkpoint_dir", help="the folder that save_checkpoint() was called with")
parser.add_argument("output_dir")
parser.add_argument("--max_shard_size", default="5GB")
parser.add_argument("--safe_serialization", action="store_true", help="safetensors instead of pytorch_model.bin")
parser.add_argument("-t", "--tag", help="default: what the file `latest` names")
parser.add_argument("--exclude_frozen_parameters", action="store_true")
parser.add_argument("-d", "--debug", action="store_true", help="errors with where they came from")

if __name__ == "__main__":
    a = parser.parse_args()
    form = {"exclude_frozen": a.exclude_frozen_parameters, "safetensors": a.safe_serialization}
    try:
        export(a.checkpoint_dir, a.output_dir, a.tag, max_shard_size=a.max_shard_size, **form)
    except (ValueError, OSError) as error:
        if a.debug:
            raise
        raise SystemExit(str(error))
)";

bool is_checkpoint(const fs::path& folder) {
  std::error_code none;
  return std::ranges::any_of(fs::directory_iterator(folder, none), [](const fs::directory_entry& entry) {
    return entry.path().filename().string().ends_with("_model_states.pt");
  });
}

// Deletes older checkpoints, so that keep_last are left, but never the one that `latest` names.
void remove_older(const std::string& dir, const std::string& tag, int keep_last) {
  std::error_code none;
  std::vector<std::pair<fs::file_time_type, fs::path>> others;
  for (const auto& entry : fs::directory_iterator(dir, none))
    if (entry.is_directory(none) && entry.path().filename() != tag && is_checkpoint(entry.path()))
      others.emplace_back(fs::last_write_time(entry.path(), none), entry.path());
  std::sort(others.rbegin(), others.rend());
  const std::string named = latest_tag(dir);
  for (size_t i = static_cast<size_t>(keep_last) - 1; i < others.size(); ++i)
    if (others[i].second.filename() != named) fs::remove_all(others[i].second, none);
}

Value value_of(const nlohmann::ordered_json& json, Values& values) {
  if (json.is_boolean()) return Value::of(json.get<bool>());
  if (json.is_number_integer()) return Value::of(json.get<int64_t>());
  if (json.is_number()) return Value::of(json.get<double>());
  if (json.is_string()) return values.text(json.get<std::string>());
  if (json.is_null()) return {};
  const Value made = values.items(json.is_array() ? Kind::List : Kind::Dict);
  for (const auto& item : json.items())
    if (json.is_array())
      made.items->push_back(value_of(item.value(), values));
    else
      values.put(made, item.key(), value_of(item.value(), values));
  return made;
}

template <class F>
void naming(const std::string& dir, const F& f) try {
  f();
} catch (const Unfit& error) {
  TESSERA_FAIL(IoError, "[checkpoints] '", dir, "' is damaged, or holds what DeepSpeed's files cannot: ", error.what());
}

// Writes into a folder beside the checkpoint's place, which is moved there once it is complete.
template <class Write, class Finish>
void put(const std::string& out, const std::string& name, const Write& write, const Finish& finish) {
  const std::string made = (fs::path(out) / ("." + name + ".part")).string();
  std::error_code none;
  fs::remove_all(made, none);
  io::make_folder(made);
  try {
    write(made);
    finish(made);
  } catch (...) {
    fs::remove_all(made, none);
    throw;
  }
  fs::remove_all(made, none);
}

}  // namespace

void write_ranks(const std::string& dir, const std::string& tag, const std::string& made, DeepSpeedLayout layout,
                 int64_t first, int64_t step) {
  const Reader reader = open(dir, tag);
  naming(dir, [&] {
    Source source(reader, Objects::Kept);
    Files files(source, layout.stage, layout.ranks);
    io::make_folder(made);
    for (int64_t rank = first; rank < layout.ranks; rank += step)
      files.write(made, rank);
  });
}

void put_script(const std::string& dir, const std::string& part) {
  std::error_code error;
  io::replace_text(part, kScript);
  using fs::perms;
  const perms all_read = perms::group_read | perms::others_read | perms::group_exec | perms::others_exec;
  fs::permissions(part, perms::owner_all | all_read, error);
  const std::string path = (fs::path(dir) / "zero_to_fp32.py").string();
  if (!error) fs::rename(part, path, error);
  TESSERA_CHECK_IO(!error, "checkpoint", "'", path, "' cannot be put in place: ", error.message());
}

void finish_folder(const std::string& made, const std::string& dir, const std::string& tag, int stage, bool latest,
                   int keep_last) {
  check_tag(tag);
  put_in_place(made, (fs::path(dir) / tag).string());
  if (stage > 0) put_script(dir, made + ".py");
  if (latest) set_latest(dir, tag);
  if (keep_last > 0) remove_older(dir, tag, keep_last);
}

std::string run_blob(const std::string& config, const std::vector<std::vector<std::string>>& group_names) {
  Values values;
  const Value python = values.items(Kind::Dict), names = values.items(Kind::List);
  values.put(python, "config", value_of(nlohmann::ordered_json::parse(config), values));
  for (const auto& group : group_names)
    names.items->push_back(values.list(group));
  values.put(python, "group_names", names);
  return pt_bytes(python, {});
}

}  // namespace deepspeed

std::string to_deepspeed(const std::string& dir, const std::string& out, const std::string& given,
                         DeepSpeedLayout layout, Objects objects) {
  std::error_code apart;
  TESSERA_CHECK_VALUE(!std::filesystem::equivalent(dir, out, apart), "checkpoints", "'", out,
                      "' has the checkpoint itself, which DeepSpeed's files would replace; name another folder");
  const std::string tag = given.empty() ? latest_tag(dir) : given;
  const Reader reader = open(dir, tag, {{}, {}, true, objects});
  deepspeed::naming(dir, [&] {
    deepspeed::Source source(reader, objects);
    deepspeed::Files files(source, layout.stage, layout.ranks);
    const auto write = [&](const std::string& made) {
      for (int64_t rank = 0; rank < layout.ranks; ++rank)
        files.write(made, rank);
    };
    deepspeed::put(out, tag, write,
                   [&](const std::string& made) { deepspeed::finish_folder(made, out, tag, layout.stage, true); });
  });
  return tag;
}

std::string to_universal(const std::string& dir, const std::string& out, const std::string& given, Objects objects,
                         const std::string& wanted) {
  const std::string tag = given.empty() ? latest_tag(dir) : given, name = wanted.empty() ? tag + "_universal" : wanted;
  const Reader reader = open(dir, tag, {{}, {}, true, objects});
  deepspeed::naming(dir, [&] {
    deepspeed::Source source(reader, objects);
    const auto write = [&](const std::string& made) { deepspeed::write_universal(source, made); };
    deepspeed::put(out, name, write, [&](const std::string& made) {
      put_in_place(made, (fs::path(out) / name).string());
      set_latest(out, name, "latest_universal");
    });
  });
  return name;
}

}  // namespace tessera::checkpoint
