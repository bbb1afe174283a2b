#include "tessera/base/heap.h"

#include <cstdlib>
#ifdef __GLIBC__
#include <malloc.h>

#include <mutex>
#endif

namespace tessera::heap {

void return_free_pages() {
#ifdef __GLIBC__
  // Where another allocator has taken malloc's place, this is glibc's first call, whose setup is not for several threads.
  static std::mutex once_at_a_time;
  const std::scoped_lock lock(once_at_a_time);
  malloc_trim(0);
#endif
}

}  // namespace tessera::heap
