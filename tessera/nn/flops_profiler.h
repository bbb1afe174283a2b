// FlopsProfiler: operations, parameters and times by module of a model's forwards, with an engine or without one.
//
//   tessera::nn::FlopsProfiler profiler(model);
//   {
//     const auto counting = profiler.start();
//     model->forward(x);
//   }
//   std::cout << profiler.text() << '\n';
//
// The section flops_profiler of the configuration has an engine profile a forward of its own: engine.flops_profiler().
//
// Note [Whose operation it is]
//   Modules of torch do not say when they run. A product, a convolution or an attention that reads a module's own parameter (whole, or a
//   view, a slice, a cast or a copy of it) belongs to that module; any other belongs to the innermost module that runs and says so,
//   which are those that hooked.h has, and layers of a plain Sequential where an engine gathers them; else to the model. It belongs to
//   all modules around that one, too. The same modules have a time; all others have none, neither in rows() nor in text(). A weight
//   that is computed from parameters (a norm of them, a sum) is nobody's.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/engine/flops_profile.h"
#include "tessera/nn/holder.h"

namespace tessera::nn {

class FlopsProfiler {
  struct State;

 public:
  // `recompute`: the share of the forward that checkpointed activations compute again.
  explicit FlopsProfiler(std::shared_ptr<torch::nn::Module> model, double recompute = 0);
  template <class M>
  explicit FlopsProfiler(const torch::nn::ModuleHolder<M>& model, double recompute = 0)
      : FlopsProfiler(detail::module_of(model), recompute) {}

  // Counts in this thread until the object goes.
  class [[nodiscard]] Counting {
   public:
    explicit Counting(std::shared_ptr<State> state) : state_(std::move(state)) {}
    ~Counting() { stop(); }
    Counting(const Counting&) = delete;
    Counting& operator=(const Counting&) = delete;
    Counting(Counting&&) = default;
    Counting& operator=(Counting&&) = delete;
    void stop();

   private:
    std::shared_ptr<State> state_;
  };
  // Forgets what was counted, and counts from here on. Usage error while it counts. Local.
  Counting start();

  // The model first, then what is in it, in the order of named_modules(); a module that is there twice once.
  const std::vector<engine::ProfileRow>& rows() const { return profile().rows(); }
  // The totals, for every level the modules with most operations, a line for each module.
  std::string text(const engine::ProfileText& options = {}) const { return profile().text(options); }
  // Totals as numbers.
  const engine::FlopsProfile& profile() const;

 private:
  friend class Session;
  // Around its call of the model.
  void enter_model();
  void leave_model();

  std::shared_ptr<State> state_;
};

}  // namespace tessera::nn
