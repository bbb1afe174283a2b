#include "tessera/config/json_text.h"

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string_view>
#include <tuple>
#include <utility>

namespace tessera::config {
namespace {

constexpr int kMaxDepth = 64;

enum class Token { Text, Comment, Space, Word, Other };

constexpr std::string_view kWords[] = {"-Infinity", "Infinity", "NaN"};

// The token that begins at `at`, and where it ends; a token that is cut off ends with the text.
std::pair<Token, size_t> next_token(std::string_view text, size_t at) {
  const std::string_view rest = text.substr(at);
  const auto after = [&](size_t found, size_t length) { return std::min(found, text.size() - length) + length; };
  if (rest[0] == '#' || rest.starts_with("//")) return {Token::Comment, after(text.find('\n', at), 0)};
  if (rest.starts_with("/*")) return {Token::Comment, after(text.find("*/", at + 2), 2)};
  if (std::isspace(static_cast<unsigned char>(rest[0]))) return {Token::Space, at + 1};
  for (const std::string_view word : kWords)
    if (rest.starts_with(word)) return {Token::Word, at + word.size()};
  if (rest[0] != '"') return {Token::Other, at + 1};
  while (++at < text.size() && text[at] != '"')
    at += text[at] == '\\' ? 1 : 0;
  return {Token::Text, after(at, 1)};
}

// Watches the parser for keys that come twice in one object.
class Watcher {
 public:
  explicit Watcher(Report& report) : report_(report) {}

  bool operator()(int depth, nlohmann::json::parse_event_t event, nlohmann::json& parsed) {
    using Event = nlohmann::json::parse_event_t;
    if (depth > kMaxDepth) {
      throw std::runtime_error("nested deeper than " + std::to_string(kMaxDepth) + " levels");
    }
    if (event == Event::object_start) {
      seen_.emplace_back();
      path_.emplace_back();
    } else if (event == Event::object_end) {
      seen_.pop_back();
      path_.pop_back();
    } else if (event == Event::key) {
      path_.back() = parsed.get<std::string>();
      if (!seen_.back().insert(path_.back()).second) {
        report_.error(join(path_, "."), "this key is given twice; keep one");
      }
    }
    return true;
  }

 private:
  Report& report_;
  std::vector<std::set<std::string>> seen_;
  std::vector<std::string> path_;
};

}  // namespace

std::string strict_json(const std::string& text, bool quote_words) {
  std::string out;
  char last = '[';                   // the last character that is neither space nor comment
  size_t comma = std::string::npos;  // in `out`: a comma that follows a value, with nothing but space after it
  for (size_t at = 0, end = 0; at < text.size(); at = end) {
    Token kind{};
    std::tie(kind, end) = next_token(text, at);
    const std::string_view token = std::string_view(text).substr(at, end - at);
    if (kind == Token::Comment || kind == Token::Space) {
      for (const char c : token)
        out += kind == Token::Space || c == '\n' ? c : ' ';
      continue;
    }
    if ((token == "}" || token == "]") && comma != std::string::npos) out[comma] = ' ';
    const bool after_value = std::string_view(",[{:").find(last) == std::string_view::npos;
    comma = token == "," && after_value ? out.size() : std::string::npos;
    const bool quoted = quote_words && kind == Token::Word;
    out.append(quoted, '"').append(token).append(quoted, '"');
    last = token.back();
  }
  return out;
}

nlohmann::json read_json(const std::string& text, Report& report, const std::string& what) {
  Watcher watcher(report);
  try {
    return nlohmann::json::parse(
        strict_json(text), [&watcher](int depth, auto event, auto& parsed) { return watcher(depth, event, parsed); });
  } catch (const nlohmann::json::exception& e) {
    const std::string fault = e.what();
    const size_t end = fault.find("] ");
    report.error(what, end == std::string::npos ? fault : fault.substr(end + 2));
  } catch (const std::runtime_error& e) {
    report.error(what, e.what());
  }
  return nlohmann::json::object();
}

}  // namespace tessera::config
