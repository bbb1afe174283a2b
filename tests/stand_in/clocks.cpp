#include "tests/stand_in/clocks.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>

#include "tests/stand_in/allocators.h"
#include "tests/stand_in/late_copies.h"
#include "tests/stand_in/stand_in.h"

namespace tessera::stand_in {
namespace {

// A use that was: the work `number` of a stream. 0: none.
struct Past {
  Stream stream = 0;
  uint64_t number = 0;
  const char *work = "", *part = "";
};

struct Segment {
  uintptr_t end;
  Past write;
  std::vector<Past> reads;  // since, one a stream; none that is before another
};

struct Lent {
  uintptr_t end;
  Stream stream;
};

void take_later(Clock& clock, const Clock& other) {
  for (size_t i = 0; i < clock.size(); ++i)
    clock[i] = std::max(clock[i], other[i]);
}

bool is_before(const Past& past, const Clock& clock) {
  return past.number <= clock[static_cast<size_t>(past.stream)];
}

std::string text(const Past& past) {
  const std::string part = *past.part == '\0' ? "" : std::string(" (") + past.part + ")";
  return past.work + part + " on " + name_of(past.stream);
}

// Of the process, as the devices are.
class Detector {
 public:
  uint64_t give(Stream stream, const char* work, const std::vector<Use>& uses) {
    const std::lock_guard lock(mutex_);
    Clock& clock = clocks_.at(stream);
    take_later(clock, host_);
    const uint64_t number = ++clock.at(stream);
    for (const bool writes : {false, true})  // what is read and written is one use
      for (const Use& use : uses)
        if (use.writes == writes) this->use(use, {stream, number, work, use.part}, clock);
    return number;
  }

  Clock clock_of(Stream stream) {
    const std::lock_guard lock(mutex_);
    Clock clock = clocks_.at(stream);
    take_later(clock, host_);
    return clock;
  }
  void order(Stream stream, const Clock& before) {
    const std::lock_guard lock(mutex_);
    take_later(clocks_.at(stream), before);
  }
  void host_waits_for(const Clock& before) {
    const std::lock_guard lock(mutex_);
    take_later(host_, before);
  }

  void lend(Bytes bytes, Stream stream) {
    const std::lock_guard lock(mutex_);
    lent_[bytes.begin] = {bytes.end, stream};
  }
  void check_released(Bytes bytes, Stream stream, const std::vector<Stream>& except) {
    const std::lock_guard lock(mutex_);
    Clock clock = clocks_.at(stream);
    take_later(clock, host_);
    for (const Stream other : except)
      take_later(clock, clocks_.at(other));
    bool over = true;
    const auto check = [&](Bytes part, const Past& past, const char* does) {
      if (is_before(past, clock)) return;
      over = false;
      report("released memory that " + text(past) + " " + does + " is free for " + name_of(stream) +
             ", which does not wait for that: " + place(part));
    };
    for_segments(bytes, [&](Bytes part, Segment& segment) {
      check(part, segment.write, "writes");
      for (const Past& read : segment.reads)
        check(part, read, "reads");
    });
    if (!over) erase(bytes);  // said once
  }
  void forget(Bytes bytes) {
    const std::lock_guard lock(mutex_);
    erase(bytes);
    lent_.erase(bytes.begin);
  }

  void found(std::string finding) {
    const std::lock_guard lock(mutex_);
    report(std::move(finding));
  }
  std::string take_findings() {
    const std::lock_guard lock(mutex_);
    std::string all;
    for (const std::string& finding : findings_)
      all += finding + "\n";
    findings_.clear();
    said_.clear();
    return all;
  }

 private:
  // Calls f(bytes, segment) for all of the range, in pieces that have one history each.
  template <class F>
  void for_segments(Bytes bytes, const F& f) {
    split(bytes.begin);
    split(bytes.end);
    uintptr_t at = bytes.begin;
    for (auto it = segments_.lower_bound(at); at < bytes.end; ++it) {
      if (it == segments_.end() || it->first > at) {
        const uintptr_t end = it == segments_.end() ? bytes.end : std::min(bytes.end, it->first);
        it = segments_.emplace_hint(it, at, Segment{end, {}, {}});
      }
      f({at, it->second.end}, it->second);
      at = it->second.end;
    }
  }
  void split(uintptr_t at) {
    auto it = segments_.lower_bound(at);
    if (it == segments_.begin() || (it != segments_.end() && it->first == at)) return;
    --it;
    if (it->second.end <= at) return;
    Segment rest = it->second;
    it->second.end = at;
    segments_.emplace(at, std::move(rest));
  }
  void erase(Bytes bytes) {
    split(bytes.begin);
    split(bytes.end);
    segments_.erase(segments_.lower_bound(bytes.begin), segments_.lower_bound(bytes.end));
  }

  void use(const Use& use, const Past& now, const Clock& clock) {
    if (use.bytes.begin >= use.bytes.end) return;
    const auto check = [&](Bytes part, const Past& past, const char* did) {
      if (!is_before(past, clock))
        report(text(now) + (use.writes ? " writes" : " reads") + " what " + text(past) + " " + did +
               ", and nothing orders the two: " + place(part));
    };
    for_segments(use.bytes, [&](Bytes part, Segment& segment) {
      check(part, segment.write, "writes");
      if (use.writes) {
        for (const Past& read : segment.reads)
          check(part, read, "reads");
        return;
      }
      std::erase_if(segment.reads, [&](const Past& read) { return is_before(read, clock); });
      segment.reads.push_back(now);
    });
    if (!use.writes) return;
    erase(use.bytes);
    segments_.emplace(use.bytes.begin, Segment{use.bytes.end, now, {}});
  }

  std::string place(Bytes bytes) const {
    auto it = lent_.upper_bound(bytes.begin);
    if (it == lent_.begin() || std::prev(it)->second.end <= bytes.begin) return "bytes of the host";
    --it;
    const auto text = [&](uintptr_t address) { return std::to_string(address - it->first); };
    return "bytes " + text(bytes.begin) + " to " + text(bytes.end) + " of " + text(it->second.end) + " lent to " +
           name_of(it->second.stream);
  }
  void report(std::string finding) {
    if (said_.insert(finding).second) findings_.push_back(std::move(finding));
  }

  std::mutex mutex_;
  std::array<Clock, size_t{kDevices} * kStreams> clocks_{};
  Clock host_{};
  std::map<uintptr_t, Segment> segments_;
  std::map<uintptr_t, Lent> lent_;
  std::vector<std::string> findings_;
  std::set<std::string> said_;
};

// What tests switch is the process's, as the devices are.
std::atomic<bool> fails{false};
std::atomic<void (*)()> on_wait{nullptr};

Detector& detector() {
  static auto* the = new Detector;  // tensors may outlive static objects
  return *the;
}

}  // namespace

std::string name_of(Stream stream) {
  return "stream " + std::to_string(stream % kStreams) + " of device " + std::to_string(stream / kStreams);
}

uint64_t give(Stream stream, const char* work, const std::vector<Use>& uses) {
  check_works();
  for (const Use& use : uses)
    do_late_copies_of(use.bytes);
  return detector().give(stream, work, uses);
}

Clock clock_of(Stream stream) {
  return detector().clock_of(stream);
}

void order(Stream stream, const Clock& before) {
  detector().order(stream, before);
}

void host_waits_for(const Clock& before) {
  do_late_copies_before(before);
  detector().host_waits_for(before);
}

void lend(Bytes bytes, Stream stream) {
  detector().lend(bytes, stream);
  give(stream, "giving out memory", {{bytes, true, ""}});
}

void check_released(Bytes bytes, Stream stream, const std::vector<Stream>& except) {
  detector().check_released(bytes, stream, except);
}

void forget(Bytes bytes) {
  do_late_copies_of(bytes);
  detector().forget(bytes);
}

void found(std::string finding) {
  detector().found(std::move(finding));
}

void check_works() {
  if (fails) throw std::runtime_error("[stand_in] the device fails, as was asked for");
}

void notice_wait() {
  if (const auto notice = on_wait.load(); notice != nullptr) notice();
}

}  // namespace tessera::stand_in

void tessera_stand_in_use(const char* work, const void* p, int64_t bytes, bool writes) {
  using namespace tessera::stand_in;
  give(current_stream(device_of(p)), work, {{bytes_at(p, static_cast<size_t>(bytes)), writes, ""}});
}

void tessera_stand_in_fail(bool on) {
  tessera::stand_in::fails = on;
}

void tessera_stand_in_on_wait(void (*notice)()) {
  tessera::stand_in::on_wait = notice;
}

const char* tessera_stand_in_races() {
  static thread_local std::string text;
  tessera::stand_in::check_all_released();
  text = tessera::stand_in::detector().take_findings();
  return text.c_str();
}
