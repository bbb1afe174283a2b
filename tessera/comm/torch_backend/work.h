// Handles of torch.distributed for calls over shared memory, and the thread that moves what nobody waits for.
//
// Note [Progress thread]
//   The handles of Tessera's own Group are waited for, and every wait moves the data. A handle of torch.distributed may
//   instead be asked for a future, polled, or forgotten. Each backend therefore has a thread, started when it is first
//   needed, that waits for such calls beside the program: they overlap with computation, and their futures complete.
//   A callback of a future may wait for the future of another call, as that of PowerSGD does. So whoever runs callbacks
//   moves nothing meanwhile, and a further thread takes its place if there is something to move; later it waits for its
//   turn. At the end of the program there are no threads any more, see Note [Python's end]: then whoever asks for a future
//   waits for the call first.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/comm/shm/rendezvous.h"
#include "tessera/comm/torch_backend/side_threads.h"

namespace tessera::comm {

class ProgressThread;

class ShmWork final : public c10d::Work {
 public:
  struct Call {
    int channel;
    ShmCallPtr call;
  };
  struct Result {
    std::vector<at::Tensor> tensors;                        // of the future
    std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // (to, from) once all calls are through
    std::function<void()> finish;                           // called then; none: nothing is left to do
  };
  // What profilers show.
  struct Label {
    const char* title;  // "tessera:all_reduce", for ever
    std::vector<at::Tensor> inputs;
  };

  // The calls are launched already. `limit`: in place of the world's timeout.
  ShmWork(ShmSharePtr share, std::weak_ptr<ProgressThread> thread, std::vector<Call> calls, Result result,
          const Label& label, std::optional<std::chrono::milliseconds> limit, c10d::OpType type, uint64_t number);

  // Waits. DistBackendError when the group has failed. `timeout` 0: the operation's own.
  bool wait(std::chrono::milliseconds timeout) override;
  bool isCompleted() override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return result_.tensors; }
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return number_; }

  // For the progress thread: returns whether all calls are through; settles the handle if so, or if they have failed.
  bool settle_if_finished();
  // Waits for the calls until they are through, or until() says so. Throws nothing; errors are kept.
  void drive(ShmWorld::Clock::time_point since, const std::function<bool()>& until);
  void fail(const std::string& reason);
  bool finished() const;
  bool settled() const { return settled_; }

 private:
  void wait_for_calls(const ShmWorld::Wait& how);
  void settle(std::exception_ptr error);
  void ask_progress_thread();

  const ShmSharePtr share_;
  const std::weak_ptr<ProgressThread> progress_thread_;
  const std::vector<Call> calls_;
  Result result_;
  const std::optional<std::chrono::milliseconds> limit_;
  const uint64_t number_;
  const ShmWorld::Clock::time_point launched_ = ShmWorld::Clock::now();
  std::atomic<bool> settled_ = false;  // completed_, for those who do not hold the mutex
  bool asked_ = false;                 // guarded by mutex_ of the base, as is what follows
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};
using ShmWorkPtr = c10::intrusive_ptr<ShmWork>;

// A forked copy of the process lets go of it as it is.
class ProgressThread {
 public:
  ProgressThread(std::shared_ptr<ShmWorld> world, SideThreadsPtr threads);
  // Fails handles that are still in flight: their group is gone.
  ~ProgressThread();
  void add(ShmWorkPtr work);
  // The calling thread is about to run callbacks, which may wait for other handles: if it is the one that moves them,
  // another takes over.
  void step_down();

 private:
  struct State;

  const ProcessOwner owner_;
  const std::shared_ptr<State> state_;  // the threads' too
};

}  // namespace tessera::comm
