#include "tessera/base/error.h"
#include "tessera/io/queue.h"

namespace tessera::io {

std::unique_ptr<Queue> make_uring_queue(int) {
  TESSERA_CHECK_IO(false, "io", kNotBuilt);
  return nullptr;
}

std::string test_uring() {
  return kNotBuilt;
}

}  // namespace tessera::io
