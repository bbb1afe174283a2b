// The bytes of states by the configured optimizer; tests/python/test_estimate.py compares with what engines hold.
#include "tessera/config/estimate.h"

#include "support.h"

namespace tessera::config {
namespace {

TEST(Estimate, StatesAreThoseOfTheOptimizer) {
  struct Row {
    const char* optimizer;
    int64_t kept;  // values an element
  };
  for (const Row& row : std::vector<Row>{
           {R"("type": "SGD")", 0},
           {R"("type": "SGD", "params": {"momentum": 0.9})", 1},
           {R"("type": "Adagrad")", 1},
           {R"("type": "lion")", 1},
           {R"("type": "Adam")", 2},
           {R"("type": "Lamb")", 2},
           {R"("type": "Muon")", 2},
           {R"("type": "Adam", "params": {"torch_adam": true, "amsgrad": true})", 3},
           {R"("type": "RMSprop", "params": {"centered": true})", 2},
           {R"("type": "NAdam")", 2},
       }) {
    const auto states = [&](int stage, const std::string& more, int ranks) {
      const Config config = Config::from_json(
          R"({"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": true, "optimizer": {)" +
          std::string(row.optimizer) + R"(}, "zero_optimization": {"stage": )" + std::to_string(stage) + "}" + more +
          "}");
      return estimate({.trained = 1000}, config, ranks).states;
    };
    EXPECT_EQ(states(0, "", 4), 4000 * row.kept) << row.optimizer;
    EXPECT_EQ(states(1, "", 4), 1000 * row.kept) << row.optimizer;
    EXPECT_EQ(states(2, R"(, "bf16": {"enabled": true})", 1), 2000 + 4000 * row.kept) << row.optimizer;
    if (std::string(row.optimizer).find("Lamb") == std::string::npos) {
      EXPECT_EQ(states(2, R"(, "fp16": {"enabled": true})", 1), 4000 + 4000 * row.kept) << row.optimizer;
    }
  }
}

}  // namespace
}  // namespace tessera::config
