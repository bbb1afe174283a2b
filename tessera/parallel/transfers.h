// Collectives along one dim of a tensor, without autograd, in flight while other work goes on. Bytes sent are the least that
// the result takes, also for uneven sizes (no padding); sums are in rank order (Note [Order of summation] in comm/group.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/parallel/sizes.h"

namespace tessera::parallel {

// The ranks of `group` and their parts of a dim. `sizes`: one a rank; empty: equal ones. Negative dims count from the end.
struct Along {
  comm::GroupPtr group;
  int64_t dim = 0;
  Sizes sizes;
  std::string label;  // in errors
};

// A result that may be on its way. Tensors that the operation needs live as long as this.
template <class T>
class Transfer {
 public:
  explicit Transfer(T done) : finish_([done = std::move(done)] { return done; }) {}
  Transfer(comm::Pending pending, std::function<T()> finish)
      : finish_(std::move(finish)), pending_(std::move(pending)) {}
  // Who drops it without a wait has failed, also where the exception has gone another way than through here (a backward's goes by
  // autograd): other ranks may never make the call, and none is waited for.
  ~Transfer() { pending_.release(); }
  Transfer(Transfer&&) noexcept = default;
  Transfer& operator=(Transfer&&) = delete;
  T wait() {
    pending_.wait();
    return finish_();
  }

 private:
  // What the operation reads and writes is held by finish_, which must go last.
  std::function<T()> finish_;
  comm::Pending pending_;
};

// Whether nobody else can see the elements of `x`: a gradient on its way, which a sum may overwrite.
bool is_only_holder(const at::Tensor& x);

// Starts the sum over the ranks. `in_place`: into x, which must be contiguous.
Transfer<at::Tensor> start_sum(const at::Tensor& x, const Along& along, bool in_place = false);
// Starts to join the ranks' parts.
Transfer<at::Tensor> start_gather(const at::Tensor& x, const Along& along);
// Starts a sum of which this rank gets its part.
Transfer<at::Tensor> start_scatter_sum(const at::Tensor& x, const Along& along);
// This rank's part, contiguous, in new memory. Local.
at::Tensor own_part(const at::Tensor& x, const Along& along);

// See functions.h. scatter[i], gather[i]: the ranks' sizes of tensor i along the two dims; empty: equal ones. The results may be
// strided views of one buffer, with version counters of their own.
struct Exchange {
  comm::GroupPtr group;
  int64_t scatter_dim = 0, gather_dim = 0;
  std::vector<Sizes> scatter, gather;
  std::string label;
};
Transfer<std::vector<at::Tensor>> start_exchange(const std::vector<at::Tensor>& tensors, const Exchange& exchange);

}  // namespace tessera::parallel
