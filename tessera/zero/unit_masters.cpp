// Unit's masters: reading and writing them, and how they follow what a user writes to the weights.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#include "tessera/shard/dtype.h"
#include "tessera/shard/part.h"
#include "tessera/shard/storage.h"
#include "tessera/zero/unit.h"

namespace tessera::zero {

namespace {

// Memory on the device for new values of `range`, which are to be stored.
at::Tensor place_for(const shard::Buffer& buffer, shard::Range range) {
  return buffer.is_here() ? buffer.view(range) : at::empty({range.size()}, buffer.options());
}

}  // namespace

bool Unit::adopts(const Param& param) const {
  return master_.defined() && !flat_->sharded() && !param.ahead && master_version() == known_master_;
}

void Unit::adopt_written(const Param& param) {
  if (!adopts(param)) return;
  for (const shard::Range tile : shard::tiles_of(owned_slice(param))) {
    const at::Tensor old = master_.read(tile), written = weights().read(tile).to(old.device());
    adopt_tile(tile, old.to(written.scalar_type()) == written, written);
  }
}

void Unit::adopt_changed(const Param& param, const at::Tensor& before) {
  if (!master_is_weight()) adopt_changed(param, before, weights().read(owned_slice(param)));
}

void Unit::adopt_replaced(const Param& param, const at::Tensor& before) {
  const shard::Range mine = shard::intersect(param.range, owned_);
  if (mine.empty()) return;
  const at::Tensor now = shard::flatten_like_param(param.tensor.detach(), param.form);
  adopt_changed(param, before, now.narrow(0, mine.begin - param.range.begin, mine.size()));
}

void Unit::adopt_changed(const Param& param, const at::Tensor& before, const at::Tensor& now) {
  const shard::Range range = owned_slice(param);
  for (const shard::Range tile : shard::tiles_of(range)) {
    const auto part = [&](const at::Tensor& all) { return all.narrow(0, tile.begin - range.begin, tile.size()); };
    adopt_tile(tile, part(now) == part(before), part(now));
  }
}

void Unit::adopt_beside_residual(const Param& param) {
  const bool first = !param.known.defined();
  const at::Tensor known = first ? weights().read(owned_slice(param)).clone() : param.known;
  if (first) {
    set_master_from(param, param.tensor.detach());
  } else {
    adopt_changed(param, known);
  }
  own(param).known = known;
  own(param).unwritten = 0;
  note_weights(param);
}

void Unit::count_update(const Param& param) {
  Param& p = own(param);
  ++p.step;
  p.ahead = false;
  // torch's own in-place updates move the version too: a graph kept over the step cannot be used again silently.
  p.tensor.unsafeGetTensorImpl()->bump_version();
  p.writes.forget_own(p.tensor);
}

void Unit::know_writes(const Param& param, bool followed) {
  Param& p = own(param);
  if (followed) p.ahead = false;
  p.writes.forget(p.tensor);
}

void Unit::note_updated(const std::vector<bool>& present) {
  for (Param& p : params_)
    if (present[p.id]) note_updated(p);
  if (std::ranges::all_of(params_, [&](const Param& p) { return present[p.id]; })) note_master();
}

void Unit::note_updated(Param& param) {
  constexpr int64_t kFollowed = 100;
  if (!param.known.defined()) return;
  if (++param.unwritten > kFollowed) return param.known.reset();
  note_weights(param);
}

void Unit::follow(const Param& param, std::optional<int64_t> unwritten) {
  Param& p = own(param);
  if (!unwritten) return p.known.reset();
  if (!residual_.defined() || flat_->sharded()) return;
  if (!p.known.defined()) p.known = weights().read(owned_slice(p)).clone();
  p.unwritten = *unwritten;
}

void Unit::note_weights(const Param& param) {
  if (param.known.defined()) own(param).known.copy_(weights().read(owned_slice(param)));
}

// On a device nothing is waited for, and all values are written; on the CPU nothing is written where all values stay.
void Unit::adopt_tile(shard::Range tile, const at::Tensor& same, const at::Tensor& now) {
  const shard::Buffer& kept = master_.defined() ? master_ : residual_;
  const at::Tensor old = kept.read(tile), stays = same.to(old.device());
  if (old.is_cpu() && stays.all().item<bool>()) return;
  if (residual_.defined()) return residual_.write(tile, at::where(stays, old, at::zeros_like(old)));
  write_master(tile, at::where(stays, old, now.to(old.device(), at::kFloat)));
}

void Unit::note_master() {
  if (master_.defined()) known_master_ = master_version();
}

void Unit::set_master_from(const Param& param, const at::Tensor& values) {
  const shard::Range mine = shard::intersect(param.range, owned_);
  if (mine.empty()) return;
  const shard::Range r{mine.begin - owned_.begin, mine.end - owned_.begin};
  const at::Tensor flat_values = shard::flatten_like_param(values, param.form);
  write_master(r, flat_values.narrow(0, mine.begin - param.range.begin, mine.size()));
}

at::Tensor Unit::read_master(shard::Range range) const {
  if (master_.defined()) return master_.read(range);
  at::Tensor values = weights().read(range);
  if (!residual_.defined()) return values;
  at::Tensor joined = at::empty({range.size()}, values.options().dtype(at::kFloat));
  shard::join_master(joined, values, residual_.read(range));
  return joined;
}

void Unit::write_master(shard::Range range, const at::Tensor& values) {
  if (master_.defined()) {
    const bool known = master_version() == known_master_;
    master_.write(range, values);
    if (known) note_master();
    return;
  }
  if (!residual_.defined()) return weights_to_write().write(range, values);
  // There are no flat parameters yet: their constructor makes the weights.
  const shard::Buffer to = flat_ ? weights_to_write() : shard::Buffer();
  for (const shard::Range tile : shard::tiles_of(range)) {
    const at::Tensor rest = place_for(residual_, tile);
    const at::Tensor weight =
        flat_ ? place_for(to, tile) : at::empty({tile.size()}, residual_.options().dtype(at::kBFloat16));
    const at::Tensor part = values.narrow(0, tile.begin - range.begin, tile.size());
    shard::split_master(weight, rest, part.to(rest.device(), at::kFloat).contiguous());
    residual_.store(tile, rest);
    if (flat_) to.store(tile, weight);
  }
}

void Unit::refresh_weights() {
  if (!master_.defined()) return;
  const shard::Buffer to = weights_to_write();
  for (const shard::Range tile : shard::tiles_of({0, owned_.size()})) {
    const at::Tensor weight = place_for(to, tile);
    shard::scaled_copy(weight, master_.read(tile));
    to.store(tile, weight);
  }
  for (Param& p : params_)
    p.ahead = false;
  note_master();
}

}  // namespace tessera::zero
