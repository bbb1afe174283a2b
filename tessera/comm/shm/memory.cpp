#include "tessera/comm/shm/memory.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <cstring>

#include "tessera/base/error.h"
#include "tessera/comm/op_info.h"
#include "tessera/comm/shm/segment.h"

namespace tessera::comm {
namespace {

constexpr size_t kHead = 4096;  // bytes before the tensor: the segment's secret
constexpr int64_t kText = 256;  // bytes of the error that a rank tells the others

// Every rank says how it went before any goes on, so that all end alike.
void agree(Group& group, const std::string& trouble, const std::string& what) {
  at::Tensor mine = at::zeros({kText}, at::kByte), all = at::zeros({kText * group.size()}, at::kByte);
  std::memcpy(mine.mutable_data_ptr(), trouble.data(), std::min<size_t>(trouble.size(), kText - 1));
  group.all_gather(all, mine, what).wait();
  for (int r = 0; r < group.size(); ++r) {
    const std::string announced = static_cast<const char*>(all.const_data_ptr()) + r * kText;
    TESSERA_CHECK_DIST(announced.empty(), "comm", what, ": rank ", r, " of ", group.size(),
                       " cannot share memory: ", announced);
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
  ShmAddress address;
  if (group.rank() == 0) {
    attempt([&] {
      auto made = ShmSegment::create(size);
      made->reserve(0, size);
      address = made->offer();
      return made;
    });
  }
  const at::Tensor sent = at::from_blob(&address, {static_cast<int64_t>(sizeof(address))}, at::kByte);
  group.broadcast(sent, 0, what).wait();
  // Where rank 0 has no segment, it says why.
  if (group.rank() != 0 && address.pid != 0) attempt([&] { return ShmSegment::attach(address, size); });
  agree(group, trouble, what);
  segment->close_file();
  char* const data = segment->data() + kHead;
  return at::from_blob(data, {bytes}, [segment = std::move(segment)](void*) {}, at::kByte);
}

}  // namespace tessera::comm
