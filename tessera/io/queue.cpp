#include "tessera/io/queue.h"

#include <new>

#include "tessera/base/env.h"
#include "tessera/base/error.h"

namespace tessera::io {

namespace {

constexpr auto kAuto = "auto";
constexpr auto kThreads = "threads";
constexpr auto kUring = "uring";

// Tested once; the first time says so where it does not work though it was built.
const std::string& uring_fault() {
  static const std::string fault = [] {
    std::string why = test_uring();
    if (!why.empty() && why != kNotBuilt)
      TORCH_WARN("[io] io_uring does not work here (", why, "); threads do its work");
    return why;
  }();
  return fault;
}

}  // namespace

QueueKind chosen_queue() {
  const std::string word = env::get("TESSERA_IO").value_or(kAuto);
  TESSERA_CHECK_VALUE(word == kAuto || word == kThreads || word == kUring, "io", "TESSERA_IO is '", word,
                      "'; it may be auto, threads or uring");
  if (word == kThreads) return QueueKind::Threads;
  const std::string& fault = uring_fault();
  TESSERA_CHECK_VALUE(word == kAuto || fault.empty(), "io", "TESSERA_IO is uring, which does not work here: ", fault);
  return fault.empty() ? QueueKind::Uring : QueueKind::Threads;
}

std::unique_ptr<Queue> make_queue(int depth, QueueKind kind) {
  return kind == QueueKind::Uring ? make_uring_queue(depth) : make_thread_queue(depth);
}

AlignedBytes aligned_bytes(int64_t bytes) {
  const int64_t whole = (bytes + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment;
  auto* memory = static_cast<char*>(std::aligned_alloc(kDirectAlignment, static_cast<size_t>(whole)));
  if (memory == nullptr) throw std::bad_alloc();
  return AlignedBytes(memory);
}

}  // namespace tessera::io
