#include "tessera/zero/unsharder.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/transforms.h"
#include "tessera/zero/memory_for.h"

namespace tessera::zero {

namespace {

constexpr int64_t kPiece = 1 << 16;  // elements of shared parameters that are rounded at a time

}  // namespace

void Unsharder::Trace::begin() {
  if (!now.empty()) last = std::move(now);
  now.clear();
  position = 0;
}

void Unsharder::Trace::use(int unit) {
  constexpr size_t kLongest = 1 << 16;  // module calls outside any pass must not grow without end
  if (now.size() < kLongest) now.push_back(unit);
  const auto from = last.begin() + static_cast<std::ptrdiff_t>(position);
  const auto found = std::find(from, last.end(), unit);
  followed = found != last.end();
  if (followed) position = static_cast<size_t>(found - last.begin()) + 1;
}

Unsharder::Unsharder(const GatherOptions& options, Phases& phases, Failed failed)
    : options_(options), failed_(std::move(failed)), phases_(phases) {}

// A rank that fails before a gather, for its memory or its device, is missed by all others; a failing disk the ranks of
// the group know.
template <class F>
void Unsharder::announcing(const Entry& entry, const F& gather) {
  const auto announce = [&](int ranks, const std::string& why) {
    if (failed_) failed_(ranks, why);
  };
  try {
    gather();
  } catch (const IoError& error) {
    announce(entry.group->size(), error.what_without_backtrace());
    throw;
  } catch (const UsageError&) {  // an error of the program's, which is the same on all ranks
    throw;
  } catch (const c10::DistBackendError&) {  // the groups have ended
    throw;
  } catch (const c10::Error& error) {
    announce(1, error.what_without_backtrace());
    throw;
  } catch (const std::exception& error) {
    announce(1, error.what());
    throw;
  }
}

int Unsharder::add(FlatParams* flat, comm::GroupPtr group) {
  entries_.emplace_back();
  entries_.back().flat = flat;
  entries_.back().group = std::move(group);
  entries_.back().seen.resize(flat->items().size());
  any_sharded_ = any_sharded_ || flat->sharded();
  return static_cast<int>(entries_.size()) - 1;
}

std::vector<int> Unsharder::sharded_of(std::vector<int> units) const {
  std::sort(units.begin(), units.end());
  units.erase(std::unique(units.begin(), units.end()), units.end());
  std::erase_if(units, [&](int unit) { return !entries_[unit].flat->sharded(); });
  return units;
}

int Unsharder::add_scope(std::vector<int> units) {
  scopes_.push_back(sharded_of(std::move(units)));
  return static_cast<int>(scopes_.size()) - 1;
}

void Unsharder::set_scope(int scope, std::vector<int> units) {
  TESSERA_ASSERT(!under_way(scope));
  scopes_[scope] = sharded_of(std::move(units));
}

void Unsharder::extend_scope(int scope, int unit, bool in_backward) {
  std::vector<int>& units = scopes_[scope];
  if (!entries_[unit].flat->sharded() || std::find(units.begin(), units.end(), unit) != units.end()) return;
  // Calls under way hold the new unit too; one inside another scope must hold all by itself from now on.
  for (Active& active : stack_) {
    if (active.scope != scope) continue;
    if (std::exchange(active.nested, false)) {
      for (const int old : units)
        ++entries_[old].holds;
    }
    ++entries_[unit].holds;
  }
  units.push_back(unit);
  if (under_way(scope)) use(unit, in_backward);
}

int Unsharder::holding_scope() const {
  const auto found = std::find_if(stack_.rbegin(), stack_.rend(), [](const Active& a) { return !a.nested; });
  return found == stack_.rend() ? -1 : found->scope;
}

bool Unsharder::under_way(int scope) const {
  return std::any_of(stack_.begin(), stack_.end(), [&](const Active& a) { return a.scope == scope; });
}

// ---------------------------------------------------------------- forward

bool Unsharder::enter(int scope, bool in_backward) {
  if (stack_.empty() && !in_backward) forward_.begin();
  const std::vector<int>& units = scopes_[scope];
  const bool nested =
      !stack_.empty() && std::all_of(units.begin(), units.end(), [&](int u) { return entries_[u].holds > 0; });
  if (!nested) {
    for (Active& around : stack_)
      around.outer = true;
  }
  stack_.push_back({scope, nested});
  if (nested) return false;
  for (const int unit : units)
    ++entries_[unit].holds;
  try {
    for (const int unit : units)
      use(unit, in_backward);
  } catch (...) {
    for (const int unit : units)
      --entries_[unit].holds;
    stack_.pop_back();
    throw;
  }
  return true;
}

void Unsharder::end_inner(int scope, bool in_backward) {
  if (!under_way(scope)) return;
  while (stack_.back().scope != scope)
    abort(stack_.back().scope, in_backward);
}

std::vector<int> Unsharder::watched(int scope) const {
  if (stack_.empty() || stack_.back().scope != scope || stack_.back().nested) return {};
  return scopes_[scope];
}

void Unsharder::leave(int scope, bool in_backward, bool recorded, bool unseen) {
  if (!under_way(scope)) return;
  end_inner(scope, in_backward);
  const Active active = stack_.back();
  stack_.pop_back();
  if (!active.nested) {
    for (const int unit : scopes_[scope]) {
      Entry& entry = entries_[unit];
      --entry.holds;
      entry.again = entry.again || unseen;
      entry.kept = recorded && !in_backward && worth_keeping(unit);
    }
    settle_all(scopes_[scope]);
  }
  if (stack_.empty() && !in_backward) release_unused(/*kept_too=*/false);
}

void Unsharder::abort(int scope, bool in_backward) {
  if (!under_way(scope)) return;
  while (!stack_.empty()) {
    const Active active = stack_.back();
    stack_.pop_back();
    if (!active.nested) {
      for (const int unit : scopes_[active.scope])
        --entries_[unit].holds;
      settle_all(scopes_[active.scope]);
    }
    if (active.scope == scope) break;
  }
  if (stack_.empty() && !in_backward) release_unused(/*kept_too=*/true);
}

void Unsharder::abort_all() {
  while (!stack_.empty())
    abort(stack_.front().scope, false);
}

// ---------------------------------------------------------------- backward

// Only these calls count: how long the graphs of other calls live is each rank's own affair.
void Unsharder::begin_backward(const std::vector<ScopeCall*>& calls) {
  ++number_;
  backward_.begin();
  for (Entry& entry : entries_)
    entry.pending = 0;
  for (ScopeCall* call : calls)
    await_end(*call);
}

void Unsharder::await_end(ScopeCall& call) {
  if (std::exchange(call.pending_in, number_) == number_) return;
  for (const int unit : call.units)
    ++entries_[unit].pending;
}

void Unsharder::call_made(ScopeCall& call) {
  await_end(call);
}

void Unsharder::call_opened(ScopeCall& call, bool again) {
  for (const int unit : call.units)
    entries_[unit].again = entries_[unit].again || again;
  if (call.opened_in == number_) return;
  await_end(call);
  call.opened_in = number_;
  call.arrived = 0;
  for (const int unit : call.units) {
    entries_[unit].calls.push_back(&call);
    use(unit, true);
  }
}

std::vector<int> Unsharder::call_closed(ScopeCall& call) {
  std::vector<int> over;
  if (call.opened_in != number_ || ++call.arrived != call.producers) return over;
  for (const int unit : call.units) {
    Entry& entry = entries_[unit];
    std::erase(entry.calls, &call);
    if (--entry.pending == 0 && !entry.again) over.push_back(unit);
  }
  settle_all(call.units);
  return over;
}

void Unsharder::call_gone(ScopeCall& call) {
  const bool closed = call.opened_in == number_ && call.producers > 0 && call.arrived >= call.producers;
  for (const int unit : call.units) {
    Entry& entry = entries_[unit];
    if (!closed && call.pending_in == number_) --entry.pending;
    if (std::erase(entry.calls, &call) > 0) settle(unit);
  }
}

void Unsharder::gradient_arrived(int unit, int item) {
  Entry& entry = entries_[unit];
  if (entry.flat->state() != ParamState::Ready || !entry.flat->sharded() || entry.seen[item]) return;
  entry.seen[item] = true;
  if (--entry.missing > 0) return;
  std::erase_if(entry.calls, [](const ScopeCall* call) { return call->producers == 0 && !call->outer; });
  settle(unit);
}

void Unsharder::end_backward() {
  for (Entry& entry : entries_)
    entry.calls.clear();
  release_unused(/*kept_too=*/true);
}

// ---------------------------------------------------------------- gathering

void Unsharder::use(int unit, bool in_backward) {
  const transforms::Suspended plain;
  Trace& trace = in_backward ? backward_ : forward_;
  trace.use(unit);
  Entry& entry = entries_[unit];
  if (entry.flat->state() == ParamState::Ready) {
    entry.flat->use();
    entry.kept = false;
  } else {
    make_ready(entry);
  }
  prefetch(trace);
  read_ahead(trace);
}

void Unsharder::start(Entry& entry, bool exact) {
  const FlatParams& flat = *entry.flat;
  const PhaseScope scope(phases_, Phase::Gather, flat.name());
  if (there_) there_(static_cast<int>(&entry - entries_.data()), /*waits=*/true);
  const int64_t size = flat.layout().size();
  const auto& options = flat.options();
  const bool rounded = flat.gathers_rounded() && !exact;
  at::Tensor bucket, staging;
  const auto gather = [&] {
    if (!flat.shares() || rounded) bucket = pool_.acquire(size, options);
    if (rounded) {
      const int64_t staged = flat.shares() ? std::min(size, kPiece) : size;
      staging = staging_.acquire(staged, options.dtype(flat.gather_dtype()));
    }
    entry.flat->begin_gather(*entry.group, bucket, staging);
  };
  try {
    announcing(entry, [&] { memory_for(gather, "the parameters of unit '", flat.name(), "'"); });
  } catch (...) {
    entry.flat->take_bucket();
    if (bucket.defined()) pool_.release(bucket);
    if (staging.defined()) staging_.release(staging);
    throw;
  }
  if (bucket.defined()) live_ += size;
}

// Takes the bucket back after a gather. Undefined: none was used.
void Unsharder::release_bucket(const FlatParams& flat, const at::Tensor& bucket) {
  if (!bucket.defined()) return;
  live_ -= flat.layout().size();
  pool_.release(bucket);
}

void Unsharder::take_staging(FlatParams& flat) {
  if (const at::Tensor staging = flat.take_staging(); staging.defined()) staging_.release(staging);
}

void Unsharder::make_ready(Entry& entry, bool exact) {
  const PhaseScope scope(phases_, Phase::Gather, entry.flat->name());
  if (entry.flat->state() == ParamState::Sharded) start(entry, exact);
  try {
    announcing(entry, [&] { entry.flat->finish_gather(); });
  } catch (...) {
    release_bucket(*entry.flat, entry.flat->take_bucket());
    take_staging(*entry.flat);
    throw;
  }
  take_staging(*entry.flat);
  entry.missing = 0;
  const auto& items = entry.flat->items();
  for (size_t i = 0; i < items.size(); ++i) {
    entry.seen[i] = false;
    if (items[i].tensor.requires_grad()) ++entry.missing;
  }
}

// Gathers the one unit that the last pass used next, whatever its size. Looking further ahead would cost memory without gain:
// one gather at a time fills the network.
void Unsharder::prefetch(const Trace& trace) {
  const int next = trace.next();
  if (next < 0 || !options_.prefetch) return;
  Entry& entry = entries_[next];
  if (entry.flat->shares()) return;  // nothing has to travel
  const int64_t size = entry.flat->layout().size();
  if (entry.flat->state() == ParamState::Sharded && live_ + size <= options_.max_live) start(entry);
}

// Reads what the last pass used soon after the present unit, and nothing else.
void Unsharder::read_ahead(const Trace& trace) {
  int64_t room = options_.ahead;
  std::vector<int> reading;
  const size_t end = std::min(trace.last.size(), trace.position + static_cast<size_t>(options_.ahead_units) + 1);
  for (size_t i = trace.position; trace.followed && i < end; ++i) {
    if (static_cast<int>(reading.size()) == options_.ahead_units) break;
    const int unit = trace.last[i];
    if (there_ && !there_(unit, /*waits=*/false)) continue;
    const int64_t elements = entries_[unit].flat->read_ahead(room);
    if (elements == 0) continue;
    room -= elements;
    reading.push_back(unit);
  }
  for (const int unit : std::exchange(reading_, std::move(reading)))
    if (std::find(reading_.begin(), reading_.end(), unit) == reading_.end()) entries_[unit].flat->forget_ahead();
}

// Going by the last pass, other units need no more than the reuse distance until this one is used again.
bool Unsharder::worth_keeping(int unit) const {
  if (live_ > options_.max_live) return false;
  int64_t distance = 0;
  const auto reached = [&](const std::vector<int>& uses, size_t from, bool& found) {
    for (size_t i = from; i < uses.size() && !found && distance <= options_.reuse_distance; ++i) {
      found = uses[i] == unit;
      if (!found) distance += entries_[uses[i]].flat->layout().size();
    }
  };
  bool found = false;
  reached(forward_.last, forward_.position, found);
  reached(backward_.now.empty() ? backward_.last : backward_.now, 0, found);
  return found && distance <= options_.reuse_distance;
}

void Unsharder::settle(int unit) {
  Entry& entry = entries_[unit];
  if (in_use(entry) || entry.kept) return;
  release(entry);
}

// Releases all units, also when one reports an error.
void Unsharder::settle_all(const std::vector<int>& units) {
  std::exception_ptr failure;
  for (const int unit : units) {
    try {
      settle(unit);
    } catch (...) {
      failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

void Unsharder::release(Entry& entry) {
  const transforms::Suspended plain;
  FlatParams& flat = *entry.flat;
  entry.kept = false;
  flat.forget_ahead();
  if (!flat.sharded() || flat.state() == ParamState::Sharded) return;
  const char* const outcome = flat.is_in_space() ? "reached the other ranks at an unknown moment" : "is lost";
  std::string edited;
  release_bucket(flat, flat.release(&edited));
  take_staging(flat);
  TESSERA_CHECK(edited.empty(), "zero", "in-place modification of parameter '", edited,
                "' while it was gathered for reading ", outcome,
                "; edit it inside GatheredParameters with modifier_rank 0");
}

void Unsharder::release_unused(bool kept_too) {
  for (Entry& entry : entries_) {
    if (in_use(entry) || (entry.kept && !kept_too)) continue;
    release(entry);
  }
}

void Unsharder::hold(int unit, bool writable) {
  const transforms::Suspended plain;
  Entry& entry = entries_[unit];
  FlatParams& flat = *entry.flat;
  if (!flat.sharded()) return;
  const bool ready = flat.state() == ParamState::Ready;
  if (!ready) make_ready(entry, /*exact=*/true);
  try {
    flat.use();
    announcing(entry, [&] { flat.make_exact(*entry.group); });
    if (writable && flat.is_in_space()) {
      const int64_t size = flat.layout().size();
      flat.make_private(memory_for([&] { return pool_.acquire(size, flat.options()); }, "a copy of unit '", flat.name(),
                                   "' in a region"));
      live_ += size;
    }
  } catch (...) {
    if (!ready) settle(unit);
    throw;
  }
  ++entry.regions;
}

void Unsharder::unhold(int unit) {
  if (!entries_[unit].flat->sharded()) return;
  --entries_[unit].regions;
  settle(unit);
}

void Unsharder::settle_before_update() {
  for (size_t unit = 0; unit < entries_.size(); ++unit)
    settle_before_update(static_cast<int>(unit));
}

void Unsharder::check_unused(const Entry& entry, int uses) {
  TESSERA_CHECK(uses == 0, "zero", "parameters of unit '", entry.flat->name(),
                "' are in use (inside GatheredParameters or a forward); leave that before they change");
}

void Unsharder::settle_before_update(int unit) {
  Entry& entry = entries_[unit];
  check_unused(entry, entry.holds + entry.regions);
  entry.calls.clear();
  entry.again = false;
  release(entry);
}

void Unsharder::abandon(const std::string& message) {
  for (Entry& entry : entries_)
    entry.flat->abandon(message);
  entries_.clear();
  stack_.clear();
}

}  // namespace tessera::zero
