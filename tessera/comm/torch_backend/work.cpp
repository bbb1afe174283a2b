#include "tessera/comm/torch_backend/work.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/copy.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/comm/torch_backend/messages.h"

namespace tessera::comm {
namespace {

constexpr auto kTurn = std::chrono::milliseconds(500);  // the progress thread turns to another handle then
constexpr auto kGroupGone = "its process group was destroyed";

}  // namespace

ShmWork::ShmWork(ShmSharePtr share, std::weak_ptr<ProgressThread> thread, std::vector<Call> calls, Result result,
                 const Label& label, std::optional<std::chrono::milliseconds> limit, c10d::OpType type, uint64_t number)
    : Work(share->world->rank(), type, label.title, label.inputs),
      share_(std::move(share)),
      progress_thread_(std::move(thread)),
      calls_(std::move(calls)),
      result_(std::move(result)),
      limit_(limit),
      number_(number) {}

bool ShmWork::finished() const {
  return std::all_of(calls_.begin(), calls_.end(), [](const Call& c) { return c.call->done.load(); });
}

// Settles, whoever comes first: the results get where they belong, then whoever waits for the future hears of it.
void ShmWork::settle(std::exception_ptr error) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::scoped_lock lock(mutex_);
    if (completed_) return;
    try {
      const at::NoGradGuard guard;
      for (size_t i = 0; i < result_.copies.size() && !error; ++i)
        result_.copies[i].first.copy_(result_.copies[i].second);
      if (result_.finish && !error) result_.finish();
    } catch (...) {
      error = std::current_exception();
    }
    result_.copies.clear();
    result_.finish = nullptr;
    exception_ = error;
    completed_ = settled_ = true;
    if (recordFunctionEndCallback_) {
      recordFunctionEndCallback_();
      recordFunctionEndCallback_ = nullptr;
    }
    future = future_;
  }
  cv_.notify_all();
  if (!future) return;
  if (const auto thread = progress_thread_.lock()) thread->step_down();
  if (error) {
    future->setErrorIfNeeded(error);
  } else {
    future->markCompleted(c10::IValue(result_.tensors));
  }
}

void ShmWork::wait_for_calls(const ShmWorld::Wait& how) {
  try {
    for (const Call& c : calls_)
      share_->world->wait(c.channel, *c.call, how);
    if (finished()) settle(nullptr);
  } catch (const std::exception&) {
    settle(std::current_exception());
  }
}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  const auto limit = timeout > kNoTimeout ? std::optional(timeout) : limit_;
  // The progress thread may settle the handle meanwhile: with an error, when the process group goes.
  const auto settled = [this] { return settled_.load(); };
  if (!settle_if_finished()) wait_for_calls({.launched = launched_, .limit = limit, .until = settled});
  if (const auto error = exception()) std::rethrow_exception(error);
  return true;
}

void ShmWork::drive(ShmWorld::Clock::time_point since, const std::function<bool()>& until) {
  wait_for_calls({.launched = launched_, .since = since, .limit = limit_, .until = until});
}

bool ShmWork::settle_if_finished() {
  if (finished()) settle(nullptr);
  const std::scoped_lock lock(mutex_);
  return completed_;
}

void ShmWork::fail(const std::string& reason) {
  try {
    throw_failed(rank_, share_->world->size(), calls_.front().call->info(), 0.0, reason);
  } catch (const std::exception&) {
    settle(std::current_exception());
  }
  share_->world->wake();
}

bool ShmWork::isCompleted() {
  if (settle_if_finished()) return true;
  try {
    for (const Call& c : calls_)
      share_->world->poll(*c.call);
  } catch (const std::exception&) {
    settle(std::current_exception());
  }
  const bool settled = settle_if_finished();
  if (!settled) ask_progress_thread();  // the progress thread notices lost ranks
  return settled;
}

int ShmWork::sourceRank() const {
  const auto* message = dynamic_cast<const ShmMessage*>(calls_.front().call.get());
  TESSERA_CHECK(message != nullptr, "comm", "only a message that was received has a source rank");
  return message->peer;
}

void ShmWork::abort() {
  share_->world->abort("a call was aborted");
}

void ShmWork::ask_progress_thread() {
  {
    const std::scoped_lock lock(mutex_);
    if (completed_ || std::exchange(asked_, true)) return;
  }
  if (const auto thread = progress_thread_.lock()) {
    thread->add(ShmWorkPtr::unsafe_reclaim_from_nonowning(this));
  } else {
    fail(kGroupGone);
  }
}

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  bool settled = false;
  {
    const std::scoped_lock lock(mutex_);
    if (future_) return future_;
    future_ = future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    settled = completed_;
  }
  if (!settled) {
    if (!settle_if_finished()) ask_progress_thread();
  } else if (const auto error = exception()) {
    future->setErrorIfNeeded(error);
  } else {
    future->markCompleted(c10::IValue(result_.tensors));
  }
  return future;
}

struct ProgressThread::State final : SideThreads::Owner, std::enable_shared_from_this<ProgressThread::State> {
  struct Item {
    ShmWorkPtr work;
    ShmWorld::Clock::time_point since;
  };

  void end_threads() override;
  bool take_over();
  void run();
  void lead(std::unique_lock<std::mutex>& lock);
  static void fail(const std::vector<Item>& items);
  std::vector<Item> take_settled();

  std::shared_ptr<ShmWorld> world;
  SideThreadsPtr threads;
  std::atomic<bool> changed = false;  // for the leader: something below has changed
  std::mutex mutex;
  std::condition_variable wake;
  std::vector<Item> items;  // in flight
  std::thread::id leader;   // the thread that moves; none: nobody does
  int idle = 0;             // threads that wait for their turn
  bool stopping = false;    // the group is gone
  bool ending = false;      // the program ends: no more threads
};

// A thread shall lead, or clear up: false when there is none. The mutex is held.
bool ProgressThread::State::take_over() {
  if (idle == 0 && !threads->start([state = shared_from_this()] { state->run(); })) return false;
  wake.notify_all();
  return true;
}

void ProgressThread::State::end_threads() {
  {
    const std::scoped_lock lock(mutex);
    ending = changed = true;
    wake.notify_all();
  }
  world->wake();
}

void ProgressThread::State::run() {
  std::unique_lock lock(mutex);
  while (!stopping && !ending) {
    idle += 1;
    wake.wait(lock, [&] { return stopping || ending || (leader == std::thread::id() && !items.empty()); });
    idle -= 1;
    if (!stopping && !ending) lead(lock);
  }
  if (!stopping) return;  // handles in flight stay for ~ProgressThread()
  const auto rest = std::exchange(items, {});
  lock.unlock();
  fail(rest);
}

void ProgressThread::State::fail(const std::vector<Item>& items) {
  for (const auto& item : items)
    item.work->fail(kGroupGone);
}

// Leads until there is nothing to move, or callbacks had to be run.
void ProgressThread::State::lead(std::unique_lock<std::mutex>& lock) {
  const auto me = leader = std::this_thread::get_id();
  while (leader == me && !stopping && !ending && !items.empty()) {
    {
      const auto mine = items;
      changed = false;
      lock.unlock();
      const auto slice = ShmWorld::Clock::now() + kTurn;
      mine.front().work->drive(mine.front().since, [&] {
        return changed.load() || ShmWorld::Clock::now() > slice ||
               std::any_of(mine.begin(), mine.end(), [](const auto& item) { return item.work->finished(); });
      });
      for (const auto& item : mine)
        item.work->settle_if_finished();
    }
    lock.lock();
    if (leader != me) return;
    auto settled = take_settled();
    if (!items.empty()) std::rotate(items.begin(), items.begin() + 1, items.end());
    lock.unlock();
    settled.clear();
    lock.lock();
  }
  if (leader == me) leader = {};
}

// Takes settled handles. The mutex is held, but must not be when these go: see ~ProgressThread().
std::vector<ProgressThread::State::Item> ProgressThread::State::take_settled() {
  const auto first =
      std::stable_partition(items.begin(), items.end(), [](auto& item) { return !item.work->settled(); });
  std::vector<Item> settled(std::make_move_iterator(first), std::make_move_iterator(items.end()));
  items.erase(first, items.end());
  return settled;
}

ProgressThread::ProgressThread(std::shared_ptr<ShmWorld> world, SideThreadsPtr threads)
    : state_(std::make_shared<State>()) {
  state_->world = std::move(world);
  state_->threads = std::move(threads);
  state_->threads->add(state_);
}

ProgressThread::~ProgressThread() {
  if (!owner_.is_here()) return;
  std::vector<State::Item> rest;
  {
    const std::scoped_lock lock(state_->mutex);
    state_->stopping = state_->changed = true;
    // The threads end by themselves, and soon. Waiting for them could take forever: they may be letting go of a tensor
    // that Python knows, which needs the interpreter's lock, and whoever destroys a process group may hold that.
    if (state_->leader == std::thread::id() && !state_->items.empty() && !state_->take_over())
      rest = std::exchange(state_->items, {});
    state_->wake.notify_all();
  }
  state_->world->wake();
  State::fail(rest);
}

void ProgressThread::add(ShmWorkPtr work) {
  const auto since = ShmWorld::Clock::now();
  {
    const std::scoped_lock lock(state_->mutex);
    if (!state_->ending && (state_->leader != std::thread::id() || state_->take_over())) {
      state_->items.push_back({std::exchange(work, {}), since});
      state_->changed = true;
    }
  }
  state_->world->wake();
  if (work) work->drive(since, [] { return false; });
}

void ProgressThread::step_down() {
  std::vector<State::Item> settled;  // goes when the mutex is free
  const std::scoped_lock lock(state_->mutex);
  if (state_->leader != std::this_thread::get_id()) return;
  settled = state_->take_settled();
  state_->leader = {};
  if (!state_->items.empty()) state_->take_over();
}

}  // namespace tessera::comm
