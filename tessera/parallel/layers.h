// The arithmetic of linear layers whose weight is cut over the ranks of a tensor-parallel group. No modules: both front ends call
// these with this rank's tensors. Shapes and autocast as torch::nn::functional::linear: x [..., in], weight [out, in].
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>

#include "tessera/comm/group.h"
#include "tessera/parallel/sizes.h"

namespace tessera::parallel {

class Entrance;

// What a layer does at the borders of its region.
struct Region {
  comm::GroupPtr group;
  // The dim along which activations outside are cut (sequence-parallel norm regions): all-gather and reduce-scatter replace
  // identity and all-reduce. -1: whole. sequence_sizes: the ranks' sizes along it; empty: equal ones.
  int64_t sequence_dim = -1;
  Sizes sequence_sizes = {};
  // The all-reduce (or reduce-scatter) of the input's gradient runs under the product for the weight's gradient.
  bool overlap = true;
  std::string label = {};  // path of the module, in errors
  // Sequence regions keep the gathered input for the backward. Else they keep this rank's part and gather once more there.
  bool keep_gathered = false;
  // Shared by column layers that may have one input (query, key and value; gate and up); null: this one alone.
  std::shared_ptr<Entrance> entrance = {};
};

// weight: this rank's rows; bias: this rank's slice. Output: this rank's columns. May be differentiated twice.
at::Tensor column_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                         const Region& region);
// weight: this rank's columns; x: this rank's inputs; bias: whole, added once after the sum; its gradient is whole on every rank.
at::Tensor row_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                      const Region& region);

// What whole layers around cut ones see, along the last dim (of an output, or of a bias alone). Collective where ranks send.
// A column layer's own outputs, of which the ranks have `sizes`: with `gather` all of them; with a `tail` (the ranks' sizes) the
// last ones are gathered for use on every rank.
at::Tensor join_outputs(const at::Tensor& own, const comm::GroupPtr& group, bool gather, const Sizes& sizes,
                        const Sizes& tail, comm::Label label = {});
// A row layer's inputs: this rank's `ranges`, where `x` has all `total` of them, from a layer that is not cut; else `x`.
at::Tensor own_inputs(const at::Tensor& x, const comm::GroupPtr& group, int64_t total, const Ranges& ranges,
                      comm::Label label = {});
// A whole layer's outputs, of which every rank uses those of `own_use` for its own heads: regions begin at them (border()).
at::Tensor share_outputs(const at::Tensor& out, const comm::GroupPtr& group, shard::Range own_use,
                         comm::Label label = {});

// Column layers that are called one after the other with the very same tensor enter their region with it once: one cast, one
// gather, and in the backward one all-reduce of the gradients' sum, launched when the last layer has its part. Kept by the
// front end for the layers of one parent; used by one thread at a time.
struct Entered;
class Entrance {
 public:
  // `uses`: how many layers there are; with the last use the input is let go of.
  explicit Entrance(int uses) : uses_(uses) {}

  // The input inside the region (in a sequence region the whole one), for code that looks at it before the layers do: they
  // know it again. From then on they take no other input; value error. Collective in sequence regions.
  at::Tensor open(const at::Tensor& x, const Region& region);

 private:
  friend at::Tensor column_linear(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                                  const Region&);
  std::shared_ptr<Entered> enter(const at::Tensor& x, const Region& region);

  int uses_, left_ = 0;
  bool opens_ = false;
  std::shared_ptr<Entered> last_;
};

}  // namespace tessera::parallel
