// ClientOptimizer: an optimizer of torch::optim, or of the program's own, that updates the masters of an engine. So do those of
// the configuration that need whole parameters (whole_optimizer.h), or are torch's (torch_optimizer.h).
//
// Note [Parameters of a client's optimizer]
//   The optimizer's groups hold the module's parameters until the engine is built. Where these are not the masters, or are cut,
//   fp32 masters take their places: this rank's slices, 1-D; a parameter of which this rank has nothing is left out. release()
//   puts the parameters back. So the optimizer must update element by element where states are cut: a norm would be that of a
//   slice. The core's groups have the hyper-parameters of the configuration's own optimizers; one of whole parameters has empty
//   slices, too, as all ranks make the same calls.
#pragma once

#include <torch/optim/optimizer.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/config/config.h"
#include "tessera/engine/checkpoint.h"
#include "tessera/engine/client_states.h"
#include "tessera/engine/engine.h"
#include "tessera/nn/whole_optimizer.h"
#include "tessera/optim/schedule.h"

namespace tessera::nn {

// What to do with a parameter that the engine's module does not have.
inline constexpr const char* kRegisterBeside =
    "a C++ engine trains what its module has; register the module that has it, as a loss with weights, beside the "
    "model "
    "in one module, and give the engine and the optimizer that one";

// Marks in `specs` the groups of the optimizer's parameters, and returns these by group. Value error: one is not in `specs`, or in two
// groups. Not-implemented error for LBFGS. Local.
std::vector<std::vector<at::Tensor>> mark_groups(torch::optim::Optimizer& optimizer,
                                                 std::vector<engine::ParamSpec>& specs);

class ClientOptimizer final : public engine::KeptStates {
 public:
  // mark_groups(). Local.
  ClientOptimizer(std::shared_ptr<torch::optim::Optimizer> optimizer, std::vector<engine::ParamSpec>& specs);
  // An optimizer of the configuration, Lamb, Muon or torch's; `specs` have its groups. Value error for options out of their
  // bounds, and for a vector in a group of matrices. Local.
  ClientOptimizer(const optim::Type& type, const std::vector<optim::GroupOptions>& groups,
                  const std::vector<engine::ParamSpec>& specs);
  // Value error where states are cut (by the stage, and by tensor parallelism where `is_cut`) and the optimizer is not one of those
  // that need no zero_allow_untested_optimizer, in Python neither; not for those of make_optimizer(), which says what they are.
  void check_cut(const config::Config& config, bool is_cut) const;

  // Class and rates, for ranks to compare.
  std::string description() const;
  std::vector<optim::GroupOptions> groups() const;
  // Updates the masters from here on. `on_params`: these are the parameters. An error of one rank is an error on all. Collective.
  void take(engine::Engine& core, bool on_params);
  // What the core has taken, too (Note [Joining]): one more group of an optimizer of the configuration; parameters that were added to
  // a group of the program's own, which leave it until they join. check_added(): value error for a vector in a group of matrices. Local.
  void check_added(const std::vector<optim::GroupOptions>& groups, const std::vector<engine::ParamSpec>& specs) const;
  void add_group(const optim::GroupOptions& options);
  void take_added(size_t number, const std::vector<at::Tensor>& params);
  // Takes parameters that have joined the core since, as run() does. Local.
  void take_joined(engine::Engine& core);
  void release();

  // Before an update: gives the core the rates of the program's optimizer, or the configuration's optimizer the core's groups.
  void publish(engine::Engine& core);
  void set_rate(size_t group, double rate);
  // Resets groups of the core to what they were before a load, but for their rates: checkpoints have no other options.
  void keep_options(engine::Engine& core) const;
  // Gives a client's own optimizer what a schedule says of momentum, as optim::put_momenta() does.
  void put_momenta(const optim::ScheduleOptions& schedule, const std::vector<double>& momenta);
  bool has_betas() const;                            // a client's own
  const optim::Type* type() const { return type_; }  // null: it is the client's own
  // The update.
  void run(engine::Engine& core);

  // ---- states of a parameter
  std::string name() const override;
  bool has_states() const override { return !optimizer_->state().empty(); }
  State state(int param) const override;
  void write_state(int param, const std::string& key, const at::Tensor& part) override;
  at::Tensor target(int param) const override;  // undefined where that is nothing

  // ---- checkpoints, with the files of Python's engines
  // states(): values of this rank's elements; numbers(): the other states by parameter name and key, a dict of dicts.
  std::vector<engine::ClientState> states(const engine::Engine& core) const;
  c10::IValue numbers(const engine::Engine& core) const;
  // saved(): what load() takes. IoError where a state cannot be read, or does not fit. try_load() keeps `present`. Local.
  std::string saved(const engine::Engine& core, const engine::Restore& found) const;
  // The optimizer's parameters by group, in their order, with whether they are trained.
  checkpoint::DeepSpeedHints::Groups names(const engine::Engine& core) const;
  std::string present() const;
  void load(const std::string& archive);
  void try_load(const std::string& archive, const std::string& present);

 private:
  struct Target {
    int param;
    at::Tensor tensor;
  };
  void begin_state(const at::Tensor& target, const torch::optim::OptimizerParamGroup& group);
  void add_target(engine::Engine& core, int param, const at::Tensor& tensor, std::vector<at::Tensor>& taken);
  void put_group(size_t number);
  State state_of(const at::Tensor& target) const;
  // States of a parameter that are whole on every rank, with their sizes (optim/whole.h).
  std::map<std::string, std::vector<int64_t>> whole_states(const Target& target) const;
  bool keeps(const Target& target) const;  // states of it on this rank
  void add_whole(const Target& target, const engine::Engine& core, const checkpoint::Reader& saved, State& state) const;
  std::map<const void*, State> all_states() const;
  std::string archive_of(const std::map<const void*, State>& states) const;

  std::shared_ptr<torch::optim::Optimizer> optimizer_;
  const optim::Type* type_ = nullptr;               // where the optimizer is of the configuration
  WholeOptimizer* whole_ = nullptr;                 // the same optimizer, where it needs whole parameters
  std::vector<optim::GroupOptions> groups_;         // of an optimizer of the configuration, as published last
  std::vector<std::vector<at::Tensor>> originals_;  // by group
  std::vector<Target> targets_;
  bool on_params_ = true;
};

}  // namespace tessera::nn
