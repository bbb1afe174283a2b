#include "tessera/io/progress.h"

#include <gtest/gtest.h>

#include <mutex>
#include <thread>
#include <vector>

namespace tessera::io {
namespace {

using std::chrono::milliseconds;

struct Lines {
  std::mutex mutex;
  std::vector<std::string> all;
  std::function<void(const std::string&)> say() {
    return [this](const std::string& line) {
      const std::lock_guard lock(mutex);
      all.push_back(line);
    };
  }
};

TEST(Progress, NothingForShortTransfers) {
  Lines lines;
  Progress progress("saving", 1000, lines.say());
  for (int i = 0; i < 1000; ++i)
    progress.add(1);
  EXPECT_TRUE(lines.all.empty());
}

TEST(Progress, OneLineForEachInterval) {
  Lines lines;
  Progress progress("saving 'x'", 3'000'000'000, lines.say(), milliseconds(40));
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) {
        std::this_thread::sleep_for(milliseconds(10));
        progress.add(50'000'000);
      }
    });
  for (std::thread& thread : threads)
    thread.join();
  ASSERT_GE(lines.all.size(), 2u);
  for (const std::string& line : lines.all) {
    EXPECT_TRUE(line.starts_with("saving 'x': ")) << line;
    EXPECT_NE(line.find(" of 3.0 GB, "), std::string::npos) << line;
  }
  std::this_thread::sleep_for(milliseconds(50));
  const size_t before = lines.all.size();
  progress.add(0);
  EXPECT_EQ(lines.all.size(), before + 1);
  EXPECT_NE(lines.all.back().find(": 3.0 of 3.0 GB"), std::string::npos) << lines.all.back();
}

TEST(ProgressLine, IsWrittenOverOnATerminalAndOneMoreElsewhere) {
  for (const bool in_place : {false, true}) {
    std::string text;
    {
      ProgressLine line(in_place, [&](const std::string& more) { text += more; }, milliseconds(0));
      EXPECT_EQ(line.wants(false), in_place);
      EXPECT_TRUE(line.wants(true));
      line.show("one");
      line.show("two");
      line.say("a warning");
      line.show("three");
    }
    EXPECT_EQ(text, in_place ? "\r\x1b[Kone\r\x1b[Ktwo\na warning\n\r\x1b[Kthree\n" : "one\ntwo\na warning\nthree\n");
  }
  std::string cut;
  ProgressLine wide(true, [&](const std::string& more) { cut += more; }, std::chrono::hours(1));
  wide.show(std::string(1000, 'x'));
  EXPECT_LT(cut.size(), 1000U);
  EXPECT_FALSE(wide.wants(true)) << "not so soon";
}

}  // namespace
}  // namespace tessera::io
