// Collectives of tensor and sequence parallelism as autograd functions. Each has a partner: what a function does forward its
// partner does backward (Megatron-LM, arXiv 1909.08053, section 3; sequence regions: arXiv 2205.05198, section 4.2).
//
//                        forward            backward
//   copy_to_ranks        identity           all-reduce            before column-parallel layers
//   reduce_from_ranks    all-reduce         identity              after row-parallel layers
//   gather_from_ranks    all-gather of dim  own slice             whole outputs of a column-parallel layer
//   split_to_ranks       own slice of dim   all-gather            its partner
//   gather_for_use       all-gather of dim  reduce-scatter        enters a region of which each rank uses all
//   scatter_sum          reduce-scatter     all-gather of dim     leaves it
//
// All functions are collective over `group`, in forward and in backward; where gradients are not needed only in forward. The
// backward is made of the partners, so it can be differentiated again. Value errors name `label`. `sizes`: the ranks' sizes along
// `dim`, which may differ; empty: equal ones. Bytes sent are the least for uneven sizes, too. A group of one rank: the identity.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/parallel/sizes.h"
#include "tessera/shard/cut.h"

namespace tessera::parallel {

at::Tensor copy_to_ranks(const at::Tensor& x, const comm::GroupPtr& group, comm::Label label = {});
at::Tensor reduce_from_ranks(const at::Tensor& x, const comm::GroupPtr& group, comm::Label label = {});
at::Tensor gather_from_ranks(const at::Tensor& x, const comm::GroupPtr& group, int64_t dim, const Sizes& sizes = {},
                             comm::Label label = {});
at::Tensor split_to_ranks(const at::Tensor& x, const comm::GroupPtr& group, int64_t dim, const Sizes& sizes = {},
                          comm::Label label = {});
at::Tensor gather_for_use(const at::Tensor& x, const comm::GroupPtr& group, int64_t dim, const Sizes& sizes = {},
                          comm::Label label = {});
at::Tensor scatter_sum(const at::Tensor& x, const comm::GroupPtr& group, int64_t dim, const Sizes& sizes = {},
                       comm::Label label = {});

// One exchange for all of `tensors` (query, key and value of attention: arXiv 2309.14509): each is cut along `scatter_dim` into
// the ranks' parts and joined along `gather_dim`; the backward is the same with the dims changed. `scatter_sizes[i]`: the ranks'
// sizes of tensor i along scatter_dim (heads, which may be uneven); `gather_sizes`: along gather_dim (of the sequence). Same
// dtype and device for all. One copy into the send buffer; none out of the receive buffer where gather_dim is the outermost and
// scatter_dim an inner one, and the tensors differ in scatter_dim only: the results are then strided views of that buffer. None
// in, one out, for one tensor whose dims are the other way round.
std::vector<at::Tensor> exchange(const std::vector<at::Tensor>& tensors, const comm::GroupPtr& group,
                                 int64_t scatter_dim, int64_t gather_dim, const std::vector<Sizes>& scatter_sizes = {},
                                 const Sizes& gather_sizes = {}, comm::Label label = {});

struct InFlight;

// exchange() in two halves, so that a program computes while the tensors travel: the constructor starts the transfer, wait() ends it.
// In the backward the gradients travel the other way: the backward of wait() starts that transfer, the one of the constructor ends it.
class Exchanging {
 public:
  Exchanging(const std::vector<at::Tensor>& tensors, const comm::GroupPtr& group, int64_t scatter_dim,
             int64_t gather_dim, const std::vector<Sizes>& scatter_sizes = {}, const Sizes& gather_sizes = {},
             comm::Label label = {});
  std::vector<at::Tensor> wait();  // once

 private:
  std::vector<at::Tensor> own_;  // the result in a group of one rank
  at::Tensor token_;             // ties the halves together in the graph
  std::shared_ptr<InFlight> flight_;
};

// ---- of values, without autograd
// This rank's slice of a whole, in new memory. Local.
at::Tensor take_slice(const at::Tensor& whole, const shard::Cut& cut);
// The whole of which `slice` is this rank's, on every rank. Elements that several ranks have must be the same there. Collective.
at::Tensor join_slices(const at::Tensor& slice, const shard::Cut& cut, const comm::GroupPtr& group,
                       comm::Label label = {});

}  // namespace tessera::parallel
