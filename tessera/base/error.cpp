#include "tessera/base/error.h"

#include "tessera/base/env.h"

namespace tessera::detail {

bool errors_have_frames() {
  return env::get("TORCH_SHOW_CPP_STACKTRACES") == "1";
}

}  // namespace tessera::detail
