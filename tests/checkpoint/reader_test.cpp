#include "tessera/checkpoint/reader.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "tessera/base/error.h"
#include "tessera/io/crc32c.h"
#include "tests/checkpoint/parts.h"
#include "tests/support/errors.h"

namespace tessera::checkpoint {

namespace {

// A matrix cut into rows by two ranks and into columns of unequal joined slices by three, each in two pieces, and one in
// column order.
std::vector<std::vector<std::vector<Item>>> ways(const at::Tensor& whole) {
  const std::vector<std::vector<Slice>> columns{{{1, {{0, 1}, {5, 7}}}}, {{1, {{1, 3}}}}, {{1, {{3, 5}}}}};
  std::vector<std::vector<Item>> cut;
  for (const auto& slice : columns) {
    const int64_t n = select(whole, slice[0]).numel();
    cut.push_back({item_of("w", whole, slice, {0, n / 3}), item_of("w", whole, slice, {n / 3, n})});
  }
  return {{{item_of("w", whole, {}, {0, whole.numel()})}},
          {{item_of("w", whole, {}, {0, 13})}, {item_of("w", whole, {}, {13, whole.numel()})}},
          cut,
          {{item_of("w", whole, {}, {20, whole.numel()}, {1, 0}), item_of("w", whole, {}, {0, 20}, {1, 0})}}};
}

}  // namespace

TEST(Reader, AnyElementsOfAnyWayToWriteThem) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kLong}) {
    const at::Tensor whole = at::arange(9 * 7).view({9, 7}).to(dtype);
    for (const auto& written : ways(whole)) {
      const io::TempFolder folder;
      write_checkpoint(folder.path(), written);
      const Reader reader = open_folder(folder.path());
      const TensorRecord& record = *reader.find("w", "weight");
      EXPECT_TRUE(reader.read_whole(record).equal(whole));
      reader.verify_all();
      for (const auto& wanted : ways(whole))
        for (const auto& rank : wanted)
          for (const Item& item : rank) {
            const Want want{item.slice, item.order, item.range};
            reader.verify(record, want);
            EXPECT_TRUE(reader.read(record, want).equal(item.values(item.range)));
          }
      EXPECT_EQ(reader.find("w", "exp_avg"), nullptr);
    }
  }
}

TEST(Reader, WhatWasMovedFromSaysSo) {
  const io::TempFolder folder;
  write_checkpoint(folder.path(), ways(at::ones({9, 7}))[0]);
  Reader reader = open_folder(folder.path());
  const TensorRecord record = *reader.find("w", "weight");
  const Reader other = std::move(reader);
  other.verify_all();
  const Want want{{}, {}, {0, 63}};
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { reader.folder(); }, [&] { reader.manifest(); }, [&] { reader.find("w", "weight"); },
           [&] { reader.read(record, want); }, [&] { reader.read_whole(record); },
           [&] { reader.read_whole("w", "weight"); }, [&] { reader.verify(record, want); }, [&] { reader.blob("b"); },
           [&] { reader.verify_all(); }})  // NOLINT
    EXPECT_HAS(testing::error_of<UsageError>(call), "[checkpoint] this reader was moved from");
}

// A file of another program, read where its bytes are, by as many readers as there are.
TEST(Reader, RawFiles) {
  const io::TempFolder folder;
  const at::Tensor whole = at::arange(40).to(at::kFloat);
  std::string bytes(300, 'x');
  std::memcpy(bytes.data() + 64, whole.data_ptr(), 160);
  std::filesystem::create_directory(folder / "below");
  const auto write = [&](const std::string& text) { std::ofstream(folder / "below/r.pt", std::ios::binary) << text; };
  Manifest manifest;
  manifest.files = {{"below/r.pt", 300, 0, "", true}};
  manifest.files[0].blocks = {{{64, 128}, io::crc32(bytes.data() + 64, 64)},
                              {{128, 224}, io::crc32(bytes.data() + 128, 96)}};
  manifest.tensors = {
      {"w", "weight", {10, 4}, {}, at::kFloat, {}, {{0, 128, -1, {16, 40}, {}}, {0, 64, -1, {0, 16}, {}}}}};
  const auto all = [](const TensorRecord&) { return true; };
  const auto open = [&] { return Reader(folder.path(), to_text(manifest)); };
  write(bytes);
  EXPECT_TRUE(open().read_whole(*open().find("w", "weight")).equal(whole.view({10, 4})));
  open().verify_all();
  bytes[140] ^= 1;
  write(bytes);
  EXPECT_THROW(open().verify_all(), IoError);
  open().verify_blocks([](const TensorRecord&) { return false; }, 0, 1);
  int found = 0;
  for (int part = 0; part < 3; ++part) {
    try {
      open().verify_blocks(all, part, 3);
    } catch (const IoError& e) {
      ++found;
    }
  }
  EXPECT_EQ(found, 1);
  manifest.files[0].blocks[1].checksum = 0;
  open().verify_all();
  write(bytes.substr(1));
  EXPECT_THROW(open().read_whole(*open().find("w", "weight")), IoError);
}

// A body with one byte changed is refused by whoever reads that byte, a header by everybody.
TEST(Reader, MutatedFiles) {
  const at::Tensor whole = at::arange(9 * 7).view({9, 7}).to(at::kFloat);
  const io::TempFolder folder;
  write_checkpoint(folder.path(), {{item_of("w", whole, {}, {0, whole.numel()})}});
  const Reader known = open_folder(folder.path());
  const std::string path = folder / known.manifest().files[0].name;
  const std::string good = io::read_text(path, 1 << 20);
  std::srand(5);
  for (int i = 0; i < 2000; ++i) {
    std::string bad = good;
    bad[static_cast<size_t>(std::rand()) % good.size()] ^= static_cast<char>(1 + std::rand() % 255);
    if (i % 10 == 0) bad.resize(static_cast<size_t>(std::rand()) % good.size());
    std::ofstream(path) << bad;
    const Reader reader = open_folder(folder.path());
    const TensorRecord& record = *reader.find("w", "weight");
    try {
      reader.verify_all();
      // Names and padding of the header are not what values depend on.
      EXPECT_TRUE(reader.read_whole(record).equal(whole));
    } catch (const IoError& e) {
      EXPECT_NE(std::string(e.what()).find(path), std::string::npos);
    }
  }
}

TEST(Reader, AFileThatTheManifestRequiresIsNamedWithWhatToDo) {
  const at::Tensor whole = at::ones({9, 7});
  const io::TempFolder folder;
  write_checkpoint(folder.path(), {{item_of("w", whole, {}, {0, whole.numel()})}});
  const std::string path = folder / open_folder(folder.path()).manifest().files[0].name;
  const std::string remedy = ": copy the checkpoint again, or load another tag";
  const auto error = [&] {
    return testing::error_of<IoError>([&] { open_folder(folder.path()).read_whole("w", "weight"); });
  };
  const auto bytes = std::filesystem::file_size(path);
  std::filesystem::resize_file(path, bytes - 4);
  EXPECT_EQ(error(),
            c10::str("[checkpoint] '", path, "' has ", bytes - 4, " bytes, the manifest says ", bytes, remedy));
  std::filesystem::remove(path);
  EXPECT_EQ(error(), "[checkpoint] there is no file '" + path + "', which the manifest requires" + remedy);
}

TEST(Reader, LatestTag) {
  const io::TempFolder folder;
  EXPECT_EQ(latest_tag(folder.path()), "");
  std::ofstream(folder / "latest") << "step7\n";
  EXPECT_EQ(latest_tag(folder.path()), "step7");
  for (const char* text : {"", "\n", "\xff\xfe", "../x/step7", "."}) {
    std::ofstream(folder / "latest") << text;
    try {
      latest_tag(folder.path());
      ADD_FAILURE() << text;
    } catch (const IoError& e) {
      EXPECT_NE(std::string(e.what()).find(folder / "latest"), std::string::npos) << e.what();
    }
  }
}

// The folder of a run, as who trains knows it.
TEST(Open, ByFolderAndTag) {
  const io::TempFolder folder;
  const at::Tensor a = at::arange(40, at::kFloat).view({8, 5}), b = a + 1;
  const auto opened = [&](const std::string& tag = "") {
    return testing::error_of<IoError>([&] { open(folder.path(), tag); });
  };
  EXPECT_TRUE(tags(folder / "none").empty());
  EXPECT_HAS(opened(), "there is no file 'latest' in '");
  EXPECT_HAS(why_no_latest(folder / "none"), "there is no folder '");
  for (const std::string tag : {"first", "second"}) {
    io::make_folder(folder / tag);
    const at::Tensor& whole = tag == "first" ? a : b;
    write_checkpoint(folder / tag, {{item_of("w", whole, {}, {0, 17})}, {item_of("w", whole, {}, {17, 40})}});
    std::filesystem::last_write_time(
        folder / (tag + "/manifest.json"),
        std::filesystem::file_time_type::clock::now() - std::chrono::seconds(tag == "first" ? 20 : 10));
  }
  EXPECT_HAS(opened(), "name a tag, as 'second'");
  EXPECT_HAS(why_no_latest(folder / "first/"), "is one checkpoint; give the folder around it, '" + folder.path());
  EXPECT_HAS(why_no_latest(folder / "first/"), "with the tag 'first'");
  EXPECT_HAS(why_no_latest(folder / "first/manifest.json"), "is a file; give the folder that save_checkpoint()");
  io::make_folder(folder / "begun");
  EXPECT_EQ(tags(folder.path()), (std::vector<std::string>{"second", "first"}));
  set_latest(folder.path(), "first");
  const Reader reader = open(folder.path());
  EXPECT_TRUE(reader.read_whole("w", "weight").equal(a));
  EXPECT_TRUE(reader.read_range("w", "weight", {15, 20}).equal(a.view({-1}).slice(0, 15, 20)));
  EXPECT_TRUE(open(folder.path(), "second").read_whole("w", "weight").equal(b));
  EXPECT_TRUE(client_values(reader).empty());
  const auto refused = [&](const auto& call) { return testing::error_of<c10::ValueError>(call); };
  EXPECT_HAS(refused([&] { reader.read_whole("w", "exp_avg"); }), "has no 'exp_avg' of 'w'; there are 'weight'");
  EXPECT_HAS(refused([&] { reader.read_whole("x", "weight"); }), "nor anything else of that name");
  EXPECT_HAS(refused([&] { reader.read_range("w", "weight", {3, 41}); }), "there are no elements 3 to 41");
  EXPECT_HAS(refused([&] { open(folder.path(), "../first"); }), "a tag is the name of one folder");
  EXPECT_HAS(opened("begun"), "there is no complete checkpoint 'begun'");
  EXPECT_HAS(opened("begun"), "and so are DeepSpeed's '*_model_states.pt'");
  const std::string manifest = folder / "second/manifest.json";
  std::filesystem::resize_file(manifest, std::filesystem::file_size(manifest) / 2);
  EXPECT_HAS(opened("second"), c10::str("'", manifest, "' ends in the middle, after ",
                                        std::filesystem::file_size(manifest), " bytes: a copy that ended early"));
  std::filesystem::resize_file(manifest, 0);
  EXPECT_HAS(opened("second"), c10::str("'", manifest, "' is empty: a copy that ended early, or a disk that was full"));
}

}  // namespace tessera::checkpoint
