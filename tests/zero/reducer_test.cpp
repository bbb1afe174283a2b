// Order, counts and bytes of the collectives, and the buckets they use.
#include "tessera/zero/reducer.h"

#include <gtest/gtest.h>

#include <mutex>

#include "tests/support/passing_group.h"
#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace tessera::testing {

namespace {

// Notes sums and gathers with their labels in order, siblings' too.
class Recorder final : public PassingGroup {
 public:
  using Labels = std::vector<std::string>;
  explicit Recorder(comm::GroupPtr inner, std::shared_ptr<Labels> noted = std::make_shared<Labels>())
      : PassingGroup(std::move(inner)), labels(*noted), noted_(std::move(noted)) {}
  Labels& labels;

 protected:
  void before(std::string_view call, comm::Label label) override {
    if (call == "all_gather" || call == "reduce_scatter" || call == "all_reduce")
      labels.push_back(std::string(call) + " " + std::string(label));
  }
  comm::GroupPtr around(comm::GroupPtr sibling) const override {
    return std::make_shared<Recorder>(std::move(sibling), noted_);
  }

 private:
  std::shared_ptr<Labels> noted_;
};

std::vector<std::string> labels_of_step(const ToyRun& run) {
  std::vector<std::string> labels;
  std::mutex mutex;
  run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
    auto recorder = std::make_shared<Recorder>(group);
    const Toy toy;
    auto engine = toy_engine(run, toy, recorder);
    recorder->labels.clear();
    for (int micro = 0; micro < run.accumulation; ++micro) {
      toy_forward(engine, toy, toy_batch(rank, micro)).backward();
      engine.step();
    }
    const std::lock_guard lock(mutex);
    if (labels.empty()) labels = recorder->labels;
    EXPECT_EQ(labels, recorder->labels) << "ranks differ";
  });
  return labels;
}

}  // namespace

// Weights in the order in which the next forward uses them.
TEST(Reducer, GradientsInUnitOrderRootLast) {
  ToyRun run;
  run.stage = 1;
  EXPECT_EQ(
      labels_of_step(run),
      (std::vector<std::string>{
          "reduce_scatter gradients of unit 'blocks.0'", "reduce_scatter gradients of unit 'blocks.1'",
          "reduce_scatter gradients of unit 'root'", "all_gather gradient norm", "all_gather parameters of unit 'root'",
          "all_gather parameters of unit 'blocks.1'", "all_gather parameters of unit 'blocks.0'"}));
  run.stage = 0;
  EXPECT_EQ(labels_of_step(run),
            (std::vector<std::string>{"all_reduce gradients of unit 'blocks.0'",
                                      "all_reduce gradients of unit 'blocks.1'", "all_reduce gradients of unit 'root'",
                                      "all_reduce units with late gradients", "all_gather gradient norm"}));
}

TEST(Reducer, Stage2ReducesEveryMicroBatchAndStages0And1OnlyAtTheBoundary) {
  ToyRun run;
  run.accumulation = 3;
  const auto reductions = [&](int stage) {
    run.stage = stage;
    int count = 0;
    for (const std::string& label : labels_of_step(run))
      count += label.find("gradients of unit") != std::string::npos;
    return count;
  };
  EXPECT_EQ(reductions(0), 3);
  EXPECT_EQ(reductions(1), 3);
  EXPECT_EQ(reductions(2), 9);
}

TEST(Reducer, VolumeIsTwoUnitsOfTheModel) {
  for (const int stage : {1, 2}) {
    run_ranks(4, [&](int rank, const comm::GroupPtr& group) {
      ToyRun run;
      run.stage = stage;
      const Toy toy;
      auto engine = toy_engine(run, toy, group);
      group->reset_stats();
      toy_forward(engine, toy, toy_batch(rank, 0)).backward();
      engine.step();
      const int64_t flat = engine.memory().params;  // bytes of the padded flat space, fp32
      EXPECT_EQ(group->stats().reduce_scatter.bytes, flat * 3 / 4);
      EXPECT_EQ(group->stats().all_gather.bytes, flat * 3 / 4 + 3 * 9 * 8)
          << "parameters, and nine doubles for the norm: what goes with it, and one of each of three units";
      EXPECT_EQ(group->stats().all_reduce.calls, 0);
    });
  }
}

TEST(Reducer, BucketsAreReusedNotGrown) {
  run_ranks(2, [](int rank, const comm::GroupPtr& group) {
    ToyRun run;
    run.stage = 2;
    const Toy toy;
    auto engine = toy_engine(run, toy, group);
    // Two in flight and one filling, each at most as large as the largest unit ('blocks.0': 85 + 17 elements, padded).
    const int64_t limit = 3 * 128 * 4;
    for (int step = 0; step < 10; ++step) {
      toy_forward(engine, toy, toy_batch(rank, step)).backward();
      engine.step();
      EXPECT_LE(engine.memory().peak_buckets, limit);
      EXPECT_GT(engine.memory().peak_buckets, 0);
      EXPECT_EQ(engine.memory().buckets, 0);
    }
  });
}

}  // namespace tessera::testing
