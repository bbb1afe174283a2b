// Copies between a device and page-locked memory that do not block: what the host does with that memory is not seen, so
// such a copy is done as late as can be, when the host waits for it, when work on a device uses its bytes, or when its
// memory goes. Until then memory that it writes is NaN, which shows where the host reads it too early, and memory that
// the host writes too early is a finding when the copy is done.
#pragma once

#include <functional>

#include "tests/stand_in/clocks.h"

namespace tessera::stand_in {

struct LateCopy {
  Stream stream;
  uint64_t number;  // of the work on the stream that it is
  Bytes device, host;
  bool to_host;
  std::function<void()> copy;  // keeps no memory alive
};

void do_late(LateCopy copy);
void do_late_copies_before(const Clock& clock);
void do_late_copies_of(Bytes bytes);
bool are_late_copies_before(const Clock& clock);

}  // namespace tessera::stand_in
