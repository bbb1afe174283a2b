#include "tessera/parallel/layers.h"

#include <ATen/autocast_mode.h>

#include "tessera/base/error.h"
#include "tessera/parallel/functions.h"
#include "tessera/parallel/held.h"
#include "tessera/parallel/inside.h"
#include "tessera/parallel/transfers.h"

namespace tessera::parallel {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What the backwards of the layers behind one input share. Their nodes hold it, so it holds no tensor with a graph.
struct Entry {
  Along along;
  bool sequence = false, overlap = true;
  int layers = 0;  // layers that will want a gradient here

  // State of the backward that is running:
  int arrived = 0;  // layers that have given their gradient
  at::Tensor sum;
  std::optional<Transfer<at::Tensor>> flight;
  at::Tensor gathered;  // the input, once more

  void add(at::Tensor gradient);
  at::Tensor leave();
};
using EntryPtr = std::shared_ptr<Entry>;

// An input inside its region.
struct Entered {
  at::Tensor given;  // by the caller
  int64_t version = 0;
  at::ScalarType autocast = at::ScalarType::Undefined;
  at::Tensor outside;  // as given, in autocast's dtype; a part in sequence regions
  at::Tensor inside;   // whole
  bool recorded = false;
  EntryPtr entry;
};

namespace {

// The dtype of autocast; undefined where it is off.
at::ScalarType autocast_dtype(const at::Tensor& t) {
  const auto device = t.device().type();
  const bool on = at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device);
  return on ? at::autocast::get_autocast_dtype(device) : at::ScalarType::Undefined;
}

std::optional<at::Tensor> cast(const std::optional<at::Tensor>& t) {
  if (!t || !t->defined()) return std::nullopt;
  const at::ScalarType dtype = autocast_dtype(*t);
  return dtype == at::ScalarType::Undefined ? t : at::autocast::cached_cast(dtype, *t, t->device().type());
}

at::Tensor product_of_rows(const at::Tensor& a, const at::Tensor& b) {
  return as_rows(a).t().mm(as_rows(b));
}

Along along_of(const Region& region) {
  return {region.group, std::max<int64_t>(region.sequence_dim, 0), region.sequence_sizes, region.label};
}

void check(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const Region& region) {
  TESSERA_CHECK_VALUE(region.group != nullptr, "parallel", region.label, ": there is no group");
  TESSERA_CHECK_VALUE(weight.dim() == 2 && x.dim() >= 1 && x.size(-1) == weight.size(1), "parallel", region.label,
                      ": an input of ", x.sizes(), " does not fit this rank's weight of ", weight.sizes());
  TESSERA_CHECK_VALUE(!bias || !bias->defined() || bias->numel() == weight.size(0), "parallel", region.label,
                      ": a bias of ", bias ? bias->numel() : 0, " elements does not fit this rank's weight of ",
                      weight.sizes());
  TESSERA_CHECK_VALUE(region.sequence_dim < x.dim() - 1, "parallel", region.label, ": the sequence cannot be dim ",
                      region.sequence_dim, " of an input of ", x.sizes());
}

// Identity or gather; the backward takes what the layers behind it have added up.
struct EnterFunction : torch::autograd::Function<EnterFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const EntryPtr& entry) {
    ctx->set_materialize_grads(false);
    hold(ctx, entry);
    return entry->sequence ? start_gather(x, entry->along).wait() : x.detach();
  }
  static variable_list backward(AutogradContext* ctx, variable_list& gradients) {
    Entry& entry = *held<EntryPtr>(ctx);
    at::Tensor gradient = std::move(gradients[0]);
    if (gradient.defined() && records(gradient)) {  // gradients were not added up, so that they can be differentiated
      return {entry.sequence
                  ? scatter_sum(gradient, entry.along.group, entry.along.dim, entry.along.sizes, entry.along.label)
                  : reduce_from_ranks(gradient, entry.along.group, entry.along.label),
              {}};
    }
    if (gradient.defined()) entry.add(std::move(gradient));
    return {entry.leave(), {}};
  }
};

std::shared_ptr<Entered> enter(const at::Tensor& x, const Region& region) {
  auto entered = std::make_shared<Entered>();
  entered->given = x;
  entered->version = x.is_inference() ? 0 : x._version();
  entered->autocast = autocast_dtype(x);
  entered->outside = *cast(x);
  entered->recorded = records(entered->outside);
  entered->entry = std::make_shared<Entry>();
  Entry& entry = *entered->entry;
  entry.along = along_of(region);
  entry.sequence = region.sequence_dim >= 0;
  entry.overlap = region.overlap;
  if (entered->recorded)
    entered->inside = EnterFunction::apply(entered->outside, entered->entry);
  else
    entered->inside = entry.sequence ? start_gather(entered->outside, entry.along).wait() : entered->outside;
  return entered;
}

// `input`: what the backward needs of the input: the whole, or this rank's part, to be gathered again.
struct ColumnCall {
  EntryPtr entry;
  bool gather_again;
  at::Tensor input;
};

struct ColumnFunction : torch::autograd::Function<ColumnFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& inside, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, const ColumnCall& call) {
    ctx->saved_data["bias"] = bias.has_value();
    ctx->save_for_backward({call.input, weight});
    hold(ctx, ColumnCall{call.entry, call.gather_again, {}});
    return at::linear(inside, weight, bias);
  }
  static variable_list backward(AutogradContext* ctx, variable_list& gradients) {
    const at::Tensor gradient = std::move(gradients[0]);
    const ColumnCall& call = held<ColumnCall>(ctx);
    Entry& entry = *call.entry;
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& weight = saved[1];
    const bool twice = c10::GradMode::is_enabled();
    const bool wants_weight = ctx->needs_input_grad(1);
    at::Tensor input = saved[0], input_gradient, weight_gradient, bias_gradient;
    std::optional<Transfer<at::Tensor>> gathering;
    if (call.gather_again && wants_weight) {
      if (twice)
        input = gather_for_use(input, entry.along.group, entry.along.dim, entry.along.sizes, entry.along.label);
      else if (entry.gathered.defined())
        input = entry.gathered;
      else
        gathering.emplace(start_gather(input, entry.along));
    }
    if (ctx->needs_input_grad(0)) {
      input_gradient = gradient.matmul(weight);
      if (gathering) input = entry.gathered = gathering->wait();  // in the order in which they were launched
      gathering.reset();
      if (!twice) entry.add(std::exchange(input_gradient, {}));
    }
    if (gathering) input = gathering->wait();
    if (wants_weight) weight_gradient = product_of_rows(gradient, input);
    if (ctx->saved_data["bias"].toBool() && ctx->needs_input_grad(2)) bias_gradient = as_rows(gradient).sum(0);
    return {input_gradient, weight_gradient, bias_gradient, {}};
  }
};

struct RowFunction : torch::autograd::Function<RowFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, const Region& region) {
    ctx->saved_data["bias"] = bias.has_value();
    ctx->save_for_backward({x, weight});
    hold(ctx, region);
    return product(x, weight, bias, region);
  }
  static at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            const Region& region) {
    const at::Tensor part = at::linear(x, weight).contiguous();
    at::Tensor sum = region.sequence_dim >= 0 ? start_scatter_sum(part, along_of(region)).wait()
                                              : start_sum(part, along_of(region), /*in_place=*/true).wait();
    return bias ? sum.add_(*bias) : sum;
  }
  static variable_list backward(AutogradContext* ctx, variable_list& gradients) {
    at::Tensor gradient = std::move(gradients[0]);
    const Region& region = held<Region>(ctx);
    const variable_list saved = ctx->get_saved_variables();
    if (region.sequence_dim >= 0)
      gradient = gather_for_use(gradient, region.group, region.sequence_dim, region.sequence_sizes, region.label);
    else  // each rank makes its own use of the gradient: a second derivative sees it
      gradient = copy_to_ranks(gradient, region.group, region.label);
    variable_list result(4);
    if (ctx->needs_input_grad(0)) result[0] = gradient.matmul(saved[1]);
    if (ctx->needs_input_grad(1)) result[1] = product_of_rows(gradient, saved[0]);
    if (ctx->saved_data["bias"].toBool() && ctx->needs_input_grad(2)) result[2] = as_rows(gradient).sum(0);
    return result;
  }
};

}  // namespace

void Entry::add(at::Tensor gradient) {
  if (sum.defined())
    sum.add_(gradient);
  else
    sum = is_only_holder(gradient) ? std::move(gradient) : gradient.clone(at::MemoryFormat::Contiguous);
  if (++arrived != layers || !overlap) return;
  flight.emplace(sequence ? start_scatter_sum(sum, along) : start_sum(sum, along, /*in_place=*/true));
}

at::Tensor Entry::leave() {
  at::Tensor total = std::exchange(sum, {});
  gathered.reset();
  arrived = 0;
  if (flight) {
    total = flight->wait();
    flight.reset();
  } else if (total.defined()) {
    total = (sequence ? start_scatter_sum(total, along) : start_sum(total, along, /*in_place=*/true)).wait();
  }
  return total;
}

at::Tensor Entrance::open(const at::Tensor& x, const Region& region) {
  TESSERA_CHECK_VALUE(region.group != nullptr, "parallel", region.label, ": there is no group");
  opens_ = true;
  last_ = parallel::enter(x, region);
  left_ = uses_;
  last_->given = last_->inside;
  last_->version = x.is_inference() ? 0 : last_->inside._version();
  return last_->inside;
}

std::shared_ptr<Entered> Entrance::enter(const at::Tensor& x, const Region& region) {
  const bool same = last_ && last_->given.is_same(x) && (x.is_inference() || last_->version == x._version()) &&
                    last_->autocast == autocast_dtype(x) && last_->recorded == records(x);
  TESSERA_CHECK_VALUE(same || !opens_, "parallel", region.label,
                      ": its input is not what came into the module around it; such a layer cannot begin a region "
                      "in which activations are whole");
  if (!same) {
    last_ = parallel::enter(x, region);
    left_ = uses_;
  }
  std::shared_ptr<Entered> entered = last_;
  if (--left_ <= 0) last_ = nullptr;
  return entered;
}

at::Tensor column_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                         const Region& region) {
  check(x, weight, bias, region);
  if (region.group->size() == 1) return at::linear(x, weight, bias);
  const auto entered = region.entrance ? region.entrance->enter(x, region) : enter(x, region);
  const at::Tensor used_weight = *cast(weight);
  const std::optional<at::Tensor> used_bias = cast(bias);
  if (!entered->recorded && !records(used_weight) && !(used_bias && records(*used_bias)))
    return at::linear(entered->inside, used_weight, used_bias);
  if (entered->recorded) ++entered->entry->layers;
  const bool gather_again = entered->entry->sequence && !region.keep_gathered;
  return ColumnFunction::apply(
      entered->inside, used_weight, used_bias,
      ColumnCall{entered->entry, gather_again, gather_again ? entered->outside : entered->inside});
}

at::Tensor row_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                      const Region& region) {
  check(x, weight, bias, region);
  if (region.group->size() == 1) return at::linear(x, weight, bias);
  const at::Tensor used_x = *cast(x), used_weight = *cast(weight);
  const std::optional<at::Tensor> used_bias = cast(bias);
  if (!records(used_x) && !records(used_weight) && !(used_bias && records(*used_bias)))
    return RowFunction::product(used_x, used_weight, used_bias, region);
  return RowFunction::apply(used_x, used_weight, used_bias, region);
}

at::Tensor join_outputs(const at::Tensor& own, const comm::GroupPtr& group, bool gather, const Sizes& sizes,
                        const Sizes& tail, comm::Label label) {
  if (gather) return gather_from_ranks(own, group, -1, sizes, label);
  if (tail.empty()) return own;
  const int64_t shared = tail[group->rank()], kept = own.size(-1) - shared;
  return at::cat({own.narrow(-1, 0, kept), gather_for_use(own.narrow(-1, kept, shared), group, -1, tail, label)}, -1);
}

at::Tensor own_inputs(const at::Tensor& x, const comm::GroupPtr& group, int64_t total, const Ranges& ranges,
                      comm::Label label) {
  int64_t mine = 0;
  for (const shard::Range& range : ranges)
    mine += range.size();
  if (x.dim() == 0 || x.size(-1) != total || total == mine) return x;
  const at::Tensor whole = copy_to_ranks(x, group, label);
  std::vector<at::Tensor> parts;
  for (const shard::Range& range : ranges)
    parts.push_back(whole.narrow(-1, range.begin, range.size()));
  return at::cat(parts, -1);
}

at::Tensor share_outputs(const at::Tensor& out, const comm::GroupPtr& group, shard::Range own_use, comm::Label label) {
  const at::Tensor shared = copy_to_ranks(out.narrow(-1, own_use.begin, own_use.size()), group, label);
  const at::Tensor after = out.narrow(-1, own_use.end, out.size(-1) - own_use.end);
  return border(at::cat({out.narrow(-1, 0, own_use.begin), shared, after}, -1));
}

}  // namespace tessera::parallel
