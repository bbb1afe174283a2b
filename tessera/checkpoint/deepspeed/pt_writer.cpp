#include "tessera/checkpoint/deepspeed/pt_writer.h"

#include <cstdio>
#include <cstring>
#include <filesystem>

#include "tessera/base/error.h"
#include "tessera/io/crc32c.h"
#include "tessera/io/file.h"

namespace tessera::checkpoint::deepspeed {

namespace {

constexpr int64_t kStorageAlignment = 64;  // a storage's alignment in bytes, as torch.save has it
constexpr const char* kRoot = "archive/";
constexpr uint16_t kVersion45 = 45;         // the format's version with numbers of 64 bits
constexpr uint16_t kDate = 33;              // 1980-01-01, the format's first date
constexpr uint16_t kPaddingField = 0x4246;  // an extra field that readers skip
constexpr int64_t kLocalBytes = 30 + 20;    // a record's header and the field of its sizes

void put16(std::string& to, uint16_t value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}
void put32(std::string& to, uint32_t value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}
void put64(std::string& to, int64_t value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}

struct Output {
  virtual ~Output() = default;
  virtual void write(const void* from, int64_t bytes, int64_t offset) = 0;
};

struct FileOutput : Output {
  explicit FileOutput(const std::string& path) : file(io::File::create(path)) {}
  void write(const void* from, int64_t bytes, int64_t offset) override { file.write(from, bytes, offset); }
  io::File file;
};

struct TextOutput : Output {
  void write(const void* from, int64_t bytes, int64_t offset) override {
    text.resize(std::max(text.size(), static_cast<size_t>(offset + bytes)));
    std::memcpy(text.data() + offset, from, static_cast<size_t>(bytes));
  }
  std::string text;
};

// A zip archive of records that are stored as they are.
class Archive {
 public:
  explicit Archive(Output& output) : output_(output) {}

  template <class F>
  void add(const std::string& name, int64_t bytes, const F& chunks) {
    Record record{kRoot + name, 0, bytes, at_};
    std::string header;
    put32(header, 0x04034b50);
    put16(header, kVersion45);
    put16(header, 0);  // flags
    put16(header, 0);  // stored
    put16(header, 0);  // time
    put16(header, kDate);
    put32(header, 0);  // the checksum, written once it is known
    put32(header, UINT32_MAX);
    put32(header, UINT32_MAX);
    const int64_t before = at_ + kLocalBytes + static_cast<int64_t>(record.name.size()) + 4;
    const auto padding = static_cast<uint16_t>((kStorageAlignment - before % kStorageAlignment) % kStorageAlignment);
    put16(header, static_cast<uint16_t>(record.name.size()));
    put16(header, static_cast<uint16_t>(20 + 4 + padding));
    header += record.name;
    put16(header, 1);  // the sizes, in 64 bits
    put16(header, 16);
    put64(header, bytes);
    put64(header, bytes);
    put16(header, kPaddingField);
    put16(header, padding);
    header.append(padding, 'Z');
    append(header.data(), static_cast<int64_t>(header.size()));
    int64_t left = bytes;
    chunks([&](const void* from, int64_t count) {
      left -= count;
      TESSERA_ASSERT(left >= 0);
      record.checksum = io::crc32(from, count, record.checksum);
      append(from, count);
    });
    TESSERA_ASSERT(left == 0);
    constexpr int64_t kChecksumPlace = 14;
    output_.write(&record.checksum, sizeof record.checksum, record.header + kChecksumPlace);
    records_.push_back(std::move(record));
  }
  void add(const std::string& name, const std::string& text) {
    const auto bytes = static_cast<int64_t>(text.size());
    add(name, bytes, [&](const auto& sink) { sink(text.data(), bytes); });
  }

  // Writes the directory.
  void finish() {
    const int64_t begin = at_;
    std::string text;
    for (const Record& record : records_)
      put(text, record);
    const auto bytes = static_cast<int64_t>(text.size()), count = static_cast<int64_t>(records_.size());
    const int64_t end = begin + bytes;
    put32(text, 0x06064b50);  // the end in 64 bits
    put64(text, 44);
    put16(text, kVersion45);
    put16(text, kVersion45);
    put64(text, 0);
    put64(text, count);
    put64(text, count);
    put64(text, bytes);
    put64(text, begin);
    put32(text, 0x07064b50);  // where the 64-bit end is
    put32(text, 0);
    put64(text, end);
    put32(text, 1);
    put32(text, 0x06054b50);
    put32(text, 0);
    put16(text, UINT16_MAX);
    put16(text, UINT16_MAX);
    put32(text, UINT32_MAX);
    put32(text, UINT32_MAX);
    put16(text, 0);
    append(text.data(), static_cast<int64_t>(text.size()));
  }

 private:
  struct Record {
    std::string name;
    uint32_t checksum = 0;
    int64_t bytes = 0, header = 0;
  };
  static void put(std::string& text, const Record& record) {
    put32(text, 0x02014b50);
    put16(text, kVersion45);
    put16(text, kVersion45);
    put32(text, 0);  // flags, stored
    put16(text, 0);
    put16(text, kDate);
    put32(text, record.checksum);
    put32(text, UINT32_MAX);
    put32(text, UINT32_MAX);
    put16(text, static_cast<uint16_t>(record.name.size()));
    put16(text, 28);
    put16(text, 0);
    put16(text, 0);
    put16(text, 0);
    put32(text, 0);
    put32(text, UINT32_MAX);
    text += record.name;
    put16(text, 1);
    put16(text, 24);
    put64(text, record.bytes);
    put64(text, record.bytes);
    put64(text, record.header);
  }
  void append(const void* from, int64_t bytes) {
    output_.write(from, bytes, at_);
    at_ += bytes;
  }

  Output& output_;
  int64_t at_ = 0;
  std::vector<Record> records_;
};

void write_to(Output& output, const Value& value, Style style) {
  const Written written = write_pickle(value, style);
  Archive archive(output);
  archive.add("data.pkl", written.pickle);
  archive.add("byteorder", "little");
  for (size_t key = 0; key < written.storages.size(); ++key) {
    const Streamed& tensor = written.storages[key];
    const int64_t numel = numel_of(tensor.shape);
    archive.add("data/" + std::to_string(key), numel * static_cast<int64_t>(c10::elementSize(tensor.dtype)),
                [&](const auto& sink) {
                  if (numel == 0) return;
                  tensor.chunks([&](const at::Tensor& chunk) {
                    TESSERA_ASSERT(chunk.scalar_type() == tensor.dtype && chunk.is_contiguous());
                    sink(chunk.const_data_ptr(), static_cast<int64_t>(chunk.nbytes()));
                  });
                });
  }
  archive.add("version", "3\n");
  archive.finish();
}

}  // namespace

void write_pt(const std::string& path, const Value& value, Style style) {
  FileOutput output(path);
  write_to(output, value, style);
  output.file.sync();
  output.file.close();
}

std::string pt_bytes(const Value& value, Style style) {
  TextOutput output;
  write_to(output, value, style);
  return std::move(output.text);
}

}  // namespace tessera::checkpoint::deepspeed
