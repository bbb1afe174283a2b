// Declarations that ProcessGroupGloo.hpp needs; the torch wheel ships the library but not these headers.
#pragma once

namespace gloo::transport {

class Device;  // only pointers to it pass through our hands

class UnboundBuffer {
 public:
  virtual ~UnboundBuffer() = default;
};

}  // namespace gloo::transport
