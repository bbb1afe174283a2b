#include "tessera/offload/nvme_file.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <random>
#include <vector>

#include "tessera/base/error.h"
#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"
#include "tests/support/open_files.h"

namespace tessera::offload {

namespace {

using testing::error_of;

constexpr int64_t kBlock = io::kDirectAlignment;

std::unique_ptr<NvmeFile> file_in(const io::TempFolder& folder) {
  return std::make_unique<NvmeFile>(folder.path(), 4, 8 * kBlock, io::make_queue);
}

std::string read_back(NvmeFile& file, Bytes bytes, Bytes space) {
  const NvmeFile::Read read = file.read(bytes, space);
  read.arrived();
  return {read.memory.get(), static_cast<size_t>(bytes.size())};
}

}  // namespace

// Random writes and reads of any range, also of what is on its way, against plain memory; some write what was read.
TEST(NvmeFile, IsMemory) {
  const io::TempFolder folder;
  const auto file = file_in(folder);
  std::mt19937 random(7);
  std::vector<Bytes> spaces;
  std::vector<std::string> expected;
  for (const int64_t size : {int64_t{1}, kBlock, 3 * kBlock + 17, 9 * kBlock - 1}) {
    spaces.push_back(file->reserve(size));
    EXPECT_EQ(spaces.back().begin % kBlock, 0);
    expected.emplace_back(static_cast<size_t>(size), '\0');
  }
  for (int i = 0; i < 2000; ++i) {
    const size_t of = random() % spaces.size();
    const int64_t size = spaces[of].size();
    const bool whole = random() % 4 == 0;
    const int64_t begin = whole ? 0 : static_cast<int64_t>(random() % size);
    const int64_t end = whole ? size : begin + 1 + static_cast<int64_t>(random() % (size - begin));
    const Bytes bytes{spaces[of].begin + begin, spaces[of].begin + end};
    const size_t length = static_cast<size_t>(end - begin);
    if (random() % 2 == 0) {
      ASSERT_EQ(read_back(*file, bytes, spaces[of]), expected[of].substr(begin, length)) << i;
    } else if (random() % 2 == 0) {
      auto values = std::make_shared<std::string>(length, static_cast<char>(random()));
      expected[of].replace(begin, length, *values);
      file->write(bytes, spaces[of], values->data(), values);
      values->assign(length, 'x');  // copied by then
    } else {
      const NvmeFile::Read read = file->read(bytes, spaces[of]);
      read.arrived();
      std::memset(read.memory.get(), i, length);
      expected[of].replace(begin, length, std::string(length, static_cast<char>(i)));
      file->write(bytes, spaces[of], read.memory.get(), read.memory);
    }
  }
  file->flush();
  for (size_t of = 0; of < spaces.size(); ++of)
    EXPECT_EQ(read_back(*file, spaces[of], spaces[of]), expected[of]);
}

TEST(NvmeFile, ReadsSeeWhatWasThereWhenTheyWereAskedFor) {
  const io::TempFolder folder;
  const auto file = file_in(folder);
  const Bytes space = file->reserve(4 * kBlock);
  const std::string values(static_cast<size_t>(4 * kBlock), 'a');
  const NvmeFile::Read before = file->read(space, space);
  file->write(space, space, values.data(), nullptr);
  const NvmeFile::Read after = file->read(space, space);
  before.arrived();
  after.arrived();
  EXPECT_EQ(before.memory.get()[100], 0);
  EXPECT_EQ(after.memory.get()[100], 'a');
}

TEST(NvmeFile, MemoryIsTheBuffers) {
  const io::TempFolder folder;
  const auto file = file_in(folder);
  const Bytes space = file->reserve(400 * kBlock);
  for (int64_t begin = space.begin; begin < space.end; begin += 8 * kBlock) {
    const Bytes tile{begin, begin + 8 * kBlock};
    const NvmeFile::Read read = file->read(tile, space);
    read.arrived();
    file->write(tile, space, read.memory.get(), read.memory);
  }
  EXPECT_LE(file->peak_buffer_bytes(), 4 * 8 * kBlock);
}

TEST(NvmeFile, NobodyElseSeesIt) {
  const io::TempFolder folder;
  const auto file = file_in(folder);
  file->reserve(kBlock);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << "it has no name";
  const auto open = testing::files_in(folder.path());
  ASSERT_FALSE(open.empty());
  for (const int fd : open) {
    struct stat info{};
    ASSERT_EQ(::fstat(fd, &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0600u);
    EXPECT_EQ(info.st_nlink, 0u);
  }
}

TEST(NvmeFile, MakesTheFolderOrNamesIt) {
  const io::TempFolder folder;
  NvmeFile(folder / "a/b", 1, kBlock, {});
  EXPECT_TRUE(std::filesystem::is_directory(folder / "a/b"));
  EXPECT_HAS(error_of([] { NvmeFile("", 1, kBlock, {}); }), "nvme_path");
  EXPECT_HAS(error_of([] { NvmeFile("/proc/none", 1, kBlock, {}); }), "/proc/none");
  EXPECT_HAS(error_of([] { NvmeFile("/proc", 1, kBlock, {}); }), "cannot make a file in '/proc'");
}

TEST(NvmeFile, ErrorsNameTheFileAndEnd) {
  const io::TempFolder folder;
  const auto file = file_in(folder);
  EXPECT_HAS(error_of([&] { file->reserve(int64_t{1} << 60); }), "cannot reserve");
  const Bytes space = file->reserve(8 * kBlock);
  const std::string values(static_cast<size_t>(8 * kBlock), 'a');
  testing::truncate_files_in(folder.path(), 2 * kBlock);  // as who cuts it through /proc
  EXPECT_HAS(error_of([&] { read_back(*file, space, space); }), "ends at byte 8192");
  {
    const testing::LargestFile limit(4 * kBlock);
    file->write(space, space, values.data(), nullptr);
    EXPECT_HAS(error_of([&] { read_back(*file, space, space); }), "ends at byte") << "a read says what is its own";
    EXPECT_HAS(error_of([&] { file->write(space, space, values.data(), nullptr); }), "cannot write");
    EXPECT_HAS(error_of([&] { file->flush(); }), "cannot write");
    EXPECT_EQ(error_of([&] { file->flush(); }), "") << "an error is thrown once";
  }
  file->write(space, space, values.data(), nullptr);
  file->flush();
  EXPECT_EQ(read_back(*file, space, space), values);
}

}  // namespace tessera::offload
