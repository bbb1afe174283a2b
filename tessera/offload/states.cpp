#include "tessera/offload/states.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/shard/host_slabs.h"
#include "tessera/shard/part.h"

namespace tessera::offload {

namespace {

using shard::PendingView;
using shard::Quantity;
using shard::Range;
using shard::Residence;

constexpr int64_t kWidest = sizeof(float);  // bytes of an element

// Makes page-locked memory: a power of two where `bytes` is one and the allocator begins at a page, as CUDA's does.
std::shared_ptr<char> pinned_bytes(int64_t bytes) {
  const auto options = at::TensorOptions(at::kByte).pinned_memory(true);
  const auto over = [](const at::Tensor& t) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % io::kDirectAlignment);
  };
  at::Tensor memory = at::empty({bytes}, options);
  if (over(memory) != 0) memory = at::empty({bytes + io::kDirectAlignment}, options);
  auto* const begin = static_cast<char*>(memory.mutable_data_ptr());
  return {begin + (over(memory) == 0 ? 0 : io::kDirectAlignment - over(memory)), [memory](char*) {}};
}

// Values in host memory, in pieces of whole tiles.
class HostHome final : public shard::Home {
 public:
  // `slabs`: page-locked memory; null: ordinary memory.
  HostHome(int64_t size, const at::TensorOptions& options, const shard::HostSlabsPtr& slabs) : slabs_(slabs) {
    const auto width = static_cast<int64_t>(options.dtype().itemsize());
    if (!slabs || size == 0) {
      pieces_.push_back({0, at::zeros({size}, options)});
      return;
    }
    int64_t begin = 0;
    for (const at::Tensor& bytes : slabs->take_pieces(size * width, shard::kTile * width)) {
      pieces_.push_back({begin, bytes.view(options.dtype().toScalarType())});
      begin += pieces_.back().values.numel();
    }
  }

  Residence residence() const override { return Residence::Host; }
  PendingView fetch(Range range) override {
    if (range.empty()) return PendingView(pieces_.front().values.narrow(0, 0, 0));
    std::vector<at::Tensor> parts;
    each_part(range, [&](const at::Tensor& there, Range) { parts.push_back(there); });
    if (parts.size() == 1) return PendingView(parts.front(), arriving(range));
    PendingView(at::Tensor(), arriving(range)).wait();
    return PendingView(at::cat(parts));
  }
  bool arrives(Range range, const std::shared_ptr<c10::Event>& event) override {
    int parts = 0;
    each_part(range, [&](const at::Tensor&, Range) { ++parts; });
    if (parts > 1) return false;
    std::erase_if(arriving_, [&](const auto& a) { return shard::intersect(a.first, range) == a.first; });
    arriving_.emplace_back(range, event);
    return true;
  }
  void store(Range range, const at::Tensor& values) override {
    PendingView(at::Tensor(), arriving(range)).wait();
    each_part(range, [&](const at::Tensor& there, Range part) {
      const bool all = part == range;
      const at::Tensor from = all ? values : values.narrow(0, part.begin - range.begin, part.size());
      if (!from.is_cpu() || from.const_data_ptr() != there.const_data_ptr()) there.copy_(from);
    });
  }

 private:
  struct Piece {
    int64_t begin;  // the piece's first element
    at::Tensor values;
  };
  template <class F>
  void each_part(Range range, const F& f) const {
    for (const auto& [begin, values] : pieces_) {
      const Range part = shard::intersect(range, {begin, begin + values.numel()});
      if (!part.empty()) f(shard::part_of(values, {part.begin - begin, part.end - begin}), part);
    }
  }

  PendingView::Events arriving(Range range) const {
    PendingView::Events events;
    for (const auto& [there, event] : arriving_)
      if (!shard::intersect(there, range).empty()) events.push_back(event);
    return events;
  }

  shard::HostSlabsPtr slabs_;
  std::vector<Piece> pieces_;
  std::vector<std::pair<Range, std::shared_ptr<c10::Event>>> arriving_;  // what streams bring
};

class NvmeHome final : public shard::Home {
 public:
  // `options`: of the host.
  NvmeHome(std::shared_ptr<NvmeFile> file, int64_t size, const at::TensorOptions& options)
      : file_(std::move(file)),
        options_(options),
        width_(static_cast<int64_t>(options.dtype().itemsize())),
        space_(file_->reserve(size * width_)) {}

  Residence residence() const override { return Residence::Nvme; }
  PendingView fetch(Range range) override {
    if (range.empty()) return PendingView(at::empty({0}, options_));
    NvmeFile::Read read = file_->read(bytes_of(range), space_);
    at::Tensor values = at::from_blob(read.memory.get(), {range.size()}, [memory = read.memory](void*) {}, options_);
    return PendingView(std::move(values), std::move(read.arrived));
  }
  PendingView to_fill(Range range) override {
    return PendingView(range.empty() ? at::empty({0}, options_) : on_host(range));
  }
  void store(Range range, const at::Tensor& values) override {
    if (range.empty()) return;
    if (!values.is_cpu()) return store(range, on_host(range).copy_(values));
    auto here = std::make_shared<at::Tensor>(values.to(options_).contiguous());
    const auto* memory = static_cast<const char*>(here->const_data_ptr());
    file_->write(bytes_of(range), space_, memory, std::move(here));
  }
  void flush() override { file_->flush(); }

 private:
  Bytes bytes_of(Range range) const { return {space_.begin + range.begin * width_, space_.begin + range.end * width_}; }

  // Values in memory from which they can be written without a copy.
  at::Tensor on_host(Range range) const {
    const std::shared_ptr<char> memory = file_->memory_for(bytes_of(range));
    return at::from_blob(memory.get(), {range.size()}, [memory](void*) {}, options_);
  }

  std::shared_ptr<NvmeFile> file_;
  at::TensorOptions options_;
  int64_t width_;
  Bytes space_;
};

// What the copies of one state_homes() have in common.
class Homes {
 public:
  explicit Homes(StateOptions options) : options_(std::move(options)) {}

  shard::HomePtr make(Quantity what, int64_t size, const at::TensorOptions& options) {
    const std::lock_guard lock(mutex_);
    const bool on_cpu = options.device().is_cpu();
    if (options_.residence == Residence::Device || (options_.residence == Residence::Host && on_cpu)) {
      if (options_.residence == Residence::Host && !std::exchange(warned_, true))
        TORCH_WARN("[offload] the model is on the CPU, where its ", options_.what,
                   " live in host memory anyway: offload to device cpu changes nothing");
      return nullptr;
    }
    quantities_.insert(what);
    const at::TensorOptions host = options.device(at::kCPU).pinned_memory(false);
    int64_t& in_memory = in_memory_[std::this_thread::get_id()];
    const bool stays =
        options_.residence == Residence::Nvme && options_.in_memory > 0 && size <= options_.in_memory - in_memory;
    if (stays) in_memory += size;
    if (stays && on_cpu) return nullptr;
    if (stays || options_.residence == Residence::Host)
      return std::make_shared<HostHome>(size, host, pins(options) ? slabs() : nullptr);
    return std::make_shared<NvmeHome>(file(!on_cpu && (options_.pin_memory || options_.pin_asked)), size, host);
  }

 private:
  bool pins(const at::TensorOptions& options) const {
    return options_.pin_memory || (options_.pin_asked && options.pinned_memory());
  }

  // The page-locked memory of this thread, as file() has its file.
  shard::HostSlabsPtr slabs() {
    std::weak_ptr<shard::HostSlabs>& known = slabs_[std::this_thread::get_id()];
    shard::HostSlabsPtr slabs = known.lock();
    if (!slabs) known = slabs = std::make_shared<shard::HostSlabs>();
    return slabs;
  }

  // The file of this thread: it builds one engine, and engines of several threads do not wait for each other's transfers.
  std::shared_ptr<NvmeFile> file(bool pinned) {
    std::weak_ptr<NvmeFile>& known = files_[std::this_thread::get_id()];
    std::shared_ptr<NvmeFile> file = known.lock();
    if (!file) {
      const int64_t bytes = shard::kTile * kWidest;  // tiles begin at blocks
      file = std::make_shared<NvmeFile>(options_.folder, options_.buffer_count, bytes, options_.make_queue,
                                        pinned ? MemoryMaker(&pinned_bytes) : MemoryMaker());
      known = file;
    }
    file->keep_buffers(kPipeline * static_cast<int64_t>(quantities_.size()));
    return file;
  }

  const StateOptions options_;
  std::mutex mutex_;
  bool warned_ = false;
  // By thread, as each thread is a rank: what one asks for does not concern the others.
  std::map<std::thread::id, int64_t> in_memory_;  // elements that live there instead
  std::set<Quantity> quantities_;
  std::map<std::thread::id, std::weak_ptr<NvmeFile>> files_;
  std::map<std::thread::id, std::weak_ptr<shard::HostSlabs>> slabs_;
};

}  // namespace

std::function<shard::HomePtr(shard::Quantity, int64_t size, const at::TensorOptions&)> state_homes(
    StateOptions options) {
  return [homes = std::make_shared<Homes>(std::move(options))](
             Quantity what, int64_t size, const at::TensorOptions& of) { return homes->make(what, size, of); };
}

}  // namespace tessera::offload
