#include "tessera/zero/units.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <functional>

#include "tessera/base/error.h"
#include "tessera/optim/advice.h"
#include "tessera/shard/device.h"
#include "tessera/zero/memory_for.h"
#include "tessera/zero/rank_guard.h"
#include "tessera/zero/tile.h"
#include "tessera/zero/update_lane.h"

namespace tessera::zero {

namespace {

constexpr const char* kHalfWritten =
    "the last update did not come to its end, weights and states do not belong together: load a checkpoint";

void check_params(const std::vector<ParamSpec>& params, const std::vector<optim::GroupOptions>& groups) {
  const ParamSpec* first = nullptr;
  for (const ParamSpec& p : params) {
    if (p.group < 0) continue;
    if (first == nullptr) first = &p;
    TESSERA_CHECK_VALUE(p.tensor.is_leaf(), "zero", "parameter '", p.name, "' is not a leaf tensor");
    TESSERA_CHECK_VALUE(at::isFloatingType(p.tensor.scalar_type()), "zero", "parameter '", p.name,
                        "' cannot be trained: its dtype is ", p.tensor.scalar_type());
    TESSERA_CHECK_VALUE(p.group < static_cast<int>(groups.size()), "zero", "parameter '", p.name,
                        "' names param group ", p.group, " of ", groups.size());
    shard::check_device(p.tensor.device());
    TESSERA_CHECK_VALUE(p.tensor.device() == first->tensor.device(), "zero", "parameter '", p.name, "' is on device '",
                        p.tensor.device(), "', parameter '", first->name, "' on '", first->tensor.device(),
                        "'; an engine trains a model on one device");
  }
}

// Gives every parameter of a unit its values, equal on all ranks: its own words, in the dtype that it comes with.
std::vector<FlatParams::Item> settle_values(const Ranks& ranks, const std::string& unit,
                                            const std::vector<const ParamSpec*>& members) {
  std::vector<FlatParams::Item> all;
  std::vector<at::Tensor> fresh;
  for (const ParamSpec* p : members) {
    all.push_back({p->name, p->tensor});
    if (p->restore) {
      p->restore();
    } else {
      fresh.push_back(p->tensor);
    }
  }
  memory_for([&] { broadcast_words(ranks, fresh, 0, "initial values of unit '" + unit + "'"); }, "the values of unit '",
             unit, "'");
  return all;
}

}  // namespace

Units::Units(const Options& options, const comm::Mesh& mesh, const std::vector<ParamSpec>& params, optim::Rule rule,
             const std::vector<optim::GroupOptions>& groups)
    : options_(options),
      placements_(shard::placements_of_stage(options.stage)),
      rule_(rule),
      groups_(groups),
      params_(params),
      places_(params.size()) {
  const c10::AutoGradMode no_grad(false);
  check_params(params, groups_);
  sets_.emplace(mesh, params, placements_.params == shard::Placement::Shard);
  planner_.emplace(options_, placements_, *sets_);
  lane_ = std::make_unique<UpdateLane>(*this);
  unsharder_ = std::make_unique<Unsharder>(
      options_.gather, phases_, [this](int informed, const std::string& why) { sets_->abort(informed, why); });
  unsharder_->follow_updates([this](int unit, bool waits) { return update_is_there(unit, waits); });
  for (size_t i = 0; i < params.size(); ++i)
    if (params[i].group >= 0) {
      trained_ids_.push_back(static_cast<ParamId>(i));
    } else if (!params[i].tensor.requires_grad()) {
      left_out_.push_back(static_cast<ParamId>(i));
    }
  params_changed();
  const std::vector<PlannedUnit> planned_units = planner_->plan(params, trained_ids_);
  shared_ = share(planned_units, params);
  try {
    build(planned_units, params);
  } catch (...) {
    undo();
    throw;
  }
  shared_.written("the initial values");
  number_elements();
  order_launches();
  built_ = true;
}

// An error of one rank's disk or device is an error of all: each broadcasts the values of all units first. (Where there is no
// memory for these the ranks' groups end.)
void Units::build(const std::vector<PlannedUnit>& units, const std::vector<ParamSpec>& params) {
  if (options_.home) check_client(params);
  const bool of_memory = !has_homes() && !ranks().device.is_cpu() && ranks().all() > 1;
  RankGuard disks = of_memory ? RankGuard::for_memory() : RankGuard(has_homes());
  const auto first_unit = static_cast<std::ptrdiff_t>(units_.size());
  const auto first_frozen = static_cast<std::ptrdiff_t>(frozen_.size());
  for (const PlannedUnit& planned : units) {
    std::vector<const ParamSpec*> originals;
    for (const ParamId id : planned.items)
      originals.push_back(&params[id]);
    std::vector<FlatParams::Item> items = settle_values(sets_->of(*originals.front()).ranks, planned.name, originals);
    const auto build_one = [&] {
      if (planned.kind == kFrozen) {
        build_frozen(planned, originals, std::move(items));
      } else {
        build_unit(planned, originals);
      }
    };
    disks.run([&] { memory_for(build_one, "the states of unit '", planned.name, "'"); });
  }
  if (!disks.agrees()) return;
  disks.run([&] { take_host_memory(first_unit); });
  std::for_each(units_.begin() + first_unit, units_.end(), [&](auto& unit) { disks.run([&] { unit->flush(); }); });
  std::for_each(frozen_.begin() + first_frozen, frozen_.end(), [&](auto& flat) { disks.run([&] { flat->flush(); }); });
  disks.agree(ranks()).check("[zero] model states could not be made, or brought to where they shall live: ");
}

// Undoes a construction. Parameters that are whole, or live elsewhere on one rank, keep their values.
void Units::undo() noexcept try {
  for (const auto& unit : units_)
    unit->drop_states();
  const auto keep = [](FlatParams& flat) {
    try {
      flat.make_whole();
    } catch (const std::exception&) {
      // There is no memory for these parameters: an access says that their engine could not be built.
    }
  };
  for (const auto& unit : units_)
    keep(unit->flat());
  for (const auto& flat : frozen_)
    keep(*flat);
  release("its engine could not be built");
} catch (const std::exception&) {
  // A device fails: the error that ended the construction says so.
}

// Takes host memory for gradients of units from `first` on that leave the device: all at once, largest first, to lose little.
void Units::take_host_memory(std::ptrdiff_t first) {
  int64_t bytes = 0;
  std::vector<HostGrads*> all;
  std::for_each(units_.begin() + first, units_.end(), [&](const auto& unit) {
    if (unit->host_grads() == nullptr) return;
    all.push_back(unit->host_grads());
    bytes += all.back()->bytes();
  });
  std::ranges::stable_sort(all, std::greater(), &HostGrads::bytes);
  const auto slabs = options_.pin_memory ? std::make_shared<shard::HostSlabs>() : nullptr;
  if (slabs) slabs->expect(bytes);
  for (HostGrads* grads : all)
    grads->take_memory(slabs);
}

void Units::number_elements() {
  uint64_t first = 0;
  for (const ParamId id : trained_ids_) {
    const Param& param = *places_[id].param;
    places_[id].unit->number_from(param, first);
    first += static_cast<uint64_t>(param.cut ? param.cut->numel() : param.tensor.numel());
  }
}

// Gradients are complete from the last unit of the forward to the first; those of the root (embeddings) and of resident
// units, which modules all over the model use, last.
void Units::order_launches() {
  std::reverse(units_.begin(), units_.end());
  root_and_flush_last();
}

void Units::root_and_flush_last() {
  std::stable_partition(units_.begin(), units_.end(), [](const auto& u) { return !u->is_root(); });
  std::stable_partition(units_.begin(), units_.end(), [](const auto& u) { return u->launch_at() != LaunchAt::Flush; });
}

SharedParams Units::share(const std::vector<PlannedUnit>& units, const std::vector<ParamSpec>& params) const {
  const RankSets::Set& set = sets_->all();
  if (!options_.share_params || !states_are_cut(set.ranks)) return {};
  int64_t bytes = 0;
  std::vector<int64_t> numels;
  for (const PlannedUnit& unit : units) {
    numels.clear();
    for (const ParamId id : unit.items) {
      const ParamSpec& p = params[id];
      TESSERA_CHECK_VALUE(p.tensor.is_cpu(), "zero", "tessera.shared_parameters is for ranks on the CPU; parameter '",
                          p.name, "' is on ", p.tensor.device());
      TESSERA_CHECK_VALUE(&sets_->of(p) == &set, "zero",
                          "tessera.shared_parameters is for parameters that all ranks share; '", p.name,
                          "' differs along ", p.varies.name());
      numels.push_back(p.tensor.numel());
    }
    bytes += SharedParams::bytes_of(shard::Layout(numels, set.ranks.shard->size()), options_.precision.param);
  }
  return {set.gathers, bytes};
}

// The next shared space; undefined where nothing is shared.
at::Tensor Units::space_of(const std::vector<const ParamSpec*>& members) {
  if (built_) return {};  // all shared memory is given away
  std::vector<int64_t> numels;
  numels.reserve(members.size());
  for (const ParamSpec* p : members)
    numels.push_back(p->tensor.numel());
  return shared_.take(shard::Layout(numels, ranks().shard->size()), options_.precision.param);
}

// Checks a client's optimizer, which updates tensors in place, and keeps its own states where it likes.
void Units::check_client(const std::vector<ParamSpec>& params) const {
  if (rule_ != optim::Rule::External || trained_ids_.empty()) return;
  const at::TensorOptions options = params[trained_ids_.front()].tensor.options().requires_grad(false);
  TESSERA_CHECK_VALUE(options_.home(shard::Quantity::Master, 0, options) == nullptr, "zero",
                      "a client's own optimizer updates its states itself, so they cannot be offloaded: ",
                      optim::use_native(), "; or leave offload_optimizer out");
}

// Where a unit's states live: the same on all ranks that exchange gradients or weights, as are sizes and the order of building.
StateResidence Units::state_residence_of(const std::vector<const ParamSpec*>& members) {
  int64_t size = 0;
  for (const ParamSpec* p : members)
    size += p->tensor.numel();
  const bool away = options_.home && away_states_.take(size, options_.ratio);
  return {away, away && of_device_.take(size, options_.device_share)};
}

void Units::build_unit(const PlannedUnit& planned, const std::vector<const ParamSpec*>& originals) {
  std::vector<Param> members;
  for (size_t i = 0; i < originals.size(); ++i) {
    Param member;
    member.name = originals[i]->name;
    member.tensor = originals[i]->tensor;
    member.id = planned.items[i];
    member.group = originals[i]->group;
    member.cut = originals[i]->cut;
    members.push_back(std::move(member));
  }
  const RankSets::Set& set = sets_->of(*originals.front());
  auto made = std::make_unique<Unit>(planned.name, std::move(members), options_, placements_, planned.kind == kResident,
                                     set.ranks, space_of(originals), state_residence_of(originals));
  Unit* const unit = made.get();
  units_.push_back(std::move(made));  // the unit has the parameters from here on, and undo() finds it
  const int number = unsharder_->add(&unit->flat(), set.gathers);
  unit_of_number_.push_back(unit);
  for (size_t i = 0; i < unit->params().size(); ++i) {
    const Param& p = unit->params()[i];
    places_[p.id] = {&unit->flat(), static_cast<int>(i), number, unit, &p};
  }
  TESSERA_CHECK_VALUE(rule_ != optim::Rule::External || !unit->master_is_weight() ||
                          unit->flat().residence() == shard::Residence::Device,
                      "zero",
                      "a client's own optimizer updates the parameters themselves here, so they cannot be offloaded: ",
                      optim::use_native(), "; or leave offload_param out");
  unit->make_root(planned.root);
  unit->travel_as(planner_->travel_of(*originals.front()));
  unit->flat().gather_in(planner_->gather_dtype_of(*originals.front()));
  const auto names = optim::state_names(rule_, groups_);
  if (rule_ != optim::Rule::External) unit->allocate_states(names.count, groups_, rule_);
  const bool away = !states_on_device(*unit) && !unit->flat().options().device().is_cpu();
  const bool leave = away && (device_of_update(*unit).is_cpu() || options_.accumulates);
  if (leave && (!options_.update_in_backward || lane_->on()) && !unit->grads_are_visible()) unit->send_grads_to_host();
  if (set.ranks.size() == 1 && lives_on_device(*unit)) unit->lie_in_pieces();
}

void Units::build_frozen(const PlannedUnit& planned, const std::vector<const ParamSpec*>& originals,
                         std::vector<FlatParams::Item> items) {
  const RankSets::Set& set = sets_->of(*originals.front());
  const bool sharded = placements_.params == shard::Placement::Shard;
  auto flat =
      std::make_unique<FlatParams>(planned.name, std::move(items), options_.precision.param, set.ranks.shard->rank(),
                                   set.ranks.shard->size(), sharded, space_of(originals), options_.weight_home);
  flat->gather_in(planner_->gather_dtype_of(*originals.front()));
  const int number = unsharder_->add(flat.get(), set.gathers);
  unit_of_number_.push_back(nullptr);
  for (size_t i = 0; i < planned.items.size(); ++i)
    places_[planned.items[i]] = {flat.get(), static_cast<int>(i), number};
  frozen_.push_back(std::move(flat));
}

const Place& Units::at(ParamId id, const char* call) const {
  TESSERA_CHECK_VALUE(id >= 0 && id < count(), "engine", call, ": no parameter ", id);
  return places_[id];
}

Units::~Units() = default;

// Whether the update of the unit with this number in the unsharder is there; nothing of a frozen one runs on.
bool Units::update_is_there(int number, bool waits) const {
  const Unit* unit = std::cmp_less(number, unit_of_number_.size()) ? unit_of_number_[number] : nullptr;
  if (unit == nullptr) return true;
  if (waits) lane_->await(*unit);
  return waits || lane_->is_there(*unit);
}

const Place& Units::trained(ParamId id, const char* call) const {
  const Place& place = at(id, call);
  TESSERA_CHECK_VALUE(place.trained(), "engine", call, ": parameter '", params_[id].name,
                      "' is not optimized and has no states",
                      params_[id].joins >= 0 ? "; once it is thawed it joins with the next step(), or by join()" : "");
  return place;
}

std::vector<ParamId> Units::held(const std::vector<ParamId>& ids, const char* call) const {
  std::vector<ParamId> result;
  for (const ParamId id : ids)
    if (at(id, call).held()) result.push_back(id);
  return result;
}

shard::Range Units::local_range(const Place& place) const {
  const shard::Range mine = shard::intersect(place.param->range, place.unit->owned());
  if (mine.empty()) return {};
  return {mine.begin - place.param->range.begin, mine.end - place.param->range.begin};
}

void Units::check_whole() const {
  TESSERA_CHECK_IO(broken_.empty(), "zero", kHalfWritten, " (", broken_, ")");
}

void Units::check_came_to_end(const Failure& failure) {
  if (failure.text.empty()) return;
  set_broken(failure.text);
  failure.check(c10::str("[zero] ", kHalfWritten, ": "));
}

void Units::fail_alone(c10::OutOfMemoryError& error) const {
  if (ranks().all() == 1 || dynamic_cast<const AgreedOutOfMemory*>(&error) != nullptr) throw;
  sets_->abort(1, error.what_without_backtrace());
  error.add_context("[zero] the other ranks cannot go on without this one: all that they have in common has ended");
  throw;
}

void Units::check_here(const char* call) const {
  check_not_away(call);
  lane_->settle();
}

void Units::check_not_away(const char* call) const {
  TESSERA_CHECK(ended_.empty(), "engine", call, ": ", ended_);
  TESSERA_CHECK(!away_, "engine", call,
                ": states of this engine were moved off the device by offload_states(); call reload_states() first");
}

void Units::check_not_captured(const char* call) const {
  TESSERA_CHECK(
      !shard::is_captured(ranks().device), "engine", call,
      ": the current stream is being captured into a graph, whose replays would leave out what the engine does "
      "on the host (hooks, gathers, the look at the norm, counters); capture parts of the model instead, as "
      "the mode reduce-overhead of torch.compile does, and make the engine's calls outside");
}

// ---------------------------------------------------------------- joining

void Units::params_changed() {
  places_.resize(params_.size());
  may_join_.clear();
  for (size_t i = 0; i < params_.size(); ++i)
    if (params_[i].group < 0 && params_[i].joins >= 0) may_join_.push_back(static_cast<ParamId>(i));
  std::erase_if(left_out_, [&](ParamId id) { return params_[id].group >= 0 || params_[id].joins >= 0; });
}

void check_real(const ParamSpec& param) {
  TESSERA_CHECK_VALUE(!param.tensor.is_complex(), "engine", "parameter '", param.name, "' is ",
                      param.tensor.scalar_type(),
                      ", which is not trained in any precision: make its real and imaginary parts a parameter "
                      "(view_as_real) and use view_as_complex() of it, or freeze it");
}

void Units::check_joins(const ParamSpec& param) const {
  check_real(param);
  const at::ScalarType dtype = param.tensor.scalar_type(), trained = options_.precision.param;
  TESSERA_CHECK_VALUE(dtype == trained, "engine", "parameter '", param.name, "' begins to be trained and is ", dtype,
                      ", the engine trains ", trained,
                      ": convert it before the engine has it, or enable bf16 or fp16 in the configuration, which casts "
                      "all");
  TESSERA_CHECK_VALUE(param.tensor.is_leaf(), "engine", "parameter '", param.name, "' is not a leaf tensor");
  const c10::Device device = ranks().device;
  TESSERA_CHECK_VALUE(param.tensor.device().type() == device.type(), "engine", "parameter '", param.name,
                      "' begins to be trained on device '", param.tensor.device(), "', the engine trains on '", device,
                      "': move it there first");
  TESSERA_CHECK_VALUE(sets_->has(param), "engine", "parameter '", param.name, "' differs along ", param.varies.name(),
                      ", as no parameter did when the engine was built; build a new one");
}

// Takes partitioned parameters of `ids` from their units, whose other parameters are to be built anew. All are whole meanwhile.
std::vector<PlannedUnit> Units::leave_frozen(const std::vector<ParamId>& ids) {
  std::vector<PlannedUnit> rest;
  for (auto flat = frozen_.begin(); flat != frozen_.end();) {
    const auto lies_here = [&](ParamId id) { return places_[id].flat == flat->get(); };
    if (std::ranges::none_of(ids, lies_here)) {
      ++flat;
      continue;
    }
    PlannedUnit others{(*flat)->name(), kFrozen, "", false, {}};
    std::vector<ParamId> members;
    for (ParamId id = 0; id < count(); ++id) {
      if (!lies_here(id)) continue;
      members.push_back(id);
      if (std::ranges::find(ids, id) == ids.end()) others.items.push_back(id);
    }
    const int number = places_[members.front()].number;
    unsharder_->hold(number, /*writable=*/false);
    const at::Tensor all = (*flat)->copy_all();
    unsharder_->unhold(number);
    (*flat)->leave(all);
    for (const ParamId id : members)
      places_[id] = {};
    left_.push_back(std::move(*flat));
    flat = frozen_.erase(flat);
    if (!others.items.empty()) rest.push_back(std::move(others));
  }
  return rest;
}

void Units::join(const std::vector<ParamId>& ids) {
  const c10::AutoGradMode no_grad(false);
  check_params(params_, groups_);
  std::vector<bool> whole;
  for (const ParamId id : ids) {
    check_joins(params_[id]);
    whole.push_back(!places_[id].held() || !places_[id].flat->sharded());
  }
  const std::vector<PlannedUnit> joined = planner_->plan_joining(params_, ids, whole);
  unsharder_->settle_before_update();
  try {
    std::vector<PlannedUnit> all = leave_frozen(ids);
    all.insert(all.end(), joined.begin(), joined.end());
    build(all, params_);
  } catch (const std::exception& error) {
    const auto* known = dynamic_cast<const c10::Error*>(&error);
    ended_ = c10::str("parameters could not join this engine, which ends with that (",
                      known == nullptr ? error.what() : known->what_without_backtrace(), "); build a new one");
    throw;
  }
  for (const ParamId id : ids)
    trained_ids_.push_back(id);
  std::ranges::sort(trained_ids_);
  params_changed();
  number_elements();
  root_and_flush_last();
}

void Units::release(const std::string& message) {
  unsharder_->abandon(message);
  for (const auto& unit : units_)
    unit->let_go();
  units_.clear();
  frozen_.clear();
  left_.clear();
  places_.clear();
  trained_ids_.clear();
  return_host_memory();
}

void Units::return_host_memory() const noexcept {
  const bool had_some = has_homes() || was_away_ || ranks().all() > 1;  // what ranks exchange passes through it, too
  if (had_some && !ranks().device.is_cpu()) shard::return_host_memory(ranks().device.type());
}

}  // namespace tessera::zero
