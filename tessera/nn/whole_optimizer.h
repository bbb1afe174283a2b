// WholeOptimizer: Lamb, Muon and Adafactor (optim/whole.h) as an optimizer of torch, for ClientOptimizer.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/optim/whole.h"

namespace tessera::nn {

class WholeOptimizer final : public torch::optim::Optimizer {
 public:
  struct Options : torch::optim::OptimizerCloneableOptions<Options> {
    explicit Options(optim::GroupOptions options = {}) : group(options) {}
    double get_lr() const override { return group.lr; }
    void set_lr(double lr) override { group.lr = lr; }
    void serialize(torch::serialize::InputArchive& /*archive*/) override {}
    void serialize(torch::serialize::OutputArchive& /*archive*/) const override {}  // the configuration has the options

    optim::GroupOptions group;
  };
  struct State : torch::optim::OptimizerCloneableParamState<State> {
    void serialize(torch::serialize::InputArchive& /*archive*/) override {}  // load() does
    void serialize(torch::serialize::OutputArchive& archive) const override;
    void read(torch::serialize::InputArchive& saved, at::Device device);

    std::map<std::string, at::Tensor> values;
    std::optional<int64_t> step;  // of parameters that count them
  };

  // Groups have Options, in the order of `params`. Value error for options out of their bounds.
  WholeOptimizer(optim::Rule rule, const std::vector<optim::GroupOptions>& groups,
                 const std::vector<std::vector<at::Tensor>>& params);

  // Gives `shards` and the numbers by which these know the parameters.
  void use(optim::ShardsPtr shards, std::unordered_map<const void*, int> numbers);
  void add_number(const at::Tensor& param, int number) { numbers_[param.unsafeGetTensorImpl()] = number; }
  optim::Rule rule() const { return rule_; }
  optim::GroupOptions& group(size_t number);
  // The states of a parameter of a group: which, and what sizes those have that are whole on every rank.
  std::vector<optim::WholeState> states_of(const at::Tensor& param, const optim::GroupOptions& group) const;

  // Collective as the shards are. Not-implemented error for a closure.
  at::Tensor step(LossClosure closure = nullptr) override;
  // Loads the states alone.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  int number_of(const at::Tensor& param) const;
  State& state_of(const at::Tensor& param, const optim::GroupOptions& group);

  const optim::Rule rule_;
  optim::ShardsPtr shards_ = optim::whole_parameters();
  std::unordered_map<const void*, int> numbers_;
};

// The states that an optimizer must have of a parameter of a group, and whether it counts steps.
struct StateForm {
  std::vector<std::string> names;
  bool counts_steps = true;
};
// Loads the states alone of `optimizer`, whose groups have WholeOptimizer::Options. IoError for those of another one than `name`.
void load_states(torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive, const std::string& name,
                 const std::function<StateForm(const optim::GroupOptions&, const at::Tensor&)>& form);

}  // namespace tessera::nn
