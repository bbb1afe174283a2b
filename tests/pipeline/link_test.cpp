// Links without engines; with them: tests/nn/link_test.cpp, tests/python/hybrid.
#include "tessera/pipeline/link.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/comm/c10d/point_to_point.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace tessera::pipeline {
namespace {

using testing::error_of;

// As Gloo: it does not tell by itself what has been taken, so it keeps what was sent until it is asked to wait for it.
class Untold final : public comm::PointToPoint {
 public:
  explicit Untold(comm::PointToPointPtr inner) : inner_(std::move(inner)) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  at::Device device() const override { return inner_->device(); }
  int64_t send(const at::Tensor& tensor, int to, int tag, comm::Label label) override {
    const int64_t number = inner_->send(tensor, to, tag, label);
    kept_.emplace(number, tensor);
    most = std::max<int64_t>(
        most, std::ranges::count_if(kept_, [](const auto& one) { return one.second.is_floating_point(); }));
    return number;
  }
  void receive(const at::Tensor& tensor, int from, int tag, comm::Label label) override {
    inner_->receive(tensor, from, tag, label);
  }
  void settle(int64_t number) override {
    inner_->settle(number);
    kept_.erase(number);
  }
  void flush() override {
    inner_->flush();
    kept_.clear();
  }

  int64_t most = 0;  // outputs and gradients kept at one time

 private:
  const comm::PointToPointPtr inner_;
  std::map<int64_t, at::Tensor> kept_;
};

// source(sender) and target(receiver) of two ranks that are threads; the most that either has kept.
int64_t linked(const std::function<void(LinkSender&)>& source, const std::function<void(LinkReceiver&)>& target) {
  std::vector<std::shared_ptr<Untold>> p2p;
  for (const auto& inner : comm::thread_point_to_point(2, std::chrono::seconds(30)))
    p2p.push_back(std::make_shared<Untold>(inner));
  const auto ranks = [&](int rank) { return LinkRanks{.target_rank = 1, .rank = rank, .p2p = p2p[rank]}; };
  std::thread other([&] {
    LinkSender sender(ranks(0), {});
    source(sender);
  });
  LinkReceiver receiver(ranks(1), {});
  target(receiver);
  other.join();
  return std::max(p2p[0]->most, p2p[1]->most);
}

constexpr int kSamples = 100;

TEST(Link, WhatIsUnderWayIsBoundedWhereNothingComesBack) {
  const int64_t most = linked(
      [](LinkSender& sender) {
        for (int i = 0; i < kSamples; ++i)
          sender.send({at::full({2, 2}, i, at::kFloat)}, i);
        sender.close();
      },
      [](LinkReceiver& receiver) {
        for (int i = 0; i < kSamples; ++i)
          EXPECT_TRUE(at::equal(receiver.receive(i)[0], at::full({2, 2}, i, at::kFloat)));
      });
  EXPECT_LE(most, 9);
}

TEST(Link, WhatIsUnderWayIsWhatHasNoGradientYet) {
  const int64_t most = linked(
      [](LinkSender& sender) {
        for (int i = 0; i < kSamples; ++i) {
          sender.send({at::ones({2, 2}).requires_grad_() * i}, i);
          if (i >= 3) sender.backward(i - 3);
        }
        for (int i = kSamples - 3; i < kSamples; ++i)
          sender.backward(i);
        sender.step();
      },
      [](LinkReceiver& receiver) {
        for (int i = 0; i < kSamples; ++i) {
          receiver.receive(i)[0].sum().backward();
          receiver.give_back(i);
        }
        receiver.step();
      });
  EXPECT_LE(most, 4);
}

// Samples by name, a note beside the tensors, and messages that come while close() waits.
TEST(Link, ANoteArrivesBesideTheTensors) {
  linked(
      [](LinkSender& sender) {
        sender.send({at::ones({2})}, Sample("(1, 'a')"), {}, "a note");
        sender.close();
        EXPECT_HAS(error_of([&] { sender.gradients(Sample("b")); }), "there is no graph of sample b");
      },
      [](LinkReceiver& receiver) {
        EXPECT_EQ(receiver.receive_message(Sample("(1, 'a')")).note, "a note");
        receiver.close();
      });
}

// Over Gloo, where what was sent waits for its receiver: a step of one link waits for no message of another one.
TEST(Link, LinksOverOneConnectionStepOneByOne) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  testing::run_ranks(2, [&](int rank, const comm::GroupPtr&) {
    const auto p2p = comm::store_point_to_point(store, rank, 2, std::chrono::seconds(30), /*shares=*/false);
    const auto ranks = [&](int source, int tag) {
      return LinkRanks{.source_rank = source, .target_rank = 1 - source, .rank = rank, .p2p = p2p, .tag = tag};
    };
    const at::Tensor x = at::ones({300'000});
    LinkSender out(ranks(rank, 3 + 3 * rank), {});
    LinkReceiver in(ranks(1 - rank, 6 - 3 * rank), {});
    out.send({x * rank}, 0);
    const auto step = [&](auto&& end) { end.step(); };
    rank == 0 ? step(LinkSender(ranks(0, 0), {})) : step(LinkReceiver(ranks(0, 0), {}));
    EXPECT_TRUE(at::equal(in.receive(0)[0], x * (1 - rank)));
    rank == 0 ? (out.step(), in.step()) : (in.step(), out.step());
  });
}

// The other side changes what it sent, or was given back.
TEST(Link, WhatIsUnderWayIsTheLinksOwn) {
  linked(
      [](LinkSender& sender) {
        const at::Tensor x = at::ones({300'000}), leaf = at::ones({2}).requires_grad_();
        sender.send({x, leaf * 1}, 0);
        x.zero_();
        sender.backward(0);
        EXPECT_TRUE(at::equal(leaf.grad(), at::full({2}, 3.F)));
      },
      [](LinkReceiver& receiver) {
        const Tensors got = receiver.receive(0);
        EXPECT_TRUE(at::equal(got[0], at::ones({300'000})));
        at::Tensor gradient = at::full({2}, 3.F);
        receiver.give_back(0, Tensors{gradient});
        gradient.zero_();
        receiver.close();
      });
}

}  // namespace
}  // namespace tessera::pipeline
