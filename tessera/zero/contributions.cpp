#include "tessera/zero/contributions.h"

#include <ATen/ops/empty.h>

#include "tessera/shard/dtype.h"
#include "tessera/shard/part.h"
#include "tessera/shard/storage.h"
#include "tessera/zero/memory_for.h"
#include "tessera/zero/sum_destination.h"

namespace tessera::zero {

namespace {
constexpr unsigned kRankShift = 48;  // local contributions: random bits of rank r are those of elements from r << 48
constexpr unsigned kStepShift = 16;  // additions of one step are numbered from step << 16,
constexpr uint64_t kSums = 1 << 15;  // sums are numbered from here on
}  // namespace

Contributions::Contributions(const Options& options, const Averaging& averaging, GradBuckets& buckets,
                             DestinationOf destination_of)
    : averaging_(averaging),
      buckets_(buckets),
      destination_of_(std::move(destination_of)),
      stochastic_(options.precision.grad_rounding == kernels::Rounding::Stochastic &&
                  at::elementSize(options.precision.grad) == 2),
      seed_(options.seed) {}

void Contributions::begin(Unit& unit) {
  if (unit.accumulates()) return;
  if (unit.in_pieces()) return unit.accumulate_in({}, /*pooled=*/false);
  const bool goes_on = one_rank(unit) && unit.has_sum();
  acquire(unit);
  if (goes_on) return destination_of_(unit).bring_to(unit, unit.partial());
  for (const shard::Range& gap : unit.layout().padding())
    shard::fill_zero(shard::part_of(unit.partial(), gap));
}

void Contributions::acquire(Unit& unit) {
  const bool unreduced = !unit.has_sum() && unit.progress().in_flight() == 0;
  if (unit.accumulates_in_grads() && (one_rank(unit) || unreduced)) {
    unit.make_grads(unit.layout().size());
    return unit.accumulate_in(unit.grads().tensor(), /*pooled=*/false);
  }
  unit.accumulate_in(
      memory_for([&] { return buckets_.contributions.acquire(unit.layout().size(), unit.grad_options()); },
                 "the gradients of unit '", unit.name(), "'"),
      /*pooled=*/true);
}

void Contributions::release(Unit& unit) {
  unit.on_this_stream();
  const at::Tensor memory = unit.give_partial();
  if (unit.progress().pooled()) buckets_.contributions.release(memory);
}

void Contributions::add(Unit& unit, const Param& param, const at::Tensor& grad, double scale, bool ours) {
  unit.on_this_stream();
  begin(unit);
  // Forms are dense, so equal strides mean equal order in memory.
  at::Tensor source = grad;
  if (grad.strides() != param.form.strides) source = shard::flatten_like_param(grad, param.form);
  if (source.scalar_type() == at::kDouble) source = source.to(at::kFloat);
  at::Tensor row;  // the gradient in a row, where it may be kept as it is
  if (unit.lies_alone(param) && !param.grad.filled() && (ours || !source.is_alias_of(grad)) &&
      source.dtype() == unit.grad_options().dtype())
    row = source.dim() == 1 ? source : shard::flatten_like_param(source, param.form);
  const int64_t n = param.range.size();
  if (one_rank(unit)) scale *= averaging_.mean_of(unit).rest;
  row.defined() ? unit.keep_row(param, row) : unit.make_slot(param);
  const shard::Memory to = unit.slot(param), from = shard::memory_of(source);
  if (!param.grad.filled()) {
    if (to.data != from.data || scale != 1) shard::scaled_copy(to, from, scale, n);
  } else if (stochastic_) {
    const uint64_t rank = static_cast<uint64_t>(unit.ranks().rank()) << kRankShift, number = unit.count_addition(param);
    shard::for_stretches(param.cut, {0, n}, [&](shard::Range r, int64_t first) {
      const at::Tensor sum = unit.contribution(param);
      shard::scaled_add(shard::memory_of(sum, r.begin), shard::memory_of(source, r.begin), scale, r.size(),
                        key_of(param, rank + static_cast<uint64_t>(first), number));
    });
  } else {
    shard::scaled_add(to, from, scale, n);
  }
  unit.grad_came(param);
}

void Contributions::put(Unit& unit, const Param& param, const at::Tensor& values) {
  unit.on_this_stream();
  begin(unit);
  unit.make_run(param);
  unit.contribution(param).copy_(values);
  unit.fill_grad(param);
}

// Random bits for addition `number` of this step to `param`, from element `first` of the whole on.
kernels::RandomKey Contributions::key_of(const Param& param, uint64_t first, uint64_t number) const {
  return {seed_, (static_cast<uint64_t>(param.step) << kStepShift) + number, param.first + first};
}

void Contributions::add_sum(Unit& unit, const at::Tensor& to, const at::Tensor& from) {
  if (!stochastic_) {
    shard::scaled_add(to, from);
    return;
  }
  const uint64_t number = kSums + unit.count_sum();  // ranks' additions differ in number: they do not count
  for (const Param& p : unit.params()) {
    const shard::Range r = unit.owned_slice(p);
    if (r.empty()) continue;
    const int64_t skipped = unit.owned().begin + r.begin - p.range.begin;
    shard::for_stretches(p.cut, {skipped, skipped + r.size()}, [&](shard::Range piece, int64_t first) {
      const int64_t at = r.begin + piece.begin - skipped;
      shard::scaled_add(shard::memory_of(to, at), shard::memory_of(from, at), 1.0, piece.size(),
                        key_of(p, static_cast<uint64_t>(first), number));
    });
  }
}

void Contributions::clear(Unit& unit, const Param& param) {
  if (unit.has_sum() && !one_rank(unit)) {
    unit.on_this_stream();
    const shard::Range r = unit.owned_slice(param);
    unit.gradients().fill(r, 0);
  }
  if (unit.lies_alone(param)) unit.drop_row(param);
  unit.drop_grad(param);
}

void Contributions::zero_unfilled(Unit& unit) {
  for (const Param& p : unit.params())
    if (!p.grad.filled() && unit.has_slot(p)) shard::fill_zero(unit.contribution(p));
}

at::Tensor Contributions::filled(const Unit& unit) {
  at::Tensor flags = at::empty({static_cast<int64_t>(unit.params().size())}, at::kInt);
  for (size_t i = 0; i < unit.params().size(); ++i)
    flags.mutable_data_ptr<int>()[i] = unit.params()[i].grad.filled() ? 1 : 0;
  return flags;
}

}  // namespace tessera::zero
