// Contributions: what the backwards of this rank add to the gradients of a unit, before the sum over ranks, and how a sum is
// added to one that is there.
//
// Note [Gradients in pieces]
//   On one rank nothing needs gradients in a row. Each parameter that is not small has a tensor of its own: the one that
//   autograd made, where nobody else has it and it lies as we want it, else a copy. Small ones that lie side by side share
//   one, into which they are copied. Norm and update take lists of them; what is missing is zero.
//
// Note [Gradients live once]
//   On several ranks the hook copies (first micro-batch) or adds (later ones) p.grad into the flat gradient, scaled and converted in that
//   one pass, and drops p.grad. Nothing is zeroed between steps: `filled` says which slots are valid, and slots without
//   a contribution are zeroed when their unit is reduced. Stage 0 gives p.grad back as a view of the flat gradient.
//
// Note [Accumulation in 16 bits]
//   What is added to a 16-bit gradient is rounded to nearest, as torch does, or stochastically where the policy says so:
//   then the mean of many small contributions is kept, where nearest rounding drops those below 0.4% of the sum. The random bits of a local
//   contribution depend on the rank too (ranks err independently), those of a sum over ranks do not: they are the same in
//   any world.
#pragma once

#include <functional>

#include "tessera/shard/dtype.h"
#include "tessera/zero/reduction.h"

namespace tessera::zero {

class SumDestination;
using DestinationOf = std::function<SumDestination&(const Unit&)>;

class Contributions {
 public:
  Contributions(const Options& options, const Averaging& averaging, GradBuckets& buckets, DestinationOf destination_of);

  // Contributions to `unit` have memory, if they had none.
  void begin(Unit& unit);
  // Adds scale * grad (dense, shape of the parameter) to the parameter's slot. `ours`: nobody else has it or its memory.
  void add(Unit& unit, const Param& param, const at::Tensor& grad, double scale, bool ours);
  // This rank's contribution to `param` is `values` (1-D), as add() had left it.
  void put(Unit& unit, const Param& param, const at::Tensor& values);
  // Forgets the contribution to `param` since the last step.
  void clear(Unit& unit, const Param& param);
  // Frees the contributions to `unit`.
  void release(Unit& unit);
  // Slots of `unit` without a contribution become zero.
  static void zero_unfilled(Unit& unit);
  // 1 for each parameter to which this rank contributed, else 0.
  static at::Tensor filled(const Unit& unit);
  // Adds a sum over ranks, `from`, to that of earlier backwards, `to`.
  void add_sum(Unit& unit, const at::Tensor& to, const at::Tensor& from);

 private:
  void acquire(Unit& unit);
  kernels::RandomKey key_of(const Param& param, uint64_t first, uint64_t number) const;

  const Averaging& averaging_;
  GradBuckets& buckets_;
  const DestinationOf destination_of_;
  bool stochastic_;  // Note [Accumulation in 16 bits]
  uint64_t seed_;
};

}  // namespace tessera::zero
