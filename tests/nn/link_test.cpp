// Two engines on ranks of their own, joined by a link: weights of one process with the whole model, whatever the two meshes.
#include "tessera/nn/link.h"

#include <gtest/gtest.h>
#include <torch/nn.h>

#include <csignal>
#include <deque>
#include <mutex>

#include "tessera/base/error.h"
#include "tessera/nn/engine.h"
#include "tessera/nn/together.h"
#include "tests/comm/process_ranks.h"
#include "tests/nn/stages.h"
#include "tests/support/errors.h"

namespace tessera::nn {

using comm::Axis;
using testing::error_of;
using testing::run_parts;
using testing::Weights;

namespace {

constexpr int kRounds = 3, kMicro = 3, kRows = 4, kTokens = 6;

// A tower of width 6 to 8 and a reader of 8 to 3, both token by token; the tower also hands on which tokens count.
Layers tower() {
  Layers list;
  list.build([] { return testing::fresh(0, torch::nn::Linear(6, 8)); });
  list.add([](const at::Tensor& x) { return std::tuple(at::tanh(x), x.detach().gt(0).to(at::kByte)); });
  return list;
}
Layers reader() {
  Layers list;
  list.add([](const at::Tensor& x, const at::Tensor& counts) { return x + counts; });
  list.build([] { return testing::fresh(1, torch::nn::Linear(8, 3)); });
  return list;
}

struct Part : StageLayers {
  explicit Part(const Layers& list) : StageLayers(list, {0, list.size()}, 1, 0, std::nullopt) {}
  Tensors forward(const Tensors& x) { return run(0, x); }
};

Config link_config(int zero, const std::string& more = "") {
  return Config::from_json(
      c10::str(R"({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": )", kMicro,
               R"(, "gradient_clipping": 0.5, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},)", more,
               R"("zero_optimization": {"stage": )", zero, "}}"));
}

// Inputs and labels of a micro-batch: [rows, length, width].
MicroBatch data(int step, int micro) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(10 * step + micro);
  return {{at::randn({kRows, kTokens, 6}, generator, at::kFloat)},
          {at::randn({kRows, kTokens, 3}, generator, at::kFloat)}};
}

at::Tensor part_of(const at::Tensor& whole, const comm::Mesh& mesh) {
  const auto cut = [](const at::Tensor& t, int64_t dim, int parts, int number) {
    return t.narrow(dim, t.size(dim) / parts * number, t.size(dim) / parts);
  };
  return cut(cut(whole, 0, mesh.size(comm::kBatchAxes), mesh.rank(comm::kBatchAxes)), 1, mesh.size(Axis::Sp),
             mesh.rank(Axis::Sp));
}

Weights trained_whole() {
  auto head = testing::fresh(1, torch::nn::Linear(8, 3));
  Layers joined = tower();
  joined.add([](const at::Tensor& x, const at::Tensor& counts) { return x + counts; }).add(head);
  const auto module = std::make_shared<Part>(joined);
  Engine<Part> engine(module, link_config(0), comm::Mesh());
  for (int step = 0; step < kRounds; ++step) {
    for (int micro = 0; micro < kMicro; ++micro) {
      const MicroBatch batch = data(step, micro);
      testing::loss_of(engine.forward(batch.inputs), batch.labels).backward();
      engine.step();
    }
  }
  return testing::weights_of(*module);
}

using Sides = std::vector<comm::MeshShape>;
const Link kLink{.sequence_dim = 1, .sides = {"tower", "reader"}};

comm::MeshShape shape(int batch, int sp, int tp) {
  return comm::MeshShape{{1, batch, sp, tp}};
}

std::string sizes_of(const comm::MeshShape& mine) {
  return c10::str(R"("sequence_parallel_size": )", mine.size(Axis::Sp), R"(, "tensor_parallel": {"autotp_size": )",
                  mine.size(Axis::Tp), "},");
}

void expect_weights(const Weights& got, const Weights& whole, bool of_tower, const std::string& where,
                    bool half = false) {
  for (const auto& [name, value] : got) {
    const at::Tensor& expected = whole.at(of_tower ? name : name.substr(0, 7) + "3" + name.substr(8));
    const bool close = at::allclose(value.to(at::kFloat), expected, half ? 1e-2 : 1e-4, half ? 1e-2 : 1e-6);
    EXPECT_TRUE(close) << where << ": " << name;
  }
}

// One rank of two engines that are linked. `half`: the tower is fp16.
void train_linked(const comm::Parts& parts, int zero, const Weights& expected, const std::string& where,
                  bool half = false) {
  const auto module = std::make_shared<Part>(parts.part == 0 ? tower() : reader());
  const std::string fp16 = half && parts.part == 0 ? R"("fp16": {"enabled": true, "initial_scale_power": 7},)" : "";
  Engine<Part> engine(module, link_config(zero, fp16 + sizes_of(parts.shapes[parts.part])), parts.mesh, nullptr,
                      {.parts_alone = true});
  const auto dtype = half ? at::kHalf : at::kFloat;
  std::optional<LinkSender> sender;
  std::optional<LinkReceiver> receiver;
  parts.part == 0 ? (void)sender.emplace(kLink, parts, engine) : (void)receiver.emplace(kLink, parts, engine);
  for (int step = 0; step < kRounds; ++step) {
    for (int micro = 0; sender && micro < kMicro; ++micro)
      sender->send(engine.forward(Tensors{part_of(data(step, micro).inputs[0], parts.mesh).to(dtype)}),
                   100 * step + micro);
    for (const int micro : {1, 0, 2}) {  // gradients are asked for in another order than they come
      const int other = parts.part == 0 ? micro : (micro == 2 ? 2 : 1 - micro);
      if (sender) {
        sender->backward(100 * step + other);
      } else {
        const Tensors got = receiver->receive(100 * step + other);
        EXPECT_TRUE(got[0].requires_grad() && got[0].is_leaf() && !got[1].requires_grad());
        const at::Tensor labels = part_of(data(step, other).labels[0], parts.mesh);
        engine.backward(testing::loss_of(engine.forward(Tensors{got[0].to(at::kFloat), got[1]}), {labels}));
        receiver->give_back(100 * step + other);
      }
      EXPECT_EQ(micro == 2 ? step_together(engine, parts) : engine.step(), micro == 2);
    }
    sender ? sender->step() : receiver->step();
  }
  expect_weights(testing::weights_of(*module), expected, parts.part == 0, where, half);
}

// One rank of parts that lie over each other. A rank of both has both engines, in one graph.
void train_over_each_other(const std::vector<comm::Parts>& parts, int zero, const Weights& expected,
                           const std::string& where, bool half = false) {
  std::vector<std::shared_ptr<Part>> modules;
  std::deque<Engine<Part>> engines;
  std::optional<LinkSender> sender;
  std::optional<LinkReceiver> receiver;
  for (const comm::Parts& mine : parts) {
    modules.push_back(std::make_shared<Part>(mine.part == 0 ? tower() : reader()));
    const std::string fp16 = half && mine.part == 0 ? R"("fp16": {"enabled": true, "initial_scale_power": 7},)" : "";
    engines.emplace_back(modules.back(), link_config(zero, fp16 + sizes_of(mine.shapes[mine.part])), mine.mesh, nullptr,
                         Recipe{.parts_alone = true});
    if (mine.part == 0)
      sender.emplace(kLink, mine, engines.back());
    else
      receiver.emplace(kLink, mine, engines.back());
  }
  std::vector<Session*> sessions;
  for (auto& engine : engines)
    sessions.push_back(&engine);
  for (int step = 0; step < kRounds; ++step) {
    for (int micro = 0; micro < kMicro; ++micro) {
      const MicroBatch batch = data(step, micro);
      Tensors handed;
      if (sender)
        handed = engines.front().forward(
            Tensors{part_of(batch.inputs[0], parts.front().mesh).to(half ? at::kHalf : at::kFloat)});
      if (!receiver) {
        sender->send(handed, micro), sender->backward(micro);
      } else {
        const Tensors got = sender ? hand_over(*sender, *receiver, handed, micro) : hand_over(*receiver, micro).tensors;
        EXPECT_TRUE(got[0].requires_grad() && !got[0].is_leaf() && !got[1].requires_grad());
        const at::Tensor labels = part_of(batch.labels[0], parts.back().mesh);
        const at::Tensor loss =
            testing::loss_of(engines.back().forward(Tensors{got[0].to(at::kFloat), got[1]}), {labels});
        engines.back().backward(loss);
      }
      EXPECT_EQ(step_together(sessions, parts[0]), micro == kMicro - 1);
    }
  }
  for (size_t i = 0; i < parts.size(); ++i)
    expect_weights(testing::weights_of(*modules[i]), expected, parts[i].part == 0, where, half);
  if (sender && receiver) {
    EXPECT_HAS(error_of([&] { sender->step(); }), "ends of hand_over() have no step()");
  }
}

}  // namespace

TEST(Link, EnginesTrainAsOneModelWhateverTheirMeshes) {
  const Weights expected = trained_whole();
  const std::vector<Sides> cases{{shape(1, 1, 1), shape(1, 1, 1)}, {shape(2, 1, 1), shape(1, 1, 1)},
                                 {shape(1, 1, 1), shape(2, 1, 1)}, {shape(2, 1, 1), shape(2, 1, 1)},
                                 {shape(1, 2, 1), shape(1, 1, 2)}, {shape(2, 1, 1), shape(1, 1, 2)},
                                 {shape(1, 1, 2), shape(2, 1, 1)}, {shape(1, 2, 1), shape(2, 1, 1)},
                                 {shape(4, 1, 1), shape(1, 2, 1)}, {shape(1, 3, 1), shape(1, 2, 1)}};
  for (size_t i = 0; i < cases.size(); ++i)
    run_parts(cases[i], [&](const comm::Parts& parts) {
      train_linked(parts, static_cast<int>(i % 3), expected, c10::str("case ", i));
    });
}

TEST(Link, EnginesOverEachOtherTrainAsOneModel) {
  const Weights expected = trained_whole();
  struct Case {
    Sides sides;
    std::vector<int> firsts = {};
    bool half = false;
  };
  const std::vector<Case> cases{
      {{shape(1, 1, 1), shape(1, 1, 1)}},           {{shape(1, 2, 1), shape(1, 1, 2)}},
      {{shape(2, 1, 1), shape(1, 1, 2)}},           {{shape(2, 1, 1), shape(1, 2, 1)}},
      {{shape(1, 1, 2), shape(2, 1, 1)}},           {{shape(2, 2, 1), shape(1, 2, 2)}},
      {{shape(2, 1, 1), shape(2, 1, 1)}, {0, 1}},   {{shape(2, 1, 1), shape(1, 1, 1)}, {0, 1}},
      {{shape(1, 1, 1), shape(1, 2, 2)}, {2, 0}},   {{shape(1, 2, 1), shape(1, 1, 2)}, {1, 0}},
      {{shape(1, 1, 1), shape(1, 1, 1)}, {}, true}, {{shape(2, 1, 1), shape(2, 1, 1)}, {0, 1}, true}};
  for (size_t i = 0; i < cases.size(); ++i) {
    auto parts = comm::thread_overlaid_parts(cases[i].sides, cases[i].firsts, std::chrono::minutes(1));
    std::vector<comm::GroupPtr> groups;
    for (const auto& each : parts)
      groups.push_back(each[0].everyone);
    testing::run_threads(groups, [&](int rank, const comm::GroupPtr&) {
      const auto mine = std::exchange(parts[rank], {});
      train_over_each_other(mine, static_cast<int>(i % 3), expected, c10::str("case ", i), cases[i].half);
    });
  }
}

namespace {

// A program of processes over both transports.
template <class F>
void in_processes(int size, const F& body) {
  if (testing::is_rank()) return body();
  for (const auto& env : {testing::kShared, testing::kGloo})
    testing::expect_success(testing::run_processes(size, env));
}

}  // namespace

TEST(Link, RanksAsProcesses) {
  in_processes(4, [] {
    train_linked(comm::environment_parts({shape(1, 2, 1), shape(1, 1, 2)}), 1, trained_whole(), "processes");
  });
}

TEST(Link, UnequalNumbersOfProcesses) {
  in_processes(3, [] {
    train_linked(comm::environment_parts({shape(1, 1, 1), shape(2, 1, 1)}), 2, trained_whole(), "processes");
  });
}

TEST(Link, ProcessesOfBothSides) {
  in_processes(2, [] {
    const auto parts = comm::environment_overlaid_parts({shape(1, 2, 1), shape(1, 1, 2)});
    train_over_each_other(parts, 1, trained_whole(), "processes");
  });
}

TEST(Link, SomeProcessesOfBothSides) {
  in_processes(3, [] {
    const auto parts = comm::environment_overlaid_parts({shape(1, 2, 1), shape(1, 1, 2)}, {0, 1});
    train_over_each_other(parts, 2, trained_whole(), "processes");
  });
}

TEST(Link, AProcessThatDiesIsNamed) {
  if (!testing::is_rank()) {
    for (const auto& env : {testing::kShared, testing::kGloo}) {
      const auto results = testing::run_processes(2, env);
      testing::expect_success(results, /*lost=*/1);
      EXPECT_LT(results[0].seconds, 60);
    }
    return;
  }
  const auto parts = comm::environment_parts({comm::mesh_shape(1), comm::mesh_shape(1)});
  if (parts.part == 1) {
    LinkReceiver(kLink, parts).receive(0);
    raise(SIGKILL);
  }
  LinkSender sender(kLink, parts);
  sender.send({at::ones({2, 2, 2}).requires_grad_() * 1}, 0);
  EXPECT_HAS(error_of([&] { sender.backward(0); }), "rank 0 of reader is lost");
}

// fp16 on one side, fp32 on the other: each has its own loss scale.
TEST(Link, LossScalesStayEachEnginesOwn) {
  const Weights expected = trained_whole();
  run_parts(Sides(2, comm::mesh_shape(1)),
            [&](const comm::Parts& parts) { train_linked(parts, 1, expected, "fp16 and fp32", /*half=*/true); });
}

TEST(Link, EnginesSteppedApartAreNamed) {
  run_parts(Sides(2, comm::mesh_shape(1)), [&](const comm::Parts& parts) {
    Engine<Part> engine(std::make_shared<Part>(parts.part == 0 ? tower() : reader()), link_config(1), parts.mesh);
    engine.core().set_gradient_accumulation_boundary(parts.part == 0);
    EXPECT_HAS(error_of([&] { step_together(engine, parts); }), "the engines were stepped apart");
  });
}

TEST(Link, EnginesOfAStepAreEachNamedOnce) {
  run_parts(Sides(2, comm::mesh_shape(1)), [&](const comm::Parts& parts) {
    Engine<Part> engine(std::make_shared<Part>(parts.part == 0 ? tower() : reader()), link_config(1), parts.mesh);
    const auto error = [&](const std::vector<Session*>& engines) {
      return error_of([&] { step_together(engines, parts); });
    };
    EXPECT_HAS(error({&engine, &engine}), "[step_together] an engine is named twice; pass each once");
    EXPECT_HAS(error({&engine, nullptr}), "[step_together] an engine is null; pass engines only");
    EXPECT_HAS(error({}), "[step_together] there are no engines");
    EXPECT_EQ(engine.core().micro_steps(), 0);
  });
}

// The errors of both sides.
TEST(Link, BadUsesAreNamed) {
  struct Bad {
    std::function<void(LinkSender&)> sender;
    std::function<void(LinkReceiver&)> receiver;
    std::string sender_says, receiver_says;
  };
  const auto x = [] { return Tensors{at::ones({2, 2, 2}).requires_grad_()}; };
  const std::vector<Bad> cases{
      {[&](LinkSender& s) { s.send(x(), 5); }, [](LinkReceiver& r) { r.receive(6); }, "",
       "rank 0 of reader asks for sample 6, but the next message of rank 0 of tower is of sample 5"},
      {[&](LinkSender& s) { s.send(x(), 5), s.send(x(), 5); }, [](LinkReceiver& r) { r.receive(5); },
       "sample 5 is on its way already", ""},
      {[](LinkSender& s) { s.backward(1); }, [](LinkReceiver& r) { r.give_back(1); }, "there is no graph of sample 1",
       "sample 1 has no gradient to give back"},
      {[&](LinkSender& s) { s.send(x(), 0), s.step(); }, [](LinkReceiver& r) { r.receive(0), r.step(); },
       "the gradients of samples [0] are still out; call backward()", "call give_back()"},
      {[&](LinkSender& s) { s.send(x(), 0); }, [](LinkReceiver& r) { r.receive(0), r.give_back(0); }, "",
       "no gradient has reached sample 0"},
      {[&](LinkSender& s) { s.send({at::ones({2})}, 0), s.step(); },
       [](LinkReceiver& r) { r.receive(0), r.receive(1); }, "lost", "has ended step 0 after 1 micro-batches"},
      {[&](LinkSender& s) { s.send({at::ones({2})}, 0), s.step(); }, [](LinkReceiver& r) { r.step(); }, "had 0 micro-",
       "rank 0 of tower had more micro-batches in step 0"},
      {[](LinkSender& s) {
         const at::Tensor leaf = at::ones({2, 2, 2}).requires_grad_(), y = leaf.exp();
         s.send({y}, 0), y.sum().backward(), s.backward(0);
       },
       [](LinkReceiver& r) { r.receive(0)[0].sum().backward(), r.give_back(0); },
       "the graph of sample 0 was freed before its gradient came", ""},
      {[](LinkSender& s) { s.abort("the tower fell"); }, [](LinkReceiver& r) { r.receive(0); }, "", "the tower fell"},
  };
  const Sides shapes(2, comm::mesh_shape(1));
  for (const Bad& bad : cases) {
    run_parts(shapes, [&](const comm::Parts& parts) {
      const bool sends = parts.part == 0;
      const auto text = error_of([&] {
        sends ? bad.sender(*std::make_unique<LinkSender>(kLink, parts))
              : bad.receiver(*std::make_unique<LinkReceiver>(kLink, parts));
      });
      const std::string& expected = sends ? bad.sender_says : bad.receiver_says;
      EXPECT_EQ(text.empty(), expected.empty()) << text;
      EXPECT_HAS(text, expected);
    });
  }
  const auto alone = comm::thread_parts({comm::mesh_shape(1), comm::MeshShape{{1, 1, 2, 1}}});
  EXPECT_HAS(error_of([&] { LinkSender(Link{}, alone[0]); }), "2 ranks share a sequence; say sequence_dim");
  EXPECT_HAS(error_of([&] { LinkSender(Link{.target = 5}, alone[0]); }),
             "[hybrid] the target of the link is part 5; the parts are 0 to 1");
  EXPECT_HAS(error_of([&] { LinkReceiver(Link{.source = -1}, alone[1]); }), "the source of the link is part -1; the");
  const auto both = comm::thread_overlaid_parts({comm::mesh_shape(1), comm::mesh_shape(1)})[0];
  EXPECT_HAS(error_of([&] { LinkSender(kLink, both[0]).send(x(), 0); }), "hands over by hand_over()");
  EXPECT_HAS(error_of([&] { LinkReceiver(kLink, both[1]).receive(0); }), "hands over by hand_over()");
  EXPECT_HAS(error_of([&] { comm::thread_overlaid_parts({comm::mesh_shape(1), comm::mesh_shape(2)}); }),
             "must have 1 ranks each, got one of 2");
  const Sides two(2, comm::mesh_shape(1));
  EXPECT_HAS(error_of([&] { comm::thread_overlaid_parts(two, {0}); }), "there are 2 parts, and first ranks of 1");
  EXPECT_HAS(error_of([&] { comm::thread_overlaid_parts(two, {0, 2}); }), "rank 1 is of no part");
  EXPECT_HAS(error_of([&] { comm::thread_overlaid_parts(two, {0, -1}); }), "part 1 has 1 ranks from -1 on");
  EXPECT_HAS(error_of([&] { LinkReceiver(kLink, alone[0]); }),
             "this rank is of part 0; the target of the link is part 1");
}

// A graph may live longer than the ends that it goes through; an end longer than the other.
TEST(Link, AnEndThatIsGoneIsNamed) {
  const auto parts = comm::thread_overlaid_parts({comm::mesh_shape(1), comm::mesh_shape(1)});
  const auto x = [] { return Tensors{at::ones({2, 2, 2}).requires_grad_()}; };
  for (const bool of_source : {true, false}) {
    auto sender = std::make_unique<LinkSender>(kLink, parts[0][0]);
    auto receiver = std::make_unique<LinkReceiver>(kLink, parts[0][1]);
    const Tensors got = hand_over(*sender, *receiver, x(), 0);
    of_source ? sender.reset() : receiver.reset();
    EXPECT_HAS(error_of([&] { got[0].sum().backward(); }), "an end of hand_over() is gone");
    if (of_source) {
      EXPECT_HAS(error_of([&] { receiver->step(); }), "ends of hand_over() have no step()");
    } else {
      EXPECT_HAS(error_of([&] { sender->send(x(), 1); }), "an end of hand_over() is gone");
    }
  }
}

}  // namespace tessera::nn
