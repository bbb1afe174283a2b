// Building models that are larger than one rank's memory, for stage 3.
//
//   tessera::nn::Construction building(config, mesh);
//   auto model = building.build([&] { return Model(options); });  // of any torch::nn modules: one piece of it is whole at a time
//   auto engine = tessera::initialize(model, config, building);
//
// Or piece by piece, where a constructor has to see values:
//
//   model->blocks->push_back(building.partition(Block(options)));  // whole only until here
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/mesh.h"
#include "tessera/config/config.h"
#include "tessera/engine/engine.h"
#include "tessera/nn/deferred.h"
#include "tessera/zero/early_params.h"

namespace tessera::nn {

// Calls marked collective are made by all data-parallel ranks in one order. Parameters that were partitioned are read
// and written in a region of gather() and release(), and belong to the engine once there is one. UsageError for an object that was
// moved from.
class Construction {
 public:
  // The parameters' dtype is that of the configuration's precision; slices live where the configuration's offload_param says.
  Construction(const Config& config, comm::Mesh mesh);

  // Returns what make() returns, a module or a holder of one, built and partitioned. Inside make() tensors have no memory (Note
  // [Constructors without memory] in nn/deferred.h): sizes are there, values are not, so item() or data_ptr() are errors. Then the
  // operators of make() run in their order, with the same random numbers, and each parameter is partitioned when no operator uses
  // it any more, or none soon. One that a later operator uses is gathered for it; with a 16-bit precision it is rounded by then.
  // All other tensors that the program still holds get their values, too. `device`: where all of them are brought to before.
  // UsageError for operators that do something else without memory. Collective: all ranks make the same.
  template <class F>
  auto build(const F& make, std::optional<c10::Device> device = {}) {
    live();
    Deferred deferred;
    auto module = recorded(deferred, make);
    realize(*module, deferred, device);
    return module;
  }

  // Broadcasts rank 0's values of every parameter of `module` that is not partitioned yet, and keeps this rank's slice.
  // Collective. Returns the module. Parameters that are not floating point or on the meta device are left alone.
  template <class M>
  M partition(M module) {
    partition_parameters(*module);
    return module;
  }

  // Between the two these parameters are whole; `writer`: the rank whose writes hold, -1: writing is a state error.
  // Collective. Others pass through. nn::GatheredParameters(building, params, writer) makes both calls.
  // Value error for a writer that is no rank.
  void gather(const std::vector<at::Tensor>& params, int writer = -1);
  void release(const std::vector<at::Tensor>& params, int writer = -1);

  // A parameter that is partitioned here becomes whole for good, in memory of its own. Collective.
  void restore(const at::Tensor& param) const;

  // Lets an engine built from `specs` take over what is partitioned here. Local.
  void hand_over(std::vector<engine::ParamSpec>& specs) const;
  const comm::Mesh& mesh() const {
    live();
    return mesh_;
  }
  // What a region could not throw where it went: gather(), build(), partition() and the engine do.
  HeldError& held_error() const { return *held_error_; }
  // Bytes of this rank's slices on the device.
  int64_t bytes() const { return live().bytes(); }

 private:
  zero::EarlyParams& live() const {
    TESSERA_CHECK(early_ != nullptr, "construction", "this object was moved from; use the one that it was moved to");
    return *early_;
  }
  template <class F>
  static auto recorded(Deferred& deferred, const F& make) try {
    const Deferred::Recording recording(deferred);
    return make();
  } catch (c10::Error& error) {
    Deferred::explain(error);
    throw;
  }
  void realize(const torch::nn::Module& module, Deferred& deferred, std::optional<c10::Device> device);
  void partition_parameters(const torch::nn::Module& module);
  std::vector<int> numbers_of(const std::vector<at::Tensor>& params) const;

  comm::Mesh mesh_;
  at::ScalarType dtype_;
  std::shared_ptr<zero::EarlyParams> early_;
  std::unique_ptr<HeldError> held_error_ = std::make_unique<HeldError>();
  std::unordered_map<const void*, int> numbers_;  // by TensorImpl; early_ keeps the tensors
};

}  // namespace tessera::nn
