#include "tessera/comm/c10d/call_log.h"

#include <algorithm>
#include <charconv>
#include <string_view>
#include <utility>

#include "tessera/comm/wait_cycle.h"

namespace tessera::comm {
namespace {

constexpr size_t kDoneKept = 8;  // a barrier or broadcast may be through here and not elsewhere

// Appends a field of a text, a row of fields "length:bytes", so that labels may hold anything; the first field counts the others.
void put(std::string& text, std::string_view field) {
  text += std::to_string(field.size()) + ":";
  text += field;
}

std::string numbers(const std::vector<int64_t>& values) {
  std::string text;
  for (const int64_t value : values)
    text += std::to_string(value) + ",";
  return text;
}

std::optional<int64_t> read_number(std::string_view& text, char end) {
  const size_t at = text.find(end);
  if (at == std::string_view::npos || at == 0) return std::nullopt;
  const std::string_view digits = text.substr(0, at);
  int64_t value = 0;
  if (std::from_chars(digits.begin(), digits.end(), value).ptr != digits.end()) return std::nullopt;
  text.remove_prefix(at + 1);
  return value;
}

// The fields of a text; nothing when it is cut off or not one of ours.
std::optional<std::vector<std::string_view>> read_fields(std::string_view text) {
  const auto count = read_number(text, ';');
  if (!count) return std::nullopt;
  std::vector<std::string_view> fields;
  while (!text.empty()) {
    const auto length = read_number(text, ':');
    if (!length || *length < 0 || static_cast<size_t>(*length) > text.size()) return std::nullopt;
    fields.push_back(text.substr(0, *length));
    text.remove_prefix(*length);
  }
  if (static_cast<int64_t>(fields.size()) != *count) return std::nullopt;
  return fields;
}

// A call of another rank, as the rank's text has it.
struct Shown {
  int64_t instance = 0, number = 0;
  std::string_view agreed, full, brief;  // what must agree; the call for people, with all and with the essentials
  std::vector<int64_t> sent, received;
};
constexpr size_t kFields = 6;

// What a rank is blocked in, as the rank's text has it, and the part of its log that matters then.
struct ShownWait {
  int64_t look = 0, instance = -1, number = -1, peer = -1;
  std::string_view call;             // as long as the text is there
  std::vector<int64_t> held;         // instances that only the blocked thread uses
  std::map<int64_t, int64_t> added;  // by instance

  // Whether this rank will never make call `number` of a group.
  bool holds_up(int64_t in, int64_t call_number) const {
    const auto made = added.find(in);
    return peer >= 0 && (made == added.end() || made->second <= call_number) &&
           std::find(held.begin(), held.end(), in) != held.end();
  }
};
constexpr size_t kWaitFields = 4;

std::vector<int64_t> read_numbers(std::string_view text) {
  std::vector<int64_t> values;
  while (const auto value = read_number(text, ','))
    values.push_back(*value);
  return values;
}

std::vector<Shown> read(const std::string& text) {
  const auto fields = read_fields(text);
  std::vector<Shown> calls;
  if (!fields || fields->size() % kFields != kWaitFields) return calls;
  for (size_t i = kWaitFields; i < fields->size(); i += kFields) {
    const auto* f = &(*fields)[i];
    const auto place = read_numbers(f[0]);
    if (place.size() == 2) {
      calls.push_back({place[0], place[1], f[1], f[2], f[3], read_numbers(f[4]), read_numbers(f[5])});
    }
  }
  return calls;
}

ShownWait read_wait(const std::string& text) {
  ShownWait wait;
  const auto fields = read_fields(text);
  if (!fields || fields->size() < kWaitFields) return wait;
  const auto place = read_numbers((*fields)[0]);
  if (place.size() != 4) return wait;
  wait = {.look = place[0],
          .instance = place[1],
          .number = place[2],
          .peer = place[3],
          .call = (*fields)[1],
          .held = read_numbers((*fields)[2]),
          .added = {}};
  const auto added = read_numbers((*fields)[3]);
  for (size_t i = 0; i + 1 < added.size(); i += 2)
    wait.added[added[i]] = added[i + 1];
  return wait;
}

int64_t at_rank(const std::vector<int64_t>& splits, int rank) {
  return rank < static_cast<int>(splits.size()) ? splits[rank] : 0;
}

}  // namespace

int64_t CallLog::add(int64_t instance, OpInfo info, Splits splits) {
  const std::scoped_lock lock(mutex_);
  Sequence& sequence = sequences_[instance];
  sequence.user = std::this_thread::get_id();
  sequence.calls.push_back({sequence.added, std::move(info), std::move(splits)});
  return sequence.added++;
}

void CallLog::done(int64_t instance, int64_t number) {
  const std::scoped_lock lock(mutex_);
  auto& calls = sequences_[instance].calls;
  while (!calls.empty() && calls.front().number + static_cast<int64_t>(kDoneKept) <= number)
    calls.pop_front();
}

void CallLog::use(int64_t instance) {
  const std::scoped_lock lock(mutex_);
  sequences_[instance].user = std::this_thread::get_id();
}

void CallLog::block(int64_t instance, int64_t number, int peer) {
  const std::scoped_lock lock(mutex_);
  if (peer < 0) {
    blocked_.erase(std::this_thread::get_id());
  } else {
    blocked_[std::this_thread::get_id()] = {instance, number, peer};
  }
}

// The fields of a ShownWait, for a rank of which one thread is blocked.
std::string CallLog::wait_text() const {
  std::string text, call;
  std::vector<int64_t> held, added;
  Blocked wait{.instance = -1, .number = -1, .peer = -1};
  if (blocked_.size() == 1) {
    const auto& [thread, blocked] = *blocked_.begin();
    wait = blocked;
    for (const auto& [instance, sequence] : sequences_) {
      if (sequence.user == thread) held.push_back(instance);
      added.insert(added.end(), {instance, sequence.added});
    }
    for (const Call& one : sequences_.at(wait.instance).calls) {
      if (one.number == wait.number) call = describe(one.info);
    }
  }
  put(text, numbers({looks_, wait.instance, wait.number, wait.peer}));
  put(text, call);
  put(text, numbers(held));
  put(text, numbers(added));
  return text;
}

std::string CallLog::text() {
  const std::scoped_lock lock(mutex_);
  looks_ += 1;
  std::string text = wait_text();
  size_t count = kWaitFields;
  for (const auto& [instance, sequence] : sequences_) {
    for (const Call& call : sequence.calls) {
      put(text, numbers({instance, call.number}));
      put(text, agreement(call.info));
      put(text, describe_fully(call.info));
      put(text, describe(call.info));
      put(text, numbers(call.splits.sent));
      put(text, numbers(call.splits.received));
      count += kFields;
    }
  }
  return std::to_string(count) + ";" + text;
}

std::optional<std::string> CallLog::difference(int peer, const std::string& text) const {
  const auto shown = read(text);
  const std::scoped_lock lock(mutex_);
  for (const Shown& theirs : shown) {
    const auto sequence = sequences_.find(theirs.instance);
    if (sequence == sequences_.end() || sequence->second.calls.empty()) continue;
    const auto& calls = sequence->second.calls;
    const int64_t at = theirs.number - calls.front().number;
    if (at < 0 || at >= static_cast<int64_t>(calls.size())) continue;
    const Call& mine = calls[at];
    const std::string full = describe_fully(mine.info);
    if (theirs.agreed != agreement(mine.info)) {
      return rank_ < peer ? disagreement(rank_, full, peer, theirs.full) : disagreement(peer, theirs.full, rank_, full);
    }
    const int64_t sent = at_rank(mine.splits.sent, peer), wanted = at_rank(theirs.received, rank_);
    if (sent != wanted) return split_disagreement(describe(mine.info), rank_, sent, peer, wanted);
    const int64_t coming = at_rank(theirs.sent, rank_), expected = at_rank(mine.splits.received, peer);
    if (coming != expected) return split_disagreement(theirs.brief, peer, coming, rank_, expected);
  }
  return std::nullopt;
}

std::optional<CallLog::Cycle> CallLog::cycle(const std::function<std::string(int)>& shown) const {
  std::string text;
  {
    const std::scoped_lock lock(mutex_);
    text = std::to_string(kWaitFields) + ";" + wait_text();
  }
  const ShownWait mine = read_wait(text);
  Cycle result;
  std::vector<std::pair<int, std::string>> waits = {{rank_, std::string(mine.call)}};
  for (ShownWait wait = mine; wait.peer >= 0;) {
    result.calls.insert(result.calls.end(), {wait.instance, wait.number});
    const auto peer = static_cast<int>(wait.peer);
    if (peer == rank_) {
      if (!mine.holds_up(wait.instance, wait.number)) return std::nullopt;
      result.text = cycle_text(std::move(waits));
      return result;
    }
    const std::string their_text = shown(peer);
    ShownWait next = read_wait(their_text);
    if (!next.holds_up(wait.instance, wait.number) || !result.looks.emplace(peer, next.look).second) break;
    waits.emplace_back(peer, std::string(next.call));
    wait = std::move(next);
  }
  return std::nullopt;
}

}  // namespace tessera::comm
