#include "tests/stand_in/late_copies.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <list>
#include <mutex>

namespace tessera::stand_in {
namespace {

struct Waiting {
  LateCopy what;
  uint64_t sum;  // of the host's memory
};

// Of the process, as the devices are.
struct All {
  std::recursive_mutex mutex;  // who is told of a copy may ask the device something
  std::list<Waiting> waiting;  // in the order of the calls
  std::atomic<size_t> count{0};
};

All& all() {
  static auto* the = new All;
  return *the;
}

uint64_t sum_of(Bytes bytes) {
  uint64_t sum = 14695981039346656037U;
  for (uintptr_t at = bytes.begin; at < bytes.end; at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, reinterpret_cast<const void*>(at), std::min<size_t>(sizeof(word), bytes.end - at));
    sum = (sum ^ word) * 1099511628211U;
  }
  return sum;
}

bool overlap(Bytes a, Bytes b) {
  return a.begin < b.end && b.begin < a.end;
}

bool is_before(const LateCopy& copy, const Clock& clock) {
  return copy.number <= clock[static_cast<size_t>(copy.stream)];
}

template <class Which>
void do_those(const Which& which) {
  if (all().count == 0) return;
  const std::lock_guard lock(all().mutex);
  const at::NoGradGuard no_grad;
  auto& waiting = all().waiting;
  for (auto it = waiting.begin(); it != waiting.end();) {
    if (!which(it->what)) {
      ++it;
      continue;
    }
    const Waiting one = std::move(*it);
    it = waiting.erase(it);
    if (sum_of(one.what.host) != one.sum) {
      found(std::string("the host writes to memory that a copy ") + (one.what.to_host ? "writes" : "reads") + " on " +
            name_of(one.what.stream) +
            ", for which it has not waited: " + std::to_string(one.what.host.end - one.what.host.begin) + " bytes");
    }
    one.what.copy();
    --all().count;  // now: who finds none does not wait for the lock
  }
}

}  // namespace

void do_late(LateCopy copy) {
  const Bytes host = copy.host;
  if (copy.to_host) std::memset(reinterpret_cast<void*>(host.begin), 0xff, host.end - host.begin);
  const std::lock_guard lock(all().mutex);
  all().waiting.push_back({std::move(copy), sum_of(host)});
  ++all().count;
}

void do_late_copies_before(const Clock& clock) {
  do_those([&](const LateCopy& copy) { return is_before(copy, clock); });
}

void do_late_copies_of(Bytes bytes) {
  do_those([&](const LateCopy& copy) { return overlap(copy.device, bytes) || overlap(copy.host, bytes); });
}

bool are_late_copies_before(const Clock& clock) {
  if (all().count == 0) return false;
  const std::lock_guard lock(all().mutex);
  return std::any_of(all().waiting.begin(), all().waiting.end(),
                     [&](const Waiting& one) { return is_before(one.what, clock); });
}

}  // namespace tessera::stand_in
