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

void UpdateLane::begin(std::vector<Work> work, const std::vector<bool>& present, double scale, Lanes& lanes,
                       Gather gather, RankGuard disks) {
  TESSERA_ASSERT(coming_.empty() && agreed_);
  const c10::Device device = units_.ranks().device;
  for (const Work& w : work) {
    numbers_[w.unit] = coming_.size();
    Coming& coming = coming_.emplace_back();
    coming.unit = w.unit;
    coming.gathers = units_.gathers_updates(*w.unit);
    // All that it was given is before the start, so its way back need not wait for the forward.
    w.unit->on_this_stream();
    w.unit->order = {};
  }
  gather_ = std::move(gather);
  present_ = present;
  gathered_ = 0;
  runs_ = true;
  agreed_ = false;
  auto job = std::make_unique<Job>(
      Job{std::move(work), units_.groups(), scale, &lanes, shard::mark(device), at::get_num_threads()});
  {
    const std::lock_guard lock(mutex_);
    disks_ = std::move(disks);
    failed_ = !disks_.went_well();
    job_ = std::move(job);
  }
  if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
  changed_.notify_all();
}

// ---------------------------------------------------------------- who waits

void UpdateLane::wait_for(const std::function<bool()>& what) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, what);
}

// Under whatever stream: it may be another one than that of the last use.
void UpdateLane::arrive(Coming& coming) {
  wait_for([&] { return coming.there; });
  for (const auto& event : coming.events)
    shard::come_after(*event, units_.ranks().device);
  if (!std::exchange(coming.awaited, true)) coming.unit->note_updated(present_);
}

bool UpdateLane::is_there(const Unit& unit) const {
  const auto found = numbers_.find(&unit);
  if (found == numbers_.end()) return true;
  const Coming& coming = coming_[found->second];
  if (coming.gathers && gathered_ <= found->second) return false;
  const std::lock_guard lock(mutex_);
  return coming.there;
}

bool UpdateLane::is_awaited(const Unit& unit) const {
  const auto found = numbers_.find(&unit);
  return found == numbers_.end() || (coming_[found->second].awaited && is_there(unit));
}

void UpdateLane::await(const Unit& unit) {
  const auto found = numbers_.find(&unit);
  if (found == numbers_.end()) return;
  const transforms::Suspended plain;
  const c10::AutoGradMode no_grad(false);
  const size_t number = found->second;
  if (coming_[number].gathers) gather_until(number + 1);
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
  wait_for([&] { return job_ == nullptr; });
  runs_ = false;
  for (Coming& coming : coming_)
    arrive(coming);
  if (error_) {
    coming_.clear();
    numbers_.clear();
    agreed_ = true;
    units_.set_broken("a part of an update that ran on failed");
    std::rethrow_exception(std::exchange(error_, nullptr));
  }
  if (std::ranges::none_of(coming_, &Coming::gathers)) {
    coming_.clear();
    numbers_.clear();
  }
  if (units_.ranks().all() == 1) agree();
}

void UpdateLane::gather_rest() {
  if (std::ranges::none_of(coming_, &Coming::gathers)) return;
  const transforms::Suspended plain;
  const c10::AutoGradMode no_grad(false);
  gather_until(coming_.size());
  if (runs_) return;
  coming_.clear();
  numbers_.clear();
}

void UpdateLane::finish() {
  settle();
  gather_rest();
  agree();
}

void UpdateLane::agree() {
  if (std::exchange(agreed_, true)) return;
  units_.check_came_to_end(disks_.agree(units_.ranks()));
}

bool UpdateLane::stop() noexcept {
  bool left = false;
  for (size_t number = gathered_; number < coming_.size(); ++number)
    left = left || coming_[number].gathers;
  if (!thread_.joinable()) return left;
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  thread_.join();
  try {
    for (Coming& coming : coming_)
      arrive(coming);
  } catch (const std::exception&) {
    // A device that fails: who uses it next is told.
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
    }
    job->work.clear();  // with all that it holds
    {
      const std::lock_guard lock(mutex_);
      error_ = error;
      failed_ = failed_ || error != nullptr || !disks_.went_well();
      for (Coming& coming : coming_)
        coming.there = true;
      job_.reset();
    }
    changed_.notify_all();
  }
}

void UpdateLane::tell(size_t number, std::vector<std::shared_ptr<c10::Event>> events) {
  {
    const std::lock_guard lock(mutex_);
    coming_[number].events = std::move(events);
    coming_[number].there = true;
    failed_ = !disks_.went_well();
  }
  changed_.notify_all();
}

void UpdateLane::run(Job& job) {
  const c10::Device device = units_.ranks().device;
  const c10::AutoGradMode no_grad(false);
  if (at::get_num_threads() != job.threads) at::set_num_threads(job.threads);
  const c10::StreamGuard guard(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
  shard::come_after(*job.start, device);
  size_t number = 0;
  TilePipeline* all = nullptr;
  TilePipeline pipeline(
      units_, *job.lanes, disks_,
      [&](Unit& unit) {
        if (!unit.weights().is_here()) all->arrive_all();  // before they are read
        const auto events = all->used();
        shard::Buffer& grads = job.work[number].grads;
        if (grads.has_memory() && grads.is_here())
          for (const auto& event : events)
            shard::StreamOrder().keep(grads.tensor(), event.get());
        grads.reset();
        tell(number++, events);
      },
      &job.groups);
  all = &pipeline;
  for (Work& w : job.work)
    pipeline.add(*w.unit, w.grads, std::move(w.segments), job.scale);
  pipeline.finish();
  for (const Work& w : job.work)
    disks_.run_always([&] { w.unit->flush(); });
}

}  // namespace tessera::zero
