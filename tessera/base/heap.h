// The C heap of this process.
#pragma once

namespace tessera::heap {

// Gives the pages of freed blocks back to the system, also those between blocks in use. glibc keeps them, and cannot
// serve an aligned request (all tensors) from a freed block of the same size, so building a model tensor by tensor would
// otherwise hold twice its bytes. Costs a walk over the free lists; nothing where the C library has no such call.
void return_free_pages();

}  // namespace tessera::heap
