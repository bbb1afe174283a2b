#include "tessera/kernels/cuda/update.cuh"

namespace tessera::kernels::cuda {

void update(const UpdateSegment<SgdRule>* segments, int64_t count, void* stream) {
  Updates<SgdElement> plain(stream);
  Updates<MomentumElement> with_momentum(stream);
  for (int64_t i = 0; i < count; ++i) {
    if (segments[i].rule.momentum == 0) {
      plain.add(segments[i]);
    } else {
      with_momentum.add(segments[i]);
    }
  }
  plain.go();
  with_momentum.go();
}

}  // namespace tessera::kernels::cuda
