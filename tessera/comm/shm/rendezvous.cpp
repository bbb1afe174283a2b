#include "tessera/comm/shm/rendezvous.h"

#include <sstream>

#include "tessera/base/error.h"
#include "tessera/comm/c10d/fault_board.h"

namespace tessera::comm {
namespace {

constexpr auto kSegmentKey = "tessera/shm/segment";
constexpr auto kNoTrouble = "ok";

std::shared_ptr<ShmSegment> create_segment(int size) {
  const ShmLayout layout{size};
  auto segment = ShmSegment::create(layout.total());
  segment->reserve(0, layout.control());
  return segment;
}

// Rank 0 makes the segment and says where it is; the others open it.
std::shared_ptr<ShmSegment> join_segment(c10d::Store& store, int rank, int size) {
  if (rank == 0) {
    auto segment = create_segment(size);
    const ShmAddress address = segment->offer();
    store.set(kSegmentKey,
              std::to_string(address.pid) + " " + std::to_string(address.fd) + " " + std::to_string(address.secret));
    return segment;
  }
  std::istringstream text(announced_by(store, kSegmentKey, 0));
  ShmAddress address;
  text >> address.pid >> address.fd >> address.secret;
  TESSERA_CHECK_DIST(text, "comm", "shared memory: rank 0 could not make a segment");
  return ShmSegment::attach(address, ShmLayout{size}.total());
}

std::string line_of(const std::exception& error) {
  std::string text = error.what();
  text = text.substr(0, text.find('\n'));
  return text.starts_with("[comm] ") ? text.substr(7) : text;
}

// Every rank says how it went before any goes on, so that all end alike.
void agree(c10d::Store& store, int rank, int size, const std::string& what, const std::string& trouble) {
  const auto key = [&](int r) { return "tessera/shm/" + what + "_" + std::to_string(r); };
  store.set(key(rank), trouble.empty() ? std::string(kNoTrouble) : trouble);
  for (int r = 0; r < size; ++r) {
    const std::string announced = announced_by(store, key(r), r);
    TESSERA_CHECK_DIST(announced == kNoTrouble, "comm", "rank ", r, " of ", size, " cannot share memory: ", announced);
  }
}

}  // namespace

ShmSharePtr shm_rendezvous(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout,
                           std::vector<int> numbers) {
  ShmSharePtr share;
  std::string trouble;
  try {
    share = std::make_shared<ShmShare>(
        std::make_shared<ShmWorld>(join_segment(store, rank, size), rank, size, timeout, std::move(numbers)));
  } catch (const std::exception& error) {
    trouble = line_of(error);
    if (rank == 0) store.set(kSegmentKey, std::string("none"));
  }
  agree(store, rank, size, "joined", trouble);
  const auto unseen = share->world->unseen();
  if (!unseen.empty()) {
    trouble = "it does not see the process(es) of rank(s) " + join(unseen) +
              "; all ranks must run on one host in one process namespace";
  }
  agree(store, rank, size, "seen", trouble);
  return share;
}

std::vector<ShmSharePtr> shm_thread_shares(int size, std::chrono::milliseconds timeout,
                                           const std::vector<int>& numbers) {
  TESSERA_CHECK_VALUE(size >= 1, "comm", "shared memory: a group has at least 1 rank, got ", size);
  const auto segment = create_segment(size);
  std::vector<ShmSharePtr> shares;
  shares.reserve(size);
  for (int r = 0; r < size; ++r)
    shares.push_back(std::make_shared<ShmShare>(std::make_shared<ShmWorld>(segment, r, size, timeout, numbers)));
  return shares;
}

}  // namespace tessera::comm
