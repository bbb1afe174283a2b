// Test support: split and join of a device's table beside the reference.
#pragma once

#include "tessera/kernels/device_table.h"
#include "tessera/kernels/table.h"
#include "tests/kernels/kernel_data.h"

namespace tessera::kernels::testing {

// OnDevice(buffer, dtype, n): the buffer's copy there; data() is its address, back() brings it into the buffer.
template <class OnDevice>
void expect_split_and_join(const DeviceTable& device, void* stream, int64_t n) {
  const Table& reference = reference_table();
  Buffer whole(DType::F32, n), weight(DType::BF16, n), residual(DType::BF16, n), joined(DType::F32, n);
  whole.fill_random(1).sprinkle(2);
  Buffer weight2 = weight, residual2 = residual, joined2 = joined;
  reference.split(weight.data(), residual.data(), whole.floats(), n);
  reference.join(joined.floats(), weight.data(), residual.data(), n);
  const OnDevice in(whole, DType::F32, n), upper(weight2, DType::BF16, n), low(residual2, DType::BF16, n),
      out(joined2, DType::F32, n);
  device.split(upper.data(), low.data(), static_cast<const float*>(in.data()), n, stream);
  device.join(static_cast<float*>(out.data()), upper.data(), low.data(), n, stream);
  upper.back();
  low.back();
  out.back();
  weight2.expect_same(weight, true);
  residual2.expect_same(residual, true);
  joined2.expect_same(joined, true);
}

}  // namespace tessera::kernels::testing
