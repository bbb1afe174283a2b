#include "tessera/checkpoint/export.h"

#include <gtest/gtest.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "tessera/io/file.h"
#include "tests/checkpoint/parts.h"

namespace tessera::checkpoint {

namespace {

// Two trained parameters, one of them tied and with a master, a frozen one and a buffer, in pieces.
std::string make(const io::TempFolder& folder) {
  const at::Tensor a = at::arange(40, at::kFloat).view({8, 5}) / 3, b = at::ones({6}, at::kBFloat16);
  Manifest manifest;
  manifest.id = new_id();
  manifest.params = {{"a", {8, 5}, at::kBFloat16, true, 3, {"tied"}},
                     {"b", {6}, at::kBFloat16, false, 0, {}},
                     {"none", {0, 3}, at::kFloat, true, 0, {}}};
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

TEST(Export, AllWeightsOnceInTheDtypeThatIsAskedFor) {
  const io::TempFolder folder;
  const Reader reader = open_folder(make(folder));
  const at::Tensor a = at::arange(40, at::kFloat).view({8, 5}) / 3;
  const auto all = list_export(reader, {.dtype = at::kFloat});
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(all[0].names, (std::vector<std::string>{"a", "tied"}));
  EXPECT_TRUE(read_export(reader, all[0]).equal(a));
  EXPECT_EQ(all[1].dtype, at::kFloat);
  EXPECT_EQ(read_export(reader, all[2]).sizes(), (at::IntArrayRef{0, 3}));
  EXPECT_EQ(all[3].dtype, at::kLong);  // a buffer keeps its own
  EXPECT_TRUE(read_export(reader, list_export(reader, {})[0]).equal(a.to(at::kBFloat16)));
  EXPECT_EQ(list_export(reader, {.dtype = {}, .frozen = false}).size(), 3u);
}

TEST(Export, AListOutlivesItsReader) {
  const io::TempFolder folder;
  const std::string path = make(folder);
  const Reader reader = open_folder(path);
  auto listed = std::make_unique<Reader>(open_folder(path));
  const auto all = list_export(*listed, {});
  listed.reset();
  EXPECT_TRUE(read_export(reader, all[0]).equal((at::arange(40, at::kFloat).view({8, 5}) / 3).to(at::kBFloat16)));
  EXPECT_TRUE(read_export(reader, all[3]).equal(at::arange(3)));
}

TEST(Export, Files) {
  const io::TempFolder folder;
  const Reader reader = open_folder(make(folder));
  const auto names = export_weights(reader, folder / "out", "model.safetensors", {.dtype = {}, .max_shard_bytes = 80});
  ASSERT_EQ(names.size(), 3u);
  const auto index = nlohmann::json::parse(io::read_text(folder / ("out/" + names.back()), 1 << 20));
  EXPECT_EQ(index["weight_map"]["a"], names[0]);
  EXPECT_EQ(index["weight_map"]["n"], names[1]);
}

}  // namespace tessera::checkpoint
