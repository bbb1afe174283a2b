#include "tessera/comm/shm_group.h"

#include <unistd.h>

#include <random>
#include <sstream>

#include "tessera/base/error.h"
#include "tessera/comm/shm_world.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

// This rank's share in a channel: it leaves when the Group and all its handles are gone.
struct Share {
  explicit Share(std::shared_ptr<ShmWorld> of) : world(std::move(of)), channel(world->add_channel()) {}
  ~Share() { world->leave(channel); }
  Share(const Share&) = delete;
  Share& operator=(const Share&) = delete;

  const std::shared_ptr<ShmWorld> world;
  const int channel;
};

class ShmWork final : public Pending::Work {
 public:
  ShmWork(std::shared_ptr<Share> share, ShmOpPtr op) : share_(std::move(share)), op_(std::move(op)) {}
  void wait() override { share_->world->wait(share_->channel, *op_, launched_); }

 private:
  std::shared_ptr<Share> share_;
  ShmOpPtr op_;
  Clock::time_point launched_ = Clock::now();
};

class ShmGroup final : public Group {
 public:
  explicit ShmGroup(std::shared_ptr<ShmWorld> world) : share_(std::make_shared<Share>(std::move(world))) {}

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
  void do_barrier(Label label) override { launch(shm_barrier(rank(), size(), label)).wait(); }
  // One world: what fails one group fails both.
  GroupPtr do_sibling() override { return std::make_shared<ShmGroup>(share_->world); }

 private:
  ShmWorld& world() const { return *share_->world; }
  Pending launch(ShmOpPtr op) {
    world().launch(share_->channel, op);
    return Pending(std::make_unique<ShmWork>(share_, std::move(op)));
  }

  const std::shared_ptr<Share> share_;
};

std::shared_ptr<ShmSegment> create_segment(int size, uint64_t nonce) {
  const ShmLayout layout{size};
  auto segment = ShmSegment::create(layout.total());
  segment->reserve(0, layout.control());
  reinterpret_cast<ShmHeader*>(segment->data())->nonce = nonce;
  return segment;
}

constexpr auto kSegmentKey = "tessera/shm/segment";

std::string rank_key(int rank) {
  return "tessera/shm/rank_" + std::to_string(rank);
}

// Rank 0 makes the segment and says where it is; the others open it.
std::shared_ptr<ShmSegment> meet_in_segment(c10d::Store& store, int rank, int size) {
  if (rank == 0) {
    std::random_device random;
    const uint64_t nonce = static_cast<uint64_t>(random()) << 32 | random();
    auto segment = create_segment(size, nonce);
    store.set(kSegmentKey,
              std::to_string(getpid()) + " " + std::to_string(segment->fd()) + " " + std::to_string(nonce));
    return segment;
  }
  std::istringstream place(store.get_to_str(kSegmentKey));
  int pid = 0, fd = -1;
  uint64_t nonce = 0;
  place >> pid >> fd >> nonce;
  TESSERA_CHECK_DIST(place, "comm", "shared memory: rank 0 could not make a segment");
  auto segment = ShmSegment::attach(pid, fd, ShmLayout{size}.total());
  TESSERA_CHECK_DIST(reinterpret_cast<ShmHeader*>(segment->data())->nonce == nonce, "comm", "shared memory: process ",
                     pid, " has another segment than rank 0's; do all ranks run on one host?");
  return segment;
}

std::string first_line(const std::exception& error) {
  std::string text = error.what();
  text = text.substr(0, text.find('\n'));
  return text.starts_with("[comm] ") ? text.substr(7) : text;
}

}  // namespace

GroupPtr shm_group(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout) {
  std::shared_ptr<ShmWorld> world;
  GroupPtr group;
  std::string trouble;
  try {
    world = std::make_shared<ShmWorld>(meet_in_segment(store, rank, size), rank, size, timeout);
    group = std::make_shared<ShmGroup>(world);
  } catch (const std::exception& error) {
    trouble = first_line(error);
    if (rank == 0) store.set(kSegmentKey, std::string("none"));
  }
  // Everybody says how it went before anybody goes on, so that all end alike.
  store.set(rank_key(rank), trouble.empty() ? std::string("ok") : trouble);
  for (int r = 0; r < size; ++r) {
    const std::string said = store.get_to_str(rank_key(r));
    TESSERA_CHECK_DIST(said == "ok", "comm", "rank ", r, " of ", size, " cannot share memory: ", said);
  }
  const auto unseen = world->unseen();
  TESSERA_CHECK_DIST(unseen.empty(), "comm", "shared memory: rank ", rank, " does not see the process(es) of rank(s) ",
                     join(unseen), "; all ranks must run on one host in one process namespace");
  group->barrier("all ranks share memory");  // the store may go with rank 0 from here on
  return group;
}

std::vector<GroupPtr> shm_thread_groups(int size, std::chrono::milliseconds timeout) {
  TESSERA_CHECK_VALUE(size >= 2, "comm", "shm_thread_groups: size must be at least 2, got ", size);
  const auto segment = create_segment(size, 0);
  std::vector<GroupPtr> groups;
  groups.reserve(size);
  for (int r = 0; r < size; ++r)
    groups.push_back(std::make_shared<ShmGroup>(std::make_shared<ShmWorld>(segment, r, size, timeout)));
  return groups;
}

}  // namespace tessera::comm
