#include "tessera/base/phases.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

namespace tessera {
namespace {

using std::chrono::milliseconds;

TEST(Phases, SumsByPhaseAndCountsNestedOnesOnce) {
  Phases phases;
  for (int i = 0; i < 2; ++i) {
    const PhaseScope outer(phases, Phase::Reduce);
    const PhaseScope inner(phases, Phase::Reduce);
    const PhaseScope other(phases, Phase::Gather);
    std::this_thread::sleep_for(milliseconds(20));
  }
  EXPECT_EQ(phases.total(Phase::Reduce).times, 2);
  EXPECT_GE(phases.total(Phase::Reduce).time, milliseconds(40));
  EXPECT_LT(phases.total(Phase::Reduce).time, 2 * phases.total(Phase::Gather).time);  // counted twice it would be this
  EXPECT_EQ(phases.total(Phase::Step).times, 0);
}

TEST(Phases, AnEndWithoutABeginIsNothing) {
  Phases phases;
  phases.end(Phase::Forward);
  EXPECT_EQ(phases.total(Phase::Forward).times, 0);
  phases.begin(Phase::Forward);
  phases.end(Phase::Forward);
  phases.end(Phase::Forward);
  EXPECT_EQ(phases.total(Phase::Forward).times, 1);
}

// What is measured may fail, as a device that is waited for: there is none of this type here. No phase is left open, and an end in a
// destructor ends nothing else.
TEST(Phases, ADeviceThatFailsIsAnErrorOfTheBegin) {
  Phases phases;
  phases.begin(Phase::Step);
  phases.wait_for(c10::Device(c10::DeviceType::VE, 0));
  EXPECT_THROW(PhaseScope(phases, Phase::Gather), c10::Error);
  EXPECT_THROW(phases.begin(Phase::Gather), c10::Error) << "as the first time: it is not open";
  EXPECT_THROW(phases.end(Phase::Step), c10::Error);
  EXPECT_NO_THROW({
    Phases scoped;
    const PhaseScope scope(scoped, Phase::Forward);
    scoped.wait_for(c10::Device(c10::DeviceType::VE, 0));
  });
}

TEST(Phases, RangesAreNamedWhereSomebodyListens) {
  static std::vector<std::string> heard;
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& fn) -> std::unique_ptr<at::ObserverContext> {
        heard.emplace_back(fn.name());
        return nullptr;
      }).scopes({at::RecordScope::USER_SCOPE}));
  {
    Phases phases;
    const PhaseScope scope(phases, Phase::Gather, "blocks.0");
    const NamedRange range("update", "");
  }
  at::removeCallback(handle);
  const NamedRange unheard("update", "blocks.1");
  EXPECT_EQ(heard, (std::vector<std::string>{"tessera::gather blocks.0", "tessera::update"}));
}

}  // namespace
}  // namespace tessera
