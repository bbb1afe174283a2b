#include "tessera/checkpoint/reader.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "tessera/base/error.h"
#include "tessera/io/crc32c.h"
#include "tests/checkpoint/parts.h"

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

}  // namespace tessera::checkpoint
