#include "tessera/comm/torch_backend/messages.h"

#include "tests/comm/collectives.h"

namespace tessera::comm {
namespace {

using testing::input;

// The messages of all ranks in one thread: nothing may ever need a wait.
struct ShmMessagesTest : ::testing::Test {
  explicit ShmMessagesTest(int size = 3) : segment(ShmSegment::create(ShmLayout{size}.total())) {
    for (int r = 0; r < size; ++r)
      ranks.emplace_back(segment, 0, r, size);
  }
  ShmMessagePtr send(int from, int to, const at::Tensor& tensor, int64_t tag = 0) {
    auto message = shm_send(tensor, to, tag);
    ranks[from].send(message);
    return message;
  }
  ShmMessagePtr receive(int at, int from, const at::Tensor& tensor, int64_t tag = 0) {
    auto message = shm_receive(tensor, from, tag);
    ranks[at].receive(message);
    return message;
  }
  void run() {
    bool moved = true;
    while (moved) {
      moved = false;
      for (ShmMessages& messages : ranks)
        moved = messages.progress() || moved;
    }
  }
  std::shared_ptr<ShmSegment> segment;
  std::deque<ShmMessages> ranks;
};

constexpr int64_t kMoreThanARing = kMessageSlots * kRecordBytes / 4 * 3 + 5;

TEST_F(ShmMessagesTest, ArriveWhateverTheirLength) {
  for (const int64_t n : {int64_t{0}, int64_t{1}, kRecordBytes / 4, kRecordBytes / 4 + 1, kMoreThanARing}) {
    const at::Tensor sent = input(1, 0, n, at::kFloat), got = at::zeros({n});
    const auto out = send(0, 2, sent), in = receive(2, 0, got);
    EXPECT_FALSE(in->done);
    run();
    EXPECT_TRUE(out->done && in->done);
    EXPECT_TRUE(got.equal(sent));
  }
}

TEST_F(ShmMessagesTest, ASmallOneIsThroughBeforeAnybodyReceivesIt) {
  const auto out = send(0, 1, at::ones({100}));
  ranks[0].progress();
  EXPECT_TRUE(out->done);
  EXPECT_FALSE(ranks[0].wants_space());
  const auto more = send(0, 1, at::ones({kMoreThanARing}));
  run();
  EXPECT_FALSE(more->done);
  EXPECT_TRUE(ranks[0].wants_space());
  EXPECT_EQ(ranks[0].missing(*more), std::vector<int>{1});
}

TEST_F(ShmMessagesTest, AreTakenByTag) {
  std::vector<ShmMessagePtr> out;
  for (const int64_t tag : {5, 6, 5, 7})
    out.push_back(send(0, 1, at::full({kMoreThanARing}, static_cast<float>(10 * tag + out.size())), tag));
  at::Tensor got = at::zeros({kMoreThanARing});
  for (const auto& [tag, value] : std::vector<std::pair<int64_t, float>>{{7, 73}, {5, 50}, {6, 61}, {5, 52}}) {
    const auto in = receive(1, 0, got, tag);
    run();
    EXPECT_TRUE(in->done);
    EXPECT_TRUE(got.eq(value).all().item<bool>()) << tag;
  }
  for (const auto& message : out)
    EXPECT_TRUE(message->done);
}

TEST_F(ShmMessagesTest, OfOneTagKeepTheirOrder) {
  for (int i = 0; i < 20; ++i)
    send(0, 1, at::full({1000 * i + 1}, i, at::kFloat), 1);
  send(0, 1, at::ones({1}), 2);
  at::Tensor other = at::zeros({1});
  const auto aside = receive(1, 0, other, 2);  // puts aside what is before it
  run();
  EXPECT_TRUE(aside->done);
  for (int i = 0; i < 20; ++i) {
    at::Tensor got = at::zeros({1000 * i + 1});
    const auto in = receive(1, 0, got, 1);
    run();
    EXPECT_TRUE(in->done);
    EXPECT_TRUE(got.eq(i).all().item<bool>());
  }
}

TEST_F(ShmMessagesTest, FromAnybodySayWhoItWas) {
  at::Tensor a = at::zeros({3}), b = at::zeros({3});
  const auto first = receive(2, -1, a, 4), second = receive(2, -1, b, 4);
  EXPECT_EQ(ranks[2].missing(*first), (std::vector<int>{0, 1}));
  send(1, 2, at::full({3}, 1, at::kFloat), 4);
  run();
  EXPECT_TRUE(first->done);
  EXPECT_EQ(first->peer, 1);
  EXPECT_FALSE(second->done);
  send(0, 2, at::full({3}, 7, at::kFloat), 9);
  send(0, 2, at::full({3}, 8, at::kFloat), 4);
  run();
  EXPECT_EQ(second->peer, 0);
  EXPECT_EQ(b[0].item<float>(), 8);
}

TEST_F(ShmMessagesTest, BothWaysAtOnceAndToOneself) {
  at::Tensor a = at::zeros({kMoreThanARing}), b = at::zeros({kMoreThanARing}), c = at::zeros({5});
  send(0, 1, at::ones({kMoreThanARing}));
  send(1, 0, at::full({kMoreThanARing}, 2, at::kFloat));
  send(2, 2, at::full({5}, 3, at::kFloat));
  receive(0, 1, a);
  receive(1, 0, b);
  receive(2, 2, c);
  run();
  EXPECT_TRUE(a.eq(2).all().item<bool>() && b.eq(1).all().item<bool>() && c.eq(3).all().item<bool>());
}

TEST_F(ShmMessagesTest, OfAnotherLengthAreNamed) {
  at::Tensor got = at::zeros({3});
  send(0, 1, at::ones({4}), 6);
  receive(1, 0, got, 6);
  run();
  EXPECT_EQ(ranks[1].disagreement(),
            "the ranks disagree: in recv (tag 6, 12 B) rank 0 sends 16 B to rank 1, which expects 12 B");
}

TEST_F(ShmMessagesTest, ThatHaveBeenWrittenAreNotMissing) {
  at::Tensor got = at::zeros({4});
  const auto in = receive(1, 0, got);
  EXPECT_EQ(ranks[1].missing(*in), std::vector<int>{0});
  send(0, 1, at::ones({4}));
  ranks[0].progress();
  EXPECT_TRUE(ranks[1].missing(*in).empty());  // though it has not been read
}

}  // namespace
}  // namespace tessera::comm
