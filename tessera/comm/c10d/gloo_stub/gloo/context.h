// Declarations that ProcessGroupGloo.hpp needs; the torch wheel ships the library but not these headers.
#pragma once

#include <chrono>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

}  // namespace gloo
