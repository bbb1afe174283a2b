#include "tessera/comm/shm_work.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/copy.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>

#include "tessera/base/error.h"

namespace tessera::comm {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(500);  // then the mover looks after another handle
constexpr auto kTitle = "tessera";

}  // namespace

ShmWork::ShmWork(ShmSharePtr share, std::weak_ptr<ShmMover> mover, std::vector<Call> calls, Result result,
                 std::optional<std::chrono::milliseconds> limit, c10d::OpType type, uint64_t number)
    : Work(share->world->rank(), type, kTitle),
      share_(std::move(share)),
      mover_(std::move(mover)),
      calls_(std::move(calls)),
      result_(std::move(result)),
      limit_(limit),
      number_(number) {}

bool ShmWork::over() const {
  return std::all_of(calls_.begin(), calls_.end(), [](const Call& c) { return c.call->done.load(); });
}

// Whoever comes first: the results get where they belong, then whoever waits for the future hears of it.
void ShmWork::settle(std::exception_ptr error) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::scoped_lock lock(mutex_);
    if (completed_) return;
    try {
      const at::NoGradGuard guard;
      for (size_t i = 0; i < result_.copies.size() && !error; ++i)
        result_.copies[i].first.copy_(result_.copies[i].second);
    } catch (...) {
      error = std::current_exception();
    }
    result_.copies.clear();
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
    if (over()) settle(nullptr);
  } catch (const std::exception&) {
    settle(std::current_exception());
  }
}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  const auto limit = timeout > kNoTimeout ? std::optional(timeout) : limit_;
  // The mover may settle it meanwhile: with an error, when the process group goes.
  const auto settled = [this] { return settled_.load(); };
  if (!settle_if_over()) wait_for_calls({.launched = launched_, .limit = limit, .until = settled});
  if (const auto error = exception()) std::rethrow_exception(error);
  return true;
}

void ShmWork::drive(ShmWorld::Clock::time_point since, const std::function<bool()>& until) {
  wait_for_calls({.launched = launched_, .since = since, .limit = limit_, .until = until});
}

bool ShmWork::settle_if_over() {
  if (over()) settle(nullptr);
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
  if (settle_if_over()) return true;
  try {
    for (const Call& c : calls_)
      share_->world->poll(*c.call);
  } catch (const std::exception&) {
    settle(std::current_exception());
  }
  const bool settled = settle_if_over();
  if (!settled) ask_mover();  // it notices lost ranks
  return settled;
}

int ShmWork::sourceRank() const {
  const auto* letter = dynamic_cast<const ShmLetter*>(calls_.front().call.get());
  TESSERA_CHECK(letter != nullptr, "comm", "only a message that was received has a source rank");
  return letter->peer;
}

void ShmWork::abort() {
  share_->world->abort("a call was aborted");
}

void ShmWork::ask_mover() {
  {
    const std::scoped_lock lock(mutex_);
    if (completed_ || std::exchange(asked_, true)) return;
  }
  if (const auto mover = mover_.lock()) {
    mover->add(ShmWorkPtr::unsafe_reclaim_from_nonowning(this));
  } else {
    fail("its process group was destroyed");
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
    if (!settle_if_over()) ask_mover();
  } else if (const auto error = exception()) {
    future->setErrorIfNeeded(error);
  } else {
    future->markCompleted(c10::IValue(result_.tensors));
  }
  return future;
}

struct ShmMover::State {
  struct Item {
    ShmWorkPtr work;
    ShmWorld::Clock::time_point since;
  };

  // Tells the thread: there is something new, or it is time to stop.
  template <class F>
  void tell(const F& change) {
    {
      const std::scoped_lock lock(mutex);
      change();
      news = true;
    }
    wake.notify_all();
    world->wake();
  }

  std::shared_ptr<ShmWorld> world;
  std::mutex mutex;
  std::condition_variable wake;
  std::vector<Item> arrived;
  std::atomic<bool> news = false;
  bool stopping = false;
};

ShmMover::ShmMover(std::shared_ptr<ShmWorld> world) : state_(std::make_shared<State>()) {
  state_->world = std::move(world);
}

ShmMover::~ShmMover() {
  state_->tell([&] { state_->stopping = true; });
  // It ends by itself, and soon. Waiting for it could take forever: it may be letting go of a tensor that Python knows,
  // which needs the interpreter's lock, and whoever destroys a process group may hold that.
  if (thread_.joinable()) thread_.detach();
}

void ShmMover::add(ShmWorkPtr work) {
  state_->tell([&] {
    state_->arrived.push_back({std::move(work), ShmWorld::Clock::now()});
    if (!thread_.joinable()) thread_ = std::thread([state = state_] { run(*state); });
  });
}

void ShmMover::run(State& state) {
  std::vector<State::Item> items;
  while (true) {
    {
      std::unique_lock lock(state.mutex);
      state.wake.wait(lock, [&] { return state.news.load() || !items.empty(); });
      state.news = false;
      std::move(state.arrived.begin(), state.arrived.end(), std::back_inserter(items));
      state.arrived.clear();
      if (state.stopping) break;
    }
    if (items.empty()) continue;
    const auto slice = ShmWorld::Clock::now() + kSlice;
    const auto until = [&] {
      return state.news.load() || ShmWorld::Clock::now() > slice ||
             std::any_of(items.begin(), items.end(), [](const auto& item) { return item.work->over(); });
    };
    items.front().work->drive(items.front().since, until);
    std::erase_if(items, [](const auto& item) { return item.work->settle_if_over(); });
    if (!items.empty()) std::rotate(items.begin(), items.begin() + 1, items.end());
  }
  for (const auto& item : items)
    item.work->fail("its process group was destroyed");
}

}  // namespace tessera::comm
