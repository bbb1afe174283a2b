// Test support: a home in memory of its own, which notes what is asked of it and brings values only when waited for.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "tessera/shard/buffer.h"

namespace tessera::testing {

class HostHome final : public shard::Home {
 public:
  using Log = std::vector<std::string>;
  HostHome(int64_t size, const at::TensorOptions& options, std::string name = "", Log* log = nullptr)
      : values_(at::zeros({size}, options)), name_(std::move(name)), log_(log) {}

  shard::Residence residence() const override { return shard::Residence::Host; }
  shard::PendingView fetch(shard::Range range) override {
    note("fetch", range);
    const at::Tensor there = at::full({range.size()}, 77, values_.options());  // until it has arrived
    return shard::PendingView(there, [this, there, range] {
      note("wait", range);
      there.copy_(values_.narrow(0, range.begin, range.size()));
    });
  }
  void store(shard::Range range, const at::Tensor& values) override {
    note("store", range);
    values_.narrow(0, range.begin, range.size()).copy_(values);
  }

 private:
  void note(const char* what, shard::Range range) {
    if (log_ != nullptr) log_->push_back(std::string(what) + " " + name_ + std::to_string(range.begin));
  }

  at::Tensor values_;
  std::string name_;
  Log* log_;
};

}  // namespace tessera::testing
