#include "tessera/comm/slurm_lists.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/launchers.h"

namespace tessera::comm {

namespace {

constexpr uint64_t kMostHosts = 1 << 20;

[[noreturn]] void refuse(const std::string& list, const char* name) {
  TESSERA_CHECK_VALUE(false, "comm", name, " is '", list,
                      "'; it must be hosts like node[003-005,07],other; or set MASTER_ADDR");
}

// The texts that "003-005,07" stands for; nothing for a text of another form.
std::vector<std::string> numbers_of(std::string_view ranges) {
  std::vector<std::string> all;
  while (true) {
    const size_t comma = ranges.find(',');
    const std::string_view range = ranges.substr(0, comma);
    const size_t dash = range.find('-');
    const std::string_view begin = range.substr(0, dash);
    const auto first = digits_as_number(begin),
               last = dash == range.npos ? first : digits_as_number(range.substr(dash + 1));
    if (!first || !last || *last < *first || *last - *first >= kMostHosts) return {};
    for (uint64_t more = 0; more <= *last - *first; ++more) {
      const std::string digits = std::to_string(*first + more);
      all.push_back(std::string(digits.size() < begin.size() ? begin.size() - digits.size() : 0, '0') + digits);
    }
    if (comma == ranges.npos) return all;
    ranges.remove_prefix(comma + 1);
  }
}

}  // namespace

std::vector<std::string> expand_hosts(const std::string& list, const char* name) {
  std::vector<std::string> all, open{""};  // open: those of the entry that is read
  std::string_view rest = list;
  while (!rest.empty()) {
    const size_t special = rest.find_first_of("[],");
    for (std::string& host : open)
      host += rest.substr(0, special);
    rest.remove_prefix(special == rest.npos ? rest.size() : special);
    if (rest.starts_with('[')) {
      const size_t end = rest.find(']');
      const auto numbers = end == rest.npos ? std::vector<std::string>{} : numbers_of(rest.substr(1, end - 1));
      if (numbers.empty() || open.size() * numbers.size() > kMostHosts) refuse(list, name);
      std::vector<std::string> longer;
      for (const std::string& host : open)
        for (const std::string& digits : numbers)
          longer.push_back(host + digits);
      open = std::move(longer);
      rest.remove_prefix(end + 1);
    } else if (rest.starts_with(',')) {
      if (open.front().empty() || rest.size() == 1) refuse(list, name);
      all.insert(all.end(), open.begin(), open.end());
      open = {""};
      rest.remove_prefix(1);
    } else if (!rest.empty()) {
      refuse(list, name);
    }
  }
  if (open.front().empty()) refuse(list, name);
  all.insert(all.end(), open.begin(), open.end());
  return all;
}

int tasks_of_host(const std::string& counts, int host) {
  std::string_view rest = counts;
  while (!rest.empty()) {
    const std::string_view entry = rest.substr(0, rest.find(','));
    const size_t times = entry.find("(x");
    const auto tasks = digits_as_number(entry.substr(0, times));
    const auto hosts = times == entry.npos ? 1 : digits_as_number(entry.substr(times + 2, entry.size() - times - 3));
    if (!tasks || !hosts) return 0;
    if (host < static_cast<int>(*hosts)) return static_cast<int>(*tasks);
    host -= static_cast<int>(*hosts);
    rest.remove_prefix(std::min(rest.size(), entry.size() + 1));
  }
  return 0;
}

}  // namespace tessera::comm
