#include "tessera/parallel/vocabulary.h"

#include <limits>

#include "tessera/base/error.h"
#include "tessera/comm/backends.h"
#include "tessera/parallel/functions.h"
#include "tessera/parallel/held.h"
#include "tessera/parallel/transfers.h"

namespace tessera::parallel {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

// Checks indices where the CPU can look at values for nothing; a device would have to be waited for.
void check_indices(const at::Tensor& indices, int64_t vocabulary, int64_t ignored, const std::string& label) {
  TESSERA_CHECK_VALUE(!indices.is_floating_point() && !indices.is_complex(), "parallel", label,
                      ": indices are integers, not ", indices.scalar_type());
  if (!indices.is_cpu() || indices.numel() == 0) return;
  const at::Tensor wrong = ((indices < 0) | (indices >= vocabulary)) & (indices != ignored);
  if (!wrong.any().item<bool>()) return;
  TESSERA_FAIL(::c10::IndexError, "[parallel] ", label, ": index ", indices.masked_select(wrong)[0].item<int64_t>(),
               " is out of range for a vocabulary of ", vocabulary);
}

struct EmbeddingCall {
  Region region;
  int64_t rows, padding;
};

// `indices`: in this rank's rows; 0 where `elsewhere`.
struct EmbeddingFunction : torch::autograd::Function<EmbeddingFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& weight, const at::Tensor& indices,
                            const at::Tensor& elsewhere, const EmbeddingCall& call) {
    ctx->save_for_backward({indices, elsewhere});
    hold(ctx, call);
    return rows_of(weight, indices, elsewhere, call.region);
  }
  static at::Tensor rows_of(const at::Tensor& weight, const at::Tensor& indices, const at::Tensor& elsewhere,
                            const Region& region) {
    const Along along{region.group, region.sequence_dim, region.sequence_sizes, region.label};
    // A rank without rows looks up zeros.
    const at::Tensor rows = weight.size(0) > 0 ? at::embedding(weight, indices).masked_fill_(elsewhere, 0)
                                               : at::zeros(with_width(indices, weight.size(1)), weight.options());
    return (region.sequence_dim >= 0 ? start_scatter_sum(rows, along) : start_sum(rows, along, /*in_place=*/true))
        .wait();
  }
  static Sizes with_width(const at::Tensor& indices, int64_t width) {
    Sizes sizes = indices.sizes().vec();
    sizes.push_back(width);
    return sizes;
  }
  static variable_list backward(AutogradContext* ctx, variable_list& gradients) {
    const EmbeddingCall& call = held<EmbeddingCall>(ctx);
    const variable_list saved = ctx->get_saved_variables();
    at::Tensor gradient = std::move(gradients[0]);
    const Region& region = call.region;
    if (region.sequence_dim >= 0)
      gradient = gather_for_use(gradient, region.group, region.sequence_dim, region.sequence_sizes, region.label);
    else  // each rank makes its own use of the gradient: a second derivative sees it
      gradient = copy_to_ranks(gradient, region.group, region.label);
    if (call.rows == 0) return {at::zeros({0, gradient.size(-1)}, gradient.options()), {}, {}, {}};
    gradient = gradient.masked_fill(saved[1], 0);
    return {at::embedding_dense_backward(gradient, saved[0], call.rows, call.padding, false), {}, {}, {}};
  }
};

}  // namespace

at::Tensor vocab_embedding(const at::Tensor& indices, const at::Tensor& weight, int64_t begin, int64_t vocabulary,
                           int64_t padding_idx, const Region& region) {
  TESSERA_CHECK_VALUE(region.group != nullptr, "parallel", region.label, ": there is no group");
  TESSERA_CHECK_VALUE(weight.dim() == 2 && begin >= 0 && begin + weight.size(0) <= vocabulary, "parallel", region.label,
                      ": rows of a weight of ", weight.sizes(), " from ", begin, " on do not lie in a vocabulary of ",
                      vocabulary);
  check_indices(indices, vocabulary, std::numeric_limits<int64_t>::min(), region.label);
  if (region.group->size() == 1) return at::embedding(weight, indices, padding_idx);
  const int64_t rows = weight.size(0);
  const at::Tensor elsewhere = ((indices < begin) | (indices >= begin + rows)).unsqueeze(-1);
  // Indices that no rank holds stay out of range, for the device to find.
  const at::Tensor held_by_others = elsewhere.squeeze(-1) & (indices >= 0) & (indices < vocabulary);
  const at::Tensor mine = (indices - begin).masked_fill(held_by_others, 0);
  const int64_t padding = padding_idx >= begin && padding_idx < begin + rows ? padding_idx - begin : -1;
  const EmbeddingCall call{region, rows, padding};
  return records(weight) ? EmbeddingFunction::apply(weight, mine, elsewhere, call)
                         : EmbeddingFunction::rows_of(weight, mine, elsewhere, region);
}

namespace {

// Rows of so many elements in all at a time stay in the caches; a device takes all at once.
int64_t rows_at_once(const at::Tensor& logits) {
  constexpr int64_t kElements = 1 << 16;
  return logits.is_cpu() ? std::max<int64_t>(kElements / std::max<int64_t>(logits.size(1), 1), 1)
                         : std::max<int64_t>(logits.size(0), 1);
}

template <class F>
void for_rows(const at::Tensor& logits, F&& f) {
  const int64_t step = rows_at_once(logits);
  for (int64_t begin = 0; begin < logits.size(0); begin += step)
    f(begin, std::min(step, logits.size(0) - begin));
}

struct EntropyCall {
  int64_t begin = 0, ignored = 0;
  comm::GroupPtr group;
  bool give_away = false;
  const char* name = "";   // of the caller's function
  at::Tensor logits = {};  // where they are given away
  Sizes sizes = {};        // of the caller's logits
};

// For each row [tokens]: the column of its target here (0 where elsewhere), whether the target is here, whether the row counts.
struct Targets {
  at::Tensor column, here, counts;
};
Targets targets_of(const at::Tensor& target, int64_t begin, int64_t columns, int64_t ignored) {
  Targets result;
  result.counts = target != ignored;
  result.here = (target >= begin) & (target < begin + columns) & result.counts;
  result.column = (target - begin).masked_fill(result.here.logical_not(), 0);
  return result;
}

// The logarithm of the sum of exponentials, and the loss, of each row of `logits` [tokens, columns].
std::pair<at::Tensor, at::Tensor> entropy(const at::Tensor& logits, const at::Tensor& target, const EntropyCall& call) {
  const int64_t tokens = logits.size(0), columns = logits.size(1);
  const Targets targets = targets_of(target, call.begin, columns, call.ignored);
  const auto options = logits.options().dtype(at::kFloat);
  at::Tensor maxima = columns > 0 ? logits.amax(1).to(at::kFloat) : at::full({tokens}, -INFINITY, options);
  call.group->all_reduce(maxima, comm::ReduceOp::Max, "maxima of logits").wait();
  at::Tensor sums = at::zeros({2, tokens}, options);  // of exponentials; the target's logit
  if (columns > 0) {
    for_rows(logits, [&](int64_t begin, int64_t count) {
      const at::Tensor shifted =
          logits.narrow(0, begin, count).to(at::kFloat) - maxima.narrow(0, begin, count).unsqueeze(1);
      const auto part = [&](const at::Tensor& t) { return t.narrow(0, begin, count); };
      sums[1]
          .narrow(0, begin, count)
          .copy_(shifted.gather(1, part(targets.column).unsqueeze(1))
                     .squeeze(1)
                     .masked_fill_(part(targets.here).logical_not(), 0));
      sums[0].narrow(0, begin, count).copy_(shifted.exp_().sum(1));
    });
  }
  call.group->all_reduce(sums, comm::ReduceOp::Sum, "sums of exponentials").wait();
  const at::Tensor logs = sums[0].log();
  return {logs + maxima, (logs - sums[1]).masked_fill_(targets.counts.logical_not(), 0)};
}

struct EntropyFunction : torch::autograd::Function<EntropyFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits, const at::Tensor& target,
                            EntropyCall call) {
    call.sizes = logits.sizes().vec();
    const at::Tensor rows = as_rows(logits);
    auto [logs, losses] = entropy(rows, target, call);
    if (call.give_away) call.logits = rows.is_contiguous() ? rows : rows.contiguous();
    ctx->save_for_backward({call.give_away ? at::Tensor() : rows, target, logs});
    hold(ctx, std::move(call));
    return losses;
  }
  static variable_list backward(AutogradContext* ctx, variable_list& gradients) {
    EntropyCall& call = held<EntropyCall>(ctx);
    TESSERA_CHECK_BUILT(!c10::GradMode::is_enabled(), "parallel", call.name,
                        " cannot be differentiated twice (create_graph)");
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor logits = call.give_away ? std::exchange(call.logits, {}) : saved[0];
    TESSERA_CHECK(logits.defined(), "parallel",
                  "a second backward of vocab_cross_entropy, whose logits were given away; call it without give_away");
    const at::Tensor result = call.give_away ? logits : at::empty(logits.sizes(), logits.options());
    const Targets targets = targets_of(saved[1], call.begin, logits.size(1), call.ignored);
    const at::Tensor factors = gradients[0].to(at::kFloat).masked_fill(targets.counts.logical_not(), 0).unsqueeze(1);
    if (logits.size(1) > 0) {
      for_rows(logits, [&](int64_t begin, int64_t count) {
        const auto part = [&](const at::Tensor& t) { return t.narrow(0, begin, count); };
        at::Tensor rows = (part(logits).to(at::kFloat) - part(saved[2]).unsqueeze(1)).exp_();
        rows.scatter_add_(1, part(targets.column).unsqueeze(1), part(targets.here).unsqueeze(1).to(at::kFloat).neg_());
        part(result).copy_(rows.mul_(part(factors)));
      });
    }
    return {result.view(call.sizes), {}, {}};
  }
};

at::Tensor token_losses(const at::Tensor& logits, const at::Tensor& target, int64_t vocabulary, EntropyCall call) {
  check_indices(target, vocabulary, call.ignored, c10::str("target of ", call.name));
  const at::Tensor tokens = target.reshape({-1});
  const at::Tensor losses = records(logits) ? EntropyFunction::apply(logits, tokens, std::move(call))
                                            : entropy(as_rows(logits), tokens, call).second;
  return losses.view(target.sizes());
}

}  // namespace

at::Tensor vocab_cross_entropy(const at::Tensor& logits, const at::Tensor& target, int64_t begin, int64_t vocabulary,
                               const comm::GroupPtr& group, int64_t ignore_index, bool give_away) {
  TESSERA_CHECK_VALUE(group != nullptr, "parallel", "vocab_cross_entropy: there is no group");
  TESSERA_CHECK_VALUE(
      logits.dim() >= 1 && logits.is_floating_point() && target.sizes() == logits.sizes().slice(0, logits.dim() - 1),
      "parallel", "vocab_cross_entropy: logits of ", logits.sizes(), " need a target of their sizes but the last, not ",
      target.sizes());
  TESSERA_CHECK_VALUE(begin >= 0 && begin + logits.size(-1) <= vocabulary, "parallel", "vocab_cross_entropy: columns ",
                      begin, " to ", begin + logits.size(-1), " do not lie in a vocabulary of ", vocabulary);
  return token_losses(logits, target, vocabulary, {begin, ignore_index, group, give_away, "vocab_cross_entropy"});
}

at::Tensor sequence_cross_entropy(const at::Tensor& logits, const at::Tensor& target, const comm::GroupPtr& group,
                                  int64_t ignore_index, const Sizes& sizes) {
  TESSERA_CHECK_VALUE(group != nullptr, "sequence_cross_entropy", "there is no group");
  TESSERA_CHECK_VALUE(logits.dim() == 3 && target.sizes() == logits.sizes().slice(0, 2), "sequence_cross_entropy",
                      "logits have the sizes ", logits.sizes(), ", target ", target.sizes(),
                      "; they must be [sequence, batch, vocabulary] and [sequence, batch]");
  TESSERA_CHECK_VALUE(logits.is_floating_point(), "sequence_cross_entropy", "logits are floating-point numbers, not ",
                      logits.scalar_type());
  const at::Tensor own = token_losses(logits, target, logits.size(-1),
                                      {0, ignore_index, comm::single_group(), false, "sequence_cross_entropy"});
  return gather_from_ranks(own, group, 0, sizes, "losses of the parts of a sequence");
}

at::Tensor mean_over_sequence(const at::Tensor& loss, const at::Tensor& labels, const comm::GroupPtr& group,
                              int64_t ignore_index) {
  const at::Tensor count = (labels != ignore_index).sum().to(loss.options().dtype(at::kFloat).requires_grad(false));
  const at::Tensor part = at::where(count > 0, loss.to(at::kFloat) * count, at::zeros_like(count));
  if (part.requires_grad())  // a rank's gradient is 1 / ranks of the ranks' mean
    part.register_hook([ranks = group->size()](const at::Tensor& gradient) { return gradient * ranks; });
  const std::vector<at::Tensor> sums =
      reduce_from_ranks(at::stack({part, count}), group, "mean_over_sequence").unbind();
  return sums[0] / sums[1].clamp_min(1);
}

}  // namespace tessera::parallel
