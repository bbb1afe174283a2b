// Races of streams are found, and nothing else is. After every test of this program there is none left.
#include "tests/stand_in/clocks.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "tessera/kernels/device_table.h"
#include "tests/stand_in/stand_in.h"
#include "tests/support/errors.h"

namespace tessera::stand_in {
namespace {

class NoRaces : public ::testing::EmptyTestEventListener {
  void OnTestEnd(const ::testing::TestInfo&) override { EXPECT_STREQ(tessera_stand_in_races(), ""); }
};
[[maybe_unused]] const bool listens = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new NoRaces);
  return true;
}();

const at::Device kDevice(at::kPrivateUse1, 0);
const c10::impl::VirtualGuardImpl& guard() {
  static const c10::impl::VirtualGuardImpl the(at::kPrivateUse1);
  return the;
}

struct Two {
  c10::Stream first = guard().getStreamFromGlobalPool(kDevice), second = guard().getStreamFromGlobalPool(kDevice);
};
void on(c10::Stream stream, const std::function<void()>& f) {
  const c10::StreamGuard there(stream);
  f();
}
c10::Event mark(c10::Stream stream) {
  c10::Event event(at::kPrivateUse1);
  event.record(stream);
  return event;
}
void wait_for(c10::Stream stream, c10::Stream before) {
  mark(before).block(stream);
}
std::string races() {
  return tessera_stand_in_races();
}

TEST(Races, BothSidesAreNamed) {
  const Two s;
  const at::Tensor t = at::ones({64}, kDevice);
  wait_for(s.first, guard().getDefaultStream(kDevice));
  wait_for(s.second, guard().getDefaultStream(kDevice));
  on(s.first, [&] { t.add_(1); });
  on(s.second, [&] { t.narrow(0, 16, 16).mul_(2); });
  const std::string found = races();
  EXPECT_HAS(found, "aten::mul (out) on stream " + std::to_string(s.second.id()) + " of device 0 writes what");
  EXPECT_HAS(found, "aten::add (out) on stream " + std::to_string(s.first.id()) + " of device 0 writes, and nothing");
  EXPECT_HAS(found, "bytes 64 to 128 of 256 lent to stream 0 of device 0");
  EXPECT_EQ(races(), "") << "said once";
  guard().synchronizeDevice(0);
}

struct Case {
  const char* name;
  std::function<void(const Two&, const at::Tensor&)> body;  // the tensor is of 64 ones, which both streams see
  const char* expected;                                     // of the finding; null: none
};

// What the first stream does to the tensor, and the second one; `between` orders them or does not.
Case of(const char* name, std::function<void(const at::Tensor&)> first, std::function<void(const Two&)> between,
        std::function<void(const at::Tensor&)> second, const char* expected) {
  return {name,
          [=](const Two& s, const at::Tensor& t) {
            on(s.first, [&] { first(t); });
            if (between) between(s);
            on(s.second, [&] { second(t); });
          },
          expected};
}

void scale(const at::Tensor& dst, const at::Tensor& src) {
  void* stream = guard().getStream(kDevice).native_handle();
  tessera_device_table()->scaled_copy(dst.data_ptr(), kernels::DType::F32, src.data_ptr(), kernels::DType::F32, 2,
                                      src.numel(), stream);
}

std::vector<Case> cases() {
  const auto write = [](const at::Tensor& t) { t.add_(1); };
  const auto read = [](const at::Tensor& t) { at::sum(t); };
  const auto fetch = [](const at::Tensor& t) { t.cpu(); };
  const auto left = [](const at::Tensor& t) { t.narrow(0, 0, 32).add_(1); };
  const auto right = [](const at::Tensor& t) { t.narrow(0, 32, 32).add_(1); };
  const auto column = [](int64_t i) { return [i](const at::Tensor& t) { t.view({8, 8}).select(1, i).add_(1); }; };
  const auto kernel_reads = [](const at::Tensor& t) { scale(at::empty({64}, kDevice), t); };
  const auto kernel_writes = [](const at::Tensor& t) { scale(t, at::ones({64}, kDevice)); };
  const auto list = [](const at::Tensor& t) { at::cat({at::ones({1}, kDevice), t}); };
  return {
      of("write, write", write, {}, write, "aten::add (out)"),
      of("write, read", write, {}, read, "aten::sum (self)"),
      of("read, write", read, {}, write, "reads, and nothing orders"),
      of("read, read", read, {}, read, nullptr),
      of("a kernel reads", write, {}, kernel_reads, "scaled_copy (src)"),
      of("a kernel writes", read, {}, kernel_writes, "scaled_copy (dst)"),
      of("a list", write, {}, list, "aten::cat (tensors)"),
      of("a blocking copy waits for its own stream only", write, {}, fetch, "copy to the host (src)"),
      of("other bytes", left, {}, right, nullptr),
      of("columns between each other", column(1), {}, column(2), nullptr),
      of("the same column", column(1), {}, column(1), "bytes 4 to 8 of 256"),
      of(
          "an event", write, [](const Two& s) { wait_for(s.second, s.first); }, write, nullptr),
      of(
          "an event of the other direction", write, [](const Two& s) { wait_for(s.first, s.second); }, write,
          "aten::add (out)"),
      of(
          "the host waits for the stream", write, [](const Two& s) { s.first.synchronize(); }, write, nullptr),
      of(
          "the host waits for another", write, [](const Two& s) { s.second.synchronize(); }, write, "aten::add (out)"),
      of(
          "the host waits for an event", write, [](const Two& s) { mark(s.first).synchronize(); }, write, nullptr),
      of(
          "the host asks", write, [](const Two& s) { EXPECT_TRUE(s.first.query()); }, write, nullptr),
      of(
          "the host waits for the device", write, [](const Two&) { guard().synchronizeDevice(0); }, write, nullptr),
      of(
          "the host waits for another device", write, [](const Two&) { guard().synchronizeDevice(1); }, write,
          "aten::add (out)"),
      of(
          "the host has the result", [](const at::Tensor& t) { t.add_(1).cpu(); }, {}, write, nullptr),
      of(
          "the host has one number", [](const at::Tensor& t) { t.add_(1).sum().item(); }, {}, write, nullptr),
      {"an event before the work",
       [](const Two& s, const at::Tensor& t) {
         c10::Event before = mark(s.first);
         on(s.first, [&] { t.add_(1); });
         before.block(s.second);
         on(s.second, [&] { t.add_(1); });
       },
       "aten::add (out)"},
      {"by way of a third stream",
       [](const Two& s, const at::Tensor& t) {
         const c10::Stream third = guard().getNewStream(kDevice);
         on(s.first, [&] { t.add_(1); });
         wait_for(third, s.first);
         wait_for(s.second, third);
         on(s.second, [&] { t.add_(1); });
       },
       nullptr},
      {"by way of another device",
       [](const Two& s, const at::Tensor& t) {
         const c10::Stream there = guard().getStreamFromGlobalPool(at::Device(at::kPrivateUse1, 1));
         on(s.first, [&] { t.add_(1); });
         wait_for(there, s.first);
         wait_for(s.second, there);
         on(s.second, [&] { t.add_(1); });
       },
       nullptr},
      {"launched by another thread",
       [](const Two& s, const at::Tensor& t) {
         std::thread([&] { on(s.first, [&] { t.add_(1); }); }).join();
         on(s.second, [&] { t.add_(1); });
       },
       "aten::add (out)"},
      {"made on one, used on the other",
       [](const Two& s, const at::Tensor&) {
         at::Tensor made;
         on(s.first, [&] { made = at::empty({8}, kDevice); });
         on(s.second, [&] { made.zero_(); });
       },
       "giving out memory"},
  };
}

TEST(Races, WhatIsNotOrdered) {
  for (const Case& c : cases()) {
    const Two s;
    const at::Tensor t = at::ones({64}, kDevice);
    guard().synchronizeDevice(0);
    c.body(s, t);
    const std::string found = races();
    if (c.expected == nullptr) {
      EXPECT_EQ(found, "") << c.name;
    } else {
      EXPECT_HAS(found, c.expected) << c.name;
    }
    guard().synchronizeDevice(0);
  }
}

TEST(Races, BackwardOnTheStreamsOfTheForward) {
  const Two s;
  at::Tensor x = at::ones({8}, kDevice).requires_grad_(), y;
  wait_for(s.first, guard().getDefaultStream(kDevice));
  on(s.first, [&] { y = x * 2; });
  wait_for(s.second, s.first);
  on(s.second, [&] { y = y.sum(); });
  on(s.first, [&] {
    wait_for(s.first, s.second);
    y.backward();
    x.grad().add_(1);
  });
  s.first.synchronize();
  EXPECT_EQ(races(), "");
}

// Memory that a stream uses, released while it may still do so.
TEST(Races, ReleasedMemory) {
  enum class Then { Nothing, Waits, Recorded, AsksLater };
  for (const auto then : {Then::Nothing, Then::Waits, Then::Recorded, Then::AsksLater}) {
    const c10::Stream stays = guard().getDefaultStream(kDevice), uses = guard().getNewStream(kDevice);
    at::Tensor t = at::ones({1000}, kDevice);
    wait_for(uses, stays);
    on(uses, [&] { t.add_(1); });
    if (then == Then::Waits) wait_for(stays, uses);
    if (then == Then::Recorded) t.record_stream(uses);
    const void* before = t.data_ptr();
    t.reset();
    if (then == Then::AsksLater) wait_for(stays, uses);
    const at::Tensor next = at::empty({1000}, kDevice);
    EXPECT_TRUE(then == Then::Recorded || next.data_ptr() == before);
    const std::string found = races();
    if (then == Then::Nothing) {
      EXPECT_HAS(found, "released memory that aten::add (out) on stream " + std::to_string(uses.id()));
      EXPECT_HAS(found, "is free for stream 0 of device 0, which does not wait for that: bytes 0 to 4000 of 4000");
    } else {
      EXPECT_EQ(found, "");
    }
  }
}

TEST(Races, ReleasedMemoryGoesToItsOwnStream) {
  const Two s;
  const void* before = nullptr;
  on(s.first, [&] { before = at::empty({1000}, kDevice).data_ptr(); });
  on(s.second, [&] { EXPECT_NE(at::empty({1000}, kDevice).data_ptr(), before); });
  on(s.first, [&] { EXPECT_EQ(at::empty({1000}, kDevice).data_ptr(), before); });
  // Where nobody asks again, it is found at the end.
  at::Tensor t = at::ones({8}, kDevice);
  wait_for(s.first, guard().getDefaultStream(kDevice));
  on(s.first, [&] { t.sum(); });
  t.reset();
  EXPECT_HAS(races(), "released memory that aten::sum (self)");
}

at::Tensor pinned(float value) {
  return at::full({64}, value, at::TensorOptions().pinned_memory(true));
}

// The host sees a copy that it has not waited for as NaN, on any stream.
TEST(LateCopies, TheHostReadsTooEarly) {
  const at::Tensor t = at::ones({64}, kDevice), host = pinned(1);
  guard().synchronizeDevice(0);
  for (const c10::Stream stream : {guard().getDefaultStream(kDevice), guard().getNewStream(kDevice)}) {
    on(stream, [&] {
      host.copy_(t, /*non_blocking=*/true);
      EXPECT_TRUE(at::isnan(host).all().item<bool>());
      c10::Event event = mark(stream);
      EXPECT_FALSE(event.query());
      event.block(guard().getNewStream(kDevice));
      EXPECT_TRUE(at::isnan(host).all().item<bool>()) << "only a stream has waited";
      event.synchronize();
      EXPECT_TRUE(event.query());
      EXPECT_TRUE(host.eq(1).all().item<bool>());
      at::Tensor plain = at::zeros({64});
      plain.copy_(t, true);
      EXPECT_TRUE(plain.eq(1).all().item<bool>()) << "other memory waits";
    });
  }
}

TEST(LateCopies, TheHostWritesTooEarly) {
  const at::Tensor t = at::ones({64}, kDevice), from = pinned(2), to = pinned(0);
  t.copy_(from, true);
  to.copy_(t, true);  // the order of the stream holds
  guard().synchronizeDevice(0);
  EXPECT_TRUE(to.eq(2).all().item<bool>());
  EXPECT_EQ(races(), "");
  t.copy_(from, true);
  from.zero_();
  guard().synchronizeDevice(0);
  EXPECT_HAS(races(),
             "the host writes to memory that a copy reads on stream 0 of device 0, for which it has not waited");
  to.copy_(t, true);
  to.zero_();
  guard().synchronizeDevice(0);
  EXPECT_HAS(races(), "the host writes to memory that a copy writes");
  t.copy_(from.to(at::kHalf).pin_memory(), true);  // converted on the host, at once
  EXPECT_EQ(t.sum().item<float>(), 0);
}

TEST(LateCopies, MemoryThatGoesMeanwhile) {
  at::Tensor t = at::ones({64}, kDevice);
  const at::Tensor to = pinned(0);
  t.copy_(pinned(3), true);  // torch keeps page-locked memory until then
  to.copy_(t, true);
  t.reset();
  t = at::zeros({64}, kDevice);  // the same memory, later on the same stream
  guard().synchronizeDevice(0);
  EXPECT_TRUE(to.eq(3).all().item<bool>());
}

TEST(LateCopies, OfTwoStreamsToOnePlaceAreARace) {
  const Two s;
  const at::Tensor t = at::ones({64}, kDevice), to = pinned(0);
  guard().synchronizeDevice(0);
  on(s.first, [&] { to.copy_(t, true); });
  on(s.second, [&] { to.copy_(t, true); });
  EXPECT_HAS(races(), "copy to the host (dst) on stream " + std::to_string(s.second.id()) + " of device 0 writes what");
  guard().synchronizeDevice(0);
}

}  // namespace
}  // namespace tessera::stand_in
