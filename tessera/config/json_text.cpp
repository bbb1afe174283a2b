#include "tessera/config/json_text.h"

#include <cctype>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>

namespace tessera::config {
namespace {

constexpr int kMaxDepth = 64;

class Cleaner {
 public:
  explicit Cleaner(const std::string& text) : text_(text) {}

  std::string run() {
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '"') {
        copy_string();
      } else if (c == '#' || starts("//")) {
        skip_line();
      } else if (starts("/*")) {
        skip_block();
      } else if (!copy_special()) {
        copy_char(c);
      }
    }
    return std::move(out_);
  }

 private:
  bool starts(const char* word) const { return text_.compare(at_, std::char_traits<char>::length(word), word) == 0; }

  void copy_string() {
    comma_ = std::string::npos;
    last_ = '"';
    out_ += text_[at_++];
    while (at_ < text_.size()) {
      const char c = text_[at_++];
      out_ += c;
      if (c == '\\' && at_ < text_.size()) {
        out_ += text_[at_++];
      } else if (c == '"') {
        return;
      }
    }
  }

  void skip_line() {
    while (at_ < text_.size() && text_[at_] != '\n') {
      ++at_;
    }
  }

  void skip_block() {
    const size_t end = text_.find("*/", at_ + 2);
    const size_t stop = end == std::string::npos ? text_.size() : end + 2;
    for (; at_ < stop; ++at_) {
      out_ += text_[at_] == '\n' ? '\n' : ' ';
    }
  }

  bool copy_special() {
    for (const char* word : {"-Infinity", "Infinity", "NaN"}) {
      if (starts(word)) {
        out_.append(1, '"').append(word).append(1, '"');
        at_ += std::char_traits<char>::length(word);
        comma_ = std::string::npos;
        last_ = '"';
        return true;
      }
    }
    return false;
  }

  void copy_char(char c) {
    if ((c == '}' || c == ']') && comma_ != std::string::npos) {
      out_[comma_] = ' ';
    }
    if (c == ',') {
      const bool after_value = last_ != ',' && last_ != '[' && last_ != '{' && last_ != ':';
      comma_ = after_value ? out_.size() : std::string::npos;
    } else if (!std::isspace(static_cast<unsigned char>(c))) {
      comma_ = std::string::npos;
    }
    if (!std::isspace(static_cast<unsigned char>(c))) {
      last_ = c;
    }
    out_ += c;
    ++at_;
  }

  const std::string& text_;
  std::string out_;
  size_t at_ = 0;
  char last_ = '[';                   // last character that is neither space nor comment
  size_t comma_ = std::string::npos;  // in out_: a comma followed by nothing but space so far
};

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

std::string strict_json(const std::string& text) {
  return Cleaner(text).run();
}

nlohmann::json read_json(const std::string& text, Report& report) {
  Watcher watcher(report);
  try {
    return nlohmann::json::parse(
        strict_json(text), [&watcher](int depth, auto event, auto& parsed) { return watcher(depth, event, parsed); });
  } catch (const nlohmann::json::exception& e) {
    const std::string what = e.what();
    const size_t end = what.find("] ");
    report.error("JSON", end == std::string::npos ? what : what.substr(end + 2));
  } catch (const std::runtime_error& e) {
    report.error("JSON", e.what());
  }
  return nlohmann::json::object();
}

}  // namespace tessera::config
