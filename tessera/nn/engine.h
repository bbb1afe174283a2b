// The C++ front end.
//
//   auto model  = std::make_shared<Gpt>(options);           // any torch::nn module, Sequential included
//   auto engine = tessera::initialize(model, tessera::Config::from_file("config.json"));
//   auto loss   = engine.forward(x, y);                     // the module's own forward
//   loss.backward();
//   engine.step();
#pragma once

#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/nn/holder.h"
#include "tessera/nn/outputs.h"
#include "tessera/nn/session.h"

namespace tessera::nn {

template <class M>
class Engine : public Session {
 public:
  Engine(std::shared_ptr<M> module, const Config& config, comm::Mesh mesh, const Construction* building = nullptr,
         const Recipe& recipe = {})
      : Session(module, config, std::move(mesh), building, recipe), module_(std::move(module)) {
    warn_of_cuts();
    warn_of_frozen();
  }

  // Calls module->forward(args...) with this rank's micro-batch. Local in stages 0 to 2, collective in stage 3 (hooked.h). An
  // exception of the module passes through and leaves the engine usable; where an input is of another dtype or device a line says so.
  // With fp16.auto_cast or cast_forward_inputs() tensors among `args`, and in vectors of them, are cast.
  template <class... A>
  auto forward(A&&... args) {
    if (!casts_inputs()) return run(std::forward<A>(args)...);
    std::tuple<HeldInput<A>...> cast{as_input(std::forward<A>(args))...};
    return std::apply([this](auto&... held) { return run(static_cast<A&&>(held)...); }, cast);
  }
  template <class... A>
  auto operator()(A&&... args) {
    return forward(std::forward<A>(args)...);
  }

  M& module() {
    core();
    return *module_;
  }
  const M& module() const {
    core();
    return *module_;
  }
  const std::shared_ptr<M>& module_ptr() const {
    core();
    return module_;
  }

 private:
  class Scope;

  template <class... A>
  auto run(A&&... args) {
    look_before_update();
    const Forward watched(*this);
    Scope scope(core());
    if (scope.switched_off()) warn_of_region();
    std::vector<SeenInput> seen;
    int argument = 0;
    (see_input(args, argument++, seen), ...);
    try {
      return call(scope, std::forward<A>(args)...);
    } catch (c10::Error& error) {
      explain(error, seen);
      throw;
    }
  }

  template <class... A>
  auto call(Scope& scope, A&&... args) {
    ModuleScope rest(this->rest());
    if (rest.wants_tensors()) {
      std::vector<at::Tensor> inputs;
      (append_inputs(args, inputs), ...);
      rest.note_inputs(inputs);
    }
    if constexpr (std::is_void_v<decltype(module_->forward(std::forward<A>(args)...))>) {
      module_->forward(std::forward<A>(args)...);
      rest.finish({}, /*hides=*/true);
      scope.finish({});
    } else {
      auto result = module_->forward(std::forward<A>(args)...);
      std::vector<at::Tensor> tensors;
      append_tensors(result, tensors);
      rest.finish(tensors);
      scope.finish(tensors);
      return result;
    }
  }

  // What an argument is while a forward with inputs that are cast runs: a value where it may change, else itself.
  template <class T>
  static constexpr bool kIsInput = std::is_same_v<std::remove_cvref_t<T>, at::Tensor> ||
                                   std::is_same_v<std::remove_cvref_t<T>, std::vector<at::Tensor>>;
  template <class T>
  using HeldInput = std::conditional_t<kIsInput<T>, std::remove_cvref_t<T>, T&&>;
  template <class T>
  HeldInput<T> as_input(T&& argument) const {
    if constexpr (kIsInput<T>)
      return cast_input(argument);
    else
      return std::forward<T>(argument);
  }

  template <class T>
  static void see_input(const T& input, int argument, std::vector<SeenInput>& seen) {
    if constexpr (std::is_same_v<T, at::Tensor>) {
      if (input.defined()) seen.push_back({argument, -1, input.scalar_type(), input.device()});
    } else if constexpr (std::is_same_v<T, std::vector<at::Tensor>>) {
      for (size_t i = 0; i < input.size(); ++i)
        if (input[i].defined())
          seen.push_back({argument, static_cast<int>(i), input[i].scalar_type(), input[i].device()});
    }
  }

  // Arguments of types that append_tensors does not know hold no tensors that matter here.
  template <class T>
  static void append_inputs(const T& argument, std::vector<at::Tensor>& inputs) {
    if constexpr (std::is_convertible_v<const T&, at::Tensor>) inputs.push_back(argument);
  }

  // Calls pre_forward now, then either finish() or, when the module throws, abort_forward.
  class Scope {
   public:
    explicit Scope(engine::Engine& core) : core_(core), switched_off_(core.pre_forward()) {}
    ~Scope() {
      if (!finished_) {
        core_.abort_forward();
      }
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    void finish(const std::vector<at::Tensor>& outputs) {
      finished_ = true;
      core_.post_forward(outputs);
    }
    // See engine::Engine::pre_forward.
    bool switched_off() const { return switched_off_; }

   private:
    engine::Engine& core_;
    bool switched_off_;
    bool finished_ = false;
  };

  std::shared_ptr<M> module_;
};

}  // namespace tessera::nn

namespace tessera {

// Collective. Takes over the storage of the module's parameters; `mesh` defaults to the ranks of the environment
// (as tessera-run, torchrun, mpirun or srun started them; one rank without any) on the axes that
// zero_optimization.mics_shard_size, sequence_parallel_size and tensor_parallel.autotp_size ask for. `recipe`: what no
// configuration can say, as parameter groups.
template <class M>
nn::Engine<M> initialize(std::shared_ptr<M> module, const Config& config, comm::Mesh mesh,
                         const nn::Recipe& recipe = {}) {
  return nn::Engine<M>(std::move(module), config, std::move(mesh), nullptr, recipe);
}
template <class M>
nn::Engine<M> initialize(std::shared_ptr<M> module, const Config& config, const nn::Recipe& recipe = {}) {
  return initialize(std::move(module), config, nn::environment_mesh(config), recipe);
}
// For a module that was built in partitions; over the ranks of `building`.
template <class M>
nn::Engine<M> initialize(std::shared_ptr<M> module, const Config& config, const nn::Construction& building,
                         const nn::Recipe& recipe = {}) {
  return nn::Engine<M>(std::move(module), config, building.mesh(), &building, recipe);
}
// For module holders (TORCH_MODULE), torch::nn::Sequential among them; the arguments are those of the others.
template <class M>
nn::Engine<M> initialize(const torch::nn::ModuleHolder<M>& module, const Config& config, comm::Mesh mesh,
                         const nn::Recipe& recipe = {}) {
  return initialize(nn::detail::module_of(module), config, std::move(mesh), recipe);
}
template <class M>
nn::Engine<M> initialize(const torch::nn::ModuleHolder<M>& module, const Config& config,
                         const nn::Recipe& recipe = {}) {
  return initialize(nn::detail::module_of(module), config, recipe);
}
template <class M>
nn::Engine<M> initialize(const torch::nn::ModuleHolder<M>& module, const Config& config,
                         const nn::Construction& building, const nn::Recipe& recipe = {}) {
  return initialize(nn::detail::module_of(module), config, building, recipe);
}

}  // namespace tessera
