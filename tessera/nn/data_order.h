// Orders of a program's own for the passes of a Loader: weighted, of examples of like length, of a curriculum.
//
//   const auto weighted = tessera::nn::order_by([=](int64_t, at::Generator draws) {
//     return at::multinomial(weights, examples, /*replacement=*/true, draws);
//   });
//   tessera::nn::Loader loader(dataset, engine, {.order = weighted});
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tessera::nn {

class PassOrder {
 public:
  virtual ~PassOrder() = default;
  // Returns the numbers of the examples that pass `epoch` gives, over all ranks, in their order: 1-D whole numbers below the dataset's
  // size, as many as the pass shall have; some may come several times, others never. The same on all ranks: each of them takes every
  // n-th, so that the batches of all ranks in a step are neighbours.
  virtual at::Tensor order(int64_t epoch) = 0;
  // What order() goes by beside the number of the pass, for checkpoints: a run that goes on amid a pass has state() of before its
  // order() loaded, and makes the order again.
  virtual c10::IValue state() const { return {}; }
  virtual void load_state(const c10::IValue& /*state*/) {}
};

// An order that depends on the pass alone, and on what it draws: `draws` has a seed of the pass's.
using OrderFunction = std::function<at::Tensor(int64_t epoch, at::Generator draws)>;
std::shared_ptr<PassOrder> order_by(OrderFunction order, uint64_t seed = 0);

namespace detail {

// The order of a pass over a dataset of `size` examples. Value error for what is none.
std::vector<int64_t> order_of(PassOrder& order, int64_t epoch, int64_t size);
// In a few words, for ranks to compare.
std::string line_of(const std::vector<int64_t>& order);

}  // namespace detail
}  // namespace tessera::nn
