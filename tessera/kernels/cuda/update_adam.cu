#include "tessera/kernels/cuda/update.cuh"

namespace tessera::kernels::cuda {

void update(const UpdateSegment<AdamRule>* segments, int64_t count, void* stream) {
  update_all<AdamElement>(segments, count, stream);
}

}  // namespace tessera::kernels::cuda
