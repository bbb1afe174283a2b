// What libtessera_cuda.so exports: Note [Device kernels] in device_table.h.
#include "tessera/kernels/device_table.h"

#include "tessera/kernels/cuda/cuda.h"

namespace tessera::kernels {
namespace {

constexpr DeviceTable kTable{
    kDeviceTableVersion,
    cuda::why_unusable,
    cuda::is_captured,
    cuda::update,
    cuda::update,
    cuda::update,
    cuda::update,
    cuda::scaled_copy,
    cuda::scaled_add,
    cuda::scaled_copy_stochastic,
    cuda::scaled_add_stochastic,
    cuda::split,
    cuda::join,
    cuda::sum_of_squares,
};

}  // namespace
}  // namespace tessera::kernels

const tessera::kernels::DeviceTable* tessera_device_table() {
  return &tessera::kernels::kTable;
}
