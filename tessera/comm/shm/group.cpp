#include "tessera/comm/shm/group.h"

#include "tessera/comm/shm/memory.h"
#include "tessera/comm/shm/rendezvous.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

class ShmPending final : public Pending::Work {
 public:
  ShmPending(ShmSharePtr share, ShmOpPtr op) : share_(std::move(share)), op_(std::move(op)) {}
  void wait() override { share_->world->wait(share_->channel, *op_, {.launched = launched_}); }
  bool wait_for(std::chrono::milliseconds limit) override {
    return share_->world->wait_until(*op_, Clock::now() + limit);
  }
  void release(std::unique_ptr<Work>) override {
    if (wait_for({})) wait();
  }  // the channel has the call, and the call its tensors

 private:
  ShmSharePtr share_;
  ShmOpPtr op_;
  Clock::time_point launched_ = Clock::now();
};

class ShmGroup final : public Group {
 public:
  explicit ShmGroup(ShmSharePtr share) : share_(std::move(share)) {}

  int rank() const override { return world().rank(); }
  int size() const override { return world().size(); }
  std::string name() const override { return "shared memory"; }
  void abort(const std::string& reason) override { world().abort(reason); }

 protected:
  Pending do_all_gather(at::Tensor out, at::Tensor in, Label label) override {
    return launch(shm_all_gather(rank(), size(), out, in, label));
  }
  Pending do_reduce_scatter(at::Tensor out, at::Tensor in, ReduceOp op, Label label) override {
    return launch(shm_reduce_scatter(rank(), size(), out, in, op, label));
  }
  Pending do_all_reduce(at::Tensor tensor, ReduceOp op, Label label) override {
    return launch(shm_all_reduce(rank(), size(), tensor, op, label));
  }
  Pending do_broadcast(at::Tensor tensor, int root, Label label) override {
    return launch(shm_broadcast(rank(), size(), tensor, root, label));
  }
  Pending do_all_to_all(at::Tensor out, at::Tensor in, std::vector<int64_t> out_splits, std::vector<int64_t> in_splits,
                        Label label) override {
    return launch(shm_all_to_all(rank(), size(), out, in, std::move(out_splits), std::move(in_splits), label));
  }
  at::Tensor do_shared_memory(int64_t bytes, Label label) override { return shm_memory(*this, bytes, label); }
  void do_barrier(Label label) override { launch(shm_barrier(rank(), size(), label)).wait(); }
  // The sibling has the same world: what fails one group fails both.
  GroupPtr do_sibling(c10::Device) override {
    return std::make_shared<ShmGroup>(std::make_shared<ShmShare>(share_->world));
  }

 private:
  ShmWorld& world() const { return *share_->world; }
  Pending launch(ShmOpPtr op) {
    world().launch(share_->channel, op);
    return Pending(std::make_unique<ShmPending>(share_, std::move(op)));
  }

  const ShmSharePtr share_;
};

}  // namespace

GroupPtr shm_group(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout) {
  auto group = std::make_shared<ShmGroup>(shm_rendezvous(store, rank, size, timeout));
  group->barrier("all ranks share memory");  // the store may go with rank 0 from here on
  return group;
}

std::vector<GroupPtr> shm_thread_groups(int size, std::chrono::milliseconds timeout) {
  std::vector<GroupPtr> groups;
  for (auto& share : shm_thread_shares(size, timeout))
    groups.push_back(std::make_shared<ShmGroup>(std::move(share)));
  return groups;
}

}  // namespace tessera::comm
