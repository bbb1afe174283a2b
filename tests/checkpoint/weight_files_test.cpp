#include "tessera/checkpoint/weight_files.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "tessera/base/error.h"
#include "tessera/checkpoint/writer.h"
#include "tessera/io/safetensors.h"
#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"

namespace tessera::checkpoint {
namespace {

using testing::message_of;
using Names = std::vector<std::string>;

struct Model {
  std::vector<at::Tensor> values{at::arange(15, at::kFloat).view({3, 5}).to(at::kBFloat16),
                                 at::arange(7).to(at::kFloat), at::tensor(3), at::zeros({0, 2}),
                                 at::arange(12, at::kFloat).view({3, 4}).t()};
  std::vector<WeightTensor> tensors;

  Model() {
    for (size_t i = 0; i < values.size(); ++i)
      tensors.push_back({{"t" + std::to_string(i)}, values[i].scalar_type(), values[i].sizes().vec()});
    tensors[1].names.emplace_back("tied");
  }
  Names write(const std::string& folder, const std::string& name, int64_t max_bytes = 1 << 20) const {
    WeightFiles files(folder, name, tensors, max_bytes);
    for (const at::Tensor& value : values)
      files.write(value);
    return files.finish();
  }
  // What the files of `names` have is this model, each value of its dtype.
  void expect_in(const std::string& folder, const Names& names) const {
    std::map<std::string, at::Tensor> found;
    for (const std::string& name : names) {
      const std::string path = folder + "/" + name;
      if (name.ends_with(".json")) continue;
      if (name.ends_with(".bin")) {
        const std::string bytes = io::read_text(path, 1 << 20);
        for (const auto& item : torch::jit::pickle_load({bytes.begin(), bytes.end()}).toGenericDict())
          found[item.key().toStringRef()] = item.value().toTensor();
        continue;
      }
      const io::File file = io::File::open(path);
      const io::SafeTensors header = io::read_safetensors(file);
      EXPECT_EQ(header.metadata.at("format"), "pt");
      for (const io::TensorEntry& entry : header.tensors) {
        EXPECT_EQ(entry.begin % static_cast<int64_t>(c10::elementSize(entry.dtype)), 0) << entry.name;
        found[entry.name] = at::empty(entry.shape, at::TensorOptions(entry.dtype));
        file.read(found[entry.name].mutable_data_ptr(), entry.end - entry.begin, entry.begin);
        if (entry.name == "t1") {
          EXPECT_EQ(header.metadata.at("tied"), "t1");
        }
      }
    }
    const bool torch = names[0].ends_with(".bin");
    EXPECT_EQ(found.size(), values.size() + (torch ? 1 : 0));
    EXPECT_EQ(torch, found.contains("tied") && found["tied"].is_alias_of(found["t1"]));
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(found[tensors[i].names[0]].scalar_type(), values[i].scalar_type()) << i;
      EXPECT_TRUE(found[tensors[i].names[0]].equal(values[i])) << i;
    }
  }
};

std::set<std::string> files_in(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.insert(entry.path().filename().string());
  return names;
}

}  // namespace

// In every format and number of files; each export leaves nothing of the one before.
TEST(WeightFiles, HaveTheTensorsAndNothingElseStays) {
  const Model model;
  for (const std::string name : {"model.safetensors", "pytorch_model.bin"}) {
    const io::TempFolder folder;
    const std::string stem = name.substr(0, name.rfind('.')), extension = name.substr(name.rfind('.'));
    io::File::create(folder / "other-model.bin");
    const std::string id = new_id();  // of one that was cut off
    io::File::create(folder / (stem + "-00001-of-00009" + extension + "." + id + ".part"));
    io::File::create(folder / (id + ".saving"));
    const Names two{stem + "-00001-of-00002" + extension, stem + "-00002-of-00002" + extension, name + ".index.json"};
    for (const int64_t max_bytes : {1000, 60, 1, 1000, 60}) {
      const Names names = model.write(folder.path(), name, max_bytes);
      EXPECT_EQ(names.size(), max_bytes == 1000 ? 1u : max_bytes == 60 ? 3u : 6u);
      EXPECT_EQ(names == two, max_bytes == 60);
      EXPECT_EQ(names == Names{name}, max_bytes == 1000);
      model.expect_in(folder.path(), names);
      std::set<std::string> expected(names.begin(), names.end());
      expected.insert("other-model.bin");
      EXPECT_EQ(files_in(folder.path()), expected);
      if (names.size() == 1) continue;
      const auto index = nlohmann::json::parse(io::read_text(folder / names.back(), 1 << 20));
      EXPECT_EQ(index["weight_map"].size(), extension == ".bin" ? 6u : 5u);
      EXPECT_EQ(index["weight_map"]["t0"], names[0]);
      EXPECT_EQ(index["metadata"]["total_size"], 30 + 28 + 4 + 48);
    }
  }
}

TEST(WeightFiles, WhatIsNotFinishedLeavesTheFormerFiles) {
  const Model model;
  for (const std::string name : {"model.safetensors", "pytorch_model.bin"}) {
    const io::TempFolder folder;
    const Names names = model.write(folder.path(), name, 60);
    {
      WeightFiles files(folder.path(), name, model.tensors, 40);
      files.write(at::zeros({3, 5}));
      EXPECT_HAS(message_of<c10::Error>([&] { files.write(at::zeros({8})); }), "'t1'");
      EXPECT_HAS(message_of<c10::Error>([&] { files.write(at::eye(7).to_sparse()); }), "dense");
    }
    model.expect_in(folder.path(), names);
    EXPECT_EQ(files_in(folder.path()), std::set<std::string>(names.begin(), names.end()));
  }
}

// Two at a time into one folder: the one that is finished last holds, and neither takes the other's files.
TEST(WeightFiles, ExportsOfOneNameAtOnce) {
  const Model model;
  for (const std::string name : {"model.safetensors", "pytorch_model.bin"}) {
    for (const int64_t max_bytes : {1000, 60}) {
      const io::TempFolder folder;
      WeightFiles first(folder.path(), name, model.tensors, max_bytes);
      first.write(model.values[0]);
      WeightFiles second(folder.path(), name, model.tensors, max_bytes);
      for (size_t i = 0; i < model.values.size(); ++i) {
        second.write(model.values[i]);
        if (i > 0) first.write(model.values[i]);
      }
      const Names names = first.finish();
      model.expect_in(folder.path(), names);
      EXPECT_EQ(second.finish(), names);
      model.expect_in(folder.path(), names);
    }
  }
}

TEST(WeightFiles, Names) {
  const io::TempFolder folder;
  for (const std::string name : {"", ".bin", "model", "a/model.bin", "../model.bin", "model.pt"})
    EXPECT_HAS(message_of<c10::Error>([&] { WeightFiles(folder.path(), name, {}, 100); }), "is named like") << name;
  EXPECT_EQ(WeightFiles(folder.path(), "none.safetensors", {}, 100).finish(), Names{"none.safetensors"});
}

TEST(PlanFiles, NoFileHasMoreThanTheLimitUnlessOneTensorHas) {
  const auto plan = [](const std::vector<int64_t>& sizes) {
    std::vector<WeightTensor> tensors;
    for (const int64_t size : sizes)
      tensors.push_back({{"x"}, at::kByte, {size}});
    return plan_files(tensors, 10);
  };
  using Counts = std::vector<size_t>;
  EXPECT_EQ(plan({}), Counts{0});
  EXPECT_EQ(plan({5, 5, 1, 9, 30, 2, 8}), (Counts{2, 2, 1, 2}));
  EXPECT_EQ(plan({0, 30}), (Counts{1, 1}));
}

}  // namespace tessera::checkpoint
