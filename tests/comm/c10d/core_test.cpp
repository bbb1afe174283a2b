#include "tessera/comm/c10d/core.h"

#include "tests/comm/c10d/gloo_threads.h"
#include "tests/comm/collectives.h"

namespace tessera::comm {
namespace {

TEST(C10dCore, KeepsTheTwoLargestBuffers) {
  testing::run_gloo_threads(1, [](int, testing::TorchGroup torch) {
    C10dCore core(nullptr, torch);
    const auto a = core.take_buffer(100), b = core.take_buffer(1000), c = core.take_buffer(10000);
    EXPECT_GE(c.numel(), 10000);
    core.give_buffer(a);
    core.give_buffer(b);
    core.give_buffer(c);
    // The smallest one that is large enough comes back; 100 bytes are too small to be kept beside the two others.
    EXPECT_EQ(core.take_buffer(50).const_data_ptr(), b.const_data_ptr());
    EXPECT_EQ(core.take_buffer(50).const_data_ptr(), c.const_data_ptr());
    EXPECT_NE(core.take_buffer(50).const_data_ptr(), a.const_data_ptr());
  });
}

TEST(C10dCore, TheFirstFailureStaysAndStopsEveryCall) {
  testing::run_gloo_threads(1, [](int, testing::TorchGroup torch) {
    C10dCore core(nullptr, torch);
    const OpInfo info{.name = "barrier", .label = "x"};
    EXPECT_NO_THROW(core.check_alive(info));
    const auto now = std::chrono::steady_clock::now();
    const auto text = testing::message_of<c10::DistBackendError>([&] { core.fail(info, now, -1, "no memory"); });
    EXPECT_HAS(text, "rank 0 of 1: barrier (x, 0 B) failed after");
    EXPECT_HAS(text, "rank 0 in barrier (x, 0 B): no memory");
    EXPECT_HAS(testing::message_of<c10::DistBackendError>([&] { core.check_alive(info); }), "no memory");
    core.abort("later");
    EXPECT_HAS(testing::message_of<c10::DistBackendError>([&] { core.check_alive(info); }), "no memory");
  });
}

}  // namespace
}  // namespace tessera::comm
