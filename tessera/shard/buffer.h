// Buffer: elements of one dtype in a row, and where they live. Who works on them asks for a range and gives it back:
//
//   PendingView pending = buffer.fetch({0, 1000});  // on their way
//   const at::Tensor values = pending.wait();       // 1-D
//   ...                                             // changes them
//   buffer.store({0, 1000}, values);                // on their way back
//
// Where a buffer lives on the device, fetching is a view of it and storing is nothing: offload is data, not a branch. What
// lives elsewhere is worked on by the host: it arrives in host memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/shard/layout.h"

namespace c10 {
struct Event;
}  // namespace c10

namespace tessera::shard {

enum class Residence : uint8_t { Device, Host, Nvme };

// Elements that are moved at a time of a buffer that does not live on the device: some milliseconds of work, and a multiple
// of what transfers of any dtype want.
inline constexpr int64_t kTile = 1 << 22;
// `range` cut at multiples of kTile.
std::vector<Range> tiles_of(Range range);

// Values on their way to who works on them.
class PendingView {
 public:
  using Events = std::vector<std::shared_ptr<c10::Event>>;
  explicit PendingView(at::Tensor values, std::function<void()> arrive = {})
      : values_(std::move(values)), arrive_(std::move(arrive)) {}
  // Values in host memory, where streams bring them until `events`.
  PendingView(at::Tensor values, Events events) : values_(std::move(values)), events_(std::move(events)) {}
  // Returns the values once they are there; throws what went wrong on the way.
  const at::Tensor& wait();
  // Returns them for what the current stream of `device` is given from here on: the host does not wait for another stream where
  // the memory is page-locked.
  const at::Tensor& wait_on(c10::Device device);

 private:
  at::Tensor values_;
  std::function<void()> arrive_;
  Events events_;
};

// Where a buffer lives that does not live on the device.
class Home {
 public:
  virtual ~Home() = default;
  virtual Residence residence() const = 0;
  // fetch() gives values in host memory: those of the last store() of every element, zeros before. Neither waits for the way
  // there or back. What fetch() gave may be stored itself, and is not changed afterwards; store() takes values of any device.
  virtual PendingView fetch(Range range) = 0;
  virtual void store(Range range, const at::Tensor& values) = 0;
  // Memory of the host for values of `range` that are to be stored; its contents before are undefined.
  virtual PendingView to_fill(Range range) { return fetch(range); }
  // A stream writes to what fetch(range) gave, until `event`: true where nothing else is to be done, and fetch() waits for that;
  // false where `range` is to be stored then.
  virtual bool arrives(Range range, const std::shared_ptr<c10::Event>& event);
  // Returns when what was stored is there; throws what went wrong on the way.
  virtual void flush() {}
};
using HomePtr = std::shared_ptr<Home>;

class Buffer {
 public:
  Buffer() = default;  // none: not defined()
  // `size` zeros, on the device of `options`, in its dtype; in `home` where there is one.
  Buffer(int64_t size, const at::TensorOptions& options, HomePtr home = nullptr);
  // A buffer of `values` themselves, 1-D.
  explicit Buffer(const at::Tensor& values);
  // `size` elements on the device of `options` that have no memory until make().
  static Buffer without_memory(int64_t size, const at::TensorOptions& options);

  bool defined() const { return size_ >= 0; }
  void reset() { *this = {}; }
  int64_t size() const { return size_; }
  at::ScalarType dtype() const { return options_.dtype().toScalarType(); }
  const at::TensorOptions& options() const { return options_; }
  // Bytes of the buffer's memory, wherever that is.
  int64_t bytes() const { return has_memory() ? size_ * static_cast<int64_t>(options_.dtype().itemsize()) : 0; }
  bool has_memory() const { return home_ != nullptr || tensor_.defined(); }
  // Makes memory with undefined contents; does nothing where there is some. Unchanged when it throws.
  void make();
  Residence residence() const { return home_ ? home_->residence() : Residence::Device; }
  bool is_here() const { return home_ == nullptr; }  // on the device

  // The whole buffer, for work in place. Only where the buffer lives on the device.
  const at::Tensor& tensor() const;
  at::Tensor view(Range range) const { return tensor().narrow(0, range.begin, range.size()); }
  // The elements of `range`, 1-D; on the device where the buffer lives there, else in host memory.
  PendingView fetch(Range range) const;
  PendingView to_fill(Range range) const { return home_ ? home_->to_fill(range) : fetch(range); }  // see Home
  void store(Range range, const at::Tensor& values) const;
  bool arrives(Range range, const std::shared_ptr<c10::Event>& event) const;  // see Home; not for one on the device
  void flush() const;
  // The elements of `range` on the device: a view where the buffer lives there, else a copy.
  at::Tensor read(Range range) const;
  // Takes values of any dtype and device, 1-D; by tiles where the buffer lives elsewhere. What goes wrong on the way a
  // later call throws, at last flush().
  void write(Range range, const at::Tensor& values) const;
  void fill(Range range, double value) const;

  // Move the buffer from the device to `home` for a while, with its values, and back. Nothing happens where it lives elsewhere
  // anyway, has no memory, or is back. An error leaves the buffer as it was; its old memory is free once nobody holds a view.
  void send_to(HomePtr home);
  void bring_back();
  bool is_sent() const { return sent_; }

 private:
  int64_t size_ = -1;
  at::TensorOptions options_;
  at::Tensor tensor_;
  HomePtr home_;
  bool sent_ = false;  // to `home_`, for a while
};

}  // namespace tessera::shard
