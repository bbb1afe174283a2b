#include "tessera/nn/recompute.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>

#include "tessera/amp/autocast.h"
#include "tessera/base/error.h"
#include "tessera/base/generators.h"
#include "tessera/parallel/held.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Tensors = std::vector<at::Tensor>;
using Call = std::function<Tensors(const Tensors&)>;

at::Device device_of(at::TensorList tensors) {
  for (const at::Tensor& t : tensors)
    if (t.defined() && !t.is_cpu()) return t.device();
  return at::kCPU;
}

// An input that is kept elsewhere, or in part.
struct Stored {
  at::Tensor part;  // undefined: autograd keeps the input
  std::vector<int64_t> sizes;
  at::Device device = at::kCPU;
  bool requires_grad = false;
  bool is_slice = false;
};

bool is_sliced(const at::Tensor& input, const RecomputeOptions& options) {
  return options.slices != nullptr && options.slices->size() > 1 && input.numel() >= options.slices->size();
}

// This rank's part of the flattened values, filled up to equal lengths.
at::Tensor slice_of(const at::Tensor& input, const comm::Group& ranks) {
  const int64_t length = (input.numel() + ranks.size() - 1) / ranks.size();
  const at::Tensor mine = at::zeros({length}, input.options().requires_grad(false));
  const int64_t begin = std::min(ranks.rank() * length, input.numel());
  const int64_t end = std::min(begin + length, input.numel());
  mine.narrow(0, 0, end - begin).copy_(input.reshape({-1}).narrow(0, begin, end - begin));
  return mine;
}

Stored stored(const at::Tensor& input, const RecomputeOptions& options) {
  const bool is_param = input.is_leaf() && input.requires_grad();
  if (is_param) return {};
  const bool slice = is_sliced(input, options), moves = options.on_host && !input.is_cpu();
  if (!slice && !moves) return {};
  const at::Tensor part = slice ? slice_of(input.detach(), *options.slices) : input.detach();
  return {options.on_host ? part.to(at::kCPU) : part, input.sizes().vec(), input.device(), input.requires_grad(),
          slice};
}

at::Tensor restored(const Stored& kept, const comm::GroupPtr& slices) {
  const at::Tensor part = kept.part.to(kept.device);
  if (!kept.is_slice) return part;
  const at::Tensor whole = at::empty({part.numel() * slices->size()}, part.options());
  slices->all_gather(whole, part, "inputs of a recomputation").wait();
  return whole.narrow(0, 0, c10::multiply_integers(kept.sizes)).view(kept.sizes);
}

// What the first run found around it.
struct Kept {
  Call f;
  at::Device device = at::kCPU;
  Tensors random;
  amp::AutocastOptions autocast;
  std::vector<Stored> inputs;
  comm::GroupPtr slices;
};

// Puts the surroundings of the first run in place, and at the end those of now.
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
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs, const at::Tensor& /*root*/, const Call& f,
                               const RecomputeOptions& options) {
    Kept kept{f, device_of(inputs), {}, {}, {}, options.slices};
    const auto type = kept.device.type();
    kept.random = Generators(kept.device).states();
    kept.autocast = {at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)};
    Tensors whole;
    for (const at::Tensor& input : inputs) {
      kept.inputs.push_back(input.defined() ? stored(input, options) : Stored());
      whole.push_back(kept.inputs.back().part.defined() ? at::Tensor() : input);
    }
    parallel::hold(ctx, std::move(kept));
    ctx->save_for_backward(whole);
    ctx->set_materialize_grads(false);
    return f(inputs.vec());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto& kept = parallel::held<Kept>(ctx);
    Tensors leaves = ctx->get_saved_variables();
    for (size_t i = 0; i < leaves.size(); ++i) {
      const Stored& input = kept.inputs[i];
      if (input.part.defined())
        leaves[i] = restored(input, kept.slices).requires_grad_(input.requires_grad);
      else if (leaves[i].defined())
        leaves[i] = leaves[i].detach().requires_grad_(leaves[i].requires_grad());
    }
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
    results.resize(results.size() + 3);
    return results;
  }
};

}  // namespace

RecomputeOptions recompute_options(const config::Config& config, const comm::Mesh& mesh) {
  const auto& section = config.activation_checkpointing;
  const bool parts = config.tessera.sequence_parallel_norms;  // inputs of blocks are no longer alike
  const bool cuts = section.partition_activations && mesh.size(comm::Axis::Tp) > 1 && !parts;
  return {section.cpu_checkpointing, cuts ? mesh.group(comm::Axis::Tp) : nullptr};
}

Tensors recompute(Call f, const Tensors& inputs, const RecomputeOptions& options) {
  TESSERA_CHECK_VALUE(f != nullptr, "recompute", "the function is null; pass one that computes the outputs");
  return Recompute::apply(at::TensorList(inputs), at::empty({0}).requires_grad_(), f, options);
}

}  // namespace tessera::nn
