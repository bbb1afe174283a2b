#include "tessera/nn/recompute.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "tessera/amp/autocast.h"
#include "tessera/parallel/held.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Tensors = std::vector<at::Tensor>;
using Call = std::function<Tensors(const Tensors&)>;

// The CPU's generator and the device's: what dropout draws from.
class Generators {
 public:
  explicit Generators(at::Device device) : all_{at::detail::getDefaultCPUGenerator()} {
    if (!device.is_cpu()) all_.push_back(at::globalContext().defaultGenerator(device));
  }
  Tensors states() {
    Tensors states;
    for (at::Generator& generator : all_) {
      const std::scoped_lock lock(generator.mutex());
      states.push_back(generator.get_state());
    }
    return states;
  }
  void set(const Tensors& states) {
    for (size_t i = 0; i < all_.size(); ++i) {
      const std::scoped_lock lock(all_[i].mutex());
      all_[i].set_state(states[i]);
    }
  }

 private:
  std::vector<at::Generator> all_;
};

at::Device device_of(at::TensorList tensors) {
  for (const at::Tensor& t : tensors)
    if (t.defined() && !t.is_cpu()) return t.device();
  return at::kCPU;
}

// What the first run found around it.
struct Kept {
  Call f;
  at::Device device = at::kCPU;
  Tensors random;
  amp::AutocastOptions autocast;
};

// Puts back what was around the first run, and at the end what is around now.
class Again {
 public:
  explicit Again(const Kept& kept)
      : generators_(kept.device), random_(generators_.states()), region_(kept.autocast, kept.device.type()) {
    generators_.set(kept.random);
  }
  ~Again() {
    region_.leave();
    generators_.set(random_);
  }
  Again(const Again&) = delete;
  Again& operator=(const Again&) = delete;

 private:
  Generators generators_;
  const Tensors random_;
  const amp::AutocastRegion region_;
};

struct Recompute : torch::autograd::Function<Recompute> {
  // `root` requires a gradient, so that there is a node whatever the inputs do.
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs, const at::Tensor& /*root*/, const Call& f) {
    Kept kept{f, device_of(inputs), {}, {}};
    const auto type = kept.device.type();
    kept.random = Generators(kept.device).states();
    kept.autocast = {at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)};
    parallel::hold(ctx, std::move(kept));
    ctx->save_for_backward(inputs.vec());
    ctx->set_materialize_grads(false);
    return f(inputs.vec());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto& kept = parallel::held<Kept>(ctx);
    Tensors leaves;
    for (const at::Tensor& input : ctx->get_saved_variables())
      leaves.push_back(input.defined() ? input.detach().requires_grad_(input.requires_grad()) : input);
    const at::AutoGradMode records(true);
    const Tensors made = [&] {
      const Again again(kept);
      return kept.f(leaves);
    }();
    Tensors roots, given;
    for (size_t i = 0; i < made.size(); ++i) {
      if (!gradients[i].defined() || !made[i].requires_grad()) continue;
      roots.push_back(made[i]);
      given.push_back(gradients[i]);
    }
    if (!roots.empty()) torch::autograd::backward(roots, given);
    variable_list results;
    for (const at::Tensor& leaf : leaves)
      results.push_back(leaf.defined() && leaf.requires_grad() ? leaf.grad() : at::Tensor());
    results.resize(results.size() + 2);
    return results;
  }
};

}  // namespace

Tensors recompute(Call f, const Tensors& inputs) {
  return Recompute::apply(at::TensorList(inputs), at::empty({0}).requires_grad_(), f);
}

}  // namespace tessera::nn
