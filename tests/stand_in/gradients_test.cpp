// Gradients of engines on a device: the memory that they have and when, and what the host waits for.
#include <c10/core/CachingDeviceAllocator.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cmath>
#include <map>
#include <string>
#include <string_view>

#include "tessera/engine/engine.h"
#include "tessera/engine/watch.h"
#include "tessera/offload/states.h"
#include "tests/stand_in/chain.h"
#include "tests/stand_in/stand_in.h"
#include "tests/support/host_home.h"
#include "tests/support/modes.h"
#include "tests/support/ranks.h"
#include "tests/support/training.h"

namespace tessera::testing {

using amp::PrecisionPolicy;
using engine::Engine;

// At the end of a forward there is none, at the end of a backward what the stage owes, after the update none again.
TEST(DeviceGradients, ExistFromTheBackwardToTheUpdate) {
  for (const int world : {1, 2}) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (const PrecisionPolicy& mode : {PrecisionPolicy::fp32(), PrecisionPolicy::bf16()}) {
        const std::string what = "stage " + std::to_string(stage) + ", world " + std::to_string(world);
        const int64_t before = tessera_stand_in_bytes();
        run_ranks(world, [&](int rank, const comm::GroupPtr& group) {
          const ToyRun run{.stage = stage, .accumulation = 2, .persistence = 0, .precision = mode};
          Chain chain({.run = run}, rank, group);
          const int64_t whole = Chain::kUnits * Chain::kSize * static_cast<int64_t>(at::elementSize(mode.grad));
          const auto gradients = [&] { return chain.bytes() - before / world - chain.held(); };
          const auto expect = [&](int64_t bytes, const char* when) {
            EXPECT_NEAR(static_cast<double>(gradients()), static_cast<double>(bytes), 4096) << what << ", " << when;
          };
          for (int step = 0; step < 2; ++step) {
            for (int micro = 0; micro < 2; ++micro) {
              const int64_t owed = stage < 2 && micro == 0 ? whole : stage == 0 ? whole : whole / world;
              at::Tensor loss = chain.forward();
              expect(micro == 0 ? 0 : stage < 2 ? whole : whole / world, "end of a forward");
              loss.backward();
              loss.reset();
              expect(owed, "end of a backward");
              EXPECT_EQ(chain.engine->memory().grads, owed) << what;
              chain.engine->step();
            }
            expect(0, "after a step");
          }
          chain.forward().backward();
          chain.engine->zero_grad();
          expect(0, "after zero_grad()");
        });
        EXPECT_STREQ(tessera_stand_in_races(), "") << what;
      }
    }
  }
}

// For the norm, which is the check for inf and NaN too; nothing else waits, also where parameters have no gradient. Ranks tell
// each other of it, and of these, in one exchange; in stage 0 also at the end of a backward, whose gradients the user may look
// at. The update in the backward waits for nothing, but for what ranks tell each other: before the first unit, and in step(). So does
// clipping by the step before: its norm has come by then. With each unit's reduction goes, unwaited for, who has gradients of it.
TEST(DeviceGradients, TheHostWaitsOnceAStep) {
  static std::atomic<int> waits, exchanges;
  for (const int world : {1, 2}) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (const auto& [early, limit] : {std::pair(false, 0.0), {true, 0.0}, {true, 0.5}}) {
        for (PrecisionPolicy mode : all_modes()) {
          if (early && (stage == 0 || mode.param == at::kHalf)) continue;
          mode.skip_nonfinite = mode.skip_nonfinite && !early;
          const std::string what = "stage " + std::to_string(stage) + ", world " + std::to_string(world) + ", " +
                                   std::to_string(mode.bytes_per_parameter()) + " bytes" +
                                   (early ? ", update in the backward" : "") + (limit > 0 ? ", clipped" : "");
          run_ranks(world, [&](int rank, const comm::GroupPtr& group) {
            const ToyRun run{.stage = stage,
                             .clip = early ? 0.0 : 1.0,
                             .persistence = 0,
                             .precision = mode,
                             .in_backward = early,
                             .previous_clip = limit};
            Chain chain({.run = run, .unused = !early, .exchanges = &exchanges}, rank, group);
            // What the host waits for, and what ranks tell each other.
            const auto counts_of = [&](const std::function<void()>& f) {
              group->barrier("before");
              waits = exchanges = 0;
              tessera_stand_in_on_wait([] { ++waits; });
              group->barrier("from here on");
              f();
              group->barrier("after");
              tessera_stand_in_on_wait(nullptr);
              return std::pair(waits.load(), exchanges.load() / world);
            };
            for (int number = 0; number < 2; ++number) {
              const at::Tensor loss = chain.forward();
              const bool tells = world == 2 && (stage == 0 || early);
              const auto in_backward = counts_of([&] { loss.backward(); });
              const auto in_step = counts_of([&] { chain.engine->step(); });
              if (number == 0) continue;  // memory that is page-locked for the first time
              EXPECT_EQ(in_backward, std::pair(tells ? 2 : 0, tells ? 1 + (early ? Chain::kUnits : 0) : 0)) << what;
              EXPECT_EQ(in_step, std::pair(early && world == 1 ? 0 : world, world == 1 ? 0 : 1)) << what;
            }
            if (mode.param != at::kHalf) {  // sums of so many overflow there
              EXPECT_GT(chain.engine->global_grad_norm().value(), 0) << what;
            }
          });
        }
      }
    }
  }
}

// Loss, norm, rate, memory, times of phases and bytes of collectives: what a step tells of itself waits for nothing that it has not
// waited for without.
TEST(DeviceGradients, NumbersOfAStepWaitForNothing) {
  static std::atomic<int> waits;
  for (const int world : {1, 2}) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (const PrecisionPolicy& mode : {PrecisionPolicy::fp32(), PrecisionPolicy::bf16()}) {
        const std::string what = "stage " + std::to_string(stage) + ", world " + std::to_string(world);
        std::map<bool, int> counted;
        for (const bool watched : {false, true}) {
          run_ranks(world, [&](int rank, const comm::GroupPtr& group) {
            const ToyRun run{.stage = stage, .accumulation = 2, .clip = 1.0, .persistence = 0, .precision = mode};
            Chain chain({.run = run}, rank, group);
            config::Config config;
            config.steps_per_print = 1;
            engine::Watch watch(config);
            if (watched) {
              watch.attach(*chain.engine, rank == 0);
              watch.listen(*chain.engine);
              watch.count_flops(*chain.engine, 1e6, 1e12);
            }
            for (int step = 0; step < 3; ++step) {
              double sum = 0;
              engine::Watch::Report report;
              for (int micro = 0; micro < 2; ++micro) {
                const at::Tensor loss = chain.forward();
                sum += loss.cpu().item<double>();  // also where nobody watches
                group->barrier("before");
                if (rank == 0) waits = 0;
                group->barrier("from here on");
                tessera_stand_in_on_wait([] { ++waits; });
                chain.engine->begin_backward(loss).backward();
                chain.engine->end_backward(loss);
                chain.engine->step();
                if (watched && micro == 1) report = watch.stepped(*chain.engine, {0.1});
                group->barrier("after");
                tessera_stand_in_on_wait(nullptr);
                if (step == 2 && rank == 0) counted[watched] += waits.load();
                group->barrier("counted");
              }
              if (!watched) continue;
              std::map<std::string, double> numbers;
              for (const io::Metric& metric : report.metrics)
                numbers[metric.name] = metric.value;
              ASSERT_TRUE(numbers.contains("Train/Samples/train_loss")) << what;
              EXPECT_DOUBLE_EQ(numbers.at("Train/Samples/train_loss"), sum / 2) << what;
              EXPECT_TRUE(numbers.contains("Train/Samples/grad_norm")) << what;
              EXPECT_EQ(report.progress.find(", loss=") != std::string::npos, rank == 0) << what;
            }
          });
        }
        EXPECT_EQ(counted.at(true), counted.at(false)) << what;
        EXPECT_STREQ(tessera_stand_in_races(), "") << what;
      }
    }
  }
}

namespace {

c10::CachingAllocator::Stat bytes_of(c10::DeviceIndex device) {
  return c10::getDeviceAllocator(c10::kPrivateUse1)->getDeviceStats(device).allocated_bytes[0];
}

int64_t peak_of(const std::function<void()>& f) {
  c10::getDeviceAllocator(c10::kPrivateUse1)->resetPeakStats(0);
  const int64_t before = bytes_of(0).current;
  f();
  return bytes_of(0).peak - before;
}

}  // namespace

// One rank. Above weights and states a step takes what the same step takes in plain PyTorch, whose gradients are all there at the
// end of the backward.
TEST(DeviceGradients, APeakIsPlainPyTorchs) {
  for (const PrecisionPolicy& mode : all_modes()) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (const bool early : {false, true}) {
        if (early && (stage == 0 || mode.param == at::kHalf)) continue;
        ToyRun run{
            .stage = stage, .clip = early ? 0.0 : 1.0, .persistence = 0, .precision = mode, .in_backward = early};
        run.precision->skip_nonfinite = mode.skip_nonfinite && !early;
        Chain chain({.run = run, .dtype = mode.param}, 0, comm::single_group());
        chain.forward().backward();
        chain.engine->step();
        const int64_t ours = peak_of([&] {
          chain.forward().backward();
          chain.engine->step();
        });
        chain.engine.reset();
        for (engine::ParamSpec& spec : chain.specs)
          spec.tensor = at::ones({Chain::kSize}, spec.tensor.options()).requires_grad_(true);
        const int64_t plain = peak_of([&] {
          at::Tensor x = at::ones({}, chain.specs[0].tensor.options().dtype(at::kFloat).requires_grad(false));
          for (const engine::ParamSpec& spec : chain.specs)
            x = x + (spec.tensor * x).sum() * 1e-6;
          x.backward();
        });
        EXPECT_LE(ours, plain + 4096) << mode.bytes_per_parameter() << " bytes, stage " << stage
                                      << (early ? ", early" : "");
      }
    }
  }
}

// When the update has read a unit's gradients, they go.
TEST(DeviceGradients, GoUnitByUnitInTheUpdate) {
  static std::array<std::vector<int64_t>, 2> found;  // of a device, its bytes at each update
  for (const int world : {1, 2}) {
    for (int stage = 0; stage <= 3; ++stage) {
      run_ranks(world, [&](int rank, const comm::GroupPtr& group) {
        Chain chain({.run = {.stage = stage, .persistence = 0}}, rank, group);
        int64_t held = 0;
        for (int number = 0; number < 2; ++number) {
          chain.forward().backward();
          held = chain.engine->memory().grads;
          group->barrier("before the update");
          found[static_cast<size_t>(rank)].clear();
          tessera_stand_in_on_launch([](const char* entry) {
            const auto device = stand_in_guard().getDevice().index();
            if (std::string_view(entry) == "adam")
              found[static_cast<size_t>(device)].push_back(bytes_of(device).current);
          });
          chain.engine->step();
          group->barrier("after it");
          tessera_stand_in_on_launch(nullptr);
        }
        const std::vector<int64_t>& bytes = found[static_cast<size_t>(rank)];
        ASSERT_EQ(bytes.size(), Chain::kUnits);
        for (int64_t i = 1; i < Chain::kUnits; ++i)
          EXPECT_LE(bytes[static_cast<size_t>(i)], bytes[0] - i * held / Chain::kUnits + 4096)
              << "stage " << stage << ", world " << world << ", unit " << i;
      });
    }
  }
}

namespace {

// Of sizes around those at which gradients lie by themselves, and blocks of the norm end.
struct Mixed {
  explicit Mixed(c10::Device device) {
    const at::Tensor draw = at::arange(1, 40001, at::kFloat).sin();
    for (const int64_t n : {40000, 3, 4096, 32768, 100, 1, 32767, 36864})
      tensors.push_back((draw.narrow(0, 0, n) * 0.5).to(device).requires_grad_(true));
  }
  at::Tensor loss(engine::Engine& engine, int number) const {
    engine.pre_forward();
    at::Tensor x = at::ones({}, tensors[0].options().dtype(at::kFloat).requires_grad(false));
    for (size_t i = 0; i < tensors.size(); ++i)
      if (i != 1 || number % 2 == 0) x = x + (tensors[i].to(at::kFloat) * x).square().mean() * (0.1 / (1 + number));
    engine.post_forward({x});
    return x;
  }
  std::vector<engine::ParamSpec> specs() const {
    std::vector<engine::ParamSpec> all;
    for (size_t i = 0; i < tensors.size(); ++i)
      all.push_back({"w" + std::to_string(i), tensors[i], static_cast<int>(i) / 4, ""});
    return all;
  }
  std::vector<at::Tensor> tensors;
};

// Masters, moments, norms and, before the last step, gradients.
std::vector<at::Tensor> trained(const Mixed& model, const engine::Options& options) {
  Engine engine(options, comm::Mesh(), model.specs(), {toy_adamw(), toy_adamw()});
  std::vector<at::Tensor> found;
  for (int number = 0; number < 4; ++number) {
    model.loss(engine, number).backward();
    for (size_t i = 0; i < model.tensors.size() && number == 3; ++i)
      if (const at::Tensor grad = engine.states().get_full(static_cast<int>(i), engine::Quantity::Gradient);
          grad.defined())
        found.push_back(grad);
    engine.step();
    found.push_back(at::scalar_tensor(engine.global_grad_norm().value_or(0), at::kDouble));
  }
  for (const at::Tensor& state : all_states(engine))
    found.push_back(state);
  for (at::Tensor& value : found)
    value = value.cpu();
  return found;
}

}  // namespace

// One rank has no flat buffer of gradients; where states live elsewhere it has one. CPU and device, by themselves.
TEST(DeviceGradients, PiecesHaveTheBitsOfAFlatBuffer) {
  for (const PrecisionPolicy& mode : all_modes()) {
    for (const int stage : {0, 2}) {
      for (const int accumulation : {1, 2}) {
        for (const auto device : {c10::Device(at::kCPU), c10::Device(c10::kPrivateUse1, 0)}) {
          if (!device.is_cpu() && stage > 0)
            continue;  // gradients leave for the host, whose norm has blocks of its own
          engine::Options options = toy_options({.stage = stage, .accumulation = accumulation, .precision = mode});
          const std::vector<at::Tensor> in_pieces = trained(Mixed(device), options);
          options.zero.home = [](shard::Quantity, int64_t size, const at::TensorOptions& of) {
            return std::make_shared<HostHome>(size, of.device(at::kCPU));
          };
          const std::string what = "mode " + std::to_string(mode.bytes_per_parameter()) + ", stage " +
                                   std::to_string(stage) + ", " + std::to_string(accumulation) + " micro-batches";
          expect_same(in_pieces, trained(Mixed(device), options), what);
        }
      }
    }
  }
  EXPECT_STREQ(tessera_stand_in_races(), "");
}

// Autograd's tensor becomes the gradient where nobody else has it or its memory; else it is copied. Graphs of a device watch
// theirs, or write to it again.
TEST(DeviceGradients, AreAutogradsOwnWhereNobodySharesThem) {
  enum Case { Alone, OfALinear, OfALinear3d, Kept, KeptUnderneath, TwoOfOneMemory, Watched, OfAGraph };
  for (const auto device : {c10::Device(at::kCPU), c10::Device(c10::kPrivateUse1, 0)}) {
    for (const Case which : {Alone, OfALinear, OfALinear3d, Kept, KeptUnderneath, TwoOfOneMemory, Watched, OfAGraph}) {
      if (which == OfAGraph && !device.is_cpu())
        continue;  // the stand-in's allocator does not say what frees its memory
      for (const int accumulation : {1, 2}) {
        const at::Tensor a = at::ones({200, 200}, device).requires_grad_(true);
        const at::Tensor b = at::ones({40000}, device).requires_grad_(true);
        const at::Tensor factor = at::arange(40000, at::kFloat).view({200, 200}).to(device);
        const engine::Options options = toy_options({.stage = 0, .accumulation = accumulation, .clip = 0});
        Engine engine(options, comm::Mesh(), {{"a", a, 0, ""}, {"b", b, 0, ""}}, {toy_adamw()});
        const auto loss_of = [&](Case of, const at::Tensor& weight) {  // its gradient is `factor`
          if (of != OfALinear && of != OfALinear3d && of != KeptUnderneath) return (weight * factor).sum();
          const auto sizes = of == OfALinear3d ? std::vector<int64_t>{2, 100, 200} : std::vector<int64_t>{200, 200};
          const at::Tensor of_output = at::eye(200).to(device).view(sizes);
          return (at::linear(factor.view(sizes), weight) * of_output).sum();
        };
        at::Tensor kept, memory = at::empty({200, 200});
        std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> watched;
        const void* made = nullptr;
        a.register_hook([&](const at::Tensor& grad) {
          made = grad.const_data_ptr();
          if (which == Kept) kept = grad;
          if (which == KeptUnderneath) kept = at::Tensor(grad._base());
          if (which == Watched) watched = grad.storage().getWeakStorageImpl();
          if (which != OfAGraph) return at::Tensor();
          made = memory.const_data_ptr();
          return at::from_blob(memory.copy_(grad).mutable_data_ptr(), {200, 200});
        });
        for (int number = 0; number < accumulation; ++number) {
          engine.pre_forward();
          const at::Tensor loss = which == TwoOfOneMemory ? ((a + b.view({200, 200})) * factor).sum()
                                                          : loss_of(which, a) + (b.view({200, 200}) * factor).sum();
          engine.post_forward({loss});
          loss.backward();
          if (number == 0) {
            const bool own = which == Alone || which == OfALinear || which == OfALinear3d;
            EXPECT_EQ(a.grad().const_data_ptr() == made, own) << which;
          }
          memory.zero_();
          EXPECT_TRUE(!kept.defined() || kept.cpu().equal(factor.cpu()) || kept.cpu().equal(factor.cpu().t())) << which;
          if (number + 1 < accumulation) engine.step();
        }
        EXPECT_TRUE(a.grad().cpu().equal(factor.cpu())) << which;
        EXPECT_TRUE(b.grad().cpu().equal(factor.cpu().flatten())) << which;
        engine.step();
        EXPECT_FALSE(a.grad().defined());
      }
    }
  }
}

// The device makes the squares of every unit as they leave, which hold until somebody writes to what has left; the host waits for
// their sum.
TEST(DeviceGradients, TheNormIsOfTheGradientsAsTheyAre) {
  static std::atomic<int> waits;
  for (const bool pin : {true, false}) {
    std::vector<engine::ParamSpec> specs;
    for (int i = 0; i < 4; ++i) {
      const at::Tensor weight = at::ones({1000 + i}, c10::Device(c10::kPrivateUse1, 0)).requires_grad_(true);
      specs.push_back({"w" + std::to_string(i), weight, 0, "u" + std::to_string(i)});
    }
    engine::Options options = toy_options({.stage = 1, .clip = 0, .precision = PrecisionPolicy::fp32()});
    options.zero.home = offload::state_homes({.residence = shard::Residence::Host, .pin_memory = pin});
    Engine engine(options, comm::Mesh(), specs, {toy_adamw()});
    at::Tensor loss = at::zeros({}, specs[0].tensor.options().requires_grad(false));
    for (const engine::ParamSpec& spec : specs)
      loss = loss + spec.tensor.square().sum();
    loss.backward();
    waits = 0;
    tessera_stand_in_on_wait([] { ++waits; });
    const double norm = engine.grad_norm();
    tessera_stand_in_on_wait(nullptr);
    EXPECT_EQ(waits, 1) << pin;
    EXPECT_NEAR(norm, 2 * std::sqrt(4006.0), 1e-3);
    const auto halve = [&] {
      for (int i = 0; i < 4; ++i) {
        const at::Tensor gradient = engine.states().local_view(i, engine::Quantity::Gradient);
        engine.states().set_local(i, engine::Quantity::Gradient, gradient * 0.5);
      }
    };
    halve();
    EXPECT_NEAR(engine.grad_norm(), norm / 2, 1e-3);
    halve();
    engine.step();
    EXPECT_NEAR(engine.global_grad_norm().value(), norm / 4, 1e-3);
  }
}

}  // namespace tessera::testing
