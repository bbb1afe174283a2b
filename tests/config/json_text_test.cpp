#include "tessera/config/json_text.h"

#include <nlohmann/json.hpp>

#include "support.h"

namespace tessera::config {
namespace {

nlohmann::json read(const std::string& text) {
  Report report;
  auto value = read_json(text, report);
  EXPECT_FALSE(report.failed()) << (report.failed() ? report.errors()[0].line() : "");
  return value;
}

std::string first_error(const std::string& text) {
  Report report;
  read_json(text, report);
  return report.failed() ? report.errors()[0].line() : "";
}

TEST(JsonText, AllowsCommentsAndClosingCommas) {
  EXPECT_EQ(read("{ // one\n \"a\": [1, 2, /* , */ ], # two\n \"b\": {\"c\": 3,\n },\n}"),
            nlohmann::json::parse(R"({"a": [1, 2], "b": {"c": 3}})"));
}

TEST(JsonText, LeavesTextsAlone) {
  const std::string text = R"({"a": "// # /* Infinity ,} \" NaN", "b": "\\"})";
  EXPECT_EQ(strict_json(text), text);
  EXPECT_EQ(strict_json("\t\f\r\n"), "\t\f\r\n");
}

TEST(JsonText, ReadsInfinity) {
  EXPECT_EQ(read("[Infinity, -Infinity, NaN,]"), nlohmann::json::parse(R"(["Infinity", "-Infinity", "NaN"])"));
  EXPECT_EQ(strict_json("[NaN, -Infinity,] # NaN", /*quote_words=*/false), "[NaN, -Infinity ]      ");
}

TEST(JsonText, NamesDuplicateKeysByPath) {
  EXPECT_HAS(first_error(R"({"a": {"b": 1, "b": 2}})"), "a.b: this key is given twice");
  EXPECT_EQ(first_error(R"({"a": {"b": 1}, "c": {"b": 2}, "d": [{"b": 1}, {"b": 2}]})"), "");
}

TEST(JsonText, ReportsSyntaxErrorsWithTheirLine) {
  EXPECT_HAS(first_error("{\n\"a\": 1\n\"b\": 2}"), "JSON: parse error at line 3");
  for (const char* bad : {"", "{", "{\"a\": }", "\"", "/*", "{\"a\": 1} x", "\"\\", "{,}", "[,]", "{a: 1}", "{'a': 1}",
                          "{\"a\": b}", "{\"a\": '''b'''}", "\"a\": 1"}) {
    EXPECT_HAS(first_error(bad), "JSON: ") << bad;
  }
}

TEST(JsonText, RefusesDeepNesting) {
  const std::string deep(100'000, '[');
  EXPECT_HAS(first_error(deep + std::string(100'000, ']')), "nested deeper than");
}

}  // namespace
}  // namespace tessera::config
