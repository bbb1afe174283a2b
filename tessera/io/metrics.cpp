#include "tessera/io/metrics.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/io/crc32c.h"
#include "tessera/io/file.h"

namespace tessera::io {
namespace {

namespace fs = std::filesystem;

double now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// A leading "~" is the user's folder, as a shell has it.
fs::path expanded(const std::string& path) {
  const auto home = env::get("HOME");
  if (!home || (path != "~" && !path.starts_with("~/"))) return path;
  return fs::path(*home) / path.substr(std::min<size_t>(2, path.size()));
}

// What text is appended to, whole or not at all.
class Appended {
 public:
  explicit Appended(fs::path path) : path_(std::move(path)) {
    fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    TESSERA_CHECK_IO(fd_ >= 0, "metrics", "cannot open '", path_.string(), "': ", std::strerror(errno));
    char last = '\n';
    torn_ = ::pread(fd_, &last, 1, size() - 1) == 1 && last != '\n';  // half a line, of a program that was killed
  }
  Appended(const Appended&) = delete;
  Appended& operator=(const Appended&) = delete;
  ~Appended() { ::close(fd_); }

  int descriptor() const { return fd_; }
  bool is_empty() const { return size() == 0; }

  void put(const std::string& text) {
    const std::string whole = (torn_ ? "\n" : "") + text;
    for (size_t done = 0; done < whole.size();) {
      const ssize_t part = ::write(fd_, whole.data() + done, whole.size() - done);
      if (part < 0 && errno == EINTR) continue;
      const int error = part == 0 ? ENOSPC : errno;
      if (part <= 0) take_back(static_cast<off_t>(done));
      TESSERA_CHECK_IO(part > 0, "metrics", "cannot write '", path_.string(), "': ", std::strerror(error));
      done += static_cast<size_t>(part);
    }
    torn_ = false;
  }

 private:
  off_t size() const {
    struct stat found{};
    return ::fstat(fd_, &found) == 0 ? found.st_size : 0;
  }

  // Cuts off the part of a text that could not be written whole, unless another program has written behind it.
  void take_back(off_t done) {
    if (done == 0) return;
    const off_t end = ::lseek(fd_, 0, SEEK_CUR);
    torn_ = end != size() || ::ftruncate(fd_, end - done) != 0;
  }

  const fs::path path_;
  int fd_ = -1;
  bool torn_ = false;
};

// Warns where another writer, of this program or another, has the file or folder; its descriptor is held as long as it is open.
void take(int fd, const fs::path& path) {
  if (::flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;  // some file systems have no locks
  TORCH_WARN("[metrics] another engine or program writes its numbers to '", path.string(),
             "' now; those of both will stand among each other there: give each a path of its own "
             "(tessera.json_lines; csv_monitor.job_name), or end the other first (engine.destroy() in Python)");
}

// Lets go of what take() has. A child that was forked meanwhile has the descriptor, too.
void give_back(int fd) {
  if (fd < 0) return;
  ::flock(fd, LOCK_UN);
  ::close(fd);
}

// Bytes that are no UTF-8 become U+FFFD.
std::string json_text(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// A cell of a CSV file.
std::string quoted(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text)
    quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

class Csv final : public MetricWriter {
 public:
  explicit Csv(fs::path folder) : folder_(std::move(folder)) {
    make_folder(folder_.string());
    fd_ = ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    take(fd_, folder_);
  }
  Csv(const Csv&) = delete;
  Csv& operator=(const Csv&) = delete;
  ~Csv() override { give_back(fd_); }

  void write(const std::vector<Metric>& metrics) override {
    check_metrics(metrics);
    for (const Metric& metric : metrics)
      check_name(metric.name);
    for (const Metric& metric : metrics) {
      std::string stem = metric.name;
      std::ranges::replace(stem, '/', '_');
      std::ranges::replace(stem, ' ', '_');
      add(stem, metric.name.substr(metric.name.rfind('/') + 1), metric.step, shortest(metric.value));
    }
  }

  void warn(const std::string& text, int64_t step) override { add(kWarnings, "warning", step, quoted(text)); }

 private:
  void add(const std::string& stem, const std::string& column, int64_t step, const std::string& cell) {
    const fs::path path = folder_ / (stem + ".csv");
    Appended file(path);
    const std::string head = file.is_empty() ? "step," + quoted(column) + "\r\n" : "";
    file.put(head + std::to_string(step) + "," + cell + "\r\n");
  }

  static void check_name(const std::string& name) {
    TESSERA_CHECK_VALUE(name.find('\0') == std::string::npos && name != kWarnings, "metrics",
                        "a number for CSV files cannot have the name ", json_text(name),
                        ": its file is called as it is, and warnings.csv has the warnings");
  }

  static constexpr const char* kWarnings = "warnings";
  const fs::path folder_;
  int fd_ = -1;
};

// ---- messages of protocol buffers: a field is its number and wire type, then its value

enum class Wire : uint8_t { Varint = 0, Fixed64 = 1, Bytes = 2, Fixed32 = 5 };

std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7)
    bytes += static_cast<char>((value & 0x7f) | 0x80);
  return bytes + static_cast<char>(value);
}

template <class T>
std::string little_endian(T value) {
  static_assert(std::endian::native == std::endian::little);
  std::string bytes(sizeof(T), '\0');
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

std::string key(uint32_t field, Wire wire) {
  return varint(field << 3 | static_cast<uint8_t>(wire));
}

std::string bytes_field(uint32_t field, const std::string& bytes) {
  return key(field, Wire::Bytes) + varint(bytes.size()) + bytes;
}

// tensorflow.Event: wall_time 1, step 2, file_version 3, summary 5.
std::string event(const std::string& what) {
  return key(1, Wire::Fixed64) + little_endian(now()) + what;
}

std::string scalar(const Metric& metric) {
  // tensorflow.Summary: value 1, of tag 1 and simple_value 2.
  const std::string value =
      bytes_field(1, metric.name) + key(2, Wire::Fixed32) + little_endian(static_cast<float>(metric.value));
  return event(key(2, Wire::Varint) + varint(static_cast<uint64_t>(metric.step)) +
               bytes_field(5, bytes_field(1, value)));
}

// A record: its length, its bytes, and a checksum of each, turned so that checksums inside the data are no accident.
std::string record(const std::string& bytes) {
  const auto masked = [](const std::string& of) {
    const uint32_t crc = crc32c(of.data(), static_cast<int64_t>(of.size()));
    return little_endian(std::rotr(crc, 15) + 0xa282ead8U);
  };
  const std::string length = little_endian(static_cast<uint64_t>(bytes.size()));
  return length + masked(length) + bytes + masked(bytes);
}

std::string host() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "host";
}

class TensorBoard final : public MetricWriter {
 public:
  explicit TensorBoard(const fs::path& folder) {
    make_folder(folder.string());
    std::array<char, 64> stem{};
    std::snprintf(stem.data(), stem.size(), "events.out.tfevents.%010lld.", static_cast<long long>(now()));
    const std::string first = stem.data() + host() + "." + std::to_string(getpid()) + ".";
    for (int number = 0; path_.empty() || fs::exists(path_); ++number)
      path_ = folder / (first + std::to_string(number) + ".tessera");  // other writers make names of the same kind
    file_.emplace(path_);
    file_->put(record(event(bytes_field(3, "brain.Event:2"))));
  }

  void write(const std::vector<Metric>& metrics) override {
    check_metrics(metrics);
    std::string records;
    for (const Metric& metric : metrics)
      records += record(scalar(metric));
    file_->put(records);
  }

 private:
  fs::path path_;
  std::optional<Appended> file_;
};

// ---- JSON

class JsonLines final : public MetricWriter {
 public:
  explicit JsonLines(const fs::path& path) : file_(made(path)) { take(file_.descriptor(), path); }
  JsonLines(const JsonLines&) = delete;
  JsonLines& operator=(const JsonLines&) = delete;
  ~JsonLines() override { ::flock(file_.descriptor(), LOCK_UN); }  // a child that was forked has the descriptor, too

  void write(const std::vector<Metric>& metrics) override {
    check_metrics(metrics);
    std::string lines;
    for (const Metric& metric : metrics)
      lines += "{\"name\": " + json_text(metric.name) +
               ", \"value\": " + (std::isfinite(metric.value) ? shortest(metric.value) : "null") + where(metric.step);
    file_.put(lines);
  }

  void warn(const std::string& text, int64_t step) override {
    file_.put("{\"warning\": " + json_text(text) + where(step));
  }

 private:
  static const fs::path& made(const fs::path& path) {
    if (path.has_parent_path()) make_folder(path.parent_path().string());
    return path;
  }

  static std::string where(int64_t step) {
    return ", \"step\": " + std::to_string(step) + ", \"time\": " + shortest(now()) + "}\n";
  }

  Appended file_;
};

}  // namespace

void check_metrics(const std::vector<Metric>& metrics) {
  for (const Metric& metric : metrics)
    TESSERA_CHECK_VALUE(!metric.name.empty(), "metrics", "a number (", shortest(metric.value), ", at ", metric.step,
                        ") has no name: give each one, as \"Own/loss\"");
}

std::string missing_numbers(const std::string& error) {
  return error + "; the run goes on, and these numbers are missing until they can be written again";
}

void MetricWriter::warn(const std::string& /*text*/, int64_t /*step*/) {}

std::unique_ptr<MetricWriter> csv_metrics(const std::string& folder) {
  return std::make_unique<Csv>(expanded(folder));
}

std::unique_ptr<MetricWriter> tensorboard_metrics(const std::string& folder) {
  return std::make_unique<TensorBoard>(expanded(folder));
}

std::unique_ptr<MetricWriter> json_metrics(const std::string& path) {
  return std::make_unique<JsonLines>(expanded(path));
}

std::string metrics_folder(const std::string& output_path, const std::string& job_name, const std::string& standard) {
  const fs::path base =
      output_path.empty() ? fs::path(env::get("HOME").value_or(".")) / standard : expanded(output_path);
  return (base / job_name).string();
}

std::string shortest(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  // The digits by scientific notation; its exponent says how Python would write them.
  std::array<char, 64> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value, std::chars_format::scientific).ptr;
  const std::string scientific(text.data(), end);
  const int exponent = std::stoi(scientific.substr(scientific.find('e') + 1));
  if (value != 0 && (exponent < -4 || exponent >= 16)) return scientific;
  const auto fixed_end = std::to_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed).ptr;
  const std::string fixed(text.data(), fixed_end);
  return fixed.find('.') == std::string::npos ? fixed + ".0" : fixed;
}

}  // namespace tessera::io
