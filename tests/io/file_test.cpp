#include "tessera/io/file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "tessera/base/error.h"
#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"

namespace tessera::io {
namespace {

using testing::message_of;

TEST(File, BytesComeBack) {
  const TempFolder folder;
  File out = File::create(folder / "a");
  out.write("hello", 5, 3);
  out.sync();
  out.close();
  const File in = File::open(folder / "a");
  EXPECT_EQ(in.size(), 8);
  std::string text(5, ' ');
  in.read(text.data(), 5, 3);
  EXPECT_EQ(text, "hello");
}

TEST(File, ErrorsNameFileAndCause) {
  const TempFolder folder;
  EXPECT_HAS(message_of<IoError>([&] { File::open(folder / "none"); }), "none': No such file");
  EXPECT_HAS(message_of<IoError>([&] { File::open(folder.path()); }), "not a regular file");
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_HAS(message_of<IoError>([&] { File::open(folder / "pipe"); }), "not a regular file");
  File::create(folder / "a").write("abc", 3, 0);
  EXPECT_HAS(message_of<IoError>([&] { File::create(folder / "a"); }), "exists");
  char bytes[8];
  EXPECT_HAS(message_of<IoError>([&] { File::open(folder / "a").read(bytes, 8, 0); }), "ends at byte 3");
  EXPECT_HAS(message_of<IoError>([&] { File::open(folder / "a").write("x", 1, 0); }), "cannot write");
}

TEST(File, DirectTransfersOfAnyAlignment) {
  const TempFolder folder;
  const std::string text(3 * kDirectAlignment, 'a');
  alignas(kDirectAlignment) static char memory[2 * kDirectAlignment];
  File out = File::create_direct(folder / "a");
  out.reserve(2 * kDirectAlignment + 10);
  std::fill(std::begin(memory), std::end(memory), 'b');
  out.write(memory, kDirectAlignment, kDirectAlignment);
  out.write(text.data(), kDirectAlignment, 0);
  out.write(text.data() + 1, 10, 2 * kDirectAlignment);
  out.close();
  const File in = File::open_direct(folder / "a");
  EXPECT_EQ(in.size(), 2 * kDirectAlignment + 10);
  in.read(memory, 2 * kDirectAlignment, 0);
  EXPECT_EQ(std::string(memory, 2 * kDirectAlignment),
            std::string(kDirectAlignment, 'a') + std::string(kDirectAlignment, 'b'));
  in.read(memory, 10, 2 * kDirectAlignment);
  EXPECT_EQ(std::string(memory, 10), std::string(10, 'a'));
  EXPECT_HAS(message_of<IoError>([&] { out = File::create_direct(folder / "b"), out.reserve(int64_t{1} << 60); }),
             "reserve");
}

TEST(File, OneWithoutANameIsReadAndWritten) {
  alignas(kDirectAlignment) static char memory[kDirectAlignment] = {};
  for (const bool knows_unnamed : {true, false}) {
    const TempFolder folder;
    const File file = File::scratch(folder.path(), knows_unnamed);
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
    struct stat info{};
    ASSERT_EQ(::fstat(file.descriptor(memory, 1, 1), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0600u);
    EXPECT_EQ(info.st_nlink, 0u);
    file.reserve(2 * kDirectAlignment);
    EXPECT_EQ(file.size(), 2 * kDirectAlignment);
    file.write("hello", 5, kDirectAlignment);
    file.read(memory, kDirectAlignment, kDirectAlignment);
    EXPECT_EQ(std::string(memory), "hello") << "and zeros after it";
    file.write(memory, kDirectAlignment, 0);
    std::string text(5, ' ');
    file.read(text.data(), 5, 0);
    EXPECT_EQ(text, "hello");
    EXPECT_HAS(message_of<IoError>([&] { File::scratch(folder / "none", knows_unnamed); }), "cannot make a file in '");
  }
}

TEST(ReplaceText, OldOrNewAndNothingBeside) {
  const TempFolder folder;
  replace_text(folder / "latest", "one");
  File::create((folder / "latest") + ".part");  // of one that was cut off
  replace_text(folder / "latest", "two");
  EXPECT_EQ(read_text(folder / "latest", 100), "two");
  EXPECT_FALSE(std::filesystem::exists((folder / "latest") + ".part"));
  EXPECT_HAS(message_of<IoError>([&] { read_text(folder / "latest", 2); }), "more than the 2");
  EXPECT_HAS(message_of<IoError>([&] { replace_text(folder / "no/latest", "x"); }), "cannot create");
}

TEST(WholeFile, TakesItsNameWholeOrNotAtAll) {
  const TempFolder folder;
  const std::string path = folder / "weights";
  {
    WholeFile dropped(path);
    std::ofstream(dropped.part()) << "half";
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  WholeFile whole(path);
  std::ofstream(whole.part()) << "all of it";
  EXPECT_FALSE(std::filesystem::exists(path));
  whole.finish();
  whole.drop();
  EXPECT_EQ(read_text(path, 100), "all of it");
  WholeFile robbed(path);
  std::filesystem::remove(robbed.part());
  EXPECT_HAS(message_of<IoError>([&] { robbed.finish(); }), "was removed or replaced");
}

// Writers of one path wait for each other: what is there is always what one of them has written.
TEST(WholeFile, WhatIsNoFileStays) {
  const TempFolder folder;
  const std::string pipe = folder / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  for (const std::string& path : {pipe, folder.path()}) {
    EXPECT_HAS(testing::error_of<IoError>([&] { replace_text(path, "text"); }),
               "[io] '" + path + "' is no file that could be replaced");
    EXPECT_FALSE(std::filesystem::is_regular_file(path));
    EXPECT_FALSE(std::filesystem::exists(path + ".part"));
  }
}

TEST(WholeFile, OfSeveralWritersOneHolds) {
  const TempFolder folder;
  const std::string path = folder / "both";
  const std::vector<std::string> texts{std::string(70'000, 'a'), std::string(90'000, 'b')};
  std::vector<std::thread> writers;
  for (const std::string& text : texts)
    writers.emplace_back([&] {
      for (int i = 0; i < 40; ++i) {
        replace_text(path, text);
        EXPECT_TRUE(std::ranges::count(texts, read_text(path, 100'000)) == 1);
        WholeFile whole(path);
        std::ofstream(whole.part(), std::ios::trunc) << text;
        whole.finish();
        EXPECT_TRUE(std::ranges::count(texts, read_text(path, 100'000)) == 1);
      }
    });
  for (std::thread& writer : writers)
    writer.join();
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

TEST(MakeFolder, AllOfThem) {
  const TempFolder folder;
  make_folder(folder / "a/b");
  make_folder(folder / "a/b");
  EXPECT_TRUE(std::filesystem::is_directory(folder / "a/b"));
  File::create(folder / "f");
  EXPECT_HAS(message_of<IoError>([&] { make_folder(folder / "f/b"); }), "cannot make the folder");
}

}  // namespace
}  // namespace tessera::io
