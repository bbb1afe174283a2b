// Modules: partitioned parameters around the forwards of the modules that read them. Front ends call these around the
// forward of every module that owns parameters; a module inside another one that covers its parameters costs next to nothing.
#pragma once

#include <vector>

#include "tessera/zero/backward_driver.h"

namespace tessera::zero {

class Modules {
 public:
  Modules(Units& units, BackwardDriver& driver);

  // Registers a module whose forward and backward read `params`; its number, or -1 where nothing is partitioned and no update
  // runs on (update_lane.h), so that nothing is to be called.
  int add(const std::vector<ParamId>& params);
  // Gathers, and waits for the last update of what the module reads. Collective. False: note_inputs() and leave() need nothing.
  bool enter(int module);
  void note_inputs(const std::vector<at::Tensor>& inputs);
  // `hides`: the module's output may hold tensors that are not among `outputs`.
  void leave(int module, const std::vector<at::Tensor>& outputs, bool hides = false);
  void abort(int module);  // the module's forward threw
  bool inside() const { return units_.unsharder().inside_scope(); }
  // A partitioned parameter is read by the module that is running, or by `module`, neither of which owns it: from now on
  // it is gathered with that module's. For any other parameter use_elsewhere() waits for the last update. Collective when such a
  // module is running.
  void use_elsewhere(ParamId param);
  void register_external(int module, ParamId param);
  // Parameters lie in other units now. To be called while no forward is under way.
  void follow_units();
  // Ends calls whose end was never reported, before a new outermost forward.
  void end_stray();

 private:
  void check(int module) const;
  void note(int module, ParamId param);
  void await_updates(const std::vector<ParamId>& params);
  std::vector<int> units_of(const std::vector<ParamId>& params) const;
  void watch_call_of(std::vector<int> units, const std::vector<at::Tensor>& outputs,
                     const std::vector<compat::NodePtr>& producers, bool open_now);

  Units& units_;
  BackwardDriver& driver_;
  std::vector<std::vector<ParamId>> params_;  // by module
  // Producers of the inputs of module calls under way, innermost last; empty for those inside others.
  std::vector<std::vector<compat::NodePtr>> producers_;
};

}  // namespace tessera::zero
