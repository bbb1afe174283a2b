#include "tessera/zero/regions.h"

#include <ATen/ops/clone.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/transforms.h"
#include "tessera/shard/storage.h"
#include "tessera/zero/memory_for.h"
#include "tessera/zero/update_lane.h"

namespace tessera::zero {

Regions::Regions(Units& units, BackwardDriver& driver)
    : units_(units), driver_(driver), open_(static_cast<size_t>(units.count())) {}

bool Regions::is_gathered(ParamId param) const {
  const Place& place = units_.at(param, "is_gathered");
  if (!place.held()) return true;
  return place.flat->state() == ParamState::Ready && (!place.trained() || units_.lane().is_awaited(*place.unit));
}

ParamPartition Regions::partition_of(ParamId param) const {
  const Place& place = units_.at(param, "partition_of");
  if (place.held()) return place.flat->partition_of(place.item);
  return {ParamState::Ready, false, {0, units_.params()[param].tensor.numel()}};
}

at::Tensor Regions::held_values(ParamId param) const {
  const Place& place = units_.at(param, "held_values");
  units_.lane().settle();
  if (place.held()) return place.flat->read(place.item, place.flat->partition_of(place.item).held);
  const at::Tensor& tensor = units_.params()[param].tensor;
  return shard::flatten_like_param(tensor, tensor);
}

void Regions::check_writer(Writes writes, int writer) const {
  TESSERA_CHECK_VALUE(writes != Writes::FromRank || (writer >= 0 && writer < units_.ranks().size()),
                      "zero.GatheredParameters", "modifier_rank ", writer, " is no rank of a group of ",
                      units_.ranks().size());
}

void Regions::open(const std::vector<ParamId>& params, Writes writes, int writer) try {
  const transforms::Suspended plain;
  check_writer(writes, writer);
  const bool writable = writes != Writes::None;
  const std::vector<ParamId> ids = units_.held(params, "gather");
  units_.check_here("gather");
  units_.lane().finish();
  const std::lock_guard lock(driver_.hooks().mutex());
  driver_.hooks().run_kept();
  for (const ParamId id : ids) {
    TESSERA_CHECK(!open_[id].open, "zero.GatheredParameters", "parameter '", units_[id].name(),
                  "' is in an open GatheredParameters region already; regions must not overlap");
  }
  size_t done = 0;
  try {
    for (; done < ids.size(); ++done) {
      units_.unsharder().hold(units_[ids[done]].number, writable);
      open_[ids[done]].open = true;
    }
    for (const ParamId id : ids)
      memory_for([&] { copy_before(id, writable); }, "a copy of parameter '", units_[id].name(), "' in a region");
  } catch (...) {
    while (done > 0)
      end(ids[--done]);
    throw;
  }
  for (const ParamId id : ids) {
    open_[id].writable = writable;
    const Place& place = units_[id];
    if (!place.flat->sharded()) place.flat->mark(place.item);  // updates write to the parameter, too
  }
  note_begun(params);
} catch (c10::OutOfMemoryError& error) {
  units_.fail_alone(error);
}

void Regions::copy_before(ParamId id, bool writable) {
  const Place& place = units_[id];
  if (place.flat->sharded()) return;
  if (writable && place.flat->shares()) place.flat->make_private_copy(place.item);
  if (writable && has_masters(id)) open_[id].before = place.unit->owned_values(place.item).clone();
}

void Regions::note_begun(const std::vector<ParamId>& params) {
  if (!params.empty()) begun_.push_back(params.front());
}

void Regions::note_ended(const std::vector<ParamId>& params) {
  const auto last = params.empty() ? begun_.rend() : std::find(begun_.rbegin(), begun_.rend(), params.front());
  if (last != begun_.rend()) begun_.erase(std::next(last).base());
}

std::string Regions::why_no_update() const {
  if (begun_.empty()) return "";
  return "parameter '" + units_.params()[begun_.back()].name +
         "' is in use (inside GatheredParameters); leave that before it changes";
}

void Regions::check_none_open() const {
  const std::string why = why_no_update();
  TESSERA_CHECK(why.empty(), "zero", why);
}

void Regions::end(ParamId id) {
  const Place& place = units_[id];
  open_[id] = {};
  if (!place.flat->sharded()) place.flat->end_private_copy(place.item);
  units_.unsharder().unhold(place.number);
}

std::vector<std::pair<ParamId, at::Tensor>> Regions::whole_copies() const {
  const c10::InferenceMode no_inference(false);
  std::vector<std::pair<ParamId, at::Tensor>> copies;
  for (ParamId id = 0; id < units_.count(); ++id) {
    if (!partition_of(id).partitioned || !is_gathered(id)) continue;
    try {
      copies.emplace_back(id, units_.params()[id].tensor.detach().clone());
    } catch (const c10::Error&) {
      // Released meanwhile, as by autograd's thread of a device after a backward that threw.
    }
  }
  return copies;
}

// The writer's values, also of what nobody holds here.
void Regions::broadcast(const std::vector<ParamId>& params, int writer) const {
  for (const ParamId id : params) {
    const Place& place = units_[id];
    const at::Tensor& tensor = units_.params()[id].tensor;
    const at::Tensor values = place.held() ? place.flat->values(place.item) : tensor.detach();
    broadcast_words(units_.ranks_of(id), {values}, units_.rank_sets().writer_of(units_.params()[id], writer),
                    "new values of '" + units_.params()[id].name + "'");
  }
}

// Not every write can be seen (p.data.copy_() leaves no trace), so all parameters of the region are taken; masters that
// still round to the parameter's values keep their bits.
void Regions::take_writes(const std::vector<ParamId>& params, Writes writes, int writer) {
  const c10::AutoGradMode no_grad(false);
  const std::vector<ParamId> ids = units_.held(params, "release");
  for (const ParamId id : ids) {
    TESSERA_CHECK(open_[id].writable, "zero.GatheredParameters", "parameter '", units_[id].name(),
                  "' was gathered for reading only; gather it for writing where a rank's values shall hold");
  }
  std::exception_ptr failure;  // this rank's error: the others get the writer's values all the same
  for (const ParamId id : ids) {
    try {
      units_[id].flat->take_replaced(units_[id].item);
    } catch (...) {
      failure = std::current_exception();
    }
  }
  if (writes == Writes::FromRank) broadcast(params, writer);
  if (failure) std::rethrow_exception(failure);
  units_.shared().readers_done("the writes of a region");
  RankGuard disks(any_elsewhere(ids));
  try {
    for (const ParamId id : ids)
      disks.run([&] {
        memory_for([&] { take_write(id); }, "what was written to parameter '", units_[id].name(), "' in a region");
      });
  } catch (const c10::OutOfMemoryError& error) {
    units_.set_broken(error.what_without_backtrace());
    throw;
  }
  units_.shared().written("the writes of a region");
  agree_on_disks(ids, disks);
}

bool Regions::has_masters(ParamId id) const {
  const Unit* unit = units_[id].unit;
  return unit != nullptr && !unit->master_is_weight();
}

void Regions::take_write(ParamId id) {
  const Place& place = units_[id];
  const bool masters = has_masters(id), apart = place.flat->sharded() || place.flat->has_private_copy(place.item);
  const at::Tensor before = masters && apart ? place.unit->owned_values(place.item).clone() : open_[id].before;
  place.flat->keep_write(place.item);
  if (!masters) return;
  place.unit->adopt_changed(*place.param, before);
  place.unit->know_writes(*place.param);
}

// Whether some values live elsewhere: the same on all ranks.
bool Regions::any_elsewhere(const std::vector<ParamId>& ids) const {
  return std::ranges::any_of(ids, [&](ParamId id) {
    const Place& place = units_[id];
    return place.trained() ? !lives_on_device(*place.unit) : place.flat->residence() != shard::Residence::Device;
  });
}

void Regions::agree_on_disks(const std::vector<ParamId>& ids, RankGuard& disks) {
  if (!disks.agrees()) return;
  for (const ParamId id : ids) {
    const Place& place = units_[id];
    disks.run_always([&] { place.trained() ? place.unit->flush() : place.flat->flush(); });
  }
  units_.check_came_to_end(disks.agree(units_.ranks()));
}

void Regions::close(const std::vector<ParamId>& params, Writes writes, int writer) try {
  const transforms::Suspended plain;
  check_writer(writes, writer);
  const std::vector<ParamId> ids = units_.held(params, "release");
  const std::lock_guard lock(driver_.hooks().mutex());
  note_ended(params);
  std::exception_ptr failure;
  try {
    if (writes != Writes::None) units_.check_here("release");
    if (writes != Writes::None) take_writes(params, writes, writer);
  } catch (...) {
    failure = std::current_exception();
  }
  for (const ParamId id : ids) {
    try {
      end(id);
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
} catch (c10::OutOfMemoryError& error) {
  units_.fail_alone(error);
}

}  // namespace tessera::zero
