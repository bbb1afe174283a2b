// Collectives over a torch process group.
//
// Note [Messages between pairs]
//   For CPU tensors every collective is made of send and recv. Measured against the native ones of Gloo (docs/comm.md)
//   this is as fast or faster, because data goes from tensor to tensor: Gloo's reduce_scatter all-reduces the whole
//   buffer, and its all_gather copies through a temporary. It also keeps Note [Order of summation], and a wait on a
//   message can be interrupted when another rank fails. Every call has its own tags, so messages of several calls in
//   flight cannot be mixed up. all_reduce and a large broadcast have a second round of messages that is sent in wait().
// Note [Marks]
//   When a peer dies, Gloo fails the messages that are posted but not the one that is just arriving: waiting for that one
//   would take until the timeout. So a long message is followed by a mark of one byte, and marks are waited for first.
#include "tessera/comm/c10d_group.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <functional>

#include "tessera/base/error.h"
#include "tessera/comm/backends.h"
#include "tessera/comm/c10d_core.h"
#include "tessera/comm/reduce_rows.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kFirstTag = 0x40000000;        // clear of the small tags that people use
constexpr int kMarkTag = 0x20000000;         // added for the mark after a message
constexpr int64_t kCallTags = 1 << 22;       // calls of one group before tags repeat
constexpr int64_t kInstances = 64;           // groups over one process group before tags repeat
constexpr int64_t kMarkedBytes = 64 * 1024;  // messages from here on are followed by a mark
constexpr int64_t kSmallBytes = 64 * 1024;   // up to here one round of whole tensors beats two rounds of parts

// The elements [begin, begin + count) of a flat tensor.
struct Span {
  int64_t begin = 0, count = 0;
};

Span chunk(int64_t total, int index, int parts) {
  const int64_t begin = total * index / parts;
  return {begin, total * (index + 1) / parts - begin};
}

c10d::ReduceOp native_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::Avg:
      return c10d::ReduceOp::AVG;
    case ReduceOp::Min:
      return c10d::ReduceOp::MIN;
    case ReduceOp::Max:
      return c10d::ReduceOp::MAX;
    case ReduceOp::Sum:
      break;
  }
  return c10d::ReduceOp::SUM;
}

// Turns `then` (may be empty) once the first messages are through; it may post a second round.
class C10dWork final : public Pending::Work {
 public:
  using Then = std::function<std::vector<Transfer>()>;

  C10dWork(std::shared_ptr<C10dCore> core, OpInfo info, std::vector<Transfer> transfers, std::vector<at::Tensor> held,
           Then then, at::Tensor buffer)
      : core_(std::move(core)),
        info_(std::move(info)),
        held_(std::move(held)),
        buffer_(std::move(buffer)),
        transfers_(std::move(transfers)),
        then_(std::move(then)) {}

  void wait() override {
    core_->finish(transfers_, info_, launched_);
    if (then_) {
      transfers_ = then_();
      core_->finish(transfers_, info_, launched_);
    }
    if (buffer_.defined()) core_->give_buffer(std::move(buffer_));
  }

 private:
  std::shared_ptr<C10dCore> core_;
  OpInfo info_;
  std::vector<at::Tensor> held_;
  at::Tensor buffer_;
  std::vector<Transfer> transfers_;  // destroyed before the memory they use
  Then then_;
  Clock::time_point launched_ = Clock::now();
};

// The messages of one call to and from the peers.
class Messages {
 public:
  Messages(C10dCore& core, const OpInfo& info, int tag) : core_(core), info_(info), tag_(tag) {}

  void receive(const at::Tensor& flat, Span span, int peer) { post(flat, span, peer, false); }
  void send(const at::Tensor& flat, Span span, int peer) { post(flat, span, peer, true); }
  // In the order in which to wait.
  std::vector<Transfer> take() {
    marks_.insert(marks_.end(), transfers_.begin(), transfers_.end());
    return std::move(marks_);
  }

 private:
  void post(const at::Tensor& flat, Span span, int peer, bool out) {
    if (span.count == 0) return;
    try {
      const at::AutoDispatchBelowADInplaceOrView guard;
      transfers_.push_back(start(flat.narrow(0, span.begin, span.count), peer, out, tag_));
      if (span.count * static_cast<int64_t>(flat.element_size()) < kMarkedBytes) return;
      const at::Tensor mark = at::empty({1}, at::TensorOptions(at::kByte));
      (out ? transfers_ : marks_).push_back(start(mark, peer, out, tag_ + kMarkTag));
    } catch (const std::exception& error) {
      core_.fail(info_, Clock::now(), peer, error.what());
    }
  }

  Transfer start(const at::Tensor& tensor, int peer, bool out, int tag) {
    std::vector<at::Tensor> one = {tensor};
    return {out ? core_.group().send(one, peer, tag) : core_.group().recv(one, peer, tag), peer};
  }

  C10dCore& core_;
  const OpInfo& info_;
  const int tag_;
  std::vector<Transfer> transfers_, marks_;
};

class C10dGroup final : public Group {
 public:
  C10dGroup(std::shared_ptr<C10dCore> core, C10dPath path, int64_t instance)
      : core_(std::move(core)), path_(path), instance_(instance) {}

  int rank() const override { return core_->rank(); }
  int size() const override { return core_->size(); }
  std::string name() const override { return core_->group().getBackendName(); }
  void abort(const std::string& reason) override { core_->abort(reason); }

 protected:
  Pending do_all_gather(at::Tensor out, at::Tensor in, Label label) override;
  Pending do_reduce_scatter(at::Tensor out, at::Tensor in, ReduceOp op, Label label) override;
  Pending do_all_reduce(at::Tensor tensor, ReduceOp op, Label label) override;
  Pending do_broadcast(at::Tensor tensor, int root, Label label) override;
  Pending do_all_to_all(at::Tensor out, at::Tensor in, std::vector<int64_t> out_splits, std::vector<int64_t> in_splits,
                        Label label) override;
  void do_barrier(Label label) override;
  // One core: what fails one group fails both.
  GroupPtr do_sibling() override { return std::make_shared<C10dGroup>(core_, path_, core_->count_instance()); }

 private:
  OpInfo begin(const char* name, const at::Tensor& full, Label label);
  bool native(const at::Tensor& t) const { return path_ == C10dPath::Native || !t.is_cpu(); }
  int next_tag() {
    const int64_t block = instance_ % kInstances * kCallTags;
    return kFirstTag + static_cast<int>(block + calls_++ % kCallTags);
  }
  Pending native_work(const OpInfo& info, std::vector<at::Tensor> held,
                      const std::function<c10::intrusive_ptr<c10d::Work>()>& launch);
  Pending small_all_reduce(const at::Tensor& flat, ReduceOp op, const OpInfo& info);
  // Sends our chunk of `flat` to all others and receives theirs.
  static std::vector<Transfer> share_chunks(C10dCore& core, const OpInfo& info, const at::Tensor& flat, int tag);
  // calls f(peer) for the other ranks, nearest first, so that not all ranks begin with the same one.
  template <class F>
  void others(const F& f) const {
    for (int d = 1; d < size(); ++d)
      f((rank() + d) % size());
  }

  std::shared_ptr<C10dCore> core_;
  const C10dPath path_;
  const int64_t instance_;
  int64_t calls_ = 0;
};

at::Tensor flat_view(const at::Tensor& t) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return t.view(-1);
}

char* bytes_of(const at::Tensor& flat, int64_t element) {
  return static_cast<char*>(flat.mutable_data_ptr()) + element * static_cast<int64_t>(flat.element_size());
}

void copy_span(const at::Tensor& to, int64_t to_begin, const at::Tensor& from, Span span) {
  char* target = bytes_of(to, to_begin);
  const char* source = bytes_of(from, span.begin);
  if (span.count > 0 && target != source) std::memcpy(target, source, span.count * from.element_size());
}

OpInfo C10dGroup::begin(const char* name, const at::Tensor& full, Label label) {
  OpInfo info{.name = name, .label = std::string(label)};
  if (full.defined()) {
    info.bytes = static_cast<int64_t>(full.nbytes());
    info.dtype = full.scalar_type();
  }
  core_->check_alive(info);
  return info;
}

Pending C10dGroup::native_work(const OpInfo& info, std::vector<at::Tensor> held,
                               const std::function<c10::intrusive_ptr<c10d::Work>()>& launch) {
  std::vector<Transfer> transfers;
  try {
    const at::AutoDispatchBelowADInplaceOrView guard;
    transfers.push_back({launch(), -1});
  } catch (const std::exception& error) {
    core_->fail(info, Clock::now(), -1, error.what());
  }
  return Pending(std::make_unique<C10dWork>(core_, info, std::move(transfers), std::move(held), nullptr, at::Tensor()));
}

Pending C10dGroup::do_all_gather(at::Tensor out, at::Tensor in, Label label) {
  const OpInfo info = begin("all_gather", out, label);
  if (native(out)) {
    return native_work(info, {out, in}, [&] {
      auto to = flat_view(out), from = flat_view(in);
      return core_->group()._allgather_base(to, from);
    });
  }
  const at::Tensor to = flat_view(out), from = flat_view(in);
  const int64_t n = from.numel();
  Messages messages(*core_, info, next_tag());
  others([&](int peer) { messages.receive(to, {peer * n, n}, peer); });
  others([&](int peer) { messages.send(from, {0, n}, peer); });
  copy_span(to, rank() * n, from, {0, n});
  return Pending(std::make_unique<C10dWork>(core_, info, messages.take(), std::vector{out, in}, nullptr, at::Tensor()));
}

Pending C10dGroup::do_reduce_scatter(at::Tensor out, at::Tensor in, ReduceOp op, Label label) {
  const OpInfo info = begin("reduce_scatter", in, label);
  if (native(in)) {
    return native_work(info, {out, in}, [&] {
      auto to = flat_view(out), from = flat_view(in);
      c10d::ReduceScatterOptions options;
      options.reduceOp = native_op(op);
      return core_->group()._reduce_scatter_base(to, from, options);
    });
  }
  const at::Tensor to = flat_view(out), from = flat_view(in);
  const int64_t n = to.numel(), width = static_cast<int64_t>(to.element_size());
  const int me = rank(), count = size();
  at::Tensor buffer = core_->take_buffer(n * width * count);
  const at::Tensor rows = buffer.narrow(0, 0, n * width * count).view(from.scalar_type());
  Messages messages(*core_, info, next_tag());
  others([&](int peer) { messages.receive(rows, {peer * n, n}, peer); });
  others([&](int peer) { messages.send(from, {peer * n, n}, peer); });
  const auto sum = [=]() -> std::vector<Transfer> {
    std::vector<const void*> pointers(count);
    for (int r = 0; r < count; ++r)
      pointers[r] = bytes_of(r == me ? from : rows, r * n);
    reduce_rows(to.mutable_data_ptr(), pointers.data(), count, n, to.scalar_type(), op);
    return {};
  };
  return Pending(std::make_unique<C10dWork>(core_, info, messages.take(), std::vector{out, in}, sum, buffer));
}

std::vector<Transfer> C10dGroup::share_chunks(C10dCore& core, const OpInfo& info, const at::Tensor& flat, int tag) {
  const int me = core.rank(), count = core.size();
  const int64_t total = flat.numel();
  Messages messages(core, info, tag);
  for (int d = 1; d < count; ++d) {
    const int peer = (me + d) % count;
    messages.receive(flat, chunk(total, peer, count), peer);
  }
  for (int d = 1; d < count; ++d)
    messages.send(flat, chunk(total, me, count), (me + d) % count);
  return messages.take();
}

Pending C10dGroup::small_all_reduce(const at::Tensor& flat, ReduceOp op, const OpInfo& info) {
  const int64_t n = flat.numel(), width = static_cast<int64_t>(flat.element_size());
  const int me = rank(), count = size();
  at::Tensor buffer = core_->take_buffer(n * width * count);
  const at::Tensor rows = buffer.narrow(0, 0, n * width * count).view(flat.scalar_type());
  Messages messages(*core_, info, next_tag());
  others([&](int peer) { messages.receive(rows, {peer * n, n}, peer); });
  others([&](int peer) { messages.send(flat, {0, n}, peer); });
  const auto sum = [=]() -> std::vector<Transfer> {
    std::vector<const void*> pointers(count);
    for (int r = 0; r < count; ++r)
      pointers[r] = r == me ? bytes_of(flat, 0) : bytes_of(rows, r * n);
    reduce_rows(flat.mutable_data_ptr(), pointers.data(), count, n, flat.scalar_type(), op);
    return {};
  };
  return Pending(std::make_unique<C10dWork>(core_, info, messages.take(), std::vector{flat}, sum, buffer));
}

Pending C10dGroup::do_all_reduce(at::Tensor tensor, ReduceOp op, Label label) {
  const OpInfo info = begin("all_reduce", tensor, label);
  if (native(tensor)) {
    return native_work(info, {tensor}, [&] {
      std::vector<at::Tensor> one = {flat_view(tensor)};
      c10d::AllreduceOptions options;
      options.reduceOp = native_op(op);
      return core_->group().allreduce(one, options);
    });
  }
  const at::Tensor flat = flat_view(tensor);
  const int me = rank(), count = size();
  if (info.bytes * count <= kSmallBytes) return small_all_reduce(flat, op, info);
  const int64_t total = flat.numel(), width = static_cast<int64_t>(flat.element_size());
  const Span mine = chunk(total, me, count);
  at::Tensor buffer = core_->take_buffer(mine.count * width * count);
  const at::Tensor rows = buffer.narrow(0, 0, mine.count * width * count).view(flat.scalar_type());
  Messages messages(*core_, info, next_tag());
  others([&](int peer) { messages.receive(rows, {peer * mine.count, mine.count}, peer); });
  others([&](int peer) { messages.send(flat, chunk(total, peer, count), peer); });
  const auto sum_and_share = [=, core = core_, tag = next_tag()] {
    std::vector<const void*> pointers(count);
    for (int r = 0; r < count; ++r) {
      pointers[r] = r == me ? bytes_of(flat, mine.begin) : bytes_of(rows, r * mine.count);
    }
    reduce_rows(bytes_of(flat, mine.begin), pointers.data(), count, mine.count, flat.scalar_type(), op);
    return share_chunks(*core, info, flat, tag);
  };
  return Pending(std::make_unique<C10dWork>(core_, info, messages.take(), std::vector{tensor}, sum_and_share, buffer));
}

Pending C10dGroup::do_broadcast(at::Tensor tensor, int root, Label label) {
  OpInfo info = begin("broadcast", tensor, label);
  info.root = root;
  if (native(tensor)) {
    return native_work(info, {tensor}, [&] {
      std::vector<at::Tensor> one = {flat_view(tensor)};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      return core_->group().broadcast(one, options);
    });
  }
  const at::Tensor flat = flat_view(tensor);
  const int64_t total = flat.numel();
  const int me = rank(), count = size();
  // Large tensors: every rank gets its chunk from the root, then all share chunks: no rank sends more than twice.
  const bool chunks = count > 2 && info.bytes > kSmallBytes;
  const auto span = [&](int r) { return chunks ? chunk(total, r, count) : Span{0, total}; };
  Messages messages(*core_, info, next_tag());
  if (me == root) {
    others([&](int peer) { messages.send(flat, span(peer), peer); });
  } else {
    messages.receive(flat, span(me), root);
  }
  C10dWork::Then then;
  if (chunks) {
    then = [=, core = core_, tag = next_tag()] { return share_chunks(*core, info, flat, tag); };
  }
  return Pending(std::make_unique<C10dWork>(core_, info, messages.take(), std::vector{tensor}, then, at::Tensor()));
}

Pending C10dGroup::do_all_to_all(at::Tensor out, at::Tensor in, std::vector<int64_t> out_splits,
                                 std::vector<int64_t> in_splits, Label label) {
  const OpInfo info = begin("all_to_all", in, label);
  const at::Tensor to = flat_view(out), from = flat_view(in);
  if (native(in)) {
    return native_work(info, {out, in}, [&] {
      auto target = to, source = from;
      return core_->group().alltoall_base(target, source, out_splits, in_splits);
    });
  }
  std::vector<Span> received(size()), sent(size());
  int64_t out_at = 0, in_at = 0;
  for (int r = 0; r < size(); ++r) {
    received[r] = {out_at, out_splits[r]};
    sent[r] = {in_at, in_splits[r]};
    out_at += out_splits[r];
    in_at += in_splits[r];
  }
  TESSERA_CHECK_VALUE(received[rank()].count == sent[rank()].count, "comm", describe(info), ": rank ", rank(),
                      " sends ", sent[rank()].count, " elements to itself and expects ", received[rank()].count);
  Messages messages(*core_, info, next_tag());
  others([&](int peer) { messages.receive(to, received[peer], peer); });
  others([&](int peer) { messages.send(from, sent[peer], peer); });
  copy_span(to, received[rank()].begin, from, sent[rank()]);
  return Pending(std::make_unique<C10dWork>(core_, info, messages.take(), std::vector{out, in}, nullptr, at::Tensor()));
}

// Round k: tell the rank 2^k further, hear from the one 2^k before; after log2(n) rounds all have heard of all.
void C10dGroup::do_barrier(Label label) {
  const OpInfo info = begin("barrier", at::Tensor(), label);
  if (path_ == C10dPath::Native || !core_->group().hasBackends() ||
      core_->group().getDeviceTypes().front().type() != at::kCPU) {
    native_work(info, {}, [&] { return core_->group().barrier(); }).wait();
    return;
  }
  const auto launched = Clock::now();
  const at::Tensor token = at::zeros({2}, at::TensorOptions(at::kByte));
  const int tag = next_tag();
  for (int distance = 1; distance < size(); distance *= 2) {
    Messages messages(*core_, info, tag);
    messages.receive(token, {1, 1}, (rank() - distance + size()) % size());
    messages.send(token, {0, 1}, (rank() + distance) % size());
    auto transfers = messages.take();
    core_->finish(transfers, info, launched);
  }
}

}  // namespace

GroupPtr make_c10d_group(std::shared_ptr<void> keep_alive, c10::intrusive_ptr<c10d::ProcessGroup> group,
                         C10dPath path) {
  auto core = std::make_shared<C10dCore>(std::move(keep_alive), std::move(group));
  const int64_t instance = core->instance();
  return std::make_shared<C10dGroup>(std::move(core), path, instance);
}

GroupPtr c10d_group(std::shared_ptr<void> keep_alive, c10d::ProcessGroup& group) {
  return make_c10d_group(std::move(keep_alive),
                         c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(&group),
                         C10dPath::ByDevice);
}

GroupPtr c10d_group(const std::string& name) {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  try {
    group = c10d::resolve_process_group(name);
  } catch (const std::exception& error) {
    const std::string text = error.what();
    TESSERA_CHECK_VALUE(false, "comm", "no torch process group is registered under '", name,
                        "'; call torch.distributed.init_process_group first (", text.substr(0, text.find('\n')), ")");
  }
  return make_c10d_group(nullptr, std::move(group), C10dPath::ByDevice);
}

}  // namespace tessera::comm
