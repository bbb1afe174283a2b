// Engines whose model states and parameters live on a disk: tiles, and what a disk that fails does to all ranks.
#include "tessera/offload/states.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>

#include "tessera/engine/checkpoint.h"
#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"
#include "tests/support/modes.h"
#include "tests/support/open_files.h"
#include "tests/support/saved.h"
#include "tests/support/training.h"

namespace tessera::testing {

namespace {

zero::HomeMaker on_disk(const std::string& folder, offload::QueueMaker make_queue = {}) {
  return offload::state_homes(
      {.residence = shard::Residence::Nvme, .folder = folder, .make_queue = std::move(make_queue)});
}

// Some of a disk's transfers fail.
struct Fault {
  bool reads = false, writes = false, memory = false;
};

class FaultyQueue final : public io::Queue {
 public:
  FaultyQueue(int depth, const Fault& fault) : queue_(io::make_queue(depth)), fault_(fault) {}
  std::future<void> read(const io::File& file, void* to, int64_t bytes, int64_t offset) override {
    if (fault_.memory) throw std::bad_alloc();
    return fault_.reads ? failed("read") : queue_->read(file, to, bytes, offset);
  }
  std::future<void> write(const io::File& file, const void* from, int64_t bytes, int64_t offset) override {
    return fault_.writes ? failed("write") : queue_->write(file, from, bytes, offset);
  }

 private:
  static std::future<void> failed(const char* what) {
    std::promise<void> promise;
    promise.set_exception(std::make_exception_ptr(IoError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                                                          c10::str("[io] cannot ", what, ": Input/output error"))));
    return promise.get_future();
  }
  std::unique_ptr<io::Queue> queue_;
  const Fault& fault_;
};

void step(Engine& engine, const Toy& toy, int rank, int number) {
  toy_forward(engine, toy, toy_batch(rank, number)).backward();
  engine.step();
}

}  // namespace

// Parameters that end inside a tile, and groups that change there; in stage 3 weights that come in tiles, too.
TEST(OffloadEngine, TilesHaveTheBitsOfOnePass) {
  const io::TempFolder folder;
  const at::Tensor values = at::randn({shard::kTile + 1000});
  for (const auto& precision :
       {mode(at::kBFloat16, amp::Master::Split, at::kBFloat16), mode(at::kBFloat16, amp::Master::Weight, at::kBFloat16),
        amp::PrecisionPolicy::fp32()}) {
    run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
      std::vector<at::Tensor> found[3];
      for (const int away : {0, 1, 2}) {
        std::vector<engine::ParamSpec> specs{{"a", values.clone().requires_grad_(true), 0, "u"},
                                             {"b", values.clone().requires_grad_(true), 1, "u"},
                                             {"idle", at::ones({50}).requires_grad_(true), 0, "u"}};
        auto options = toy_options({.stage = away == 2 ? 3 : 2, .precision = precision});
        if (away > 0) options.zero.home = on_disk(folder.path());
        if (away == 2) options.zero.weight_home = on_disk(folder.path());
        Engine engine(options, comm::Mesh(group), specs, {toy_adamw(), optim::GroupOptions{}});
        const int module = engine.modules().add({0, 1, 2});
        const at::Tensor input = at::ones({}).requires_grad_(true);
        for (int number = 0; number < 2; ++number) {
          if (module >= 0 && engine.modules().enter(module)) engine.modules().note_inputs({input});
          const at::Tensor loss = input * ((specs[0].tensor.to(at::kFloat) * values).sum() * (rank + 1) +
                                           specs[1].tensor.to(at::kFloat).square().sum());
          if (module >= 0) engine.modules().leave(module, {loss});
          loss.backward();
          engine.step();
        }
        found[away] = all_states(engine);
        const auto memory = engine.memory();
        EXPECT_EQ(memory.disk, away == 0 ? 0 : memory.master + memory.states + (away == 2 ? memory.params : 0));
        EXPECT_EQ(memory.host, 0);
      }
      for (const int away : {1, 2})
        expect_same(found[away], found[0], c10::str(precision.bytes_per_parameter(), " bytes, ", away));
    });
  }
}

TEST(OffloadEngine, AClientsOptimizerIsRefused) {
  const io::TempFolder folder;
  const Toy toy;
  auto options = toy_options({.stage = 1});
  options.rule = optim::Rule::External;
  options.zero.home = on_disk(folder.path());
  EXPECT_HAS(error_of([&] { Engine(options, comm::Mesh(), toy.specs(), {toy_adamw()}); }), "Adam, AdamW, SGD");
  options.zero.home = offload::state_homes({.residence = shard::Residence::Host});
  Engine(options, comm::Mesh(), toy.specs(), {toy_adamw()});  // where its states are anyway
  options.zero.stage = 3;
  options.zero.home = {};
  options.zero.weight_home = on_disk(folder.path());
  EXPECT_HAS(error_of([&] { Engine(options, comm::Mesh(), Toy().specs(), {toy_adamw()}); }), "leave offload_param out");
}

TEST(OffloadEngine, WeightsThatAllRanksShareStay) {
  const io::TempFolder folder;
  run_ranks(2, [&](int, const comm::GroupPtr& group) {
    const Toy toy;
    auto options = toy_options({.stage = 3, .share = true});
    options.zero.weight_home = on_disk(folder.path());
    EXPECT_HAS(error_of([&] { Engine(options, comm::Mesh(group), toy.specs(), {toy_adamw()}); }),
               "choose one of the two");
  });
}

// The first elements stay in host memory, which is the device of a model on the CPU.
TEST(OffloadEngine, SomeWeightsMayStayInMemory) {
  const io::TempFolder folder;
  for (const int64_t stay : {0, 100, 1000}) {
    const Toy toy;
    auto options = toy_options({.stage = 3, .persistence = 0});
    options.zero.weight_home =
        offload::state_homes({.residence = shard::Residence::Nvme, .folder = folder.path(), .in_memory = stay});
    Engine engine(options, comm::Mesh(), toy.specs(), {toy_adamw()});
    const int64_t away = engine.memory().disk / 4, all = engine.memory().params / 4;
    EXPECT_TRUE(stay == 0 ? away == all : stay == 1000 ? away == 0 : away < all && away >= all - stay) << away;
    step(engine, toy, 0, 0);
  }
}

// A disk that fails in a forward: an error of all ranks, after which the engine goes on.
TEST(OffloadEngine, AReadOfWeightsThatFailsOnOneRankFailsOnAll) {
  const io::TempFolder folder;
  Fault fault;
  const auto faulty = [&](int depth) { return std::make_unique<FaultyQueue>(depth, fault); };
  run_ranks(3, [&](int rank, const comm::GroupPtr& group) {
    const Toy toy, reference;
    auto options = toy_options({.stage = 3, .bf16 = true});
    Engine well(options, comm::Mesh(group), reference.specs(), {toy_adamw()});
    options.zero.weight_home = on_disk(folder.path(), rank == 1 ? offload::QueueMaker(faulty) : offload::QueueMaker());
    Engine engine(options, comm::Mesh(group), toy.specs(), {toy_adamw()});
    for (int number = 0; number < 3; ++number) {
      group->barrier("the fault");
      if (rank == 1) fault = {.reads = number == 1, .memory = number == 2};
      if (number > 0) {
        const std::string mine = number == 1 ? "Input/output error" : "bad_alloc";
        const std::string text = rank == 1 ? mine : "rank 1 of its group could not read its slice";
        EXPECT_HAS(error_of<IoError>([&] { toy_forward(engine, toy, toy_batch(rank, number)); }), text);
        if (rank == 1) fault = {};
      }
      step(engine, toy, rank, number);
      step(well, reference, rank, number);
    }
    const Values is = values_of(engine), was = values_of(well);
    expect_same(is.masters, was.masters, at::kFloat, "masters");
  });
}

// Other replicas, and other slices of the model, gather nothing with the rank that failed, and cannot wait for it: they hear
// of it where they next meet its group.
TEST(OffloadEngine, AReadOfWeightsThatFailsIsAnErrorOfAllAxes) {
  using enum comm::Axis;
  for (const AxisSizes& sizes : {AxisSizes{{DpReplicate, 2}, {DpShard, 2}}, AxisSizes{{DpShard, 2}, {Tp, 2}},
                                 AxisSizes{{DpReplicate, 3}}, AxisSizes{{Tp, 2}}}) {
    const io::TempFolder folder;
    Fault fault;
    const auto faulty = [&](int depth) { return std::make_unique<FaultyQueue>(depth, fault); };
    const auto start = std::chrono::steady_clock::now();
    run_axes(sizes, [&](int rank, const comm::Mesh& mesh) {
      const Toy toy;
      auto options = toy_options({.stage = 3, .bf16 = true, .persistence = 0});
      options.zero.weight_home =
          on_disk(folder.path(), rank == 1 ? offload::QueueMaker(faulty) : offload::QueueMaker());
      Engine engine(options, mesh, toy.specs(), {toy_adamw()});
      step(engine, toy, 0, 0);
      if (rank == 1) fault.reads = true;
      const std::string what = error_of([&] { step(engine, toy, 0, 1); });
      EXPECT_TRUE(what.find("Input/output error") != std::string::npos ||
                  what.find("could not read its slice") != std::string::npos)
          << rank << ": " << what;
      EXPECT_NE(error_of([&] { step(engine, toy, 0, 2); }), "") << "the groups have ended";
    });
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
  }
}

// One rank's disk refuses to hold the states, or to take them: an error of all, at once.
TEST(OffloadEngine, AConstructionThatFailsOnOneRankFailsOnAll) {
  const io::TempFolder folder;
  const Fault fault{.writes = true};
  const auto faulty = [&](int depth) { return std::make_unique<FaultyQueue>(depth, fault); };
  const std::vector<std::pair<zero::HomeMaker, const char*>> homes{
      {on_disk("/proc/none"), "/proc/none"}, {on_disk(folder.path(), faulty), "Input/output error"}};
  for (const auto& [home, text] : homes) {
    for (const int stage : {1, 3, 4}) {  // 4: weights in stage 3
      const auto start = std::chrono::steady_clock::now();
      run_ranks(2, [&, text = text, &home = home](int rank, const comm::GroupPtr& group) {
        const Toy toy;
        auto options = toy_options({.stage = std::min(stage, 3), .bf16 = true});
        (stage == 4 ? options.zero.weight_home : options.zero.home) = rank == 1 ? home : on_disk(folder.path());
        const auto what = error_of<IoError>([&] { Engine(options, comm::Mesh(group), toy.specs(), {toy_adamw()}); });
        EXPECT_HAS(what, rank == 1 ? text : "rank 1 of this engine failed; see its error");
      });
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
    }
  }
}

TEST(OffloadEngine, AFullDiskIsAnErrorOfTheConstruction) {
  const io::TempFolder folder;
  const LargestFile limit(1 << 20);
  at::Tensor weight = at::zeros({1 << 20}).requires_grad_(true);
  auto options = toy_options({.stage = 1});
  options.zero.home = on_disk(folder.path());
  const auto make = [&] { Engine(options, comm::Mesh(), {{"w", weight, 0, ""}}, {toy_adamw()}); };
  EXPECT_HAS(error_of<IoError>(make), "cannot reserve");
  EXPECT_TRUE(files_in(folder.path()).empty());
  EXPECT_TRUE(weight.equal(at::zeros({1 << 20}))) << "it is still a parameter";
}

// In the middle of a step: an error of all ranks, which stays until a checkpoint is loaded; then training goes on with the
// bits of one that met no fault.
TEST(OffloadEngine, AFaultInAStepIsSaidUntilACheckpointIsLoaded) {
  enum class Kind { ReadError, WriteError, Short, NoMemory };
  for (const Kind kind : {Kind::ReadError, Kind::WriteError, Kind::Short, Kind::NoMemory}) {
    for (const int stage : {1, 2, 3, 4}) {  // 4: weights, too
      const io::TempFolder saved, disks;
      Fault fault;
      const auto faulty = [&](int depth) { return std::make_unique<FaultyQueue>(depth, fault); };
      run_ranks(2, [&](int rank, const comm::GroupPtr& group) {
        const std::string disk = disks / std::to_string(rank);
        const Toy toy, reference;
        auto options = toy_options({.stage = std::min(stage, 3), .bf16 = true});
        Engine well(options, comm::Mesh(group), reference.specs(), {toy_adamw()});
        options.zero.home = on_disk(disk, rank == 1 ? offload::QueueMaker(faulty) : offload::QueueMaker());
        if (stage == 4) options.zero.weight_home = options.zero.home;
        Engine engine(options, comm::Mesh(group), toy.specs(), {toy_adamw()});
        step(engine, toy, rank, 0);
        step(well, reference, rank, 0);
        engine.checkpoints().save(saved.path(), {});
        group->barrier("the fault");
        if (rank == 1 && kind == Kind::Short) truncate_files_in(disk, 100);
        if (rank == 1) fault = {kind == Kind::ReadError, kind == Kind::WriteError, kind == Kind::NoMemory};
        const char* mine = kind == Kind::Short      ? "ends at byte"
                           : kind == Kind::NoMemory ? "bad_alloc"
                                                    : "Input/output error";
        const std::string text = rank == 1 ? mine : "rank 1 of this engine failed; see its error";
        const auto access = [&] {  // rank 1 has a part of some of them
          for (int id = 0; const auto& spec : toy.specs()) {
            if (kind == Kind::WriteError) engine.states().set_full(id, Quantity::State0, at::zeros_like(spec.tensor));
            engine.states().get_full(id++, Quantity::State0);
          }
        };
        EXPECT_HAS(error_of<IoError>(access), text);
        if (stage == 4 && kind != Kind::WriteError) {  // a forward reads
          EXPECT_NE(error_of<IoError>([&] { step(engine, toy, rank, 1); }), "");
          return;
        }
        EXPECT_HAS(error_of<IoError>([&] { step(engine, toy, rank, 1); }), text);
        EXPECT_HAS(error_of<IoError>([&] { step(engine, toy, rank, 1); }), "load a checkpoint");
        EXPECT_HAS(error_of<IoError>([&] { engine.checkpoints().save(saved.path(), {.tag = "broken"}); }),
                   "load a checkpoint");
        if (kind == Kind::Short) return;  // a file that was cut stays so
        if (kind == Kind::WriteError) {   // nor does a load that one rank cannot write help any of them
          EXPECT_NE(error_of<IoError>([&] { engine.checkpoints().open(saved.path(), "", {})->apply(); }), "");
          EXPECT_HAS(error_of<IoError>([&] { step(engine, toy, rank, 1); }), "load a checkpoint");
        }
        if (rank == 1) fault = {};
        engine.checkpoints().open(saved.path(), "", {})->apply();
        step(engine, toy, rank, 1);
        step(well, reference, rank, 1);
        const Values is = values_of(engine), was = values_of(well);
        expect_same(is.masters, was.masters, at::kFloat, "masters");
        expect_same(is.second, was.second, at::kFloat, "moments");
      });
    }
  }
}

}  // namespace tessera::testing
