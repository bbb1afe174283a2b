#include "tessera/config/text.h"

#include "support.h"

namespace tessera::config {
namespace {

TEST(Text, CountsEdits) {
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(edit_distance("stage", "stage"), 0);
  EXPECT_EQ(edit_distance("stge", "stage"), 1);
  EXPECT_EQ(edit_distance("satge", "stage"), 1);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
}

TEST(Text, FindsTheNearestWord) {
  const std::vector<std::string> words{"stage", "overlap_comm", "ratio"};
  EXPECT_EQ(nearest("Stgae", words), "stage");
  EXPECT_EQ(nearest("overlapcomm", words), "overlap_comm");
  EXPECT_EQ(nearest("something_else", words), "");
  EXPECT_EQ(all_nearest("f16", {"bf16", "fp16", "fp32"}), (std::vector<std::string>{"bf16", "fp16"}));
  for (const char* word : {"warmup_steps", "warmup_step"})
    EXPECT_EQ(all_nearest(word, {"warmup_type", "warmup_num_steps"}), std::vector<std::string>{"warmup_num_steps"});
  EXPECT_TRUE(near_miss("Stge", "stage") && near_miss("gradient_acumulation_step", "gradient_accumulation_steps"));
  EXPECT_FALSE(near_miss("sage_", "stage") || near_miss("comment", "comet"));
  EXPECT_EQ(nearest(std::string(100'000, 'a'), words), "");
}

TEST(Text, MessagesAreWholeCharacters) {
  for (const char* text : {"", "plain", "\xc3\xa4", "a\xe2\x82\xac", "\xf0\x9f\x98\x80"})
    EXPECT_EQ(whole_characters(text), text);
  EXPECT_EQ(whole_characters("a\xc3"), "a?");
  EXPECT_EQ(whole_characters("\xe2\x82"), "??");
  EXPECT_EQ(whole_characters("\xc3"
                             "b\xff"),
            "?b?");
  Report report;
  report.error("JSON", "last read: '\xc3'");
  EXPECT_EQ(report.errors()[0].line(), "JSON: last read: '?'");
}

TEST(Text, ReportRaisesAllLinesAtOnce) {
  Report report;
  report.warning("x", "odd");
  EXPECT_NO_THROW(report.raise());
  report.error("a.b", "wrong");
  EXPECT_HAS(error_of([&] { report.raise(); }), "[config] 1 problem in the configuration:\n  a.b: wrong");
  report.error("c", "also wrong");
  EXPECT_HAS(error_of([&] { report.raise(); }), "[config] 2 problems in the configuration:\n  a.b: wrong\n  c: also");
}

}  // namespace
}  // namespace tessera::config
