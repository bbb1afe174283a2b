// File: a file by descriptor, and the few operations on names that make a change appear whole or not at all. Errors are
// IoError and name the file, the operation and the system's reason.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/io/lock.h"

namespace tessera::io {

// Alignment of memory, offset and length of a transfer that goes past the page cache.
inline constexpr int64_t kDirectAlignment = 4096;

class File {
 public:
  static File open(const std::string& path);    // for reading; a directory or a device is refused
  static File create(const std::string& path);  // for writing; must not exist
  // Open and create with aligned transfers that go past the page cache where the file system lets them.
  static File open_direct(const std::string& path);
  static File create_direct(const std::string& path);
  // Makes a file for reading and writing past the page cache, in `folder`, without a name: nobody else can open it, and it goes
  // with this object or its process, whatever ends that. Mode 0600. `knows_unnamed` false: as on a file system without such
  // files, where it has a name for a moment.
  static File scratch(const std::string& folder, bool knows_unnamed = true);
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  const std::string& path() const { return path_; }
  bool is_direct() const { return direct_ >= 0; }  // aligned transfers go past the page cache
  // The descriptor that serves a transfer.
  int descriptor(const void* memory, int64_t bytes, int64_t offset) const;
  int64_t size() const;
  // Transfer all of `bytes`, or throw: a file that ends before is an error. Any number of threads at once.
  void read(void* to, int64_t bytes, int64_t offset) const;
  void write(const void* from, int64_t bytes, int64_t offset) const;
  // Reserves space for `bytes` bytes, so that a full disk is seen before anything is written, and writes need not wait for each
  // other to grow the file. The file has that size at least; where the file system cannot reserve, writes take the space.
  void reserve(int64_t bytes) const;
  // Returns when the contents are on the disk.
  void sync() const;
  // Throws what only closing reports; the destructor does not.
  void close();

 private:
  File(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  void add_direct(int flags);
  bool falls_back(int fd, int error) const;

  std::string path_;
  int fd_ = -1;
  int direct_ = -1;  // past the page cache
};

// The text of the whole file; an error where the file is longer than `limit` bytes.
std::string read_text(const std::string& path, int64_t limit);
// A file that takes the name `path` whole or not at all, whoever writes it: under the name part() at first. Writers of
// the same path, of any process, wait for each other; what a writer that was cut off has left is written over.
class WholeFile {
 public:
  explicit WholeFile(std::string path);  // waits for other writers; IoError where another thing than a file is there
  ~WholeFile() { drop(); }
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;

  const std::string& part() const { return part_; }  // empty at first
  void finish();  // contents and name are on the disk. IoError where that fails, or where part() is another file by now
  void drop();    // unfinished, nothing of it stays

 private:
  friend void replace_text(const std::string& path, const std::string& text);

  std::string path_, part_;
  std::optional<Lock> lock_;  // of the part, until it has its name
};

// Replaces the text of `path`, on the disk; at any moment before the file holds what it held.
void replace_text(const std::string& path, const std::string& text);
// Puts new and removed names of `folder` on the disk.
void sync_folder(const std::string& folder);
// Makes the folder and its parents.
void make_folder(const std::string& folder);

}  // namespace tessera::io
