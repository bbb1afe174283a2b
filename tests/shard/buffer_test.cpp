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

}  // namespace tessera::shard
