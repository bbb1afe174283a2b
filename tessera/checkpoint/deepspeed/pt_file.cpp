#include "tessera/checkpoint/deepspeed/pt_file.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

#include "tessera/checkpoint/deepspeed/names.h"
#include "tessera/checkpoint/deepspeed/pickle.h"
#include "tessera/io/crc32c.h"

namespace tessera::checkpoint::deepspeed {

namespace {

constexpr int64_t kPickleLimit = int64_t{1} << 30;     // bytes of data.pkl
constexpr int64_t kDirectoryLimit = int64_t{1} << 27;  // the archive's directory, in bytes
// Sizes of an archive's parts, and the marks that they begin with.
constexpr int64_t kLocalHeader = 30, kEntry = 46, kEnd = 22, kEnd64 = 56, kLocator = 20, kLongestComment = 65535;
constexpr uint32_t kLocalMark = 0x04034b50, kEntryMark = 0x02014b50, kEndMark = 0x06054b50, kEnd64Mark = 0x06064b50,
                   kLocatorMark = 0x07064b50;
constexpr uint16_t kLargeField = 1;  // the extra field with numbers of 64 bits
constexpr const char* kTrust =
    "If you trust it, Python reads it with trusted=True (--trusted on the command line), which can run code";

template <class T>
T number_at(const std::string& bytes, size_t at) {
  T value{};
  if (bytes.size() < sizeof value || at > bytes.size() - sizeof value) unfit("its directory ends before its end");
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

// A number that does not fit into 32 bits stands in an extra field, which holds only such numbers, in the order of `numbers`.
void read_large(const std::string& extra, const std::vector<int64_t*>& numbers) {
  size_t at = 0;
  while (at + 4 <= extra.size()) {
    const auto id = number_at<uint16_t>(extra, at), length = number_at<uint16_t>(extra, at + 2);
    size_t field = at + 4;
    at = field + length;
    if (id != kLargeField) continue;
    for (int64_t* number : numbers) {
      if (*number != UINT32_MAX) continue;
      *number = number_at<int64_t>(extra, field);
      field += sizeof *number;
    }
    if (field > at) unfit("a number of 64 bits is not there");
  }
}

}  // namespace

PtFile::PtFile(const std::string& path, Objects objects, int number) : path_(path), objects_(objects), number_(number) {
  try {
    file_ = io::File::open(path);
    size_ = file_->size();
  } catch (const c10::Error& error) {
    fail("cannot be read: ", error.what_without_backtrace());
  }
  open();
  file_.reset();
}

PtFile::PtFile(std::string bytes, const std::string& path, Objects objects)
    : path_(path), bytes_(std::move(bytes)), objects_(objects), size_(static_cast<int64_t>(bytes_->size())) {
  open();
}

void PtFile::open() {
  std::string pickled;
  try {
    const std::vector<Entry> all = entries();
    const auto is_pickle = [](const Entry& entry) {
      const size_t folder = entry.name.find('/');
      return folder != std::string::npos && entry.name.substr(folder) == "/data.pkl";
    };
    if (std::ranges::count_if(all, is_pickle) != 1) fail("is no file of torch.save: it has no data.pkl");
    const Entry& found = *std::ranges::find_if(all, is_pickle);
    const std::string root = found.name.substr(0, found.name.find('/') + 1), data = root + "data/";
    for (const Entry& entry : all) {
      if (entry.name.starts_with(data) && !records_.emplace(entry.name.substr(data.size()), block_of(entry)).second)
        fail("is damaged: two records have one name");
      if (entry.name == root + "byteorder" && contents(entry) != "little") fail("was written by a big-endian machine");
    }
    const std::vector<Block> in_order = blocks();
    for (size_t i = 1; i < in_order.size(); ++i)
      if (in_order[i - 1].bytes.end > in_order[i].bytes.begin) fail("is damaged: two records overlap");
    pickled = contents(found);
  } catch (const Unfit& error) {
    fail("is damaged, or was not written by torch.save as a zip archive: ", error.what());
  }
  try {
    const auto refuse = [&](const Name& name) {
      fail("holds an object of '", printable(name.text()),
           "', which is none of those that such files are known to hold: nothing was run. ", kTrust);
    };
    value_ = read_pickle(pickled, objects_, {[&](const Value& id) { return storage_of(id); }, refuse}, values_);
  } catch (const Unfit& error) {
    fail("is damaged: its pickle cannot be read (", error.what(), ")");
  }
}

std::vector<Block> PtFile::blocks() const {
  std::vector<Block> all;
  for (const auto& [key, block] : records_)
    all.push_back(block);
  std::ranges::sort(all, [](const Block& a, const Block& b) {
    return std::pair(a.bytes.begin, a.bytes.end) < std::pair(b.bytes.begin, b.bytes.end);
  });
  return all;
}

void PtFile::read_at(void* to, int64_t bytes, int64_t offset) const {
  if (bytes_)
    std::memcpy(to, bytes_->data() + offset, static_cast<size_t>(bytes));
  else if (file_)
    file_->read(to, bytes, offset);
  else
    io::File::open(path_).read(to, bytes, offset);
}

std::string PtFile::bytes_at(int64_t offset, int64_t bytes) const {
  if (offset < 0 || bytes < 0 || offset > size_ || bytes > size_ - offset) unfit("a part of it is beyond its end");
  std::string text(static_cast<size_t>(bytes), '\0');
  read_at(text.data(), bytes, offset);
  return text;
}

// The directory stands at the end of the file; where it begins is said in the end record behind it.
std::vector<PtFile::Entry> PtFile::entries() const {
  const int64_t tail = std::min(size_, kEnd + kLongestComment);
  const std::string last = bytes_at(size_ - tail, tail);
  size_t place = std::string::npos;
  for (int64_t at = tail - kEnd; at >= 0 && place == std::string::npos; --at)
    if (number_at<uint32_t>(last, static_cast<size_t>(at)) == kEndMark) place = static_cast<size_t>(at);
  if (place == std::string::npos) unfit("it has no directory");
  const int64_t end = size_ - tail + static_cast<int64_t>(place);
  int64_t count = number_at<uint16_t>(last, place + 10), bytes = number_at<uint32_t>(last, place + 12),
          begin = number_at<uint32_t>(last, place + 16);
  if (end >= kLocator) {
    const std::string locator = bytes_at(end - kLocator, kLocator);
    if (number_at<uint32_t>(locator, 0) == kLocatorMark) {
      const std::string large = bytes_at(number_at<int64_t>(locator, 8), kEnd64);
      if (number_at<uint32_t>(large, 0) != kEnd64Mark) unfit("its end is not where it says");
      count = number_at<int64_t>(large, 32);
      bytes = number_at<int64_t>(large, 40);
      begin = number_at<int64_t>(large, 48);
    }
  }
  if (bytes > kDirectoryLimit || begin > end) unfit("a directory of ", bytes, " bytes");
  const std::string directory = bytes_at(begin, bytes);
  std::vector<Entry> all;
  for (size_t at = 0; at < directory.size();)
    all.push_back(entry_of(directory, at));
  if (static_cast<int64_t>(all.size()) != count) unfit("a directory of ", all.size(), " records, not ", count);
  return all;
}

PtFile::Entry PtFile::entry_of(const std::string& directory, size_t& at) const {
  if (number_at<uint32_t>(directory, at) != kEntryMark) unfit("no record where one must be");
  Entry entry;
  entry.flags = number_at<uint16_t>(directory, at + 8);
  entry.method = number_at<uint16_t>(directory, at + 10);
  entry.checksum = number_at<uint32_t>(directory, at + 16);
  entry.packed = number_at<uint32_t>(directory, at + 20);
  entry.size = number_at<uint32_t>(directory, at + 24);
  const size_t name = number_at<uint16_t>(directory, at + 28), extra = number_at<uint16_t>(directory, at + 30),
               comment = number_at<uint16_t>(directory, at + 32);
  entry.header = number_at<uint32_t>(directory, at + 42);
  const size_t begin = at + static_cast<size_t>(kEntry);
  at = begin + name + extra + comment;
  if (at > directory.size()) unfit("its directory ends before its end");
  entry.name = directory.substr(begin, name);
  read_large(directory.substr(begin + name, extra), {&entry.size, &entry.packed, &entry.header});
  return entry;
}

Block PtFile::block_of(const Entry& entry) const {
  const std::string header = bytes_at(entry.header, kLocalHeader);
  if (number_at<uint32_t>(header, 0) != kLocalMark || entry.method != 0 || (entry.flags & 1) != 0)
    fail("has a record '", printable(entry.name), "' that is not stored as it is");
  const int64_t begin = entry.header + kLocalHeader + number_at<uint16_t>(header, 26) + number_at<uint16_t>(header, 28);
  if (entry.packed != entry.size || entry.size < 0 || begin > size_ || entry.size > size_ - begin)
    fail("is damaged: record '", printable(entry.name), "' is beyond the file");
  return {{begin, begin + entry.size}, entry.checksum};
}

std::string PtFile::contents(const Entry& entry) const {
  const Block block = block_of(entry);
  if (block.bytes.size() > kPickleLimit)
    fail("is no checkpoint: '", printable(entry.name), "' has ", block.bytes.size(), " bytes");
  std::string data = bytes_at(block.bytes.begin, block.bytes.size());
  if (block.checksum != 0 && io::crc32(data.data(), block.bytes.size()) != block.checksum)
    fail("is damaged: the checksum of '", printable(entry.name), "' differs");
  return data;
}

// The storage that a persistent id names.
Storage PtFile::storage_of(const Value& id) const {
  if (!id.is(Kind::Tuple) || id.items->size() != 5 || !id.items->front().is_text("storage"))
    fail("is damaged: its pickle refers to something that is no storage");
  const Value &kind = (*id.items)[1], &key = (*id.items)[2], &numel = (*id.items)[4];
  const bool known = kind.is(Kind::Name) && kind.name->meaning == Meaning::Storage && key.is(Kind::Text) &&
                     numel.is(Kind::Int) && numel.number >= 0;
  const auto record = known ? records_.find(*key.text) : records_.end();
  if (record == records_.end()) fail("is damaged: there is no storage ", shown(key));
  const at::ScalarType dtype = kind.name->dtype;
  if (numel.number > record->second.bytes.size() / static_cast<int64_t>(c10::elementSize(dtype)))
    fail("is damaged: storage ", shown(key), " has fewer bytes than its tensors need");
  return {this, record->second, dtype, numel.number};
}

at::Tensor PtFile::read(const TensorRef& tensor) const {
  const Storage& storage = *tensor.storage;
  if (tensor.numel() > storage.numel)
    fail("has a tensor of shape ", at::IntArrayRef(tensor.shape), " that repeats the elements of a smaller one");
  const shard::Range bytes = storage.block.bytes;
  at::Tensor all = at::empty({bytes.size()}, at::TensorOptions(at::kByte));
  read_at(all.mutable_data_ptr(), bytes.size(), bytes.begin);
  if (storage.block.checksum != 0 && io::crc32(all.const_data_ptr(), bytes.size()) != storage.block.checksum)
    fail("is damaged: the checksum of bytes ", bytes.begin, " to ", bytes.end, " differs");
  if (tensor.numel() == 0) return at::empty(tensor.shape, at::TensorOptions(storage.dtype));
  const at::Tensor flat = all.narrow(0, 0, storage.numel * tensor.itemsize()).view(storage.dtype);
  return flat.as_strided(tensor.shape, tensor.strides, tensor.offset).clone(at::MemoryFormat::Contiguous);
}

}  // namespace tessera::checkpoint::deepspeed
