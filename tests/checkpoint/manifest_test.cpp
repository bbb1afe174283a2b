#include "tessera/checkpoint/manifest.h"

#include <gtest/gtest.h>

#include <functional>

#include "tessera/base/error.h"
#include "tests/support/numbers.h"

namespace tessera::checkpoint {

namespace {

Manifest some() {
  Manifest m;
  m.id = "0123456789abcdef";
  m.run = R"({"counters":{"global_steps":3}})";
  m.files = {{"a.safetensors", 1000}, {"b.safetensors", 500}, {"zero/r.pt", 400, 0, "", true}};
  m.files[2].blocks = {{{64, 128}, 7}, {{192, 292}, 8}};
  m.blobs["client"] = {"c.bin", 10, 77};
  m.blobs["here"] = {"", 3, 0, std::string("\0\xff{", 3)};
  m.params = {{"w", {4, 6}, at::kBFloat16, true, 3, {"tied"}}, {"f", {2}, at::kFloat, false, 0, {}}};
  m.tensors = {{"w",
                "master",
                {4, 6},
                {},
                at::kFloat,
                {{1, {{0, 1}, {4, 6}}}, {1, {{1, 4}}}},
                {{0, 100, 0, {0, 12}, {1}}, {1, 100, 1, {0, 5}, {2}}, {1, 200, 1, {5, 12}, {3}}}},
               {"f", "weight", {2}, {}, at::kFloat, {}, {{0, 200, -1, {0, 2}, {4}}}},
               {"t", "buffer", {2, 3}, {1, 0}, at::kLong, {}, {{1, 300, -1, {0, 6}, {5}}}},
               {"none", "buffer", {0, 3}, {}, at::kLong, {}, {}},
               {"r", "weight", {20}, {}, at::kFloat, {}, {{2, 192, -1, {0, 20}, {}}}},
               {"same", "weight", {16}, {}, at::kFloat, {}, {{2, 64, -1, {0, 16}, {}}}},
               {"shared", "weight", {4}, {}, at::kFloat, {}, {{2, 96, -1, {0, 4}, {}}}}};
  return m;
}

}  // namespace

TEST(Manifest, ComesBack) {
  const std::string text = to_text(some());
  const Manifest back = parse_manifest(text, "m");
  EXPECT_EQ(to_text(back), text);
  EXPECT_EQ(back.params[0].aliases, std::vector<std::string>{"tied"});
  EXPECT_EQ(back.tensors[0].slices[0].ranges.size(), 2u);
  EXPECT_EQ(back.blobs.at("here").text, std::string("\0\xff{", 3));
  const size_t brace = text.find(',') + 1;
  EXPECT_EQ(sealed("{" + text.substr(brace)), text);
}

TEST(Manifest, WhatCannotBeIsRefused) {
  const std::vector<std::function<void(Manifest&)>> changes{
      [](Manifest& m) { m.files[0].name = "../a"; },
      [](Manifest& m) { m.files[0].name = "/etc/passwd"; },
      [](Manifest& m) { m.files[0].name = "zero/a"; },
      [](Manifest& m) { m.files[2].name = "zero/../../r.pt"; },
      [](Manifest& m) { m.files[2].name = "/zero/r.pt"; },
      [](Manifest& m) { m.files[2].blocks[1].bytes.begin = 100; },  // two that overlap
      [](Manifest& m) { m.files[2].blocks[1].bytes.end = 401; },
      [](Manifest& m) { m.files[2].blocks[1].bytes.end = 271; },  // shorter than its piece
      [](Manifest& m) { m.files[2].blocks.clear(); },
      [](Manifest& m) { m.tensors[4].pieces[0].offset = 188; },
      [](Manifest& m) { m.tensors[4].pieces[0].offset = 0; },
      [](Manifest& m) { m.files[0].bytes = 120; },  // beyond the file
      [](Manifest& m) { m.tensors[0].pieces[1].offset = -4; },
      [](Manifest& m) { m.tensors[0].pieces[1].offset = int64_t{1} << 61; },
      [](Manifest& m) { m.tensors[0].pieces[1].file = 3; },
      [](Manifest& m) { m.tensors[0].pieces[1].range = {1, 5}; },  // a gap
      [](Manifest& m) { m.tensors[0].pieces[1].range = {0, 6}; },  // an overlap
      [](Manifest& m) { m.tensors[0].pieces[2].slice = 0; },
      [](Manifest& m) { m.tensors[0].pieces[2].slice = 2; },
      [](Manifest& m) { m.tensors[0].pieces[2].offset = 104; },  // two pieces in the same bytes
      [](Manifest& m) { m.tensors[0].pieces[0].checksums.clear(); },
      [](Manifest& m) { m.tensors[0].pieces.pop_back(); },
      [](Manifest& m) { m.tensors[0].slices[0].dim = 2; },
      [](Manifest& m) { m.tensors[0].slices[0].ranges[0].end = 9; },
      [](Manifest& m) { m.tensors[0].shape = {int64_t{1} << 40, int64_t{1} << 40}; },
      [](Manifest& m) { m.tensors[2].order = {1, 1}; },
      [](Manifest& m) { m.tensors[2].order = {0}; },
      [](Manifest& m) { m.tensors.push_back(m.tensors[1]); },  // twice
      [](Manifest& m) { m.params.push_back(m.params[0]); },
      [](Manifest& m) { m.blobs["client"].name = "a/b"; },
      [](Manifest& m) { m.run = "[1]"; },
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    Manifest m = some();
    changes[i](m);
    EXPECT_THROW(parse_manifest(to_text(m), "m"), IoError) << i;
  }
  for (const char* text : {"", "{", "[]", "{\"crc32c\": \"00000000\",}"})
    EXPECT_THROW(parse_manifest(text, "m"), IoError) << text;
}

// Also where the checksum of the text is good: what is read is what is there.
TEST(Manifest, NoNumberWraps) {
  Manifest m = some();
  m.params[0].name += "@dp_shard=0";
  m.params[0].along = {{"dp_shard", 0, 2}};
  const std::string text = to_text(m);
  nlohmann::ordered_json good = nlohmann::ordered_json::parse(text);
  good.erase("crc32c");
  int refused = 0;
  const auto check = [&](const std::string& pointer, const nlohmann::ordered_json& json, bool same) {
    const std::string wrong = sealed(json.dump(1));
    try {
      const std::string back = to_text(parse_manifest(wrong, "m"));
      EXPECT_EQ(same ? back : to_text(parse_manifest(back, "m")), same ? wrong : back) << pointer;
    } catch (const IoError& error) {
      ++refused;
      EXPECT_NE(std::string(error.what()).find("'m'"), std::string::npos) << pointer;
    }
  };
  testing::each_wrong_number(good, [&](const auto& pointer, const auto& json) { check(pointer, json, true); });
  EXPECT_GT(refused, 500);
  // An empty list of what may be left out is left out.
  testing::each_wrong_kind(good, [&](const auto& pointer, const auto& json) { check(pointer, json, false); });
  EXPECT_GT(refused, 2000);
}

TEST(Manifest, WhatIsNestedTooDeepIsRefused) {
  nlohmann::ordered_json good = nlohmann::ordered_json::parse(to_text(some()));
  good.erase("crc32c");
  const auto refused = [&](const std::string& json) { EXPECT_THROW(parse_manifest(sealed(json), "m"), IoError); };
  refused(testing::with_nested(good.dump(), "more"));
  const std::string run = good["run"].dump();
  std::string text = good.dump();
  refused(text.replace(text.find(run), run.size(), testing::with_nested(run, "more")));
}

TEST(Manifest, NoMorePartsThanCanBe) {
  Manifest m = some();
  const int64_t rows = int64_t{1} << 40;
  m.files[0].bytes = rows * 8;
  m.tensors = {{"w", "master", {rows, 2}, {}, at::kFloat, {{1, {{0, 1}}}}, {{0, 0, 0, {0, rows}, {}}}}};
  m.tensors[0].pieces[0].checksums.resize(rows * 4 / kChecksumBlock);
  EXPECT_THROW(parse_manifest(to_text(m), "m"), IoError);
}

TEST(Manifest, NoByteCanBeAnother) {
  const std::string good = to_text(some());
  std::srand(2);
  for (int i = 0; i < 1000; ++i) {
    std::string bad = good;
    bad[static_cast<size_t>(std::rand()) % good.size()] ^= static_cast<char>(1 + std::rand() % 255);
    EXPECT_THROW(parse_manifest(bad, "m"), IoError) << bad;
  }
}

TEST(Manifest, RecordsOfRanksAreOneTensor) {
  std::vector<TensorRecord> all;
  const Manifest m = some();
  TensorRecord first = m.tensors[0], second = m.tensors[0];
  first.pieces.resize(1);
  first.slices.resize(1);
  second.pieces.erase(second.pieces.begin());
  second.slices.erase(second.slices.begin());
  for (Piece& piece : second.pieces) {
    piece.slice = 0;
    piece.file = 0;
  }
  merge_records(all, records_text({first}), 0);
  merge_records(all, records_text({second}), 1);
  Manifest merged = m;
  merged.tensors[0] = all.at(0);
  EXPECT_EQ(to_text(merged), to_text(m));
  second.shape = {6, 4};
  EXPECT_THROW(merge_records(all, records_text({second}), 1), c10::ValueError);
}

}  // namespace tessera::checkpoint
