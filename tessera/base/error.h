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
#include <string>
#include <utility>

namespace tessera {

class UsageError final : public c10::Error {
  using c10::Error::Error;
};
class IoError final : public c10::Error {
  using c10::Error::Error;
};

// Whether what() ends with the frames of who threw the error: TORCH_SHOW_CPP_STACKTRACES, as for errors in Python.
namespace detail {
bool errors_have_frames();
}

template <class Class>
[[noreturn, gnu::cold, gnu::noinline]] void fail(c10::SourceLocation where, std::string text) {
  if (detail::errors_have_frames()) throw Class(where, std::move(text));
  throw Class(std::move(text));
}

}  // namespace tessera

// Checks are expressions, not statements: of a check of `false` nothing is left but the call, so the compiler sees, without
// optimisation too, that nothing comes after it.
#define TESSERA_FAIL(Class, ...) \
  ::tessera::fail<Class>({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, ::c10::str(__VA_ARGS__))
#define TESSERA_CHECK_AS(Class, cond, origin, ...) \
  ((cond) ? static_cast<void>(0) : TESSERA_FAIL(Class, "[" origin "] ", __VA_ARGS__))
#define TESSERA_CHECK_VALUE(cond, origin, ...) TESSERA_CHECK_AS(::c10::ValueError, cond, origin, __VA_ARGS__)
#define TESSERA_CHECK(cond, origin, ...) TESSERA_CHECK_AS(::tessera::UsageError, cond, origin, __VA_ARGS__)
#define TESSERA_CHECK_IO(cond, origin, ...) TESSERA_CHECK_AS(::tessera::IoError, cond, origin, __VA_ARGS__)
#define TESSERA_CHECK_BUILT(cond, origin, ...) TESSERA_CHECK_AS(::c10::NotImplementedError, cond, origin, __VA_ARGS__)
#define TESSERA_CHECK_DIST(cond, origin, ...) TESSERA_CHECK_AS(::c10::DistBackendError, cond, origin, __VA_ARGS__)
#define TESSERA_ASSERT(cond, ...)                                                   \
  ((cond) ? static_cast<void>(0)                                                    \
          : TESSERA_FAIL(::c10::Error, #cond " INTERNAL ASSERT FAILED at " __FILE__ \
                                             ":" C10_STRINGIZE(__LINE__) ": " __VA_OPT__(, ) __VA_ARGS__))
