#include "tessera/config/text.h"

#include <algorithm>
#include <cctype>
#include <set>
#include <sstream>

#include "tessera/base/error.h"

namespace tessera::config {

int edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<int>> cost(a.size() + 1, std::vector<int>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        cost[i][j] = int(i + j);
        continue;
      }
      const int change = cost[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      cost[i][j] = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1, change});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
      }
    }
  }
  return cost[a.size()][b.size()];
}

namespace {

std::set<std::string> words_of(const std::string& name) {
  std::istringstream parts(name);
  std::set<std::string> words;
  for (std::string part; std::getline(parts, part, '_');) {
    if (part.size() > 2 && part.back() == 's') part.pop_back();  // a plural is the same word
    words.insert(part);
  }
  return words;
}

// Names that have all words of one of several, and others: warmup_num_steps for warmup_steps. Not where there are many.
std::vector<std::string> with_all_words_of(const std::string& name, const std::vector<std::string>& candidates) {
  constexpr size_t kMany = 3;
  const std::set<std::string> words = words_of(name);
  std::vector<std::string> found;
  for (const std::string& candidate : words.size() > 1 ? candidates : std::vector<std::string>())
    if (std::ranges::includes(words_of(lower(candidate)), words) && std::ranges::find(found, candidate) == found.end())
      found.push_back(candidate);
  return found.size() > kMany ? std::vector<std::string>() : found;
}

}  // namespace

std::vector<std::string> all_nearest(std::string_view word, const std::vector<std::string>& candidates) {
  if (word.size() > 200) {
    return {};
  }
  const std::string wanted = lower(word);
  std::vector<std::string> best;
  int best_cost = std::max<int>(1, int(word.size()) / 3);
  for (const std::string& candidate : candidates) {
    const int cost = edit_distance(wanted, lower(candidate));
    if (cost > best_cost || cost >= int(candidate.size())) continue;
    if (cost < best_cost) best.clear();
    best_cost = cost;
    if (std::find(best.begin(), best.end(), candidate) == best.end()) best.push_back(candidate);
  }
  if (!best.empty() && near_miss(word, best.front())) return best;
  const std::vector<std::string> longer = with_all_words_of(wanted, candidates);
  return longer.empty() ? best : longer;
}

std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
  const std::vector<std::string> best = all_nearest(word, candidates);
  return best.empty() ? "" : best.front();
}

bool near_miss(std::string_view word, std::string_view candidate) {
  return edit_distance(lower(word), lower(candidate)) <= std::max<int>(1, int(candidate.size()) / 6);
}

std::string whole_characters(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i]);
    const size_t length =
        first < 0x80 ? 1 : (first >> 5 == 6 ? 2 : (first >> 4 == 14 ? 3 : (first >> 3 == 30 ? 4 : 0)));
    const std::string_view rest = text.substr(i, length).substr(length == 0 ? 0 : 1);
    const bool whole = length > 0 && rest.size() == length - 1 &&
                       std::all_of(rest.begin(), rest.end(), [](unsigned char c) { return c >> 6 == 2; });
    out += whole ? text.substr(i, length) : std::string_view("?");
    i += whole ? length : 1;
  }
  return out;
}

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), [](unsigned char c) { return std::tolower(c); });
  return out;
}

std::string join(const std::vector<std::string>& parts, std::string_view separator) {
  std::string out;
  for (const std::string& part : parts) {
    out += (out.empty() ? "" : std::string(separator)) + part;
  }
  return out;
}

void Report::error(const std::string& path, const std::string& text, Problem::Kind kind) {
  errors_.push_back({kind, whole_characters(path), whole_characters(text)});
}

void Report::warning(const std::string& path, const std::string& text) {
  warnings_.push_back(whole_characters(path + ": " + text));
}

InvalidConfig::InvalidConfig(c10::SourceLocation where, const std::string& message, std::vector<Problem> problems,
                             std::vector<std::string> warnings)
    : ValueError(tessera::detail::errors_have_frames() ? ValueError(where, message) : ValueError(message)),
      problems_(std::move(problems)),
      warnings_(std::move(warnings)) {}

void Report::raise() const {
  if (errors_.empty()) {
    return;
  }
  std::vector<std::string> lines;
  for (const Problem& problem : errors_)
    lines.push_back(problem.line());
  const std::string count = errors_.size() == 1 ? "1 problem" : std::to_string(errors_.size()) + " problems";
  throw InvalidConfig({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                      c10::str("[config] ", count, " in the configuration:\n  ", join(lines, "\n  ")), errors_,
                      warnings_);
}

}  // namespace tessera::config
