#include "tessera/parallel/functions.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/parallel/held.h"
#include "tessera/parallel/transfers.h"

namespace tessera::parallel {

// An exchange that two nodes of the graph share, and the exchange of their backward. No tensor with a graph is in it.
struct InFlight {
  Exchange exchange;
  std::optional<Transfer<std::vector<at::Tensor>>> transfer;
  std::shared_ptr<InFlight> back;
};

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using InFlightPtr = std::shared_ptr<InFlight>;

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

InFlightPtr turned(const Exchange& exchange) {
  auto back = std::make_shared<InFlight>(InFlight{exchange, {}, {}});
  std::swap(back->exchange.scatter_dim, back->exchange.gather_dim);
  std::swap(back->exchange.scatter, back->exchange.gather);
  return back;
}

// Starts an exchange. The result is the token: an empty tensor that makes the second half's node follow the first one's.
at::Tensor start(at::TensorList tensors, InFlight& flight) {
  flight.transfer.emplace(start_exchange(tensors.vec(), flight.exchange));
  return at::empty({0}, tensors[0].options());
}

variable_list finish(InFlight& flight) {
  variable_list results = flight.transfer->wait();
  flight.transfer.reset();
  return results;
}

at::Tensor start_differentiable(const variable_list& tensors, const InFlightPtr& flight);

struct FinishFunction : torch::autograd::Function<FinishFunction> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& token, const InFlightPtr& flight) {
    (void)token;
    hold(ctx, flight);
    return finish(*flight);
  }
  static variable_list backward(AutogradContext* ctx, variable_list& gradients) {
    InFlight& flight = *held<InFlightPtr>(ctx);
    flight.back = turned(flight.exchange);
    const bool twice = std::any_of(gradients.begin(), gradients.end(), records);
    return {twice ? start_differentiable(gradients, flight.back) : start(gradients, *flight.back), {}};
  }
};

struct StartFunction : torch::autograd::Function<StartFunction> {
  static at::Tensor forward(AutogradContext* ctx, at::TensorList tensors, const InFlightPtr& flight) {
    hold(ctx, flight);
    return start(tensors, *flight);
  }
  static variable_list backward(AutogradContext* ctx, variable_list& gradients) {
    const InFlightPtr back = std::exchange(held<InFlightPtr>(ctx)->back, {});
    variable_list results = records(gradients[0]) ? FinishFunction::apply(gradients[0], back) : finish(*back);
    results.emplace_back();
    return results;
  }
};

at::Tensor start_differentiable(const variable_list& tensors, const InFlightPtr& flight) {
  return StartFunction::apply(at::TensorList(tensors), flight);
}

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
  return Exchanging(tensors, group, scatter_dim, gather_dim, scatter_sizes, gather_sizes, label).wait();
}

Exchanging::Exchanging(const std::vector<at::Tensor>& tensors, const comm::GroupPtr& group, int64_t scatter_dim,
                       int64_t gather_dim, const std::vector<Sizes>& scatter_sizes, const Sizes& gather_sizes,
                       comm::Label label) {
  TESSERA_CHECK_VALUE(group != nullptr, "parallel", label, ": there is no group");
  if (group->size() == 1) {
    own_ = tensors;
    return;
  }
  flight_ = std::make_shared<InFlight>();
  flight_->exchange = {group, scatter_dim, gather_dim, scatter_sizes, {}, std::string(label)};
  if (!gather_sizes.empty()) flight_->exchange.gather.assign(tensors.size(), gather_sizes);
  if (std::any_of(tensors.begin(), tensors.end(), records))
    token_ = start_differentiable(tensors, flight_);
  else
    flight_->transfer.emplace(start_exchange(tensors, flight_->exchange));
}

std::vector<at::Tensor> Exchanging::wait() {
  if (flight_ == nullptr) return own_;
  return token_.defined() ? FinishFunction::apply(token_, flight_) : finish(*flight_);
}

at::Tensor take_slice(const at::Tensor& whole, const shard::Cut& cut) {
  const c10::AutoGradMode no_grad(false);
  std::vector<at::Tensor> parts;
  for (const shard::Range& range : cut.ranges)
    parts.push_back(whole.narrow(cut.dim, range.begin, range.size()));
  if (parts.empty()) parts.push_back(whole.narrow(cut.dim, 0, 0));
  return parts.size() == 1 ? parts[0].clone(at::MemoryFormat::Contiguous) : at::cat(parts, cut.dim);
}

// Other ranks have zeros there, so the greatest byte is that of whoever has the element, in every dtype.
at::Tensor join_slices(const at::Tensor& slice, const shard::Cut& cut, const comm::GroupPtr& group, comm::Label label) {
  const c10::AutoGradMode no_grad(false);
  at::Tensor whole = at::zeros(cut.sizes, slice.options().requires_grad(false));
  int64_t at = 0;
  for (const shard::Range& range : cut.ranges) {
    whole.narrow(cut.dim, range.begin, range.size()).copy_(slice.narrow(cut.dim, at, range.size()));
    at += range.size();
  }
  if (whole.numel() > 0)
    group->all_reduce(whole.view({-1}).view(at::kByte), comm::ReduceOp::Max, std::move(label)).wait();
  return whole;
}

}  // namespace tessera::parallel
