// Errors by blame. Every message starts with its origin in brackets: "[engine.step] ...".
//   TESSERA_CHECK_VALUE   bad argument or configuration       -> c10::ValueError (ValueError in Python)
//   TESSERA_CHECK         wrong moment or state               -> UsageError, a c10::Error (in Python tessera.errors.UsageError,
//                                                                a RuntimeError); says which call to make
//   TESSERA_CHECK_BUILT   honest limit, names the key or call -> c10::NotImplementedError
//   TESSERA_CHECK_DIST    lost peer, failed collective        -> c10::DistBackendError; names rank, operation, bytes
//   TESSERA_CHECK_IO      disk, file, damaged contents        -> IoError, a c10::Error (in Python tessera.errors.IoError, an
//                                                                OSError); names file, operation, bytes
//   TESSERA_ASSERT        impossible unless Tessera is wrong  -> c10::Error (internal assert)
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>

namespace tessera {

class UsageError final : public c10::Error {
  using c10::Error::Error;
};
class IoError final : public c10::Error {
  using c10::Error::Error;
};

}  // namespace tessera

#define TESSERA_CHECK_VALUE(cond, origin, ...) TORCH_CHECK_VALUE(cond, "[" origin "] ", __VA_ARGS__)
#define TESSERA_CHECK_AS(Class, cond, origin, ...)                                                                  \
  do {                                                                                                              \
    if (!(cond)) [[unlikely]] {                                                                                     \
      throw Class({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, ::c10::str("[" origin "] ", __VA_ARGS__)); \
    }                                                                                                               \
  } while (false)
#define TESSERA_CHECK(cond, origin, ...) TESSERA_CHECK_AS(::tessera::UsageError, cond, origin, __VA_ARGS__)
#define TESSERA_CHECK_IO(cond, origin, ...) TESSERA_CHECK_AS(::tessera::IoError, cond, origin, __VA_ARGS__)
#define TESSERA_CHECK_BUILT(cond, origin, ...) TORCH_CHECK_NOT_IMPLEMENTED(cond, "[" origin "] ", __VA_ARGS__)
#define TESSERA_CHECK_DIST(cond, origin, ...) TORCH_CHECK_WITH(DistBackendError, cond, "[" origin "] ", __VA_ARGS__)
#define TESSERA_ASSERT(cond, ...) TORCH_INTERNAL_ASSERT(cond, __VA_ARGS__)
