// File: a file by descriptor, and the few operations on names that make a change appear whole or not at all. Errors are
// IoError and name the file, the operation and what the system said.
#pragma once

#include <cstdint>
#include <string>

namespace tessera::io {

class File {
 public:
  static File open(const std::string& path);    // for reading; a directory or a device is refused
  static File create(const std::string& path);  // for writing; must not exist
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  const std::string& path() const { return path_; }
  int descriptor() const { return fd_; }
  int64_t size() const;
  // All of `bytes`, or an error: a file that ends before is one. Any number of threads at once.
  void read(void* to, int64_t bytes, int64_t offset) const;
  void write(const void* from, int64_t bytes, int64_t offset) const;
  // Until the contents are on the disk.
  void sync() const;
  // What only closing reports; the destructor does not.
  void close();

 private:
  File(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

  std::string path_;
  int fd_ = -1;
};

// The whole file; an error where it is longer than `limit` bytes.
std::string read_text(const std::string& path, int64_t limit);
// `path` holds `text` afterwards, on the disk; at any moment before it holds what it held. Writes path + ".part" first.
void replace_text(const std::string& path, const std::string& text);
// New and removed names of `folder` are on the disk.
void sync_folder(const std::string& folder);
// Makes the folder and those above it.
void make_folder(const std::string& folder);

}  // namespace tessera::io
