#include "tests/stand_in/stand_in.h"

#include <gtest/gtest.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/sgd.h>

#include <barrier>
#include <cstdio>
#include <cstring>
#include <thread>

#include "tests/stand_in/memory.h"
#include "tests/stand_in/module.h"
#include "tests/support/errors.h"

namespace tessera::stand_in {
namespace {

using testing::error_of;
const at::Device kHere(at::kPrivateUse1, 0);

// Equal bits, both brought to the host.
bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && at::equal(a.cpu(), b.cpu());
}

TEST(StandInDeathTest, TheHostCannotTouchItsMemory) {
  const at::Tensor t = at::ones({8}, kHere);
  auto* p = static_cast<volatile float*>(t.data_ptr());
  EXPECT_DEATH(std::printf("%f", p[0]), "");
  EXPECT_DEATH(p[7] = 1, "");
  EXPECT_DEATH(std::memcpy(t.data_ptr(), "abc", 3), "");
}

TEST(StandIn, AddressesKeepTheirDistances) {
  const at::Tensor t = at::arange(12, at::TensorOptions(kHere).dtype(at::kFloat)).view({3, 4});
  EXPECT_TRUE(on_device(t.data_ptr()));
  const at::Tensor inner = t.narrow(0, 1, 2).narrow(1, 2, 2);
  EXPECT_EQ(static_cast<float*>(inner.data_ptr()) - static_cast<float*>(t.data_ptr()), 6);
  const at::Tensor blob = at::from_blob(static_cast<float*>(t.data_ptr()) + 6, {2, 2}, {4, 1}, [](void*) {}, kHere);
  EXPECT_EQ(blob.device(), kHere);
  EXPECT_TRUE(same(blob, inner));
  float host = 0;
  EXPECT_HAS(error_of([&] { at::from_blob(&host, {1}, [](void*) {}, at::TensorOptions(kHere)); }), "not the device's");
}

TEST(StandIn, MemoryIsFreedAndStartsAsNan) {
  const int64_t before = tessera_stand_in_bytes();
  {
    const at::Tensor t = at::empty({100}, kHere);
    EXPECT_EQ(tessera_stand_in_bytes(), before + 400);
    EXPECT_TRUE(at::isnan(t).all().item<bool>());
    t.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(nullptr, kHere));
    EXPECT_EQ(tessera_stand_in_bytes(), before);
    EXPECT_HAS(error_of([&] { t.cpu(); }), "no memory");
  }
  at::Tensor grown = at::ones({4}, kHere);
  grown.resize_({100});
  EXPECT_EQ(tessera_stand_in_bytes(), before + 400);
  EXPECT_TRUE(same(grown.narrow(0, 0, 4), at::ones({4})));
}

TEST(StandIn, ViewsAndCopies) {
  const at::Tensor host = at::arange(24, at::kFloat).view({4, 6});
  const at::Tensor there = host.to(kHere, /*non_blocking=*/true);
  EXPECT_TRUE(same(there, host));
  EXPECT_TRUE(same(there.t(), host.t()));
  EXPECT_TRUE(same(there.as_strided({3, 2}, {7, 2}, 1), host.as_strided({3, 2}, {7, 2}, 1)));
  EXPECT_TRUE(same(there.unfold(1, 2, 2), host.unfold(1, 2, 2)));
  EXPECT_TRUE(same(there.flatten().view(at::kInt), host.flatten().view(at::kInt)));
  EXPECT_TRUE(same(there.to(at::kBFloat16), host.to(at::kBFloat16)));

  at::Tensor column = there.select(1, 2);  // a write through a view, from a tensor of another type and shape
  column.copy_(at::full({1}, 7, at::kDouble), true);
  EXPECT_EQ(there.select(1, 2).sum().item<float>(), 28);
  EXPECT_EQ(there.sum().item<float>(), host.sum().item<float>() - 44 + 28);

  at::Tensor set = at::empty({0}, kHere);
  set.set_(there.storage(), 6, {3}, {1});
  EXPECT_TRUE(same(set, there[1].narrow(0, 0, 3)));
  EXPECT_TRUE(set.is_alias_of(there));
  at::Tensor pinned = host.pin_memory();
  EXPECT_TRUE(pinned.is_pinned());
  EXPECT_FALSE(host.is_pinned());
}

struct Mlp : torch::nn::Module {
  Mlp() {
    embedding = register_module("embedding", torch::nn::Embedding(11, 8));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
    up = register_module("up", torch::nn::Linear(8, 32));
    down = register_module("down", torch::nn::Linear(32, 11));
  }
  at::Tensor loss(const at::Tensor& ids, const at::Tensor& targets) {
    namespace F = torch::nn::functional;
    return F::cross_entropy(down(F::gelu(up(norm(embedding(ids))))), targets);
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};

TEST(StandIn, TrainingHasTheBitsOfTheHost) {
  Mlp models[2];
  for (Mlp& model : models) {
    torch::manual_seed(1);
    for (at::Tensor p : model.parameters())
      p.detach().normal_(0, 0.5);
  }
  move_to_device(models[1]);
  EXPECT_EQ(models[1].up->weight.device(), kHere);
  const at::Tensor ids = at::arange(16) % 11, targets = (ids * 3 + 1) % 11;
  std::vector<at::Tensor> losses[2];
  for (int k = 0; k < 2; ++k) {
    const at::Device device = k == 0 ? at::Device(at::kCPU) : kHere;
    torch::optim::SGD sgd(models[k].parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 5; ++step) {
      sgd.zero_grad();
      losses[k].push_back(models[k].loss(ids.to(device), targets.to(device)));
      losses[k].back().backward();
      sgd.step();
    }
  }
  for (int step = 0; step < 5; ++step)
    EXPECT_TRUE(same(losses[0][step], losses[1][step])) << step;
  EXPECT_LT(losses[1][4].item<float>(), losses[1][0].item<float>());
  const auto expected = models[0].named_parameters(), actual = models[1].named_parameters();
  for (const auto& p : expected) {
    EXPECT_EQ(actual[p.key()].grad().device(), kHere);
    EXPECT_TRUE(same(actual[p.key()].grad(), p.value().grad())) << p.key();
    EXPECT_TRUE(same(actual[p.key()], p.value())) << p.key();
  }
}

TEST(StandIn, DevicesAreSeveral) {
  const at::Device second(at::kPrivateUse1, 1);
  const at::Tensor t = at::ones({4}, second), inner = t.narrow(0, 1, 2);
  EXPECT_EQ(inner.device(), second);
  EXPECT_EQ((inner + 1).device(), second);
  EXPECT_EQ(device_of(inner.data_ptr()), 1);
  EXPECT_EQ(at::from_blob(inner.data_ptr(), {2}, [](void*) {}, at::TensorOptions(second)).device(), second);
  EXPECT_EQ(at::ones({4}, at::kPrivateUse1).device(), kHere);
  EXPECT_TRUE(same(t.to(kHere), t));
  at::Tensor grown = at::ones({0}, second);
  grown.resize_({100});
  EXPECT_EQ(device_of(grown.data_ptr()), 1);
  {
    const c10::DeviceGuard guard(second);
    EXPECT_EQ(at::ones({4}, at::kPrivateUse1).device(), second);
  }
  EXPECT_HAS(error_of([] { at::ones({4}, at::Device(at::kPrivateUse1, kDevices)); }), "there is no device");
}

// Ranks in one process, a device each: a hook of one may wait for a hook of the other.
TEST(StandIn, BackwardPassesOfSeveralDevicesMeet) {
  std::barrier<> meeting(2);
  const auto rank = [&](int index) {
    at::Tensor leaf = at::ones({3}, at::Device(at::kPrivateUse1, index)).requires_grad_();
    leaf.register_hook([&](const at::Tensor&) { meeting.arrive_and_wait(); });
    (leaf * 2).sum().backward();
    EXPECT_EQ(leaf.grad().sum().item<float>(), 6);
  };
  std::thread other(rank, 1);
  rank(0);
  other.join();
}

// Autograd has a thread for each device. The engine's hooks run there.
TEST(StandIn, HooksRunOnTheThreadOfTheDevice) {
  for (const at::Device device : {at::Device(at::kCPU), kHere}) {
    at::Tensor leaf = at::ones({3}, device).requires_grad_();
    std::thread::id thread;
    float seen = 0;
    leaf.register_hook([&](const at::Tensor& grad) {
      thread = std::this_thread::get_id();
      seen = grad.sum().item<float>();
    });
    (leaf * 2).sum().backward();
    EXPECT_EQ(seen, 6);
    EXPECT_EQ(thread == std::this_thread::get_id(), device.is_cpu());
  }
}

TEST(StandIn, AnErrorOfAHookArrives) {
  at::Tensor leaf = at::ones({3}, kHere).requires_grad_();
  leaf.register_hook([](const at::Tensor&) { throw std::runtime_error("from the hook"); });
  EXPECT_HAS(error_of([&] { (leaf * 2).sum().backward(); }), "from the hook");
}

TEST(StandIn, StreamsAndEvents) {
  const auto* guard = c10::impl::getDeviceGuardImpl(at::kPrivateUse1);
  const c10::Stream stream = guard->getStream(kHere);
  EXPECT_EQ(guard->getStreamNativeHandle(stream), stream_handle(0));
  c10::Event event(at::kPrivateUse1);
  event.record(stream);
  event.block(stream);
  EXPECT_TRUE(event.query());
  event.synchronize();
  guard->synchronizeStream(stream);
}

}  // namespace
}  // namespace tessera::stand_in
