#include "tessera/comm/torch_backend/tessera_backend.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tessera/comm/c10d/gloo.h"
#include "tessera/comm/c10d/point_to_point.h"
#include "tessera/comm/c10d/transport.h"
#include "tessera/comm/c10d/watched_store.h"
#include "tessera/comm/torch_backend/backend.h"

namespace tessera::comm {

c10::intrusive_ptr<c10d::Backend> tessera_backend(const c10::intrusive_ptr<c10d::Store>& given, int rank, int size,
                                                  std::chrono::milliseconds timeout, const SideThreadsPtr& threads) {
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  const StorePtr store = watch_fresh_store(given, "backend", rank, size);
  const auto hosts = find_hosts(*store, rank, size);
  const bool one_host = hosts && hosts->count() == 1;
  ShmSharePtr share;
  if (one_host) try_sharing(rank, [&] { share = shm_rendezvous(*store, rank, size, timeout); });
  const MakeBackend make = [threads](const StorePtr& at, int place, int count, std::chrono::milliseconds limit) {
    return tessera_backend(at, place, count, limit, threads);
  };
  if (share) return shm_backend(std::move(share), make, threads);
  return gloo_backend(c10::make_intrusive<c10d::PrefixStore>("gloo", store), rank, size, timeout, one_host);
}

c10::intrusive_ptr<c10d::Backend> point_to_point_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                         int size, std::chrono::milliseconds timeout, bool,
                                                         const SideThreadsPtr& threads) {
  return tessera_backend(store, rank, size, timeout, threads);
}

}  // namespace tessera::comm
