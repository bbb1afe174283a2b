// A CUDA runtime with one device, the machine of ptx_machine.h: what nvcc's host code and the tests call, so that both
// run unchanged where no device is. Kernels are looked up by name in the files TESSERA_PTX_FILES, run at once whatever
// the stream, and what they do wrong is the error that cudaGetLastError gives, cudaGetErrorString its text.
#pragma once

#include <cstdint>

namespace tessera::kernels::ptx {

// From now on grids have `most` blocks at most: kernels that go round by the grid's size have to do so.
void limit_blocks(int64_t most);

}  // namespace tessera::kernels::ptx
