#include "tessera/kernels/cuda/update.cuh"

namespace tessera::kernels::cuda {

void update(const UpdateSegment<AdagradRule>* segments, int64_t count, void* stream) {
  update_all<AdagradElement>(segments, count, stream);
}

}  // namespace tessera::kernels::cuda
