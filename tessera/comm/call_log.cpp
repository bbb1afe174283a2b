#include "tessera/comm/call_log.h"

#include <charconv>
#include <string_view>
#include <utility>

namespace tessera::comm {
namespace {

constexpr size_t kDoneKept = 8;  // a barrier or broadcast may be through here and not elsewhere

// A text is a row of fields "length:bytes", so that labels may hold anything; the first field counts those that follow.
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

// Nothing when the text is cut off or not one of ours.
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

// A call of another rank, as its text has it.
struct Shown {
  int64_t instance = 0, number = 0;
  std::string_view agreed, full, brief;  // what must agree; for people, with all and with the essentials
  std::vector<int64_t> sent, received;
};
constexpr size_t kFields = 6;

std::vector<int64_t> read_numbers(std::string_view text) {
  std::vector<int64_t> values;
  while (const auto value = read_number(text, ','))
    values.push_back(*value);
  return values;
}

std::vector<Shown> read(const std::string& text) {
  const auto fields = read_fields(text);
  std::vector<Shown> calls;
  if (!fields || fields->size() % kFields != 0) return calls;
  for (size_t i = 0; i < fields->size(); i += kFields) {
    const auto* f = &(*fields)[i];
    const auto place = read_numbers(f[0]);
    if (place.size() == 2) {
      calls.push_back({place[0], place[1], f[1], f[2], f[3], read_numbers(f[4]), read_numbers(f[5])});
    }
  }
  return calls;
}

int64_t at_rank(const std::vector<int64_t>& splits, int rank) {
  return rank < static_cast<int>(splits.size()) ? splits[rank] : 0;
}

}  // namespace

int64_t CallLog::add(int64_t instance, OpInfo info, Splits splits) {
  const std::scoped_lock lock(mutex_);
  Sequence& sequence = sequences_[instance];
  sequence.calls.push_back({sequence.added, std::move(info), std::move(splits)});
  return sequence.added++;
}

void CallLog::done(int64_t instance, int64_t number) {
  const std::scoped_lock lock(mutex_);
  auto& calls = sequences_[instance].calls;
  while (!calls.empty() && calls.front().number + static_cast<int64_t>(kDoneKept) <= number)
    calls.pop_front();
}

std::string CallLog::text() const {
  const std::scoped_lock lock(mutex_);
  std::string text;
  size_t count = 0;
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

}  // namespace tessera::comm
