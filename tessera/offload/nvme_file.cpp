#include "tessera/offload/nvme_file.h"

#include <chrono>
#include <cstring>
#include <exception>
#include <iterator>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::offload {

namespace {

constexpr int kDepth = 16;
constexpr int64_t kBlock = io::kDirectAlignment;

io::File scratch_in(const std::string& folder) {
  TESSERA_CHECK_VALUE(!folder.empty(), "offload", "states on a disk need a folder there (nvme_path)");
  io::make_folder(folder);
  return io::File::scratch(folder);
}

bool overlap(Bytes a, Bytes b) {
  return a.begin < b.end && b.begin < a.end;
}

}  // namespace

NvmeFile::NvmeFile(const std::string& folder, int64_t buffers, int64_t buffer_bytes, const QueueMaker& make_queue,
                   MemoryMaker make_memory)
    : file_(scratch_in(folder)),
      staging_(std::make_shared<Staging>(buffers, buffer_bytes, std::move(make_memory))),
      queue_(make_queue ? make_queue(kDepth) : io::make_queue(kDepth)) {
  if (!file_.is_direct())
    TORCH_WARN("[offload] the file system of '", folder,
               "' has no transfers past the page cache (O_DIRECT): model states pass through it, slower, and take its "
               "memory");
}

NvmeFile::~NvmeFile() = default;

Bytes NvmeFile::whole_blocks(Bytes bytes) {
  return {bytes.begin / kBlock * kBlock, (bytes.end + kBlock - 1) / kBlock * kBlock};
}

Bytes NvmeFile::reserve(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  const Bytes space{end_, end_ + bytes};
  file_.reserve(whole_blocks(space).end);
  end_ = whole_blocks(space).end;
  return space;
}

NvmeFile::Read NvmeFile::read(Bytes bytes, Bytes space) {
  TESSERA_ASSERT(space.begin <= bytes.begin && bytes.begin < bytes.end && bytes.end <= space.end);
  const std::lock_guard lock(mutex_);
  const Bytes blocks = whole_blocks(bytes);
  settle(blocks, /*reads_too=*/false);
  std::shared_ptr<char> memory = take(blocks.size());
  std::shared_future<void> done = queue_->read(file_, memory.get(), blocks.size(), blocks.begin);
  flight_.push_back({blocks, memory, done, false});
  return {std::shared_ptr<char>(memory, memory.get() + (bytes.begin - blocks.begin)), [done] { done.get(); }};
}

std::shared_ptr<char> NvmeFile::memory_for(Bytes bytes) {
  const std::lock_guard lock(mutex_);
  const Bytes blocks = whole_blocks(bytes);
  const std::shared_ptr<char> memory = take(blocks.size());
  return {memory, memory.get() + (bytes.begin - blocks.begin)};
}

void NvmeFile::write(Bytes bytes, Bytes space, const char* values, std::shared_ptr<void> keeps) {
  TESSERA_ASSERT(space.begin <= bytes.begin && bytes.begin < bytes.end && bytes.end <= space.end);
  const std::lock_guard lock(mutex_);
  const Bytes blocks = whole_blocks(bytes);
  settle(blocks, /*reads_too=*/true);
  check_writes();
  const bool from_block = bytes.begin == blocks.begin;
  const bool to_block = bytes.end == blocks.end || bytes.end == space.end;  // nobody reads what is after the space
  const bool aligned = reinterpret_cast<uintptr_t>(values) % kBlock == 0;
  if (!(from_block && to_block && aligned && staging_->holds(values, blocks.size()))) {
    const std::shared_ptr<char> memory = take(blocks.size());
    char* const last = memory.get() + blocks.size() - kBlock;
    if (!from_block) read_now(memory.get(), {blocks.begin, blocks.begin + kBlock});
    if (!to_block && (from_block || blocks.size() > kBlock)) read_now(last, {blocks.end - kBlock, blocks.end});
    if (to_block)
      std::memset(memory.get() + (bytes.end - blocks.begin), 0, static_cast<size_t>(blocks.end - bytes.end));
    std::memcpy(memory.get() + (bytes.begin - blocks.begin), values, static_cast<size_t>(bytes.size()));
    values = memory.get();
    keeps = memory;
  }
  std::shared_future<void> done = queue_->write(file_, values, blocks.size(), blocks.begin);
  flight_.push_back({blocks, std::move(keeps), std::move(done), true});
}

void NvmeFile::read_now(char* to, Bytes bytes) {
  queue_->read(file_, to, bytes.size(), bytes.begin).get();
}

// Takes a buffer; where all are in use, the oldest transfers come to their end first. Buffers that a reader still holds do not
// come back: then the buffer is new memory.
std::shared_ptr<char> NvmeFile::take(int64_t bytes) {
  while (!staging_->has_room(bytes) && !flight_.empty())
    finish(flight_.begin());
  return staging_->take(bytes);
}

// Forgets transfers that are over, and waits for those that must be over before a transfer of `bytes`.
void NvmeFile::settle(Bytes bytes, bool reads_too) {
  for (auto transfer = flight_.begin(); transfer != flight_.end();) {
    const bool over = transfer->done.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
    const bool first = overlap(transfer->bytes, bytes) && (reads_too || transfer->writes);
    transfer = over || first ? finish(transfer) : std::next(transfer);
  }
}

// A failed read is thrown to who waits for it; a failed write to who writes or flushes next.
std::list<NvmeFile::Transfer>::iterator NvmeFile::finish(std::list<Transfer>::iterator transfer) {
  const Transfer gone = std::move(*transfer);
  const auto next = flight_.erase(transfer);
  gone.done.wait();
  try {
    if (gone.writes) gone.done.get();
  } catch (const IoError&) {
    if (!failure_) failure_ = std::current_exception();
  }
  return next;
}

void NvmeFile::check_writes() const {
  if (failure_) std::rethrow_exception(failure_);
}

void NvmeFile::flush() {
  const std::lock_guard lock(mutex_);
  while (!flight_.empty())
    finish(flight_.begin());
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

}  // namespace tessera::offload
