#include "tessera/io/metrics.h"

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
#include <fstream>

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

std::ofstream opened(const fs::path& path) {
  std::ofstream file(path, std::ios::app | std::ios::binary);
  TESSERA_CHECK_IO(file.good(), "metrics", "cannot open '", path.string(), "': ", std::strerror(errno));
  return file;
}

void put(std::ofstream& file, const fs::path& path, const std::string& text) {
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  file.flush();
  TESSERA_CHECK_IO(file.good(), "metrics", "cannot write '", path.string(), "': ", std::strerror(errno));
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
  explicit Csv(fs::path folder) : folder_(std::move(folder)) { make_folder(folder_.string()); }

  void write(const std::vector<Metric>& metrics) override {
    for (const Metric& metric : metrics) {
      std::string stem = metric.name;
      std::ranges::replace(stem, '/', '_');
      std::ranges::replace(stem, ' ', '_');
      add(stem, metric.name.substr(metric.name.rfind('/') + 1), metric.step, shortest(metric.value));
    }
  }

  void warn(const std::string& text, int64_t step) override { add("warnings", "warning", step, quoted(text)); }

 private:
  void add(const std::string& stem, const std::string& column, int64_t step, const std::string& cell) {
    const fs::path path = folder_ / (stem + ".csv");
    std::ofstream file = opened(path);
    const bool is_new = file.tellp() == std::streampos(0);
    put(file, path, (is_new ? "step," + quoted(column) + "\r\n" : "") + std::to_string(step) + "," + cell + "\r\n");
  }

  const fs::path folder_;
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
    file_ = opened(path_);
    put(file_, path_, record(event(bytes_field(3, "brain.Event:2"))));
  }

  void write(const std::vector<Metric>& metrics) override {
    std::string records;
    for (const Metric& metric : metrics)
      records += record(scalar(metric));
    put(file_, path_, records);
  }

 private:
  fs::path path_;
  std::ofstream file_;
};

// ---- JSON

std::string json_text(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    std::array<char, 8> escape{};
    if (c == '"' || c == '\\') {
      (out += '\\') += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      std::snprintf(escape.data(), escape.size(), "\\u%04x", static_cast<unsigned>(c));
      out += escape.data();
    } else {
      out += c;
    }
  }
  return out + "\"";
}

class JsonLines final : public MetricWriter {
 public:
  explicit JsonLines(fs::path path) : path_(std::move(path)) {
    if (path_.has_parent_path()) make_folder(path_.parent_path().string());
    file_ = opened(path_);
  }

  void write(const std::vector<Metric>& metrics) override {
    std::string lines;
    for (const Metric& metric : metrics)
      lines += "{\"name\": " + json_text(metric.name) +
               ", \"value\": " + (std::isfinite(metric.value) ? shortest(metric.value) : "null") + where(metric.step);
    put(file_, path_, lines);
  }

  void warn(const std::string& text, int64_t step) override {
    put(file_, path_, "{\"warning\": " + json_text(text) + where(step));
  }

 private:
  static std::string where(int64_t step) {
    return ", \"step\": " + std::to_string(step) + ", \"time\": " + shortest(now()) + "}\n";
  }

  const fs::path path_;
  std::ofstream file_;
};

}  // namespace

void MetricWriter::warn(const std::string& /*text*/, int64_t /*step*/) {}

std::unique_ptr<MetricWriter> csv_metrics(const std::string& folder) {
  return std::make_unique<Csv>(folder);
}

std::unique_ptr<MetricWriter> tensorboard_metrics(const std::string& folder) {
  return std::make_unique<TensorBoard>(folder);
}

std::unique_ptr<MetricWriter> json_metrics(const std::string& path) {
  return std::make_unique<JsonLines>(path);
}

std::string metrics_folder(const std::string& output_path, const std::string& job_name, const std::string& standard) {
  const fs::path base =
      output_path.empty() ? fs::path(env::get("HOME").value_or(".")) / standard : fs::path(output_path);
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
