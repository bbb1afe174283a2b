// What a device's memory was wanted for, in the error where there is none.
#pragma once

#include <c10/util/Exception.h>

#include <utility>

namespace tessera::zero {

// f(). An OutOfMemoryError says what it was for: the arguments, as one text.
template <class F, class... What>
decltype(auto) memory_for(const F& f, const What&... what) {
  try {
    return f();
  } catch (c10::OutOfMemoryError& error) {
    error.add_context(c10::str("[zero] no memory for ", what...));
    throw;
  }
}

}  // namespace tessera::zero
