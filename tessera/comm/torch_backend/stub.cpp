// In place of the back end where the build leaves it out.
#include "tessera/base/error.h"
#include "tessera/comm/torch_backend/tessera_backend.h"

namespace tessera::comm {

c10::intrusive_ptr<c10d::Backend> tessera_backend(const c10::intrusive_ptr<c10d::Store>&, int, int,
                                                  std::chrono::milliseconds, const SideThreadsPtr&) {
  TESSERA_CHECK_VALUE(false, "comm", "this build has no back end \"tessera\" (TESSERA_TORCH_BACKEND is OFF)");
}

}  // namespace tessera::comm
