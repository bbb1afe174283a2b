// Takes the place of the back end where the build leaves it out.
#include "tessera/base/error.h"
#include "tessera/comm/c10d/gloo.h"
#include "tessera/comm/c10d/point_to_point.h"
#include "tessera/comm/torch_backend/backend.h"
#include "tessera/comm/torch_backend/tessera_backend.h"

namespace tessera::comm {

c10::intrusive_ptr<c10d::Backend> tessera_backend(const c10::intrusive_ptr<c10d::Store>&, int, int,
                                                  std::chrono::milliseconds, const SideThreadsPtr&) {
  TESSERA_CHECK_VALUE(false, "comm", "this build has no back end \"tessera\" (TESSERA_TORCH_BACKEND is OFF)");
}

c10::intrusive_ptr<c10d::Backend> shm_backend(ShmSharePtr, MakeBackend, SideThreadsPtr) {
  TESSERA_CHECK_VALUE(false, "comm", "this build has no back end \"tessera\" (TESSERA_TORCH_BACKEND is OFF)");
}

c10::intrusive_ptr<c10d::Backend> point_to_point_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                         int size, std::chrono::milliseconds timeout, bool loopback,
                                                         const SideThreadsPtr&) {
  return gloo_backend(store, rank, size, timeout, loopback);
}

}  // namespace tessera::comm
