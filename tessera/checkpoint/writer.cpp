#include "tessera/checkpoint/writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <deque>
#include <filesystem>
#include <map>
#include <optional>
#include <random>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/checkpoint/reader.h"
#include "tessera/io/crc32c.h"
#include "tessera/io/queue.h"
#include "tessera/io/safetensors.h"

namespace tessera::checkpoint {

namespace {

namespace fs = std::filesystem;

constexpr int kDepth = 8;
constexpr size_t kBlocks = 8;                 // blocks in memory
constexpr int64_t kBlock = int64_t{4} << 20;  // bytes of a block
constexpr size_t kIdDigits = 16;
constexpr int kAttempts = 10;

// How tools show a piece: "exp_avg/blocks.0.weight[0:1024]".
std::string key_of(const Item& item) {
  std::string key = item.kind + "/" + item.name;
  for (const Slice& slice : item.slice) {
    key += c10::str("{", slice.dim, ":");
    for (const shard::Range& r : slice.ranges)
      key += c10::str(" ", r.begin, "-", r.end);
    key += "}";
  }
  return key + c10::str("[", item.range.begin, ":", item.range.end, "]");
}

bool is_whole(const Item& item) {
  int64_t numel = 1;
  for (const int64_t size : item.shape)
    numel *= size;
  return item.slice.empty() && item.order.empty() && item.range == shard::Range{0, numel};
}

io::TensorEntry entry_of(const Item& item) {
  const bool whole = is_whole(item);
  io::TensorEntry entry{whole ? item.kind + "/" + item.name : key_of(item), item.dtype,
                        whole ? item.shape : std::vector<int64_t>{item.range.size()}};
  if (item.dtype == at::kComplexDouble) {
    entry.dtype = at::kDouble;
    entry.shape.push_back(2);
  }
  return entry;
}

// The bytes of a file from its beginning on, on their way in blocks that can go past the page cache.
class Stream {
 public:
  explicit Stream(const io::File& file) : file_(file), queue_(io::make_queue(kDepth)) {}

  void append(const char* bytes, int64_t size) {
    for (int64_t done = 0; done < size;) {
      if (!block_) block_ = free_block();
      const int64_t part = std::min(size - done, kBlock - filled_);
      std::memcpy(block_.get() + filled_, bytes + done, static_cast<size_t>(part));
      done += part;
      filled_ += part;
      if (filled_ == kBlock) send();
    }
  }
  // Appends an item; returns the checksums of its piece.
  std::vector<uint32_t> append(const Item& item) {
    static_assert(shard::kTile % kChecksumBlock == 0, "every part but the last ends with a block");
    std::vector<uint32_t> checksums;
    for (int64_t begin = item.range.begin; begin < item.range.end; begin += shard::kTile) {
      const shard::Range part{begin, std::min(begin + shard::kTile, item.range.end)};
      const at::Tensor values = item.values(part).to(at::kCPU).contiguous();
      TESSERA_ASSERT(values.numel() == part.size() && values.scalar_type() == item.dtype);
      append(values, checksums);
    }
    return checksums;
  }
  void finish() {
    if (block_) send();
    while (!flight_.empty())
      finish_one();
  }

 private:
  struct Flight {
    io::AlignedBytes block;
    std::future<void> done;
  };

  void append(const at::Tensor& values, std::vector<uint32_t>& checksums) {
    const auto* bytes = static_cast<const char*>(values.const_data_ptr());
    const auto size = static_cast<int64_t>(values.nbytes());
    for (int64_t at = 0; at < size; at += kChecksumBlock) {
      const int64_t length = std::min(kChecksumBlock, size - at);
      append(bytes + at, length);
      checksums.push_back(io::crc32c(bytes + at, length));
    }
  }
  io::AlignedBytes free_block() { return flight_.size() < kBlocks ? io::aligned_bytes(kBlock) : finish_one(); }
  // Sends the last block: what of it is aligned, and the rest.
  void send() {
    const int64_t whole = filled_ / io::kDirectAlignment * io::kDirectAlignment;
    char* memory = block_.get();
    if (whole < filled_)
      flight_.push_back({nullptr, queue_->write(file_, memory + whole, filled_ - whole, at_ + whole)});
    if (whole > 0) flight_.push_back({nullptr, queue_->write(file_, memory, whole, at_)});
    flight_.back().block = std::move(block_);
    at_ += std::exchange(filled_, 0);
  }
  io::AlignedBytes finish_one() {
    Flight& flight = flight_.front();
    flight.done.get();
    io::AlignedBytes block = std::move(flight.block);
    flight_.pop_front();
    return block;
  }

  const io::File& file_;
  int64_t at_ = 0, filled_ = 0;  // of the file, where the block begins; bytes in it
  io::AlignedBytes block_;
  std::deque<Flight> flight_;
  std::unique_ptr<io::Queue> queue_;  // first to go: it waits for what is in flight
};

std::string mark_name(const std::string& id) {
  return id + ".saving";
}

// The id of the save that has made a file of that name; empty: none of ours.
std::string id_of(const std::string& name) {
  const std::string id = name.substr(0, kIdDigits);
  if (!is_id(id)) return {};
  const bool is_data =
      name.size() > kIdDigits && name[kIdDigits] == '-' && (name.ends_with(".safetensors") || name.ends_with(".bin"));
  return is_data || name == mark_name(id) ? id : "";
}

using Files = std::map<std::string, std::vector<fs::path>>;  // by the id of their save

Files files_of(const fs::path& folder) {
  std::error_code ignored;
  Files files;
  for (const auto& entry : fs::directory_iterator(folder, ignored))
    if (const std::string id = id_of(entry.path().filename().string()); !id.empty()) files[id].push_back(entry.path());
  return files;
}

// Removes from `folder` the files of every save whose mark no process holds, and the folder if it is empty then. `keep` is called
// once the marks are known: where it returns nothing, no file is removed; else the files of the save whose id it returns stay.
void remove_left(const fs::path& folder, const std::function<std::optional<std::string>()>& keep) {
  std::error_code ignored;
  Files files = files_of(folder);
  std::vector<io::Lock> left;  // held meanwhile
  bool all = true;
  for (auto it = files.begin(); it != files.end();) {
    const fs::path mark = folder / mark_name(it->first);
    auto lock = io::Lock::take_left(mark.string());
    const bool is_live = !lock && fs::exists(mark, ignored);
    if (lock) left.push_back(std::move(*lock));
    all = all && !is_live;
    it = is_live ? files.erase(it) : std::next(it);
  }
  const std::optional<std::string> kept = keep();
  if (!kept) return;
  for (const auto& [id, paths] : files)
    for (const fs::path& path : paths)
      if (id != *kept) fs::remove(path, ignored);
  if (all) fs::remove(folder / (std::string(kManifestName) + ".part"), ignored);
  if (all && kept->empty() && !files.empty()) fs::remove(folder, ignored);  // an error where it is not empty
}

}  // namespace

std::vector<TensorRecord> write_items(const std::string& path, const std::string& id, std::vector<Item> items,
                                      FileRecord& file) {
  // Without gaps between tensors every one of them is aligned to its element when the larger elements come first.
  std::stable_sort(items.begin(), items.end(),
                   [](const Item& a, const Item& b) { return c10::elementSize(a.dtype) > c10::elementSize(b.dtype); });
  io::SafeTensors header{{}, {{"format", "tessera"}, {"id", id}}};
  for (const Item& item : items)
    header.tensors.push_back(entry_of(item));
  const std::string text = io::layout_safetensors(header);
  std::vector<TensorRecord> records;
  io::File out = io::File::create_direct(path);
  try {
    out.reserve(items.empty() ? static_cast<int64_t>(text.size()) : header.tensors.back().end);
    Stream stream(out);
    stream.append(text.data(), static_cast<int64_t>(text.size()));
    for (size_t i = 0; i < items.size(); ++i) {
      const Item& item = items[i];
      const int64_t offset = header.tensors[i].begin;
      const Piece piece{0, offset, item.slice.empty() ? -1 : 0, item.range, stream.append(item)};
      records.push_back({item.name, item.kind, item.shape, item.order, item.dtype, item.slice, {piece}});
    }
    stream.finish();
    out.sync();
    file = {fs::path(path).filename().string(), out.size()};
    out.close();
  } catch (...) {
    ::unlink(path.c_str());
    throw;
  }
  return records;
}

FileRecord write_blob(const std::string& path, const std::string& bytes) {
  io::File out = io::File::create(path);
  const auto size = static_cast<int64_t>(bytes.size());
  try {
    out.write(bytes.data(), size, 0);
    out.sync();
    out.close();
  } catch (...) {
    ::unlink(path.c_str());
    throw;
  }
  return {fs::path(path).filename().string(), size, io::crc32c(bytes.data(), size)};
}

void check_tag(const std::string& tag) {
  TESSERA_CHECK_VALUE(is_tag(tag), "checkpoint", "a tag is the name of one folder, not '", tag, "'");
}

std::string folder_of(const std::string& dir, const std::string& tag) {
  return (fs::path(dir) / tag).string();
}

std::string file_name(const std::string& id, int rank) {
  std::string number = std::to_string(rank);
  number.insert(0, number.size() < 5 ? 5 - number.size() : 0, '0');
  return id + "-" + number + ".safetensors";
}

std::string blob_name(const std::string& id, const std::string& name) {
  return id + "-" + name + ".bin";
}

std::string new_id() {
  std::random_device random;
  std::string id;
  for (size_t i = 0; i < kIdDigits; ++i)
    id += "0123456789abcdef"[random() & 15];
  return id;
}

bool is_id(const std::string& text) {
  return text.size() == kIdDigits && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

void commit(const std::string& folder, const Manifest& manifest) {
  io::sync_folder(folder);  // the files' names first
  io::replace_text((fs::path(folder) / kManifestName).string(), to_text(manifest));
}

std::string complete_id(const std::string& folder) {
  const std::string path = (fs::path(folder) / kManifestName).string();
  try {
    return fs::exists(path) ? parse_manifest(io::read_text(path, int64_t{1} << 31), path).id : "";
  } catch (const IoError&) {
    return {};
  }
}

void set_latest(const std::string& dir, const std::string& tag, const std::string& file) {
  io::sync_folder(dir);
  io::replace_text((fs::path(dir) / file).string(), tag);
}

void put_in_place(const std::string& from, const std::string& folder) {
  io::sync_folder(from);
  const bool replaces = fs::exists(folder);
  int failed = ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, folder.c_str(), replaces ? RENAME_EXCHANGE : 0);
  if (failed != 0 && replaces && (errno == EINVAL || errno == ENOSYS)) {
    // A file system that cannot exchange: for a moment there is no folder of that name, but the former one is beside.
    const std::string former = from + ".former";
    failed = ::rename(folder.c_str(), former.c_str());
    if (failed == 0 && ::rename(from.c_str(), folder.c_str()) != 0) {
      failed = errno;
      TESSERA_CHECK_IO(::rename(former.c_str(), folder.c_str()) == 0, "checkpoint", "'", folder,
                       "' cannot be put in place: ", std::strerror(failed), "; what was there is '", former,
                       "' now, because moving it back failed as well: ", std::strerror(errno));
      errno = failed;
    } else if (failed == 0) {
      std::error_code error;
      fs::rename(former, from, error);
      TESSERA_CHECK_IO(!error, "checkpoint", "'", folder, "' is in place; what was there before is '", former,
                       "', because it cannot be moved to '", from, "': ", error.message());
    }
  } else if (failed != 0 && !replaces) {
    failed = ::rename(from.c_str(), folder.c_str());
  }
  TESSERA_CHECK_IO(failed == 0, "checkpoint", "'", folder, "' cannot be put in place: ", std::strerror(errno));
  io::sync_folder(fs::path(folder).parent_path().string());
  std::error_code ignored;
  if (replaces) fs::remove_all(from, ignored);
}

SaveMark::SaveMark(const std::string& folder, const std::string& id) {
  const std::string path = (fs::path(folder) / mark_name(id)).string();
  for (int attempt = 1; !lock_; ++attempt) {
    io::make_folder(folder);
    try {
      lock_.emplace(io::Lock::wait(path));
    } catch (const IoError&) {
      // Another save has just found the folder empty and removed it.
      if (attempt == kAttempts) throw;
    }
  }
}

SaveMark::~SaveMark() {
  lock_->remove();
}

bool is_held(const std::string& folder, const std::string& id) {
  std::error_code ignored;
  const std::string path = (fs::path(folder) / mark_name(id)).string();
  std::optional<io::Lock> left = io::Lock::take_left(path);
  if (left) left->remove();
  return !left && fs::exists(path, ignored);
}

namespace {

bool is_complete(const fs::path& folder) {
  std::error_code ignored;
  return fs::exists(folder / kManifestName, ignored);
}

}  // namespace

std::vector<std::string> tags(const std::string& dir) {
  std::error_code ignored;
  std::vector<std::pair<fs::file_time_type, std::string>> complete;
  for (const auto& entry : fs::directory_iterator(dir, ignored))
    if (entry.is_directory(ignored) && is_complete(entry.path()))
      complete.emplace_back(fs::last_write_time(entry.path() / kManifestName, ignored),
                            entry.path().filename().string());
  std::sort(complete.rbegin(), complete.rend());
  std::vector<std::string> names;
  for (const auto& [when, name] : complete)
    names.push_back(name);
  return names;
}

void clean(const std::string& dir, const std::string& tag, int keep_last) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(dir, ignored)) {
    const fs::path& folder = entry.path();
    if (!entry.is_directory(ignored)) continue;
    if (!is_complete(folder))
      remove_left(folder, [&] { return is_complete(folder) ? std::nullopt : std::optional<std::string>(""); });
    else if (folder.filename() == tag)
      remove_left(folder, [&] {
        const std::string id = complete_id(folder.string());
        return id.empty() ? std::nullopt : std::optional(id);
      });
  }
  if (keep_last <= 0) return;
  std::vector<std::string> others = tags(dir);
  std::erase(others, tag);
  std::string latest;
  try {
    latest = latest_tag(dir);
  } catch (const IoError&) {
    return;  // `latest` cannot be read: then no checkpoint is known to be free
  }
  for (size_t i = static_cast<size_t>(keep_last) - 1; i < others.size(); ++i) {
    if (others[i] == latest) continue;
    const fs::path folder = fs::path(dir) / others[i];
    fs::remove(folder / kManifestName, ignored);  // first: the checkpoint is not complete from here on
    remove_left(folder, [&] { return is_complete(folder) ? std::nullopt : std::optional<std::string>(""); });
  }
}

}  // namespace tessera::checkpoint
