#include "tessera/checkpoint/writer.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/io/safetensors.h"
#include "tests/checkpoint/parts.h"
#include "tests/support/errors.h"

namespace {

std::vector<int>* g_renames = nullptr;  // what the next renames of this process do: errno, or 0 where they are made

// In the place of the system's, which have no failure to order.
int renamed(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  if (g_renames != nullptr && !g_renames->empty()) {
    errno = g_renames->front();
    g_renames->erase(g_renames->begin());
    if (errno != 0) return -1;
  }
  return static_cast<int>(::syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
}

class Renames {
 public:
  explicit Renames(std::vector<int> results) : results_(std::move(results)) { g_renames = &results_; }
  ~Renames() { g_renames = nullptr; }
  Renames(const Renames&) = delete;

 private:
  std::vector<int> results_;
};

}  // namespace

extern "C" int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  return renamed(from_folder, from, to_folder, to, flags);
}
extern "C" int rename(const char* from, const char* to) noexcept {
  return renamed(AT_FDCWD, from, AT_FDCWD, to, 0);
}

namespace tessera::checkpoint {

namespace fs = std::filesystem;

TEST(Writer, FilesAreSafetensorsNamedByQuantityAndParameter) {
  const io::TempFolder folder;
  const at::Tensor small = at::ones({3}, at::kBFloat16), large = at::arange(12, at::kFloat).view({3, 4});
  FileRecord file;
  write_items(folder / "f", "id",
              {item_of("small", small, {}, {0, 3}), item_of("large", large, {}, {0, 12}),
               item_of("large", large, {}, {2, 5}), item_of("cut", large, {{1, {{0, 1}, {3, 4}}}}, {0, 6})},
              file);
  const io::SafeTensors header = io::read_safetensors(io::File::open(folder / "f"));
  ASSERT_EQ(header.tensors.size(), 4u);
  EXPECT_EQ(header.tensors[0].name, "weight/large");
  EXPECT_EQ(header.tensors[0].shape, (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(header.tensors[1].name, "weight/large[2:5]");
  EXPECT_EQ(header.tensors[2].name, "weight/cut{1: 0-1 3-4}[0:6]");
  EXPECT_EQ(header.tensors[3].name, "weight/small");  // the smaller elements last
  EXPECT_EQ(file.bytes, static_cast<int64_t>(fs::file_size(folder / "f")));
}

TEST(Writer, NothingIsLeftOfAFileThatCannotBeWritten) {
  const io::TempFolder folder;
  FileRecord file;
  Item item = item_of("w", at::ones({3}), {}, {0, 3});
  item.values = [](shard::Range) -> at::Tensor { throw std::runtime_error("no values"); };
  EXPECT_THROW(write_items(folder / "f", "id", {item}, file), std::runtime_error);
  EXPECT_FALSE(fs::exists(folder / "f"));
}

TEST(Writer, Tags) {
  for (const char* tag : {"", ".", "..", "a/b", "../a", ".hidden", "latest"})
    EXPECT_THROW(check_tag(tag), c10::ValueError) << tag;
  EXPECT_NO_THROW(check_tag("global_step10"));
}

TEST(Writer, CleanTouchesOnlyWhatASaveHasMade) {
  const io::TempFolder folder;
  const auto put = [&](const std::string& name) {
    fs::create_directories(fs::path(folder / name).parent_path());
    std::ofstream(folder / name) << "x";
  };
  const std::string dead = file_name(new_id(), 0);
  put("cut_off/" + dead);
  put("cut_off_with_notes/" + dead);
  put("cut_off_with_notes/notes.txt");
  put("mine/model.safetensors");
  for (const char* tag : {"a", "b", "c"}) {
    fs::create_directories(folder / tag);
    write_checkpoint(folder / tag, {{item_of("w", at::ones({3}), {}, {0, 3})}});
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  put("c/" + dead);
  put(std::string("c/") + kManifestName + ".part");
  clean(folder.path(), "c", 2);
  EXPECT_FALSE(fs::exists(folder / "cut_off"));
  EXPECT_FALSE(fs::exists(folder / ("cut_off_with_notes/" + dead)));
  EXPECT_TRUE(fs::exists(folder / "cut_off_with_notes/notes.txt"));
  EXPECT_TRUE(fs::exists(folder / "mine/model.safetensors"));
  EXPECT_FALSE(fs::exists(folder / "a"));
  EXPECT_FALSE(fs::exists(folder / ("c/" + dead)));
  for (const char* tag : {"b", "c"})
    EXPECT_TRUE(
        open_folder(folder / tag).read_whole(*open_folder(folder / tag).find("w", "weight")).equal(at::ones({3})));
}

// What a save that may still be on its way has written stays, in a folder of its own or one that another save completes;
// that of a save whose holder is gone goes.
TEST(Writer, CleanLeavesSavesThatAreOnTheirWay) {
  for (const char* tag : {"other", "mine"}) {
    const io::TempFolder folder;
    const std::string live = new_id(), dead = new_id(), at = folder / tag;
    auto mark = std::make_unique<SaveMark>(at, live);
    std::ofstream(at + "/" + file_name(live, 1)) << "x";
    for (const std::string& name : {file_name(dead, 0), dead + ".saving"})
      std::ofstream(at + "/" + name) << "x";
    fs::create_directories(folder / "mine");
    write_checkpoint(folder / "mine", {{item_of("w", at::ones({3}), {}, {0, 3})}});
    clean(folder.path(), "mine", 1);
    EXPECT_TRUE(fs::exists(at + "/" + file_name(live, 1))) << tag;
    EXPECT_FALSE(fs::exists(at + "/" + file_name(dead, 0))) << tag;
    EXPECT_FALSE(fs::exists(at + "/" + dead + ".saving")) << tag;
    mark.reset();
    clean(folder.path(), "mine", 1);
    EXPECT_FALSE(fs::exists(at + "/" + file_name(live, 1))) << tag;
    open_folder(folder / "mine").verify_all();
  }
}

TEST(Writer, CleanKeepsWhatLatestNames) {
  const io::TempFolder folder;
  for (const char* tag : {"a", "b", "c"}) {
    fs::create_directories(folder / tag);
    write_checkpoint(folder / tag, {{item_of("w", at::ones({3}), {}, {0, 3})}});
  }
  set_latest(folder.path(), "a");
  clean(folder.path(), "c", 1);
  EXPECT_TRUE(fs::exists(folder / "a"));
  EXPECT_FALSE(fs::exists(folder / "b"));
  open_folder(folder / latest_tag(folder.path())).verify_all();
}

// Neither exchanged nor, by name, moved there: what was there is there still.
TEST(Writer, WhatCannotBePutInPlaceLeavesTheFormerOne) {
  const io::TempFolder folder;
  const std::string from = folder / "new", to = folder / "new/checkpoint";  // no folder goes into itself
  fs::create_directories(to);
  std::ofstream(to + "/former") << "x";
  try {
    put_in_place(from, to);
    ADD_FAILURE();
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("'" + to + "' cannot be put in place"), std::string::npos) << error.what();
  }
  EXPECT_TRUE(fs::exists(to + "/former"));
  EXPECT_FALSE(fs::exists(from + ".former"));
}

// A file system that cannot exchange folders, on a disk that fails between the two renames: either what was there is back, or
// the error says where it is.
TEST(Writer, WhatWasThereIsBackOrTheErrorSaysWhereItIs) {
  for (const bool back : {true, false}) {
    const io::TempFolder folder;
    const std::string from = folder / "new", to = folder / "tag", former = from + ".former";
    fs::create_directories(from);
    fs::create_directories(to);
    std::ofstream(to + "/former") << "x";
    // The exchange; the former one goes aside; the new one does not come; the former one comes back or does not.
    const Renames renames({EINVAL, 0, EIO, back ? 0 : EROFS});
    const std::string text = testing::error_of<IoError>([&] { put_in_place(from, to); });
    EXPECT_HAS(text, "'" + to + "' cannot be put in place: Input/output error");
    EXPECT_EQ(text.find("what was there is '" + former + "' now") != std::string::npos, !back) << text;
    EXPECT_EQ(text.find("moving it back failed as well: Read-only file system") != std::string::npos, !back) << text;
    EXPECT_TRUE(fs::exists((back ? to : former) + "/former"));
    EXPECT_TRUE(fs::exists(from)) << "the new one is there, to be moved by hand";
  }
}

// Threads that replace one file: it is always one of theirs, whole.
TEST(Writer, LatestOfSeveralSavesAtOnce) {
  const io::TempFolder folder;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&folder, t] {
      const std::string tag = "tag" + std::string(static_cast<size_t>(40 * t), static_cast<char>('a' + t));
      for (int i = 0; i < 20; ++i) {
        EXPECT_NO_THROW(set_latest(folder.path(), tag));
        EXPECT_EQ(latest_tag(folder.path()).find("tag"), 0u);
      }
    });
  for (std::thread& thread : threads)
    thread.join();
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator{}), 1);
}

// Killed at any moment of a save over an old one: the folder holds one complete checkpoint, the old or the new, whose
// values are its own.
TEST(Writer, KilledAtRandomMoments) {
  const io::TempFolder folder;
  fs::create_directories(folder / "t");
  const auto save = [&](double value) {
    std::vector<Item> items;
    for (int i = 0; i < 8; ++i)
      items.push_back(item_of("w" + std::to_string(i), at::full({20000}, value), {}, {0, 20000}));
    write_checkpoint(folder / "t", {items});
    set_latest(folder.path(), "t");
    clean(folder.path(), "t", 0);
  };
  save(0);
  std::mt19937 random(11);
  double last = 0;
  for (int i = 1; i <= 40; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      save(i);
      ::_exit(0);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 12000));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    const Reader reader = open_folder(folder / latest_tag(folder.path()));
    reader.verify_all();
    const double value = reader.read_whole(*reader.find("w0", "weight"))[0].item<double>();
    EXPECT_TRUE(value == last || value == i) << value;
    for (int k = 0; k < 8; ++k)
      EXPECT_TRUE(reader.read_whole(*reader.find("w" + std::to_string(k), "weight")).eq(value).all().item<bool>());
    last = value;
  }
  save(99);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder / "t"), fs::directory_iterator{}), 2);
}

TEST(Writer, AFolderTakesThePlaceOfAnother) {
  const io::TempFolder folder;
  for (const char* text : {"one", "two"}) {
    std::filesystem::create_directory(folder / "new");
    std::ofstream(folder / "new/file") << text;
    put_in_place(folder / "new", folder / "tag");
    EXPECT_EQ(io::read_text(folder / "tag/file", 10), text);
    EXPECT_FALSE(std::filesystem::exists(folder / "new"));
  }
  EXPECT_THROW(put_in_place(folder / "new", folder / "tag"), IoError);
  EXPECT_EQ(io::read_text(folder / "tag/file", 10), "two");
}

}  // namespace tessera::checkpoint
