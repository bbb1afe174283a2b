// Files of torch.save: zip archives whose records are stored as they are, data.pkl (pickle.h) and one for every storage. Only the
// pickle is read when a file is opened; a tensor is read from its place when it is asked for.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/checkpoint/deepspeed/values.h"
#include "tessera/checkpoint/reader.h"
#include "tessera/io/file.h"

namespace tessera::checkpoint::deepspeed {

class PtFile {
 public:
  // `number`: the file's index in a manifest. IoError that names the file where it is damaged, or holds objects of
  // unknown classes and these are refused.
  PtFile(const std::string& path, Objects objects, int number = 0);
  // Reads a file that lies in memory; errors name it `path`.
  PtFile(std::string bytes, const std::string& path, Objects objects);
  PtFile(const PtFile&) = delete;
  PtFile& operator=(const PtFile&) = delete;

  const std::string& path() const { return path_; }
  int number() const { return number_; }
  int64_t size() const { return size_; }
  const Value& value() const { return value_; }
  // The tensors' records, in order of their place in the file.
  std::vector<Block> blocks() const;
  // Reads the tensor into memory, contiguous, and checks its storage's checksum.
  at::Tensor read(const TensorRef& tensor) const;

  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    TESSERA_FAIL(IoError, "[checkpoint] '", path_, "' ", parts...);
  }

 private:
  struct Entry {
    std::string name;
    uint16_t flags = 0, method = 0;
    uint32_t checksum = 0;
    int64_t packed = 0, size = 0, header = 0;
  };
  void open();
  void read_at(void* to, int64_t bytes, int64_t offset) const;
  std::string bytes_at(int64_t offset, int64_t bytes) const;
  std::vector<Entry> entries() const;
  Entry entry_of(const std::string& directory, size_t& at) const;
  Block block_of(const Entry& entry) const;
  std::string contents(const Entry& entry) const;
  Storage storage_of(const Value& id) const;

  std::string path_;
  std::optional<io::File> file_;  // only while the file is opened: a checkpoint may have more files than a process may
  std::optional<std::string> bytes_;
  Objects objects_;
  int number_ = 0;
  int64_t size_ = 0;
  std::map<std::string, Block> records_;  // by key
  Values values_;
  Value value_;
};

}  // namespace tessera::checkpoint::deepspeed
