#include "tessera/pipeline/wire.h"

#include <gtest/gtest.h>

#include <thread>

#include "tessera/base/error.h"
#include "tests/support/errors.h"

namespace tessera::pipeline {
namespace {

using testing::error_of;

// sender(wire) on rank 0, receiver(wire) on rank 1.
void talk(const std::function<void(Wire&)>& sender, const std::function<void(Wire&)>& receiver) {
  const auto p2p = comm::thread_point_to_point(2, std::chrono::seconds(30));
  const auto body = [&](int rank, const auto& f) {
    const Line ahead{p2p[rank], 0, "activations"}, back{p2p[rank], 1, "gradients"};
    Wire wire({1 - rank, c10::str("stage ", 1 - rank)}, rank == 0 ? ahead : back, rank == 0 ? back : ahead, at::kCPU);
    f(wire);
  };
  std::thread other([&] { body(0, sender); });
  body(1, receiver);
  other.join();
}

TEST(Wire, MessagesSayWhatTheyAreWhereItIsNew) {
  const at::Tensor x = at::randn({3, 4}), half = at::randn({5}).to(at::kHalf), flag = at::ones({2}).to(at::kBool);
  const std::vector<Message> messages{{{x.clone().requires_grad_()}},
                                      {{(x + 1).requires_grad_()}},
                                      {{x.t(), half, at::empty({0, 3}), flag, at::scalar_tensor(2)}, "a note"},
                                      {{at::Tensor(), at::randn({600, 1000})}, "a note"},
                                      {{}},
                                      {{}},
                                      {{}, "another"}};
  talk(
      [&](Wire& wire) {
        for (size_t i = 0; i < messages.size(); ++i)
          wire.send(messages[i], static_cast<int64_t>(i));
        EXPECT_EQ(wire.forms(), 5);
      },
      [&](Wire& wire) {
        for (size_t i = 0; i < messages.size(); ++i) {
          const auto [got, note] = wire.receive(static_cast<int64_t>(i));
          ASSERT_EQ(got.size(), messages[i].tensors.size());
          EXPECT_EQ(note, messages[i].note);
          for (size_t j = 0; j < got.size(); ++j) {
            const at::Tensor& sent = messages[i].tensors[j];
            ASSERT_EQ(got[j].defined(), sent.defined());
            if (!sent.defined()) continue;
            EXPECT_EQ(got[j].scalar_type(), sent.scalar_type());
            EXPECT_TRUE(at::equal(got[j], sent));
            EXPECT_EQ(got[j].requires_grad(), sent.requires_grad());
            EXPECT_TRUE(got[j].is_leaf());
          }
        }
        EXPECT_EQ(wire.forms(), 5);
      });
}

TEST(Wire, ErrorsNameTheOtherSide) {
  talk([](Wire& wire) { wire.send({{at::ones({2})}}, 7); },
       [](Wire& wire) { EXPECT_HAS(error_of([&] { wire.receive(8); }), "stage 0 sent activations number 7"); });
  talk([](Wire& wire) { wire.send_failure("[pipeline] stage 0 has no luck"); },
       [](Wire& wire) { EXPECT_HAS(error_of([&] { wire.receive(0); }), "stage 0 has no luck"); });
}

// Each direction tells of the other; where nothing comes back, acknowledgements do.
TEST(Wire, WhatIsUnderWayIsWhatTheOtherSideHasNotTaken) {
  constexpr int64_t kMessages = 5;
  talk(
      [&](Wire& wire) {
        for (int64_t i = 0; i < kMessages; ++i)
          wire.send({{at::ones({3})}}, i);
        EXPECT_EQ(wire.under_way(), kMessages);
        wire.receive(0);
        EXPECT_EQ(wire.under_way(), 2);
        wire.await_taken(1);
        EXPECT_EQ(wire.under_way(), 1);
        wire.await_taken(0);
        wire.send({{}}, kMessages);
        EXPECT_HAS(error_of([&] { wire.await_taken(0); }), "no luck");
      },
      [&](Wire& wire) {
        for (int64_t i = 0; i < 3; ++i)
          wire.receive(i);
        wire.send({{at::ones({1})}}, 0);
        for (int64_t i = 3; i < kMessages; ++i) {
          wire.receive(i);
          wire.acknowledge();
        }
        wire.send_failure("no luck");
        wire.receive(kMessages);
        EXPECT_EQ(wire.under_way(), 1) << "of a gradient, two acknowledgements and a failure";
      });
}

// Where others may come that way, they are kept.
TEST(Wire, ADrainedWireKeepsWhatComes) {
  talk(
      [&](Wire& wire) {
        for (int64_t i = 0; i < 3; ++i)
          wire.send({{at::full({2}, i)}}, i);
        wire.drain(1);
        EXPECT_EQ(wire.under_way(), 1);
        wire.drain(0);
        EXPECT_EQ(wire.under_way(), 0);
        for (int64_t i = 0; i < 2; ++i)
          EXPECT_TRUE(at::equal(wire.receive(i).tensors[0], at::full({1}, i)));
        wire.acknowledge();
        wire.drain(0);
        EXPECT_EQ(wire.under_way(), 1) << "nobody is asked to acknowledge an acknowledgement";
      },
      [&](Wire& wire) {
        for (int64_t i = 0; i < 3; ++i) {
          wire.receive(i);
          wire.acknowledge();
          if (i < 2) wire.send({{at::full({1}, i)}}, i);
        }
        wire.drain(0);
      });
}

// Who goes without a message is no peer that may still send one.
TEST(Wire, APeerThatIsGoneIsLost) {
  auto p2p = comm::thread_point_to_point(2, std::chrono::seconds(30));
  const Line line{p2p[1], 3, "gradients"};
  Wire wire({0, "stage 0 (rank 0)"}, line, line, at::kCPU);
  p2p[0].reset();
  try {
    wire.receive(0);
    FAIL() << "nothing was sent";
  } catch (const c10::DistBackendError& error) {
    EXPECT_HAS(std::string(error.what()), "stage 0 (rank 0) is lost");
    EXPECT_HAS(std::string(error.what()), "while gradients were under way");
  }
}

}  // namespace
}  // namespace tessera::pipeline
