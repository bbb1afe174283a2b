#include "tessera/checkpoint/export.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tessera/io/safetensors.h"
#include "tests/checkpoint/parts.h"

namespace tessera::checkpoint {

namespace {

// Two trained parameters, one of them tied and with a master, a frozen one and a buffer, in pieces.
std::string make(const io::TempFolder& folder) {
  const at::Tensor a = at::arange(40, at::kFloat).view({8, 5}) / 3, b = at::ones({6}, at::kBFloat16);
  Manifest manifest;
  manifest.id = new_id();
  manifest.params = {{"a", {8, 5}, at::kBFloat16, true, 3, {"tied"}}, {"b", {6}, at::kBFloat16, false, 0, {}}};
  Item first = item_of("a", a, {}, {0, 17}), second = item_of("a", a, {}, {17, 40});
  first.kind = second.kind = "master";
  Item moment = item_of("a", a, {}, {0, 40}), buffer = item_of("n", at::arange(3), {}, {0, 3});
  moment.kind = "exp_avg";
  buffer.kind = "buffer";
  FileRecord file;
  const auto records = write_items(folder / file_name(manifest.id, 0), manifest.id,
                                   {first, second, moment, item_of("b", b, {}, {0, 6}), buffer}, file);
  manifest.files.push_back(file);
  merge_records(manifest.tensors, records_text(records), 0);
  commit(folder.path(), manifest);
  return folder.path();
}

}  // namespace

TEST(Export, FilesHaveTheWeightsOnceInTheDtypeThatIsAskedFor) {
  const io::TempFolder folder;
  const Reader reader = open_folder(make(folder));
  const at::Tensor a = at::arange(40, at::kFloat).view({8, 5}) / 3;
  EXPECT_EQ(export_safetensors(reader, folder / "out", {.dtype = at::kFloat}),
            std::vector<std::string>{"model.safetensors"});
  const io::File file = io::File::open(folder / "out/model.safetensors");
  const io::SafeTensors header = io::read_safetensors(file);
  ASSERT_EQ(header.tensors.size(), 3u);
  EXPECT_EQ(header.tensors[0].name, "a");
  at::Tensor read = at::empty({8, 5});
  file.read(read.mutable_data_ptr(), 160, header.tensors[0].begin);
  EXPECT_TRUE(read.equal(a));
  EXPECT_EQ(header.tensors[1].dtype, at::kFloat);
  EXPECT_EQ(header.tensors[2].dtype, at::kLong);  // a buffer keeps its own
  const auto plan = plan_export(reader, {});
  EXPECT_TRUE(read_export(reader, plan[0][0]).equal(a.to(at::kBFloat16)));
  EXPECT_EQ(plan_export(reader, {.frozen = false})[0].size(), 2u);
}

TEST(Export, SmallShardsHaveAnIndex) {
  const io::TempFolder folder;
  const Reader reader = open_folder(make(folder));
  const auto names = export_safetensors(reader, folder / "out", {.dtype = at::kFloat, .max_shard_bytes = 100});
  EXPECT_EQ(names, (std::vector<std::string>{"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                                             "model.safetensors.index.json"}));
  const auto index = nlohmann::json::parse(io::read_text(folder / ("out/" + names[2]), 1 << 20));
  EXPECT_EQ(index["weight_map"]["a"], names[0]);
  EXPECT_EQ(index["weight_map"]["n"], names[1]);
  EXPECT_EQ(index["metadata"]["total_size"], 160 + 24 + 24);
}

}  // namespace tessera::checkpoint
