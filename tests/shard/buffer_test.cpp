#include "tessera/shard/buffer.h"

#include <gtest/gtest.h>

#include "tests/support/host_home.h"

namespace tessera::shard {

TEST(Buffer, IsTheSameWhereverItLives) {
  const auto options = at::TensorOptions(at::kBFloat16);
  const auto of = [](const std::vector<double>& values) { return at::tensor(values).to(at::kBFloat16); };
  for (const bool away : {false, true}) {
    Buffer buffer(10, options, away ? std::make_shared<testing::HostHome>(10, options) : nullptr);
    EXPECT_EQ(buffer.size(), 10);
    EXPECT_EQ(buffer.bytes(), 20);
    EXPECT_EQ(buffer.dtype(), at::kBFloat16);
    EXPECT_EQ(buffer.residence(), away ? Residence::Host : Residence::Device);
    EXPECT_TRUE(buffer.read({0, 10}).equal(at::zeros({10}, options)));
    buffer.write({2, 5}, at::arange(3, at::kFloat));
    PendingView pending = buffer.fetch({1, 7});
    at::Tensor values = pending.wait();
    EXPECT_TRUE(values.equal(of({0, 0, 1, 2, 0, 0})));
    values.add_(1);
    EXPECT_EQ(buffer.read({3, 4}).item<float>(), away ? 1 : 2) << "on the device it is a view";
    buffer.store({1, 7}, values);
    EXPECT_TRUE(buffer.read({0, 8}).equal(of({0, 1, 1, 2, 3, 1, 1, 0})));
    if (away) {
      EXPECT_ANY_THROW(buffer.tensor());
    }
    buffer.reset();
    EXPECT_FALSE(buffer.defined());
    EXPECT_EQ(buffer.bytes(), 0);
  }
}

TEST(Buffer, GoesElsewhereForAWhile) {
  const auto options = at::TensorOptions(at::kFloat);
  const at::Tensor values = at::arange(kTile + 5, at::kFloat);
  Buffer buffer(values.clone());
  const auto home = [&] { return std::make_shared<testing::HostHome>(kTile + 5, options); };
  buffer.send_to(nullptr);
  EXPECT_TRUE(buffer.is_here());
  buffer.send_to(home());
  buffer.send_to(home());  // it is away
  EXPECT_FALSE(buffer.is_here());
  EXPECT_TRUE(buffer.is_sent());
  buffer.write({0, 1}, at::full({1}, 7));
  buffer.bring_back();
  buffer.bring_back();
  EXPECT_TRUE(buffer.is_here() && !buffer.is_sent());
  EXPECT_EQ(buffer.tensor()[0].item<float>(), 7);
  EXPECT_TRUE(buffer.view({1, kTile + 5}).equal(values.narrow(0, 1, kTile + 4)));
  Buffer settled(5, options, home()), none;
  settled.send_to(home());
  settled.bring_back();
  none.send_to(home());
  EXPECT_FALSE(settled.is_here() || settled.is_sent() || none.defined()) << "lives there anyway";
}

}  // namespace tessera::shard
