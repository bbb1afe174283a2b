#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <mutex>

#include "tessera/base/error.h"
#include "tessera/comm/backends.h"
#include "tessera/comm/op_info.h"

namespace tessera::comm {
namespace {

void copy_flat(const at::Tensor& to, const at::Tensor& from) {
  const at::NoGradGuard no_grad;
  if (to.numel() > 0 && to.const_data_ptr() != from.const_data_ptr()) to.view(-1).copy_(from.view(-1));
}

// Every reduction over one rank is a copy, the average too.
class SingleGroup final : public Group {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string name() const override { return "single"; }

  void abort(const std::string& reason) override {
    const std::scoped_lock lock(mutex_);
    if (cause_.empty()) cause_ = "rank 0 aborted: " + reason;
  }

 protected:
  Pending do_all_gather(at::Tensor out, at::Tensor in, Label label) override {
    check("all_gather", out, label);
    copy_flat(out, in);
    return {};
  }
  Pending do_reduce_scatter(at::Tensor out, at::Tensor in, ReduceOp, Label label) override {
    check("reduce_scatter", in, label);
    copy_flat(out, in);
    return {};
  }
  Pending do_all_reduce(at::Tensor tensor, ReduceOp, Label label) override {
    check("all_reduce", tensor, label);
    return {};
  }
  Pending do_broadcast(at::Tensor tensor, int, Label label) override {
    check("broadcast", tensor, label);
    return {};
  }
  Pending do_all_to_all(at::Tensor out, at::Tensor in, std::vector<int64_t> out_splits, std::vector<int64_t> in_splits,
                        Label label) override {
    check("all_to_all", in, label);
    TESSERA_CHECK_VALUE(out_splits == in_splits, "comm", "all_to_all (", label, "): 'out' and 'in' differ in size");
    copy_flat(out, in);
    return {};
  }
  void do_barrier(Label label) override { check("barrier", at::Tensor(), label); }
  GroupPtr do_sibling(c10::Device) override { return single_group(); }
  at::Tensor do_shared_memory(int64_t bytes, Label label) override {
    check("shared_memory", at::Tensor(), label);
    return at::zeros({bytes}, at::kByte);
  }

 private:
  void check(const char* name, const at::Tensor& t, Label label) {
    const std::scoped_lock lock(mutex_);
    if (cause_.empty()) return;
    const int64_t bytes = t.defined() ? static_cast<int64_t>(t.nbytes()) : 0;
    throw_failed(0, 1, {.name = name, .label = std::string(label), .bytes = bytes}, 0.0, cause_);
  }

  std::mutex mutex_;
  std::string cause_;
};

}  // namespace

GroupPtr single_group() {
  return std::make_shared<SingleGroup>();
}

}  // namespace tessera::comm
