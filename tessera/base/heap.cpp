#include "tessera/base/heap.h"

#include <cstdlib>
#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace tessera::heap {

void return_free_pages() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace tessera::heap
