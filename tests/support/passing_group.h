// PassingGroup: passes every collective on to another group; tests see each call before it.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera::testing {

class PassingGroup : public comm::Group {
 public:
  explicit PassingGroup(comm::GroupPtr inner) : inner_(std::move(inner)) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string name() const override { return inner_->name(); }
  void abort(const std::string& reason) override { inner_->abort(reason); }

 protected:
  // `call`: all_gather, reduce_scatter, all_reduce, broadcast, all_to_all or barrier.
  virtual void before(std::string_view call, comm::Label label) = 0;
  // Around a sibling of the group below.
  virtual comm::GroupPtr around(comm::GroupPtr sibling) const = 0;

  comm::Pending do_all_gather(at::Tensor out, at::Tensor in, comm::Label label) override {
    return before("all_gather", label), inner_->all_gather(out, in, label);
  }
  comm::Pending do_reduce_scatter(at::Tensor out, at::Tensor in, comm::ReduceOp op, comm::Label label) override {
    return before("reduce_scatter", label), inner_->reduce_scatter(out, in, op, label);
  }
  comm::Pending do_all_reduce(at::Tensor t, comm::ReduceOp op, comm::Label label) override {
    return before("all_reduce", label), inner_->all_reduce(t, op, label);
  }
  comm::Pending do_broadcast(at::Tensor t, int root, comm::Label label) override {
    return before("broadcast", label), inner_->broadcast(t, root, label);
  }
  comm::Pending do_all_to_all(at::Tensor out, at::Tensor in, std::vector<int64_t> o, std::vector<int64_t> i,
                              comm::Label label) override {
    return before("all_to_all", label), inner_->all_to_all(out, in, std::move(o), std::move(i), label);
  }
  void do_barrier(comm::Label label) override { before("barrier", label), inner_->barrier(label); }
  comm::GroupPtr do_sibling(c10::Device device) override { return around(inner_->sibling(device)); }

 private:
  comm::GroupPtr inner_;
};

}  // namespace tessera::testing
