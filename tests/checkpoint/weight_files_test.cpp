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
#include "tests/support/numbers.h"

namespace tessera::checkpoint {
namespace {

using testing::error_of;
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

void write_bytes(const std::string& path, const std::string& bytes) {
  std::filesystem::remove(path);
  io::File::create(path).write(bytes.data(), static_cast<int64_t>(bytes.size()), 0);
}

// Of every dtype that the format has, and of shapes that are easily forgotten.
NamedTensors tensors() {
  NamedTensors all;
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar, at::kByte, at::kShort, at::kInt, at::kLong,
        at::kBool, at::kUInt16, at::kUInt32, at::kUInt64, at::kComplexFloat, at::kFloat8_e4m3fn, at::kFloat8_e5m2,
        at::kFloat8_e4m3fnuz, at::kFloat8_e5m2fnuz, at::kFloat8_e8m0fnu})
    all.insert(c10::toString(dtype), at::arange(12).remainder(2).view({3, 4}).to(dtype));
  all.insert("Float4", at::arange(12).to(at::kByte).view({3, 4}).view(at::ScalarType::Float4_e2m1fn_x2));
  all.insert("scalar", at::tensor(2.5));
  all.insert("none", at::zeros({0, 3}));
  all.insert("turned", at::arange(6, at::kFloat).view({2, 3}).t());
  all.insert("conjugate", at::complex(at::ones({2}), at::ones({2})).conj());
  all.insert("tied", all["Float"]);
  return all;
}

at::Tensor bytes_of(const at::Tensor& value) {
  return value.resolve_conj().contiguous().view({-1}).view(at::kByte);
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

TEST(WeightReader, WhatWasWrittenComesBack) {
  const NamedTensors written = tensors();
  for (const int64_t limit : {int64_t{1} << 40, int64_t{60}}) {
    const io::TempFolder folder;
    const Names files = write_weights(folder.path(), "model.safetensors", written,
                                      {.max_shard_bytes = limit, .metadata = {{"epoch", "3"}, {"who", "ich, größer"}}});
    EXPECT_EQ(files.size() > 1, limit == 60);
    for (const std::string& path : {folder.path(), folder / files.back()}) {
      const WeightReader reader(path);
      EXPECT_EQ(reader.tensors().size(), written.size() - 1);
      EXPECT_EQ(reader.metadata().at("who"), "ich, größer");
      EXPECT_EQ(reader.metadata().at("format"), "pt");
      EXPECT_EQ(reader.find("Float"), reader.find("tied"));
      EXPECT_EQ(reader.find("tied")->names, (Names{"Float", "tied"}));
      EXPECT_EQ(reader.find("epoch"), nullptr);
      for (const auto& item : written) {
        const at::Tensor found = reader.read(item.key());
        EXPECT_EQ(found.scalar_type(), item.value().scalar_type()) << item.key();
        EXPECT_EQ(found.sizes(), item.value().sizes()) << item.key();
        EXPECT_TRUE(bytes_of(found).equal(bytes_of(item.value()))) << item.key();
      }
      EXPECT_TRUE(bytes_of(reader.read("Float4", {1, {{1, 3}}})).equal(bytes_of(written["Float4"].slice(1, 1, 3))));
    }
  }
}

// Any ranges of any dim: rows that are read together, and rows far apart.
TEST(WeightReader, ASliceIsThatOfTheWhole) {
  NamedTensors written;
  for (const auto& shape : std::vector<std::vector<int64_t>>{
           {7}, {5, 6}, {3, 1, 4}, {2, 3, 2, 5}, {6, 20'000}, {3, 9'000, 2}, {9'000, 300}, {2, 0, 3}})
    written.insert(c10::str(at::IntArrayRef(shape)),
                   at::arange(c10::multiply_integers(shape)).to(at::kInt).view(shape));
  const io::TempFolder folder;
  write_weights(folder.path(), "model.safetensors", written);
  const WeightReader reader(folder.path());
  for (const auto& item : written) {
    for (int64_t dim = 0; dim < item.value().dim(); ++dim) {
      const int64_t n = item.value().size(dim);
      for (const Slice& slice : {Slice{dim, {{0, n}}}, Slice{dim, {{n / 3, n / 2}}}, Slice{dim, {}},
                                 Slice{dim, {{n / 2, n}, {0, n / 4}}}, Slice{dim, {{n - n / 5, n}}}}) {
        std::vector<at::Tensor> parts{item.value().narrow(dim, 0, 0)};
        for (const shard::Range& range : slice.ranges)
          parts.push_back(item.value().slice(dim, range.begin, range.end));
        EXPECT_TRUE(reader.read(item.key(), slice).equal(at::cat(parts, dim))) << item.key() << " dim " << dim;
      }
    }
  }
  const auto refused = [&](const Slice& slice) {
    return error_of<c10::ValueError>([&] { reader.read("[5, 6]", slice); });
  };
  EXPECT_HAS(refused({2, {{0, 1}}}), "has no dim 2");
  EXPECT_HAS(refused({-1, {{0, 1}}}), "has no dim -1");
  for (const shard::Range range : {shard::Range{0, 7}, {-1, 2}, {3, 2}})
    EXPECT_HAS(refused({1, {range}}), "dim 1 of tensor '[5, 6]' has 6 elements");
  EXPECT_HAS(error_of<c10::ValueError>([&] { reader.read("x"); }), "no file has a tensor 'x'");
}

// An index says which files count, and what of them.
TEST(WeightReader, AnIndexSaysWhatIsRead) {
  const io::TempFolder folder;
  const auto index = folder / "model.safetensors.index.json";
  write_weights(folder.path(), "a.safetensors", {{"x", at::ones({2})}, {"more", at::ones({1})}});
  write_weights(folder.path(), "b.safetensors", {{"x", at::zeros({2})}, {"y", at::zeros({3})}});
  EXPECT_HAS(error_of<IoError>([&] { WeightReader reader(folder.path()); }), "'x' is in another file, too");
  EXPECT_HAS(error_of<IoError>([&] { WeightReader reader({folder / "a.safetensors", folder / "b.safetensors"}); }),
             "b.safetensors'");
  write_bytes(index, R"({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})");
  const WeightReader reader(folder.path());
  EXPECT_EQ(reader.tensors().size(), 2U);
  EXPECT_TRUE(reader.read("x").equal(at::ones({2})));
  EXPECT_TRUE(reader.read("y").equal(at::zeros({3})));
  write_bytes(folder / "other.safetensors.index.json", "{}");
  EXPECT_HAS(error_of<IoError>([&] { WeightReader other(folder.path()); }), "has several indices");
  for (const auto& [text, message] : std::vector<std::pair<std::string, std::string>>{
           {"", "is no index"},
           {"[]", "is no index"},
           {R"({"weight_map": [1]})", "is no index"},
           {R"({"weight_map": {"x": 3}})", "tensor 'x': its file must be"},
           {R"({"weight_map": {"x": "../a.safetensors"}})", "tensor 'x': its file must be"},
           {R"({"weight_map": {"x": "/a.safetensors"}})", "tensor 'x': its file must be"},
           {R"({"weight_map": {"x": "a.bin"}})", "tensor 'x': its file must be"},
           {R"({"weight_map": {"x": "none.safetensors"}})", "none.safetensors"},
           {R"({"weight_map": {"z": "a.safetensors"}})", "tensor 'z' is in 'a.safetensors', which has none"},
           {testing::with_nested("{}", "weight_map"), "is no index"}}) {
    write_bytes(index, text);
    EXPECT_HAS(error_of<IoError>([&] { WeightReader other(index); }), message);
  }
}

// A tensor of a dtype that torch does not have: the others are read.
TEST(WeightReader, ADtypeThatTorchDoesNotHaveIsAnErrorOfItsTensor) {
  const io::TempFolder folder;
  const std::string json =
      R"({"a":{"dtype":"F6_E3M2","shape":[4],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})";
  write_bytes(folder / "f.safetensors",
              std::string({static_cast<char>(json.size()), 0, 0, 0, 0, 0, 0, 0}) + json + "xxxab");
  const WeightReader reader(folder.path());
  EXPECT_TRUE(reader.read("b").equal(at::tensor({97, 98}, at::kByte)));
  EXPECT_EQ(reader.find("a")->unknown, "F6_E3M2");
  for (const auto& read :
       std::vector<std::function<void()>>{[&] { reader.read("a"); }, [&] { reader.read("a", {0, {}}); }})
    EXPECT_HAS(error_of<IoError>(read),
               "f.safetensors', tensor 'a' has the dtype 'F6_E3M2', which torch does not have");
  const auto tensors = reader.tensors();
  EXPECT_HAS(error_of<c10::ValueError>([&] { WeightFiles files(folder.path(), "o.safetensors", tensors, 1 << 20); }),
             "F6_E3M2");
}

TEST(WeightReader, WhatIsNoFileOfWeightsIsNamed) {
  const io::TempFolder folder;
  const auto opened = [&](const std::string& path) { return error_of<IoError>([&] { WeightReader reader(path); }); };
  EXPECT_HAS(opened(folder.path()), "has no file '*.safetensors'");
  EXPECT_HAS(opened(folder / "none.safetensors"), "none.safetensors");
  write_weights(folder.path(), "model.safetensors", {{"x", at::ones({2})}});
  write_bytes(folder / "model.safetensors", io::read_text(folder / "model.safetensors", 1 << 20) + "x");
  EXPECT_HAS(opened(folder.path()), "its tensors end at");
}

// What cannot be written is said before the former file goes.
TEST(WriteWeights, WhatCannotBeWritten) {
  const io::TempFolder folder;
  const auto write = [&](const std::string& name, const NamedTensors& all, const WriteOptions& options = {}) {
    return error_of<c10::ValueError>([&] { write_weights(folder.path(), name, all, options); });
  };
  const at::Tensor one = at::ones({1});
  EXPECT_EQ(write("model.safetensors", {{"x", one}}), "");
  EXPECT_HAS(write("model.safetensors", {{"x", at::Tensor()}}), "'x' is not a dense tensor");
  EXPECT_HAS(write("model.safetensors", {{"x", at::eye(2).to_sparse()}}), "'x' is not a dense tensor");
  EXPECT_HAS(write("model.safetensors", {{"x", one.to(at::kComplexDouble)}}), "which the format does not know");
  EXPECT_HAS(write("model.safetensors", {{"x", one}, {"y", one}}, {.metadata = {{"y", "1"}}}), "key of the metadata");
  EXPECT_HAS(write("model.safetensors", {{"__metadata__", one}}), "is the format's");
  EXPECT_HAS(write("model.bin", {{"x", one}}, {.metadata = {{"y", "1"}}}), "no place for metadata");
  EXPECT_EQ(WeightReader(folder.path()).tensors().size(), 1U);
}

}  // namespace tessera::checkpoint
