#include "tessera/config/lookup.h"

#include <algorithm>

#include "support.h"

namespace tessera::config {
namespace {

bool has(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

TEST(Lookup, FindsKeysSectionsAndAliases) {
  ASSERT_NE(find_key("zero_optimization.stage"), nullptr);
  EXPECT_EQ(find_key("zero_optimization"), nullptr);
  EXPECT_EQ(find_key("zero_optimization.max_live_parameters"), nullptr);
  EXPECT_EQ(canonical("zero_optimization.max_live_parameters"), "zero_optimization.stage3_max_live_parameters");
  EXPECT_EQ(canonical("bfloat16"), "bf16");
  EXPECT_EQ(canonical("something"), "something");
  for (const char* name : {"", "bf16", "zero_optimization.offload_param", "timers.throughput"}) {
    EXPECT_TRUE(has(sections(), name)) << name;
  }
}

TEST(Lookup, ListsTheNamesOfASection) {
  EXPECT_EQ(names_in("timers"), std::vector<std::string>{"throughput"});
  const auto zero = names_in("zero_optimization");
  for (const char* name : {"stage", "offload_param", "max_live_parameters", "cpu_offload", "zenflow"}) {
    EXPECT_TRUE(has(zero, name)) << name;
  }
  EXPECT_FALSE(has(zero, "device"));
  for (const char* name : {"bf16", "bfloat16", "train_batch_size", "autotuning"}) {
    EXPECT_TRUE(has(names_in(""), name)) << name;
  }
}

TEST(Lookup, SaysWhatAKeyTakesAndHolds) {
  Config c;
  c.zero_optimization.stage = 2;
  c.communication_data_type = c10::ScalarType::BFloat16;
  EXPECT_EQ(allowed(*find_key("zero_optimization.stage")), "integer from 0 to 3");
  EXPECT_EQ(allowed(*find_key("gradient_predivide_factor")), "number > 0");
  EXPECT_EQ(allowed(*find_key("gradient_allreduce_op")), "one of mean, sum");
  EXPECT_EQ(value_text(*find_key("zero_optimization.stage"), c), "2");
  EXPECT_EQ(value_text(*find_key("communication_data_type"), c), "\"bf16\"");
  EXPECT_EQ(value_text(*find_key("train_batch_size"), c), "unset");
  EXPECT_EQ(value_text(*find_key("elasticity.micro_batch_sizes"), c), "[2, 4, 6]");
  EXPECT_EQ(value_text(*find_key("gradient_allreduce_op"), c), "\"mean\"");
  EXPECT_EQ(value_text(*find_key("optimizer.params"), c), "{}");
}

TEST(Lookup, ChecksLimitsOfEveryKindOfMember) {
  Config c;
  Report fine;
  check_limits(c, fine);
  EXPECT_FALSE(fine.failed());
  c.train_batch_size = -1;
  c.gradient_predivide_factor = 0;
  c.zero_optimization.offload_optimizer.ratio = 1.5;
  c.log_level = "loud";
  c.elasticity.micro_batch_sizes = {2, 0};
  Report report;
  check_limits(c, report);
  EXPECT_EQ(report.errors().size(), 5u);
}

TEST(Lookup, NamesDtypes) {
  for (const char* name : {"fp32", "fp16", "bf16"}) {
    EXPECT_EQ(dtype_name(dtype_of(name).value()), name);
  }
  EXPECT_FALSE(dtype_of("float8"));
}

}  // namespace
}  // namespace tessera::config
