#include "tessera/comm/shm_memory.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <random>

#include "tessera/base/error.h"
#include "tessera/comm/op_info.h"
#include "tessera/comm/shm_segment.h"

namespace tessera::comm {
namespace {

constexpr size_t kHead = 4096;  // before the tensor: the secret number that proves it is rank 0's segment
constexpr int64_t kText = 256;  // bytes of what went wrong that a rank tells the others

// Where rank 0's segment is.
struct Place {
  int64_t pid = 0, fd = -1, secret = 0;
};

int64_t& secret_of(const ShmSegment& segment) {
  return *reinterpret_cast<int64_t*>(segment.data());
}

std::shared_ptr<ShmSegment> create(size_t size, Place& place) {
  auto segment = ShmSegment::create(size);
  segment->reserve(0, size);
  std::random_device random;
  place = {getpid(), segment->fd(), static_cast<int64_t>(static_cast<uint64_t>(random()) << 32 | random())};
  secret_of(*segment) = place.secret;
  return segment;
}

std::shared_ptr<ShmSegment> attach(size_t size, const Place& place) {
  if (place.pid == 0) return nullptr;  // rank 0 says why
  auto segment = ShmSegment::attach(static_cast<int>(place.pid), static_cast<int>(place.fd), size);
  TESSERA_CHECK_DIST(secret_of(*segment) == place.secret, "comm", "shared memory: process ", place.pid,
                     " has another segment than rank 0's");
  return segment;
}

// Everybody says how it went before anybody goes on, so that all end alike.
void agree(Group& group, const std::string& trouble, const std::string& what) {
  at::Tensor mine = at::zeros({kText}, at::kByte), all = at::zeros({kText * group.size()}, at::kByte);
  std::memcpy(mine.mutable_data_ptr(), trouble.data(), std::min<size_t>(trouble.size(), kText - 1));
  group.all_gather(all, mine, what).wait();
  for (int r = 0; r < group.size(); ++r) {
    const std::string said = static_cast<const char*>(all.const_data_ptr()) + r * kText;
    TESSERA_CHECK_DIST(said.empty(), "comm", what, ": rank ", r, " of ", group.size(), " cannot share memory: ", said);
  }
}

}  // namespace

at::Tensor shm_memory(Group& group, int64_t bytes, Label label) {
  // Ranks that ask for different sizes make different calls, and are named.
  const std::string what =
      std::to_string(bytes) + " B of shared memory" + (label.empty() ? "" : " for " + std::string(label));
  const size_t size = kHead + (static_cast<size_t>(bytes) + kHead - 1) / kHead * kHead;
  std::shared_ptr<ShmSegment> segment;
  std::string trouble;
  const auto attempt = [&](const auto& share) {
    try {
      segment = share();
    } catch (const c10::DistBackendError& error) {
      trouble = cause_of(error);
      if (constexpr std::string_view origin = "[comm] "; trouble.starts_with(origin)) trouble.erase(0, origin.size());
    }
  };
  Place place;
  if (group.rank() == 0) attempt([&] { return create(size, place); });
  const at::Tensor sent = at::from_blob(&place, {static_cast<int64_t>(sizeof(place))}, at::kByte);
  group.broadcast(sent, 0, what).wait();
  if (group.rank() != 0) attempt([&] { return attach(size, place); });
  agree(group, trouble, what);
  segment->close_file();
  char* const data = segment->data() + kHead;
  return at::from_blob(data, {bytes}, [segment = std::move(segment)](void*) {}, at::kByte);
}

}  // namespace tessera::comm
