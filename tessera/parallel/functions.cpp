#include "tessera/parallel/functions.h"

#include "tessera/base/error.h"
#include "tessera/parallel/held.h"
#include "tessera/parallel/transfers.h"

namespace tessera::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

enum class Move : int64_t { Copy, Sum, Gather, Split, GatherForUse, ScatterSum };

Move partner(Move move) {
  switch (move) {
    case Move::Copy:
      return Move::Sum;
    case Move::Sum:
      return Move::Copy;
    case Move::Gather:
      return Move::Split;
    case Move::Split:
      return Move::Gather;
    case Move::GatherForUse:
      return Move::ScatterSum;
    default:
      return Move::GatherForUse;
  }
}

at::Tensor carry_out(const at::Tensor& x, Move move, const Along& along, bool in_place) {
  switch (move) {
    case Move::Copy:
      return x;
    case Move::Sum:
      return start_sum(x, along, in_place).wait();
    case Move::Gather:
    case Move::GatherForUse:
      return start_gather(x, along).wait();
    case Move::Split:
      return own_part(x, along);
    default:
      return start_scatter_sum(x, along).wait();
  }
}

at::Tensor differentiable(const at::Tensor& x, Move move, const Along& along);

struct MoveFunction : torch::autograd::Function<MoveFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, Move move, const Along& along) {
    hold(ctx, along);
    ctx->saved_data["move"] = static_cast<int64_t>(move);
    at::Tensor result = carry_out(x, move, along, false);
    // An input that is handed through could not be changed in place any more.
    return result.is_same(x) ? x.detach() : result;
  }
  static variable_list backward(AutogradContext* ctx, variable_list& gradients) {
    const at::Tensor gradient = std::move(gradients[0]);
    const Move back = partner(static_cast<Move>(ctx->saved_data["move"].toInt()));
    const auto& along = held<Along>(ctx);
    at::Tensor result = records(gradient) ? differentiable(gradient, back, along)
                                          : carry_out(gradient, back, along, is_only_holder(gradient));
    return {std::move(result), {}, {}};
  }
};

at::Tensor differentiable(const at::Tensor& x, Move move, const Along& along) {
  return MoveFunction::apply(x, move, along);
}

at::Tensor run(const at::Tensor& x, Move move, const comm::GroupPtr& group, int64_t dim, const Sizes& sizes,
               comm::Label label) {
  TESSERA_CHECK_VALUE(group != nullptr, "parallel", label, ": there is no group");
  const Along along{group, dim, sizes, std::string(label)};
  if (group->size() == 1) return x;
  return records(x) ? differentiable(x, move, along) : carry_out(x, move, along, false);
}

struct ExchangeFunction : torch::autograd::Function<ExchangeFunction> {
  static variable_list forward(AutogradContext* ctx, at::TensorList tensors, const Exchange& exchange) {
    hold(ctx, exchange);
    return start_exchange(tensors.vec(), exchange).wait();
  }
  static variable_list backward(AutogradContext* ctx, variable_list& gradients) {
    Exchange back = held<Exchange>(ctx);
    std::swap(back.scatter_dim, back.gather_dim);
    std::swap(back.scatter, back.gather);
    variable_list results = std::any_of(gradients.begin(), gradients.end(), records)
                                ? apply(at::TensorList(gradients), back)
                                : start_exchange(gradients, back).wait();
    results.emplace_back();
    return results;
  }
};

}  // namespace

at::Tensor copy_to_ranks(const at::Tensor& x, const comm::GroupPtr& group, comm::Label label) {
  return run(x, Move::Copy, group, 0, {}, label);
}
at::Tensor reduce_from_ranks(const at::Tensor& x, const comm::GroupPtr& group, comm::Label label) {
  return run(x, Move::Sum, group, 0, {}, label);
}
at::Tensor gather_from_ranks(const at::Tensor& x, const comm::GroupPtr& group, int64_t dim, const Sizes& sizes,
                             comm::Label label) {
  return run(x, Move::Gather, group, dim, sizes, label);
}
at::Tensor split_to_ranks(const at::Tensor& x, const comm::GroupPtr& group, int64_t dim, const Sizes& sizes,
                          comm::Label label) {
  return run(x, Move::Split, group, dim, sizes, label);
}
at::Tensor gather_for_use(const at::Tensor& x, const comm::GroupPtr& group, int64_t dim, const Sizes& sizes,
                          comm::Label label) {
  return run(x, Move::GatherForUse, group, dim, sizes, label);
}
at::Tensor scatter_sum(const at::Tensor& x, const comm::GroupPtr& group, int64_t dim, const Sizes& sizes,
                       comm::Label label) {
  return run(x, Move::ScatterSum, group, dim, sizes, label);
}

std::vector<at::Tensor> exchange(const std::vector<at::Tensor>& tensors, const comm::GroupPtr& group,
                                 int64_t scatter_dim, int64_t gather_dim, const std::vector<Sizes>& scatter_sizes,
                                 const Sizes& gather_sizes, comm::Label label) {
  TESSERA_CHECK_VALUE(group != nullptr, "parallel", label, ": there is no group");
  if (group->size() == 1) return tensors;
  Exchange call{group, scatter_dim, gather_dim, scatter_sizes, {}, std::string(label)};
  if (!gather_sizes.empty()) call.gather.assign(tensors.size(), gather_sizes);
  if (std::none_of(tensors.begin(), tensors.end(), records)) return start_exchange(tensors, call).wait();
  return ExchangeFunction::apply(at::TensorList(tensors), call);
}

}  // namespace tessera::parallel
