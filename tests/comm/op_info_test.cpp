#include "tessera/comm/op_info.h"

#include "tests/comm/collectives.h"

namespace tessera::comm {
namespace {

TEST(OpInfo, IsDescribedWithLabelAndBytes) {
  OpInfo info{.name = "all_gather", .label = "unit 'a'", .bytes = 4096, .dtype = at::kFloat};
  EXPECT_EQ(describe(info), "all_gather (unit 'a', 4096 B)");
  EXPECT_EQ(describe_fully(info), "all_gather (unit 'a', 4096 B, Float)");
  info.name = "reduce_scatter";
  info.label.clear();
  info.op = ReduceOp::Max;
  EXPECT_EQ(describe_fully(info), "reduce_scatter (4096 B, Float, max)");
}

TEST(OpInfo, CallsMustAgreeInEverythingThatTravels) {
  const OpInfo a{.name = "all_reduce", .label = "x", .bytes = 8, .dtype = at::kFloat};
  OpInfo b = a;
  EXPECT_TRUE(same_call(a, b));
  b.label = "another purpose";
  EXPECT_FALSE(same_call(a, b));
  b = a;
  b.op = ReduceOp::Avg;
  EXPECT_FALSE(same_call(a, b));
  b = a;
  b.bytes = 16;
  EXPECT_FALSE(same_call(a, b));
  b = a;
  b.dtype = at::kInt;
  EXPECT_FALSE(same_call(a, b));
  b = a;
  b.name = "broadcast";
  EXPECT_FALSE(same_call(a, b));
}

TEST(OpInfo, AgreementIsWhatTheSameCallsHaveInCommon) {
  std::vector<OpInfo> calls;
  for (const char* name : {"all_reduce", "all_gather", "all_to_all"}) {
    for (const auto op : {ReduceOp::Sum, ReduceOp::Max}) {
      for (const auto dtype : {at::kFloat, at::kInt}) {
        for (const int64_t bytes : {8, 1 << 20}) {
          for (const char* label : {"", "x", "y"})
            calls.push_back({.name = name, .label = label, .bytes = bytes, .dtype = dtype, .op = op});
        }
      }
    }
  }
  for (const int root : {0, 1})
    calls.push_back({.name = "broadcast", .label = "", .bytes = 8, .dtype = at::kFloat, .root = root});
  for (const OpInfo& a : calls) {
    for (const OpInfo& b : calls) {
      EXPECT_EQ(agreement(a) == agreement(b), same_call(a, b)) << describe_fully(a) << " and " << describe_fully(b);
      EXPECT_EQ(agreement_hash(a) == agreement_hash(b), same_call(a, b)) << describe_fully(a) << describe_fully(b);
    }
  }
}

TEST(OpInfo, AFailureNamesRankOperationAndCause) {
  const OpInfo info{.name = "barrier", .label = "end"};
  const auto text = testing::message_of<c10::DistBackendError>([&] { throw_failed(1, 4, info, 0.5, "gone"); });
  EXPECT_EQ(text, "[comm] rank 1 of 4: barrier (end, 0 B) failed after 0.50 s: gone");
  const auto cause = [](const auto& call) {
    try {
      call();
    } catch (const std::exception& error) {
      return cause_of(error);
    }
    return std::string();
  };
  EXPECT_EQ(cause([&] { throw_failed(1, 4, info, 0.5, "rank 2 failed after 3.0 s: gone"); }),
            "rank 2 failed after 3.0 s: gone");
  EXPECT_EQ(cause([] { throw std::runtime_error("more\nthan one line"); }), "more");
}

}  // namespace
}  // namespace tessera::comm
