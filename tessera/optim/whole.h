// Lamb, Muon and Adafactor: the update of an element depends on the whole parameter. Callers hold slices of parameters and say what of a
// parameter lies on other ranks (Shards).
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/optim/types.h"

namespace tessera::optim {

// Parameters go by numbers of the caller's. Every rank makes the same calls in the same order.
class Shards {
 public:
  virtual ~Shards() = default;
  // The parameter-shaped tensor that `part` is this rank's slice of, in fp32. Collective.
  virtual at::Tensor whole(int param, const at::Tensor& part) = 0;
  // The sizes of that tensor. Local.
  virtual at::IntArrayRef sizes(int /*param*/, const at::Tensor& part) const { return part.sizes(); }
  // This rank's slice of a whole tensor. Local.
  virtual at::Tensor mine(int param, const at::Tensor& full) = 0;
  // The L2 norms of whole tensors, of parameters and this rank's slices. Collective.
  virtual std::vector<double> norms(const std::vector<std::pair<int, at::Tensor>>& parts) = 0;
};
using ShardsPtr = std::shared_ptr<Shards>;
// Shards of parameters that are whole.
ShardsPtr whole_parameters();

// The sum of squares of fp32 or 16-bit values, a number in fp64 on their device.
at::Tensor squares(const at::Tensor& values);

// A state of a parameter: a value for each element of this rank's slice, or, with `sizes`, the whole of it on every rank.
struct WholeState {
  const char* name;
  std::optional<std::vector<int64_t>> sizes;
};
// The states of a parameter of these whole sizes, two at most: those of state_names(), of Adafactor the mean squares of rows and
// columns ("row_var", "col_var", whole on every rank), of vectors "variance".
std::vector<WholeState> whole_states(Rule rule, const GroupOptions& group, at::IntArrayRef sizes);

// A parameter, or a rank's slice of one, which may be empty.
struct WholeUpdate {
  const GroupOptions* group;
  int param = -1;                        // the parameter's number for Shards
  at::Tensor values;                     // changed in place
  at::Tensor grad;                       // in the values' shape and dtype
  int64_t step = 1;                      // number of this update, from 1
  std::array<at::Tensor, 2> state = {};  // whole_states(), shaped as the values or as those say
};
// Lamb (You et al., arXiv:1904.00962, algorithm 2): Adam's direction plus weight_decay * w, scaled for every parameter by
// |w| / |direction|, which is kept within min_coeff and max_coeff; 1 where either norm is 0. Bias correction is applied to the rate
// and not to the moments. `eps_inside_sqrt`: the direction is mean / sqrt(square + eps), else mean / (sqrt(square) + eps).
// All is computed in the parameter's dtype: in fp16 an eps below 2^-25 is 0, and a gradient of zeros gives NaN, as with torch's Adam.
// Muon (Jordan et al.): Nesterov momentum, made a nearly orthogonal matrix by `ns_steps` steps of a Newton-Schulz iteration in
// bf16, times sqrt(max(1, rows / columns)); decoupled weight decay. Parameters of more than two dimensions count as matrices of
// their first one. Groups without use_muon are updated as by AdamW. Every rank computes the whole of one matrix after the other.
// Adafactor (torch.optim's): second moments by rows and columns of a matrix (the last two dimensions), each the mean square of
// all ranks' gradients; a rate relative to the parameter's norm, and an update of bounded norm. Every rank gathers the gradient and the
// values of one parameter after the other, and computes its update whole: the arithmetic is torch's, bit for bit in fp32.
// Collective as `shards` is. Value error for a rule with a kernel.
void update_whole(Rule rule, const std::vector<WholeUpdate>& updates, Shards& shards);

// Muon's iteration: a matrix of the same singular vectors whose singular values are near 1, in bf16.
at::Tensor orthogonal(const at::Tensor& matrix, int64_t steps);
// Whether Muon takes a parameter for a matrix inside the model: two dimensions or more, no "embed" or "lm_head" in the name.
bool is_muon_matrix(const std::string& name, int64_t dims);

}  // namespace tessera::optim
