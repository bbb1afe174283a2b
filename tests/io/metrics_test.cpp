#include "tessera/io/metrics.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <sstream>

#include "tessera/base/caught_warnings.h"
#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/io/crc32c.h"
#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"

namespace tessera::io {
namespace {

std::string text_of(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

template <class T>
T take(std::string& bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  bytes.erase(0, sizeof(T));
  return value;
}

uint64_t take_varint(std::string& bytes) {
  uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    const auto byte = take<uint8_t>(bytes);
    value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return value;
  }
}

// Calls f(field, value) for each; bytes as they are, numbers as their bytes.
template <class F>
void each_field(std::string bytes, const F& f) {
  while (!bytes.empty()) {
    const uint64_t key = take_varint(bytes);
    const uint64_t wire = key & 7;
    std::string value;
    if (wire == 0) {
      value = std::to_string(take_varint(bytes));
    } else {
      const size_t size = wire == 1 ? 8 : wire == 5 ? 4 : take_varint(bytes);
      value = bytes.substr(0, size);
      bytes.erase(0, size);
    }
    f(key >> 3, value);
  }
}

// Records whose checksums are right.
std::vector<std::string> records_of(std::string bytes) {
  const auto masked = [](const std::string& of) {
    const uint32_t crc = crc32c_reference(of.data(), static_cast<int64_t>(of.size()));
    return ((crc >> 15) | (crc << 17)) + 0xa282ead8U;
  };
  std::vector<std::string> records;
  while (!bytes.empty()) {
    const std::string head = bytes.substr(0, 8);
    const auto length = take<uint64_t>(bytes);
    EXPECT_EQ(take<uint32_t>(bytes), masked(head));
    records.push_back(bytes.substr(0, length));
    bytes.erase(0, length);
    EXPECT_EQ(take<uint32_t>(bytes), masked(records.back()));
  }
  return records;
}

std::vector<Metric> scalars_of(const std::string& path) {
  std::vector<Metric> metrics;
  const auto records = records_of(text_of(path));
  each_field(records.at(0), [](uint64_t field, const std::string& value) {
    if (field == 3) {
      EXPECT_EQ(value, "brain.Event:2");
    }
  });
  for (size_t i = 1; i < records.size(); ++i) {
    Metric metric;
    each_field(records[i], [&](uint64_t field, std::string value) {
      if (field == 1) {
        EXPECT_GT(take<double>(value), 1.6e9);  // seconds since 1970
      }
      if (field == 2) metric.step = std::stoll(value);
      if (field != 5) return;
      each_field(value, [&](uint64_t, const std::string& one) {
        each_field(one, [&](uint64_t place, std::string of) {
          if (place == 1) metric.name = of;
          if (place == 2) metric.value = take<float>(of);
        });
      });
    });
    metrics.push_back(metric);
  }
  return metrics;
}

TEST(Metrics, CsvFilesAreNamedAsTheirNumbersAndGoOn) {
  const TempFolder folder;
  for (const int64_t step : {8, 16})
    csv_metrics(folder / "a/b")
        ->write({{"Train/Samples/lr", 0.5, step}, {"my note", 1e-5, step}, {"x/a,\"b", 1, step}});
  EXPECT_EQ(text_of(folder / "a/b/Train_Samples_lr.csv"), "step,lr\r\n8,0.5\r\n16,0.5\r\n");
  EXPECT_EQ(text_of(folder / "a/b/my_note.csv"), "step,my note\r\n8,1e-05\r\n16,1e-05\r\n");
  EXPECT_EQ(text_of(folder / "a/b/x_a,\"b.csv"), "step,\"a,\"\"b\"\r\n8,1.0\r\n16,1.0\r\n");
}

TEST(Metrics, WarningsAreTextsAmongThem) {
  const TempFolder folder;
  csv_metrics(folder / "csv")->warn("a, \"b\"", 8);
  json_metrics(folder / "lines")->warn("a \"b\"\n", 8);
  tensorboard_metrics(folder / "events")->warn("has no place there", 8);
  EXPECT_EQ(text_of(folder / "csv/warnings.csv"), "step,warning\r\n8,\"a, \"\"b\"\"\"\r\n");
  EXPECT_TRUE(text_of(folder / "lines").starts_with(R"({"warning": "a \"b\"\n", "step": 8, "time": )"));
}

TEST(Metrics, EventFilesHaveRecordsWithChecksums) {
  const TempFolder folder;
  auto first = tensorboard_metrics(folder.path()), second = tensorboard_metrics(folder.path());
  first->write({{"Train/Samples/lr", 0.5, 8}, {"loss", -3.25, int64_t{1} << 40}});
  first->write({{std::string(300, 'n'), 0.1, 0}});
  std::vector<std::vector<Metric>> found;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    EXPECT_TRUE(entry.path().filename().string().starts_with("events.out.tfevents.")) << entry.path();
    found.push_back(scalars_of(entry.path().string()));
  }
  ASSERT_EQ(found.size(), 2U);  // a file for each writer
  const auto& metrics = found[found[0].empty() ? 1 : 0];
  EXPECT_TRUE(found[0].empty() || found[1].empty());
  ASSERT_EQ(metrics.size(), 3U);
  EXPECT_EQ(metrics[0].name, "Train/Samples/lr");
  EXPECT_EQ(metrics[0].value, 0.5);
  EXPECT_EQ(metrics[0].step, 8);
  EXPECT_EQ(metrics[1].value, -3.25);
  EXPECT_EQ(metrics[1].step, int64_t{1} << 40);
  EXPECT_EQ(metrics[2].name, std::string(300, 'n'));
  EXPECT_EQ(metrics[2].value, 0.1F);
}

TEST(Metrics, LinesOfJson) {
  const TempFolder folder;
  const std::string path = folder / "x/run.jsonl";
  for (const int64_t step : {1, 2})
    json_metrics(path)->write({{"a \"b\"\n", std::nan(""), step}, {"loss", 1.25, step}});
  const std::string text = text_of(path);
  EXPECT_EQ(std::ranges::count(text, '\n'), 4);
  EXPECT_TRUE(text.starts_with(R"({"name": "a \"b\"\n", "value": null, "step": 1, "time": )")) << text;
  EXPECT_HAS(text, R"({"name": "loss", "value": 1.25, "step": 2, "time": )");
  json_metrics(folder / "bytes")->write({{"a\xff", 1, 1}});  // no UTF-8, which readers of JSON refuse
  EXPECT_TRUE(text_of(folder / "bytes").starts_with("{\"name\": \"a\xef\xbf\xbd\", "));
}

// What a writer of one path sees of another that lives.
std::vector<std::string> warned_beside(const std::function<std::unique_ptr<MetricWriter>()>& make, bool first_lives) {
  auto first = make();
  first->write({{"a", 1, 1}});
  if (!first_lives) first.reset();
  const CaughtWarnings caught(false);
  make()->write({{"a", 2, 2}});
  return caught.texts();
}

TEST(Metrics, AnotherWriterOfTheSamePathIsWarnedOf) {
  const TempFolder folder;
  const std::vector<std::function<std::unique_ptr<MetricWriter>()>> kinds{
      [&] { return csv_metrics(folder / "csv"); }, [&] { return json_metrics(folder / "lines"); },
      [&] { return tensorboard_metrics(folder / "events"); }};
  for (size_t i = 0; i < kinds.size(); ++i) {
    EXPECT_TRUE(warned_beside(kinds[i], false).empty());
    const auto warnings = warned_beside(kinds[i], true);
    ASSERT_EQ(warnings.size(), i < 2 ? 1U : 0U);
    if (i == 2) continue;
    EXPECT_HAS(warnings[0], (folder / (i == 0 ? "csv" : "lines")) + "' now; those of both");
  }
  EXPECT_EQ(std::ranges::count(text_of(folder / "lines"), '\n'), 4);
}

// As a killed program leaves it, or a disk that was full.
TEST(Metrics, WhatIsHalfIsALineOfItsOwn) {
  const TempFolder folder;
  std::ofstream(folder / "lines") << R"({"name": "Tr)";
  json_metrics(folder / "lines")->write({{"a", 1, 8}});
  EXPECT_TRUE(text_of(folder / "lines").starts_with("{\"name\": \"Tr\n{\"name\": \"a\""));
  std::filesystem::create_directory(folder / "csv");
  std::ofstream(folder / "csv/a.csv") << "step,a\r\n8,0";
  csv_metrics(folder / "csv")->write({{"a", 1, 16}});
  EXPECT_EQ(text_of(folder / "csv/a.csv"), "step,a\r\n8,0\n16,1.0\r\n");
}

// A limit of the process for the length of a file stands for a disk that is full.
TEST(Metrics, WhatCannotBeWrittenWholeIsNotWritten) {
  const TempFolder folder;
  const auto json = json_metrics(folder / "lines");
  json->write({{"a", 1, 8}});
  const std::string before = text_of(folder / "lines");
  struct rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small{before.size() + 10, limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string error = testing::error_of<IoError>([&] { json->write({{"a", 2, 16}}); });
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_HAS(error, "cannot write '" + (folder / "lines") + "': File too large");
  EXPECT_EQ(text_of(folder / "lines"), before);
  json->write({{"a", 3, 24}});
  EXPECT_EQ(std::ranges::count(text_of(folder / "lines"), '\n'), 2);
}

TEST(Metrics, NamesOfCsvFiles) {
  const TempFolder folder;
  for (const std::string& name : {std::string("warnings"), std::string("a\0b", 3)})
    EXPECT_HAS(
        testing::error_of<c10::ValueError>([&] { csv_metrics(folder.path())->write({{"a", 1, 1}, {name, 1, 1}}); }),
        "[metrics] a number for CSV files cannot have the name \"");
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(Metrics, ANumberWithoutANameIsRefused) {
  const TempFolder folder;
  const auto refused = [](MetricWriter& writer) {
    EXPECT_HAS(testing::error_of<c10::ValueError>([&] { writer.write({{"a", 1, 8}, {"", 0.5, 8}}); }),
               "[metrics] a number (0.5, at 8) has no name: give each one, as \"Own/loss\"");
  };
  refused(*csv_metrics(folder / "csv"));
  refused(*json_metrics(folder / "lines"));
  refused(*tensorboard_metrics(folder / "board"));
  EXPECT_TRUE(std::filesystem::is_empty(folder / "csv"));
  EXPECT_EQ(text_of(folder / "lines"), "");
}

TEST(Metrics, APathBelowTheUsersFolder) {
  const TempFolder folder;
  const std::string home = env::get("HOME").value_or("");
  setenv("HOME", folder.path().c_str(), 1);
  csv_metrics("~/csv")->write({{"a", 1, 1}});
  json_metrics("~/lines")->write({{"a", 1, 1}});
  EXPECT_TRUE(std::filesystem::exists(folder / "csv/a.csv"));
  EXPECT_TRUE(std::filesystem::exists(folder / "lines"));
  EXPECT_EQ(metrics_folder("~/runs", "job", "csv_monitor"), folder / "runs/job");
  EXPECT_EQ(metrics_folder("~other", "job", "csv_monitor"), "~other/job");
  setenv("HOME", home.c_str(), 1);
}

TEST(Metrics, ErrorsNameTheFile) {
  const TempFolder folder;
  std::ofstream(folder / "file") << "x";
  EXPECT_HAS(testing::error_of<IoError>([&] { csv_metrics(folder / "file/b"); }), "cannot make the folder");
  std::filesystem::create_directory(folder / "a.csv");
  EXPECT_HAS(testing::error_of<IoError>([&] { csv_metrics(folder.path())->write({{"a", 1, 1}}); }),
             "[metrics] cannot open '" + (folder / "a.csv"));
}

TEST(Metrics, NumbersAsPythonWritesThem) {
  const std::vector<std::pair<double, const char*>> rows{{1, "1.0"},
                                                         {-0.0, "-0.0"},
                                                         {0.1, "0.1"},
                                                         {1e-4, "0.0001"},
                                                         {1.5e-5, "1.5e-05"},
                                                         {1e15, "1000000000000000.0"},
                                                         {1e16, "1e+16"},
                                                         {1e-300, "1e-300"},
                                                         {2.0 / 3, "0.6666666666666666"},
                                                         {-std::numeric_limits<double>::infinity(), "-inf"}};
  for (const auto& [value, text] : rows)
    EXPECT_EQ(shortest(value), text);
}

TEST(Metrics, FoldersOfSections) {
  EXPECT_EQ(metrics_folder("out", "job", "tensorboard"), "out/job");
  EXPECT_TRUE(metrics_folder("", "job", "tensorboard").ends_with("/tensorboard/job"));
}

}  // namespace
}  // namespace tessera::io
