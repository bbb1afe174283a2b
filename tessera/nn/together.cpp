#include "tessera/nn/together.h"

#include <algorithm>
#include <iterator>

#include "tessera/base/error.h"
#include "tessera/pipeline/together.h"

namespace tessera::nn {

namespace {

class Member final : public pipeline::Stepping {
 public:
  Member(Session& engine, const std::vector<int>& copies) : engine_(engine) {
    const auto& params = engine.core().params();
    std::ranges::copy_if(copies, std::back_inserter(copies_), [&](int id) { return params[id].group >= 0; });
  }

  const void* engine() const override { return &engine_; }
  bool at_boundary() override {
    const engine::Engine& core = engine_.core();
    return !core.options().managed_accumulation || core.is_gradient_accumulation_boundary();
  }
  void check(bool at_boundary) override {
    engine_.core().check_step();
    const std::string fault = at_boundary ? engine_.fault() : "";
    TESSERA_CHECK(fault.empty(), "engine.step", fault);
  }
  double square(bool) override { return engine_.core().norm_contribution(copies_); }
  bool step(std::optional<double> norm) override { return engine_.step(norm); }

 private:
  Session& engine_;
  std::vector<int> copies_;
};

bool step_all(const std::vector<Session*>& engines, const comm::Parts& parts, const std::vector<int>& copies) {
  std::vector<Member> members;
  for (Session* engine : engines) {
    TESSERA_CHECK_VALUE(engine != nullptr, "step_together", "an engine is null; pass engines only");
    members.emplace_back(*engine, copies);
  }
  std::vector<pipeline::Stepping*> stepping;
  for (Member& member : members)
    stepping.push_back(&member);
  return pipeline::step_together(stepping, parts.everyone.get()).applied;
}

}  // namespace

bool step_together(Session& engine, const comm::Parts& parts, const std::vector<int>& copies) {
  return parts.shapes.size() == 1 ? engine.step() : step_all({&engine}, parts, copies);
}

bool step_together(const std::vector<Session*>& engines, const comm::Parts& parts) {
  TESSERA_CHECK_VALUE(!engines.empty(), "step_together", "there are no engines; pass those of this process");
  return step_all(engines, parts, {});
}

}  // namespace tessera::nn
