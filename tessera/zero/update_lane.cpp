#include "tessera/zero/update_lane.h"

#include <ATen/Parallel.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/transforms.h"
#include "tessera/zero/tile_pipeline.h"

namespace tessera::zero {

bool UpdateLane::on() const {
  const Options& options = units_.options();
  return options.update_runs_on && (options.home || options.weight_home) && !units_.ranks().device.is_cpu() &&
         units_.rule() != optim::Rule::External;
}

bool UpdateLane::takes(const Unit& unit) const {
  return on() && !lives_on_device(unit);
}

void UpdateLane::open(const std::vector<Unit*>& units, Lanes& lanes, Gather gather, RankGuard disks) {
  TESSERA_ASSERT(coming_.empty() && agreed_);
  for (Unit* unit : units) {
    numbers_[unit] = coming_.size();
    coming_.emplace_back().unit = unit;
  }
  gather_ = std::move(gather);
  present_.assign(units_.count(), false);
  gathered_ = 0;
  runs_ = true;
  agreed_ = false;
  {
    const std::lock_guard lock(mutex_);
    beside_ = RankGuard(true);
    disks_ = std::move(disks);
    failed_ = !disks_.went_well();
    job_ = std::make_unique<Job>(Job{units_.groups(), &lanes, at::get_num_threads()});
    open_ = true;
  }
  if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
  changed_.notify_all();
}

void UpdateLane::add(Work work, const std::vector<bool>& present) {
  Coming& coming = coming_[numbers_.at(work.unit)];
  for (const Param& p : work.unit->params())
    present_[p.id] = present[p.id];
  // The unit's work so far is before the start, so its way back need not wait for what comes next.
  work.unit->on_this_stream();
  work.start = shard::mark(units_.ranks().device);
  if (work.release) wait_for([&] { return held_ < kHeld; });
  collect();
  coming.gathers = units_.gathers_updates(*work.unit);
  coming.added = true;
  {
    const std::lock_guard lock(mutex_);
    held_ += work.release ? 1 : 0;
    waiting_.push_back(std::move(work));
  }
  changed_.notify_all();
}

void UpdateLane::close(RankGuard disks) {
  {
    const std::lock_guard lock(mutex_);
    beside_ = std::move(disks);
    open_ = false;
  }
  changed_.notify_all();
  collect();
}

void UpdateLane::abandon() {
  if (!open_) return;
  close();
  wait_for([&] { return job_ == nullptr; });
  forget();
}

// ---------------------------------------------------------------- who waits

void UpdateLane::wait_for(const std::function<bool()>& what) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, what);
}

// Gradients that were used go back to who has lent them.
void UpdateLane::collect() {
  decltype(used_) used;
  {
    const std::lock_guard lock(mutex_);
    used.swap(used_);
  }
  for (const auto& [release, event] : used)
    release(event);
}

// Waits for a unit under the current stream, which may be another one than that of the last use.
void UpdateLane::arrive(Coming& coming) {
  if (!coming.added) return;
  wait_for([&] { return coming.there; });
  collect();
  for (const auto& event : coming.events)
    shard::come_after(*event, units_.ranks().device);
  if (std::exchange(coming.awaited, true)) return;
  coming.unit->on_this_stream();
  coming.unit->note_updated(present_);
}

bool UpdateLane::is_there(const Unit& unit) const {
  const auto found = numbers_.find(&unit);
  if (found == numbers_.end()) return true;
  const Coming& coming = coming_[found->second];
  if (!coming.added) return true;
  if (coming.gathers && !open_ && gathered_ <= found->second) return false;
  const std::lock_guard lock(mutex_);
  return coming.there;
}

bool UpdateLane::is_awaited(const Unit& unit) const {
  const auto found = numbers_.find(&unit);
  if (found == numbers_.end()) return true;
  const Coming& coming = coming_[found->second];
  return !coming.added || (coming.awaited && is_there(unit));
}

bool UpdateLane::has_failed() const {
  const std::lock_guard lock(mutex_);
  return !agreed_ && failed_;
}

// During a backward the weights of units that have not come are the old ones, and nobody gathers those of the other units yet.
void UpdateLane::await(const Unit& unit) {
  const auto found = numbers_.find(&unit);
  if (found == numbers_.end() || !coming_[found->second].added) return;
  const transforms::Suspended plain;
  const c10::AutoGradMode no_grad(false);
  const size_t number = found->second;
  if (coming_[number].gathers && !open_) gather_until(number + 1);
  arrive(coming_[number]);
  if (units_.ranks().all() > 1) return;
  std::unique_lock lock(mutex_);
  const bool failed = failed_;
  lock.unlock();
  if (failed) settle();
}

// Waits come in the order of the calls, on all ranks.
void UpdateLane::gather_until(size_t end) {
  std::vector<std::pair<Coming*, comm::Pending>> pending;
  for (; gathered_ < end; ++gathered_) {
    Coming& coming = coming_[gathered_];
    arrive(coming);
    if (coming.gathers) pending.emplace_back(&coming, gather_(*coming.unit));
  }
  for (auto& [coming, gather] : pending) {
    gather.wait();
    coming->events.assign(1, shard::mark(units_.ranks().device));
  }
}

void UpdateLane::settle() {
  if (!runs_) return;
  const transforms::Suspended plain;
  const c10::AutoGradMode no_grad(false);
  wait_for([&] { return open_ ? rests() : job_ == nullptr; });
  collect();
  for (Coming& coming : coming_)
    arrive(coming);
  if (open_) return;
  runs_ = false;
  if (const auto error = std::exchange(error_, nullptr)) {
    forget();
    units_.set_broken("a part of an update that ran on failed");
    std::rethrow_exception(error);
  }
  if (std::ranges::none_of(coming_, &Coming::gathers)) {
    coming_.clear();
    numbers_.clear();
  }
  if (units_.ranks().all() == 1) agree();
}

void UpdateLane::gather_rest() {
  if (open_ || std::ranges::none_of(coming_, &Coming::gathers)) return;
  const transforms::Suspended plain;
  const c10::AutoGradMode no_grad(false);
  gather_until(coming_.size());
  if (runs_) return;
  coming_.clear();
  numbers_.clear();
}

void UpdateLane::finish() {
  settle();
  if (open_) return;
  gather_rest();
  agree();
}

void UpdateLane::agree() {
  if (std::exchange(agreed_, true)) return;
  units_.check_came_to_end(disks_.agree(units_.ranks()));
}

void UpdateLane::forget() {
  collect();
  for (Coming& coming : coming_)
    arrive(coming);
  coming_.clear();
  numbers_.clear();
  error_ = nullptr;
  runs_ = false;
  agreed_ = true;
}

bool UpdateLane::stop() noexcept {
  bool left = false;
  for (size_t number = gathered_; number < coming_.size() && !open_; ++number)
    left = left || coming_[number].gathers;
  if (!thread_.joinable()) return left;
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
    open_ = false;
  }
  changed_.notify_all();
  thread_.join();
  try {
    forget();
  } catch (const std::exception&) {
    // A device that fails: its next use throws.
  }
  coming_.clear();
  numbers_.clear();
  stops_ = runs_ = false;
  agreed_ = true;
  return left;
}

// ---------------------------------------------------------------- the thread

void UpdateLane::loop() {
  for (;;) {
    Job* job = nullptr;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return job_ != nullptr || stops_; });
      job = job_.get();
    }
    if (job == nullptr) return;
    std::exception_ptr error;
    try {
      run(*job);
    } catch (...) {
      error = std::current_exception();
      const std::lock_guard lock(mutex_);
      failed_ = true;
    }
    do {  // what an error has left
      while (!under_way_.empty())
        end_first({});
    } while (next([] {}) != nullptr);
    {
      const std::lock_guard lock(mutex_);
      error_ = error;
      if (disks_.went_well()) disks_ = std::move(beside_);
      failed_ = error != nullptr || !disks_.went_well();
      job_.reset();
    }
    changed_.notify_all();
  }
}

// The unit to go on with; null where no more come. While there is none yet, the last one's update is brought to its end.
UpdateLane::Work* UpdateLane::next(const std::function<void()>& end_the_last) {
  std::unique_lock lock(mutex_);
  const auto goes_on = [&] { return !waiting_.empty() || !open_; };
  if (!goes_on()) {
    lock.unlock();
    end_the_last();
    lock.lock();
    rests_ = true;
    changed_.notify_all();
    changed_.wait(lock, goes_on);
    rests_ = false;
  }
  if (waiting_.empty()) return nullptr;
  const auto rank_of = [&](const Work& work) { return std::pair(!work.release, numbers_.at(work.unit)); };
  const auto first = std::ranges::min_element(waiting_, {}, rank_of);
  under_way_.push_back(std::move(*first));
  waiting_.erase(first);
  return &under_way_.back();
}

// The first work under way is done, or will be with the events.
void UpdateLane::end_first(std::vector<std::shared_ptr<c10::Event>> events) {
  Work work = std::move(under_way_.front());
  under_way_.pop_front();
  if (!work.release && work.grads.has_memory() && work.grads.is_here())
    for (const auto& event : events)
      shard::StreamOrder().keep(work.grads.tensor(), event.get());
  work.grads.reset();
  {
    const std::lock_guard lock(mutex_);
    if (work.release) {
      used_.emplace_back(std::move(work.release), events.empty() ? nullptr : events.front());
      --held_;
    }
    Coming& coming = coming_[numbers_.at(work.unit)];
    coming.events = std::move(events);
    coming.there = true;
    failed_ = failed_ || !disks_.went_well();
  }
  changed_.notify_all();
}

void UpdateLane::run(const Job& job) {
  const c10::Device device = units_.ranks().device;
  const c10::AutoGradMode no_grad(false);
  if (at::get_num_threads() != job.threads) at::set_num_threads(job.threads);
  const c10::StreamGuard guard(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
  std::vector<Unit*> updated;
  TilePipeline* all = nullptr;
  TilePipeline pipeline(
      units_, *job.lanes, disks_,
      [&](Unit& unit) {
        if (!unit.weights().is_here()) all->arrive_all();  // before the weights are read
        updated.push_back(&unit);
        end_first(all->used());
      },
      &job.groups);
  all = &pipeline;
  while (Work* work = next([&] { pipeline.finish(); })) {
    const std::vector<Segment> segments = std::move(work->segments);  // the work may end before add() does
    pipeline.add(*work->unit, work->grads, segments, work->scale, work->start);
  }
  pipeline.finish();
  for (const Unit* unit : updated)
    disks_.run_always([&] { unit->flush(); });
}

}  // namespace tessera::zero
