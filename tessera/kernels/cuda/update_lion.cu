#include "tessera/kernels/cuda/update.cuh"

namespace tessera::kernels::cuda {

void update(const UpdateSegment<LionRule>* segments, int64_t count, void* stream) {
  update_all<LionElement>(segments, count, stream);
}

}  // namespace tessera::kernels::cuda
