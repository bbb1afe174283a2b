#include "tessera/config/elastic.h"

#include <algorithm>
#include <random>

#include "support.h"

namespace tessera::config {
namespace {

Config elastic(const std::string& more = "", const std::string& beside = "") {
  return Config::from_json(R"({"elasticity": {"enabled": true, "max_train_batch_size": 1000)" + more + "}" + beside +
                           "}");
}

TEST(Elastic, HighlyCompositeNumbers) {
  std::vector<int64_t> by_hand;
  int most = 0;
  for (int64_t number = 1; number < 400; ++number) {
    int divisors = 0;
    for (int64_t d = 1; d <= number; ++d)
      divisors += number % d == 0 ? 1 : 0;
    if (divisors <= most) continue;
    by_hand.push_back(number);
    most = divisors;
  }
  EXPECT_EQ(highly_composite(399), by_hand);
  const auto large = highly_composite(5040);
  EXPECT_EQ((std::vector<int64_t>(large.end() - 3, large.end())), (std::vector<int64_t>{1680, 2520, 5040}));
  EXPECT_EQ(highly_composite(0), std::vector<int64_t>{});
}

// Of random sections: what is promised works, what is not promised does not divide or is refused.
TEST(Elastic, EveryNumberOfRanksThatIsPromisedWorks) {
  std::mt19937 random(7);
  const auto upto = [&](int64_t most) { return 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(most)); };
  int tried = 0;
  for (int round = 0; round < 300; ++round) {
    Config config;
    Elasticity& section = config.elasticity;
    section.enabled = true;
    section.micro_batch_sizes.assign(static_cast<size_t>(upto(3)), 0);
    for (int64_t& micro : section.micro_batch_sizes)
      micro = upto(9);
    section.max_train_batch_size = 8 + upto(292);
    section.min_gpus = upto(4);
    section.max_gpus = 3 + upto(37);
    section.prefer_larger_batch = round % 2 == 0;
    Report report;
    check_elasticity(config, report);
    if (report.failed()) continue;
    ++tried;
    const ElasticBatch batch = elastic_batch(config);
    ASSERT_TRUE(batch.train_batch_size > 0 && batch.train_batch_size <= section.max_train_batch_size);
    ASSERT_FALSE(batch.ranks.empty());
    for (int64_t ranks = 1; ranks <= section.max_gpus + 1; ++ranks) {
      const bool fits = std::ranges::any_of(
          section.micro_batch_sizes, [&](int64_t micro) { return batch.train_batch_size % (micro * ranks) == 0; });
      const bool promised = fits && ranks >= section.min_gpus && ranks <= section.max_gpus;
      ASSERT_EQ(std::ranges::count(batch.ranks, ranks), promised ? 1 : 0) << ranks;
      if (!promised) {
        EXPECT_HAS(error_of([&] { config.resolve_batch(ranks); }), "data-parallel ranks do not fit the batch");
        continue;
      }
      const Batch found = config.resolve_batch(ranks);
      ASSERT_EQ(found.train_batch_size, batch.train_batch_size);
      ASSERT_EQ(found.micro_batch_size * found.gradient_accumulation_steps * ranks, batch.train_batch_size);
      ASSERT_EQ(found.micro_batch_size, std::ranges::max(elastic_micro_batches(config, ranks)));
    }
  }
  EXPECT_GT(tried, 100);
}

TEST(Elastic, WrongSectionsAreRefusedWithTheConfiguration) {
  const std::vector<std::array<std::string, 3>> rows{
      {R"(, "version": 0.9)", "", "elasticity.version: must be 0.1 or 0.2"},
      {R"(, "version": 0.1, "model_parallel_size": 2)", "", "model_parallel_size: above 1 needs version 0.2"},
      {R"(, "model_parallel_size": 3, "num_gpus_per_node": 4)", "", "does not divide num_gpus_per_node 4"},
      {R"(, "num_gpus_per_node": 8, "max_gpus": 4)", "", "max_gpus: is less than a node"},
      {R"(, "micro_batch_sizes": [2, 1001], "version": 0.1)", "", "micro_batch_sizes: must be at most 1000"},
      {R"(, "num_gpus_per_node": 500)", "", "micro_batch_sizes: must be at most 2"},
      {R"(, "min_gpus": 9, "max_gpus": 3)", "", "min_gpus: is larger than max_gpus 3"},
      {R"(, "micro_batch_sizes": [0])", "", "micro_batch_sizes: must be"},
      {R"(, "micro_batch_sizes": [])", "", "micro_batch_sizes: is empty"},
      {R"(, "micro_batch_sizes": [7], "min_gpus": 999)", "", "elasticity: no batch within max_train_batch_size"},
      {"", R"(, "train_batch_size": 8)", "beside it"},
      {"", R"(, "gradient_accumulation_steps": 8)", "beside it"},
      {R"(, "nonsense": 1)", "", "nonsense"}};
  for (const auto& [more, beside, says] : rows)
    EXPECT_HAS(error_of([&, &m = more, &b = beside] { elastic(m, b); }), says);
  EXPECT_EQ(elastic(R"(, "ignore_non_elastic_batch_info": true)", R"(, "train_batch_size": 7)")
                .resolve_batch(2)
                .train_batch_size,
            elastic().resolve_batch(2).train_batch_size);
  // What is off is read by nobody.
  Config::from_json(R"({"train_batch_size": 8, "elasticity": {"version": 0.9, "min_gpus": 9, "max_gpus": 3}})");
}

}  // namespace
}  // namespace tessera::config
