// HeldError: the error of a destructor, for the next call that can throw it.
#pragma once

#include <exception>
#include <utility>

namespace tessera {

class HeldError {
 public:
  // Of several the first one counts. Called in a handler.
  void hold() {
    if (error_ == nullptr) error_ = std::current_exception();
  }
  // Throws it, once.
  void rethrow() {
    if (const auto error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
  }

 private:
  std::exception_ptr error_;
};

}  // namespace tessera
