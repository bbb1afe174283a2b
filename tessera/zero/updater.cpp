#include "tessera/zero/updater.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <numeric>
#include <optional>
#include <ranges>

#include "tessera/base/error.h"
#include "tessera/comm/op_info.h"
#include "tessera/optim/norm.h"
#include "tessera/shard/dtype.h"
#include "tessera/zero/adoption.h"
#include "tessera/zero/update_lane.h"

namespace tessera::zero {

namespace {

constexpr const char* kHalfDone = "a step ended with an error after it had updated a part of the model";

// Squares of the gradients of `slice` (in the coordinates of the flat space, and owned here), without those of some
// parameters.
void add_squares(std::vector<at::Tensor>& squares, const Unit& unit, shard::Range slice,
                 const std::vector<ParamId>& without) {
  const bool all = std::ranges::none_of(
      unit.params(), [&](const Param& p) { return std::ranges::find(without, p.id) != without.end(); });
  if (all && slice == unit.owned() && unit.host_grads() && unit.host_grads()->squares().defined()) {
    squares.push_back(unit.host_grads()->squares());
    return;
  }
  const auto add = [&](int64_t begin, int64_t end) {
    if (begin >= end) return;
    const shard::Range range{begin - unit.owned().begin, end - unit.owned().begin};
    const auto pieces = unit.pieces(range);
    const at::TensorOptions options = pieces.empty() ? unit.grad_options() : pieces[0].values.options();
    squares.push_back(optim::squares_there(range.size(), pieces, options));
  };
  for (const Param& p : unit.params()) {  // in the order of their places
    if (std::ranges::find(without, p.id) == without.end()) continue;
    add(slice.begin, std::min(p.range.begin, slice.end));
    slice.begin = std::max(slice.begin, p.range.end);
  }
  add(slice.begin, slice.end);
}

// A given norm as it travels: a number that compares; no norm is one of these.
double given_norm(std::optional<double> norm) {
  if (!norm) return -1;
  return std::isfinite(*norm) ? *norm : -2;
}

// What ranks exchange before a step: these numbers, then which parameters have gradients, the number announced, and squares.
enum Announced : size_t { kGivenNorm, kLate, kScaled, kMissingElsewhere, kPresence };
constexpr size_t kFlags = 52;  // flags in a number, exactly

double sum_of(const std::vector<double>& numbers, size_t first = 0) {
  double sum = 0;
  for (size_t i = first; i < numbers.size(); ++i)
    sum += numbers[i];
  return sum;
}

// Adds numbers one after the other, without a wait where all are on a device.
at::Tensor sum_there(const std::vector<at::Tensor>& numbers, c10::Device device) {
  const bool read = std::ranges::any_of(numbers, &at::Tensor::is_cpu);
  if (read) return at::scalar_tensor(sum_of(optim::read_numbers(numbers)), at::kDouble);
  at::Tensor sum = at::zeros({}, at::TensorOptions(at::kDouble).device(device));
  for (const at::Tensor& number : numbers)
    sum = sum + number;
  return sum;
}

at::Tensor stacked(const std::vector<at::Tensor>& numbers) {
  const bool read = numbers.empty() || std::ranges::any_of(numbers, &at::Tensor::is_cpu);
  return read ? at::tensor(optim::read_numbers(numbers), at::kDouble) : at::stack(numbers);
}

// Merges units that pass through the device with those that the host updates, both at the same time: the host gives the device as
// much as will last until it is through with its own next unit, if both end together. Else one of them has more than it needs.
std::vector<Unit*> beside_each_other(const std::vector<Unit*>& through, const std::vector<Unit*>& of_host) {
  const auto sum = [](const std::vector<Unit*>& units) {
    return std::accumulate(units.begin(), units.end(), 0.0,
                           [](double n, const Unit* unit) { return n + static_cast<double>(unit->owned().size()); });
  };
  const double all_through = sum(through), all_of_host = sum(of_host);
  std::vector<Unit*> order;
  double given = 0, done = 0;  // elements
  auto next = through.begin();
  for (Unit* const unit : of_host) {
    done += static_cast<double>(unit->owned().size());
    for (; next != through.end() && given * all_of_host < done * all_through; ++next) {
      given += static_cast<double>((*next)->owned().size());
      order.push_back(*next);
    }
    order.push_back(unit);
  }
  order.insert(order.end(), next, through.end());
  return order;
}

}  // namespace

Updater::Updater(Units& units, BackwardDriver& driver) : units_(units), driver_(driver) {}

// Squares of this rank's slice of the gradients of units that all ranks share. Sums of slices are added in rank order, so
// that the bits are the same whether a rank holds one slice or all.
std::vector<at::Tensor> Updater::squares_of_shared(const std::vector<ParamId>& without) const {
  const Ranks& ranks = units_.ranks();
  std::vector<at::Tensor> squares;
  for (const auto& unit : units_.all()) {
    if (&unit->ranks() != &ranks) continue;
    if (units_.options().update_in_backward) {
      squares.push_back(unit->squares().defined() ? unit->squares() : at::zeros({}, at::kDouble));
    } else {
      add_squares(squares, *unit, unit->layout().shard(ranks.shard->rank()), without);
    }
  }
  return squares;
}

// Squares of the gradients of other units: of ranks with equal ones, one counts.
std::vector<at::Tensor> Updater::squares_of_varying(const std::vector<ParamId>& without) const {
  std::vector<at::Tensor> squares;
  for (const auto& unit : units_.all()) {
    const Ranks& ranks = unit->ranks();
    if (&ranks == &units_.ranks() || ranks.replicate->rank() > 0) continue;
    if (!ranks.varies_along_model && ranks.model->rank() > 0) continue;
    if (!units_.states_are_cut(ranks) && ranks.shard->rank() > 0) continue;
    if (units_.options().update_in_backward) {
      if (unit->squares().defined()) squares.push_back(unit->squares());
    } else {
      add_squares(squares, *unit, unit->owned(), without);
    }
  }
  return squares;
}

// The total of squares of units, which stand from `first` on: slices of replicas, and of the model's other slices, are the same
// and count once; where one is not finite the sum is not.
double Updater::total(const std::vector<std::vector<double>>& rows, size_t first) const {
  const Ranks& ranks = units_.ranks();
  const size_t along_model = ranks.model->size(), shards = ranks.shard->size();
  std::vector<double> of_shard(shards, 0);
  for (size_t place = 0; place < rows.size(); ++place) {
    double& most = of_shard[place / along_model % shards];
    const double sum = sum_of(rows[place], first);
    if (std::isnan(sum) || sum > most) most = sum;
  }
  return sum_of(of_shard);
}

// The sum of the varying units' squares, which stands at `place`, over all ranks: along one group after the other.
double Updater::total_of_varying(const std::vector<std::vector<double>>& rows, size_t place) const {
  const Ranks& ranks = units_.ranks();
  std::vector<double> of_model;
  for (int slice = 0; slice < ranks.model->size(); ++slice) {
    std::vector<double> of_replica;
    for (int replica = 0; replica < ranks.replicate->size(); ++replica) {
      std::vector<double> of_shard;
      for (int r = 0; r < ranks.shard->size(); ++r)
        of_shard.push_back(rows[(replica * ranks.shard->size() + r) * ranks.model->size() + slice][place]);
      of_replica.push_back(sum_of(of_shard));
    }
    of_model.push_back(sum_of(of_replica));
  }
  return sum_of(of_model);
}

void Updater::reduce_late() {
  driver_.reducer().reduce_late();
  driver_.reduce_replicas();
}

std::optional<double> Updater::norm_contribution(const std::vector<ParamId>& without, double announced, bool counts) {
  for (const ParamId id : without)
    units_.trained(id, "norm_contribution");
  const Ranks& ranks = units_.ranks();
  const at::Tensor late = at::tensor({driver_.reducer().has_late() ? 1.0 : 0.0, announced, -announced}, at::kDouble);
  ranks.agree(late, comm::ReduceOp::Max, comm::kGradientNorm);
  if (late[1].item<double>() != announced || late[2].item<double>() != -announced) return {};
  if (!counts) return 0;
  if (late[0].item<double>() > 0) reduce_late();
  std::vector<at::Tensor> squares = squares_of_varying(without);
  const size_t varying = squares.size();
  if (ranks.replicate->rank() == 0 && ranks.model->rank() == 0)
    std::ranges::copy(squares_of_shared(without), std::back_inserter(squares));
  const std::vector<double> read = optim::read_numbers(squares);
  const double own = sum_of({read.begin(), read.begin() + static_cast<std::ptrdiff_t>(varying)});
  return sum_of(read, varying) + own;
}

GradientSummary Updater::summarize(std::optional<double> norm, double announced, const at::Tensor& shown, bool counts) {
  const Ranks& ranks = units_.ranks();
  const bool early = units_.options().update_in_backward;
  std::vector<double> mine(kPresence);
  mine[kGivenNorm] = given_norm(norm);
  mine[kLate] = driver_.reducer().has_late() ? 1 : 0;
  mine[kScaled] = driver_.scaled() ? 1 : 0;
  if (!early) {  // the backward has used them up
    for (const ParamId id : units_.trained_ids())
      if (&units_[id].unit->ranks() != &ranks && !units_[id].param->grad.has()) mine[kMissingElsewhere] = 1;
  }
  const std::vector<double> flags = presence_flags();
  mine.insert(mine.end(), flags.begin(), flags.end());
  std::vector<at::Tensor> squares;
  const bool varies = units_.rank_sets().each().size() > 1;
  if (norm || !counts) {  // as many numbers as of a rank that has some
    const auto shared = [&](const auto& unit) { return &unit->ranks() == &ranks && unit->layout().size() > 0; };
    squares.assign(std::ranges::count_if(units_.all(), shared) + (varies ? 1 : 0), at::zeros({}, at::kDouble));
  } else {
    if (varies) squares.push_back(sum_there(squares_of_varying(), ranks.device));
    std::ranges::copy(squares_of_shared(), std::back_inserter(squares));
  }

  GradientSummary summary;
  if (early && ranks.all() == 1) summary.unread = stacked(std::exchange(squares, {}));
  // Reduced gradients, and with them the squares, are the same in all replicas; the flags are of local gradients.
  const bool shows = ranks.all() > 1;
  if (shows) {
    const c10::Device there = squares.empty() ? c10::Device(c10::kCPU) : squares.front().device();
    const auto options = at::TensorOptions(at::kDouble).device(there);
    squares.insert(squares.begin(), shown.defined() ? shown : at::full({}, announced, options));
  }
  const auto rows = ranks.gather(mine, squares, comm::kGradientNorm);
  const size_t first = mine.size() + (shows ? 1 : 0);
  bool late = false, missing_elsewhere = false;
  for (const std::vector<double>& row : rows) {
    TESSERA_CHECK_VALUE(row[kGivenNorm] == given_norm(norm), "engine.step",
                        "ranks of this engine give different norms: one has ", norm.value_or(-1),
                        " (-1: none), others another; global_norm is the same on all of them");
    late = late || row[kLate] > 0;
    missing_elsewhere = missing_elsewhere || row[kMissingElsewhere] > 0;
    summary.scaled = summary.scaled || row[kScaled] > 0;
    summary.alike = summary.alike && (!shows || row[mine.size()] == rows[0][mine.size()]);
  }
  if (!summary.alike) return summary;
  if (late) {  // on all ranks alike
    reduce_late();
    return summarize(norm, announced, shown, counts);
  }
  const double varying = varies && !norm ? total_of_varying(rows, first) : 0;
  summary.norm = norm ? *norm : std::sqrt(total(rows, first + (varies ? 1 : 0)) + varying);
  summary.finite = std::isfinite(summary.norm);
  summary.present = presence(rows);
  if (!missing_elsewhere) return summary;
  for (const Ranks* others : units_.rank_sets().each())
    if (others != &ranks) agree_presence(*others, summary.present);
  return summary;
}

// Flags of parameters that all ranks share, by number: this rank has a gradient.
std::vector<double> Updater::presence_flags() const {
  std::vector<double> numbers;
  size_t count = 0;
  for (const ParamId id : units_.trained_ids()) {
    if (&units_[id].unit->ranks() != &units_.ranks()) continue;
    if (count++ % kFlags == 0) numbers.push_back(0);
    const bool has = units_.options().update_in_backward || units_[id].param->grad.has();
    if (has) numbers.back() += std::ldexp(1.0, static_cast<int>((count - 1) % kFlags));
  }
  return numbers;
}

// By parameter: some rank has a gradient; parameters that ranks do not share are taken to have one.
std::vector<bool> Updater::presence(const std::vector<std::vector<double>>& rows) const {
  std::vector<bool> present(units_.count(), true);
  size_t count = 0;
  for (const ParamId id : units_.trained_ids()) {
    if (&units_[id].unit->ranks() != &units_.ranks()) continue;
    const size_t number = kPresence + count / kFlags, bit = count % kFlags;
    present[id] = std::ranges::any_of(
        rows, [&](const std::vector<double>& row) { return (static_cast<uint64_t>(row[number]) >> bit & 1) != 0; });
    ++count;
  }
  return present;
}

void Updater::agree_presence(const Ranks& ranks, std::vector<bool>& present) const {
  std::vector<ParamId> ids;
  for (const ParamId id : units_.trained_ids())
    if (&units_[id].unit->ranks() == &ranks) ids.push_back(id);
  if (ids.empty()) return;
  const at::Tensor seen = at::zeros({static_cast<int64_t>(ids.size())}, at::kInt);
  int* flags = seen.data_ptr<int>();
  for (size_t i = 0; i < ids.size(); ++i)
    flags[i] = units_[ids[i]].param->grad.has() ? 1 : 0;
  ranks.agree(seen, comm::ReduceOp::Max, "parameters with gradients");
  for (size_t i = 0; i < ids.size(); ++i)
    present[ids[i]] = flags[i] != 0;
}

comm::Pending Updater::gather(Unit& unit) {
  const PhaseScope scope(units_.phases(), Phase::Gather, unit.name());
  unit.on_this_stream();
  return unit.ranks().shard->all_gather(unit.flat().whole(), unit.weights().tensor(),
                                        "parameters of unit '" + unit.name() + "'");
}

void Updater::gather_unit(Unit& unit) {
  if (units_.gathers_updates(unit)) gathers_.push_back(gather(unit));
}

void Updater::finish_gathers() {
  if (gathers_.empty()) return;
  const PhaseScope scope(units_.phases(), Phase::Gather);
  for (comm::Pending& p : std::exchange(gathers_, {}))
    p.wait();
}

void Updater::abandon() {
  for (comm::Pending& gather : std::exchange(gathers_, {}))
    gather.release();
  pipeline_.reset();
  lanes_.on_device.clear();
  lanes_.on_host.clear();
}

// Room is made before the first update, so that nothing is half done without memory.
void Updater::make_room() {
  RankGuard memory = RankGuard::for_memory();
  if (lanes_.has_room(units_)) return;
  memory.run([&] { lanes_.make_room(units_); });
  const Failure failure = memory.agree(units_.ranks());
  if (!failure.text.empty()) lanes_.units = 0;  // all ranks make room again
  failure.check("[zero] ");
}

std::vector<Unit*> Updater::in_order_of_update() const {
  std::vector<Unit*> order, through, of_host;
  for (const auto& unit : std::views::reverse(units_.all())) {
    const bool stays = lives_on_device(*unit), host = device_of_update(*unit).is_cpu();
    (stays ? order : host ? of_host : through).push_back(unit.get());
  }
  std::ranges::copy(beside_each_other(through, of_host), std::back_inserter(order));
  return order;
}

void Updater::update_units(const std::vector<Unit*>& units, const GradientSummary& summary, double scale,
                           RankGuard& disks) {
  for (const auto& unit : units_.all())
    unit->on_this_stream();
  TilePipeline pipeline(units_, lanes_, disks, [this](Unit& unit) {
    gather_unit(unit);
    driver_.used_up(unit);
  });
  for (Unit* unit : units)
    pipeline.add(*unit, unit->in_pieces() ? shard::Buffer() : unit->gradients(), summary.present, scale);
  pipeline.finish();
}

void Updater::run_on(const std::vector<Unit*>& units, const GradientSummary& summary, double scale, RankGuard disks) {
  open_lane(units, disks);
  for (Unit* unit : units) {
    leave_unit(*unit, unit->gradients(), summary.present, scale);
    driver_.used_up(*unit);
  }
  units_.lane().close();
}

void Updater::open_lane(const std::vector<Unit*>& units, RankGuard& disks) {
  if (!lanes_.has_room(units_)) disks.run([&] { lanes_.make_room(units_); });
  units_.lane().open(units, lanes_, [this](Unit& unit) { return gather(unit); }, disks);
}

void Updater::leave_unit(Unit& unit, const shard::Buffer& grads, const std::vector<bool>& present, double scale,
                         decltype(ArrivedSum::release) release) {
  const c10::AutoGradMode no_grad(false);
  UpdateLane::Work work{&unit, grads, TilePipeline::pieces_of(units_, unit, present), scale, std::move(release)};
  count_updates(unit, present);
  units_.lane().add(std::move(work), present);
}

std::shared_ptr<c10::Event> Updater::update_unit(Unit& unit, const at::Tensor& grads, const std::vector<bool>& present,
                                                 double scale, RankGuard& disks) {
  const c10::AutoGradMode no_grad(false);
  if (!pipeline_) pipeline_.emplace(units_, lanes_, disks);
  pipeline_->add(unit, grads.defined() ? shard::Buffer(grads) : shard::Buffer(), present, scale);
  count_updates(unit, present);
  return pipeline_->launch();
}

void Updater::finish_units(const std::vector<bool>& present) {
  if (!pipeline_) return;
  pipeline_->finish();
  pipeline_.reset();
  for (const auto& unit : units_.all())
    if (!units_.lane().takes(*unit)) unit->note_updated(present);
}

void Updater::launch_gathers() {
  for (const auto& unit : units_.all())
    if (!units_.lane().takes(*unit)) gather_unit(*unit);
}

void Updater::finish_gathers(RankGuard& disks) {
  finish_gathers();
  units_.lane().is_open() ? units_.lane().close(std::move(disks)) : agree_on_disks(disks);
}

std::vector<Unit*> Updater::elsewhere() const {
  std::vector<Unit*> order;
  for (const auto& unit : std::views::reverse(units_.all()))
    if (!lives_on_device(*unit)) order.push_back(unit.get());
  return order;
}

RankGuard Updater::guard() const {
  return RankGuard(!std::ranges::all_of(units_.all(), [](const auto& unit) { return lives_on_device(*unit); }));
}

// Where states or weights live on a disk, an update is over when they are there, on all ranks or on none.
void Updater::agree_on_disks(RankGuard& disks) {
  if (!disks.agrees()) return;
  for (const auto& unit : units_.all())
    disks.run_always([&] { unit->flush(); });
  units_.check_came_to_end(disks.agree(units_.ranks()));
}

void Updater::update(const GradientSummary& summary, double scale, const std::function<void()>& external) {
  units_.lane().finish();  // the lane has had the lanes
  units_.check_whole();
  const std::lock_guard lock(driver_.hooks().mutex());
  const c10::AutoGradMode no_grad(false);
  driver_.hooks().run_kept();
  units_.unsharder().settle_before_update();
  prepare_update();
  complete_pieces(summary.present);
  RankGuard disks = guard();
  std::vector<Unit*> now = in_order_of_update(), later;
  if (units_.rule() == optim::Rule::External) {
    update_external(summary, scale, external, disks);
    launch_gathers();
  } else {
    make_room();
    units_.set_broken(kHalfDone);  // until the update is over
    if (units_.lane().on()) {
      const auto away = std::ranges::find_if_not(now, [](const Unit* unit) { return lives_on_device(*unit); });
      later.assign(away, now.end());
      now.erase(away, now.end());
    }
    update_units(now, summary, scale, disks);
  }
  finish_gathers();
  units_.shared().written("an update");
  if (later.empty()) agree_on_disks(disks);
  for (Unit* unit : now) {
    count_updates(*unit, summary.present);
    unit->note_updated(summary.present);
  }
  units_.set_broken("");
  if (!later.empty()) run_on(later, summary, scale, std::move(disks));
}

// Other slices of the model have a gradient where this rank has none.
void Updater::complete_pieces(const std::vector<bool>& present) {
  if (units_.options().update_in_backward) return;
  for (const auto& unit : units_.all())
    for (const Param& p : unit->params())
      if (present[p.id]) unit->make_run(p);
}

void Updater::prepare_update() {
  check_no_region_writes();
  // A client's optimizer has passes of its own, and many.
  adopt_params(units_, /*compare=*/units_.rule() == optim::Rule::External);
}

void Updater::count_updates(Unit& unit, const std::vector<bool>& present) {
  for (const Param& p : unit.params())
    if (present[p.id]) unit.count_update(p);
}

// torch wants gradients in the dtype of what they update.
at::ScalarType Updater::client_dtype() const {
  return units_.options().precision.master_is_param() ? units_.options().precision.param : at::kFloat;
}

bool Updater::client_reads_gradients() const {
  return units_.rule() == optim::Rule::External && units_.options().precision.grad == client_dtype();
}

void Updater::scale_gradients(double scale) {
  if (scale == 1.0) return;
  for (const auto& unit : units_.all())
    for (const optim::Piece& piece : unit->pieces({0, unit->owned().size()}))
      shard::scaled_copy(piece.values, piece.values, scale);
}

void Updater::update_external(const GradientSummary& summary, double scale, const std::function<void()>& external,
                              RankGuard& disks) {
  TESSERA_CHECK_VALUE(external, "engine.step",
                      "this engine was built for a client's optimizer; step() needs its update");
  for (const auto& unit : units_.all()) {
    if (client_reads_gradients()) continue;
    const at::Tensor grads = at::zeros({unit->owned().size()}, unit->grad_options().dtype(client_dtype()));
    for (const optim::Piece& piece : unit->pieces({0, unit->owned().size()}))
      shard::scaled_copy(grads.narrow(0, piece.begin, piece.values.numel()), piece.values, scale);
    unit->lend_client_grads(grads);
  }
  for (const ParamId id : units_.trained_ids())
    units_[id].unit->show_grad(*units_[id].param, summary.present[id]);
  const auto forget = [&] {
    for (const auto& unit : units_.all())
      unit->lend_client_grads({});
  };
  try {
    const NamedRange range("update", "by the client's optimizer");
    external();
  } catch (...) {
    forget();
    throw;
  }
  forget();
  units_.set_broken(kHalfDone);
  for (const auto& unit : units_.all())
    disks.run([&] { unit->refresh_weights(); });
}

void Updater::refresh_params() {
  const c10::AutoGradMode no_grad(false);
  units_.unsharder().settle_before_update();
  check_no_region_writes();
  RankGuard disks = guard();
  if (!disks.agrees()) disks = RankGuard::for_memory();
  disks.run([&] { adopt_params(units_, /*compare=*/true); });
  units_.shared().readers_done("a refresh");
  for (const auto& unit : units_.all()) {
    disks.run([&] { unit->refresh_weights(); });
    for (const Param& p : unit->params())
      if (p.known.defined()) disks.run([&] { unit->note_weights(p); });
    gather_unit(*unit);
  }
  finish_gathers();
  units_.shared().written("a refresh");
  agree_on_disks(disks);
}

// Shared parameters are whole always: a region's private copies would undo what is written meanwhile.
void Updater::check_no_region_writes() const {
  if (!units_.shared().on()) return;
  for (ParamId id = 0; id < units_.count(); ++id) {
    const Place& place = units_[id];
    if (!place.held()) continue;
    TESSERA_CHECK(!place.flat->has_private_copy(place.item), "zero", "parameter '", place.name(),
                  "' is in use (inside GatheredParameters); leave that before it changes");
  }
}

}  // namespace tessera::zero
