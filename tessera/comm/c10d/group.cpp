// Collectives over a torch process group.
//
// Note [Messages between pairs]
//   For CPU tensors every collective is made of send and recv. Measured against the native ones of Gloo (docs/comm.md)
//   this is as fast or faster, because data goes from tensor to tensor: Gloo's reduce_scatter all-reduces the whole
//   buffer, and its all_gather copies through a temporary. It also keeps Note [Order of summation], and a wait on a
//   message can be interrupted when another rank fails. all_reduce and a large broadcast have a second round of messages
//   that is sent in wait().
// Note [Tags]
//   The tag of a message says which group it belongs to, which round, what call it is part of (its number there, and a
//   hash of what ranks must agree on) and how long it is. So messages of several calls in flight cannot be mixed up, and
//   those of different calls never meet: see Note [Different calls] in call_log.h. Numbers repeat after kCallTags calls;
//   messages with one tag between two ranks arrive in the order in which they were sent.
// Note [Marks]
//   When a peer dies, Gloo fails the messages that are posted but not the one that is just arriving: waiting for that one
//   would take until the timeout. So a long message is followed by a mark of one byte, and marks are waited for first.
#include "tessera/comm/c10d/group.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <functional>

#include "tessera/base/error.h"
#include "tessera/comm/backends.h"
#include "tessera/comm/c10d/compat.h"
#include "tessera/comm/c10d/core.h"
#include "tessera/comm/c10d/transport.h"
#include "tessera/comm/c10d/watched_store.h"
#include "tessera/comm/reduce_rows.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kFirstTag = 0x40000000;        // clear of the small tags that people use
constexpr int kMarkTag = 0x20000000;         // added for the mark after a message
constexpr int kSecondRound = 0x10000000;     // added for the second round of a call
constexpr int64_t kInstances = 64;           // groups over one process group before tags repeat
constexpr int64_t kCallTags = 64;            // calls of one group before tags repeat
constexpr int64_t kHashes = 1 << 16;         // that tags tell apart
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

// One after the other.
std::vector<Span> spans(const std::vector<int64_t>& counts) {
  std::vector<Span> result;
  int64_t begin = 0;
  for (const int64_t count : counts) {
    result.push_back({begin, count});
    begin += count;
  }
  return result;
}

c10d::ReduceOp native_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::Avg:
      return c10d::ReduceOp::AVG;
    case ReduceOp::Min:
      return c10d::ReduceOp::MIN;
    case ReduceOp::Max:
      return c10d::ReduceOp::MAX;
    case ReduceOp::Product:
      return c10d::ReduceOp::PRODUCT;
    case ReduceOp::BitAnd:
      return c10d::ReduceOp::BAND;
    case ReduceOp::BitOr:
      return c10d::ReduceOp::BOR;
    case ReduceOp::BitXor:
      return c10d::ReduceOp::BXOR;
    case ReduceOp::Sum:
      break;
  }
  return c10d::ReduceOp::SUM;
}

using Call = C10dCall;

// Turns `then` (may be empty) once the first messages are through; it may post a second round.
class C10dWork final : public Pending::Work {
 public:
  using Then = std::function<std::vector<Transfer>()>;

  C10dWork(std::shared_ptr<C10dCore> core, Call call, std::vector<Transfer> transfers, std::vector<at::Tensor> held,
           Then then, at::Tensor buffer)
      : core_(std::move(core)),
        call_(std::move(call)),
        held_(std::move(held)),
        buffer_(std::move(buffer)),
        transfers_(std::move(transfers)),
        then_(std::move(then)) {}

  void wait() override {
    core_->finish(transfers_, call_, launched_);
    if (then_) {
      transfers_ = then_();
      core_->finish(transfers_, call_, launched_);
    }
    core_->calls().done(call_.instance, call_.number);
    if (buffer_.defined()) core_->give_buffer(std::move(buffer_));
  }

  bool wait_for(std::chrono::milliseconds limit) override {
    const auto end = Clock::now() + limit;
    while (arrived(end)) {
      if (!then_) return true;
      core_->finish(transfers_, call_, launched_);
      transfers_ = std::exchange(then_, nullptr)();
      if (transfers_.empty()) return true;
    }
    return false;
  }

 private:
  // A transfer cannot be asked whether it is through (a Gloo wait with a limit ends the connection), but the byte of a
  // mark tells: it is sent behind the data. What all peers have sent, they have launched: ours gets through, too.
  bool arrived(Clock::time_point end) const {
    if (!held_.front().is_cpu()) return true;  // waiting orders streams
    int marks = 0;
    for (const Transfer& transfer : transfers_) {
      if (!transfer.mark.defined()) break;
      const auto* byte = static_cast<const char*>(transfer.mark.const_data_ptr());
      while (__atomic_load_n(byte, __ATOMIC_ACQUIRE) == 0) {
        if (Clock::now() >= end) return false;
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      ++marks;
    }
    return marks == core_->size() - 1;
  }

  std::shared_ptr<C10dCore> core_;
  Call call_;
  std::vector<at::Tensor> held_;
  at::Tensor buffer_;
  std::vector<Transfer> transfers_;  // destroyed before the memory they use
  Then then_;
  Clock::time_point launched_ = Clock::now();
};

// The messages of one call to and from the peers.
class Messages {
 public:
  Messages(C10dCore& core, const Call& call, bool second_round = false)
      : core_(core),
        info_(call.info),
        tag_(kFirstTag + (second_round ? kSecondRound : 0) +
             static_cast<int>((call.instance % kInstances * kCallTags + call.number % kCallTags) * kHashes)),
        hash_(agreement_hash(call.info)) {}

  void receive(const at::Tensor& flat, Span span, int peer) { add(flat, span, peer, false); }
  void send(const at::Tensor& flat, Span span, int peer) { add(flat, span, peer, true); }
  // In the order in which to wait.
  std::vector<Transfer> take() {
    marks_.insert(marks_.end(), transfers_.begin(), transfers_.end());
    return std::move(marks_);
  }

 private:
  void add(const at::Tensor& flat, Span span, int peer, bool out) {
    if (span.count == 0) return;
    try {
      const at::AutoDispatchBelowADInplaceOrView guard;
      const int64_t bytes = span.count * static_cast<int64_t>(flat.element_size());
      const int tag = tag_of(bytes);
      transfers_.push_back(start(flat.narrow(0, span.begin, span.count), peer, out, tag));
      if (bytes < kMarkedBytes) return;
      const at::Tensor mark = at::full({1}, out ? 1 : 0, at::TensorOptions(at::kByte));
      Transfer transfer = start(mark, peer, out, tag + kMarkTag);
      if (out) {
        transfers_.push_back(std::move(transfer));
      } else {
        transfer.mark = mark;
        marks_.push_back(std::move(transfer));
      }
    } catch (const std::exception& error) {
      core_.fail(info_, Clock::now(), peer, error.what());
    }
  }

  int tag_of(int64_t bytes) const {
    const uint64_t mixed = (hash_ ^ static_cast<uint64_t>(bytes)) * 0x9e3779b97f4a7c15u;  // its top bits depend on all
    return tag_ + static_cast<int>(mixed / (UINT64_MAX / uint64_t{kHashes} + 1));
  }

  Transfer start(const at::Tensor& tensor, int peer, bool out, int tag) {
    std::vector<at::Tensor> one = {tensor};
    return {out ? core_.group().send(one, peer, tag) : core_.group().recv(one, peer, tag), peer};
  }

  C10dCore& core_;
  const OpInfo& info_;
  const int tag_;
  const uint64_t hash_;
  std::vector<Transfer> transfers_, marks_;
};

char* bytes_of(const at::Tensor& flat, int64_t element) {
  return static_cast<char*>(flat.mutable_data_ptr()) + element * static_cast<int64_t>(flat.element_size());
}

// The summands of one call, `n` elements a rank: this rank's where they are, the others' in a buffer.
struct Rows {
  Rows(C10dCore& core, const at::Tensor& like, int64_t elements) : me(core.rank()), count(core.size()), n(elements) {
    const int64_t bytes = n * static_cast<int64_t>(like.element_size()) * (count - 1);
    buffer = core.take_buffer(bytes);
    others = buffer.narrow(0, 0, bytes).view(like.scalar_type());
  }
  Span of(int peer) const { return {(peer < me ? peer : peer - 1) * n, n}; }
  // `out` may be `own`.
  void sum(void* out, const void* own, ReduceOp op) const {
    std::vector<const void*> pointers(count);
    for (int r = 0; r < count; ++r)
      pointers[r] = r == me ? own : bytes_of(others, of(r).begin);
    reduce_rows(out, pointers.data(), count, n, others.scalar_type(), op);
  }

  int me, count;
  int64_t n;
  at::Tensor buffer, others;
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
  Call begin(OpInfo info, Splits splits = {});
  bool native(const at::Tensor& t) const { return path_ == C10dPath::Native || !t.is_cpu(); }
  Pending native_work(const Call& call, std::vector<at::Tensor> held,
                      const std::function<c10::intrusive_ptr<c10d::Work>()>& launch);
  Pending small_all_reduce(const at::Tensor& flat, const Call& call);
  // Second round: sends our chunk of `flat` to all others and receives theirs.
  static std::vector<Transfer> share_chunks(C10dCore& core, const Call& call, const at::Tensor& flat);
  // calls f(peer) for the other ranks, nearest first, so that not all ranks begin with the same one.
  template <class F>
  void others(const F& f) const {
    for (int d = 1; d < size(); ++d)
      f((rank() + d) % size());
  }

  std::shared_ptr<C10dCore> core_;
  const C10dPath path_;
  const int64_t instance_;
};

at::Tensor flat_view(const at::Tensor& t) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return t.view(-1);
}

void copy_span(const at::Tensor& to, int64_t to_begin, const at::Tensor& from, Span span) {
  char* target = bytes_of(to, to_begin);
  const char* source = bytes_of(from, span.begin);
  if (span.count > 0 && target != source) std::memcpy(target, source, span.count * from.element_size());
}

Call C10dGroup::begin(OpInfo info, Splits splits) {
  core_->check_alive(info);
  const int64_t number = core_->calls().add(instance_, info, std::move(splits));
  return {std::move(info), instance_, number};
}

Pending C10dGroup::native_work(const Call& call, std::vector<at::Tensor> held,
                               const std::function<c10::intrusive_ptr<c10d::Work>()>& launch) {
  std::vector<Transfer> transfers;
  try {
    const at::AutoDispatchBelowADInplaceOrView guard;
    transfers.push_back({launch(), -1});
  } catch (const std::exception& error) {
    core_->fail(call.info, Clock::now(), -1, error.what());
  }
  return Pending(std::make_unique<C10dWork>(core_, call, std::move(transfers), std::move(held), nullptr, at::Tensor()));
}

Pending C10dGroup::do_all_gather(at::Tensor out, at::Tensor in, Label label) {
  const Call call = begin(describe_call("all_gather", out, label));
  if (native(out)) {
    return native_work(call, {out, in}, [&] {
      auto to = flat_view(out), from = flat_view(in);
      return core_->group()._allgather_base(to, from);
    });
  }
  const at::Tensor to = flat_view(out), from = flat_view(in);
  const int64_t n = from.numel();
  Messages messages(*core_, call);
  others([&](int peer) { messages.receive(to, {peer * n, n}, peer); });
  others([&](int peer) { messages.send(from, {0, n}, peer); });
  copy_span(to, rank() * n, from, {0, n});
  return Pending(std::make_unique<C10dWork>(core_, call, messages.take(), std::vector{out, in}, nullptr, at::Tensor()));
}

Pending C10dGroup::do_reduce_scatter(at::Tensor out, at::Tensor in, ReduceOp op, Label label) {
  const Call call = begin(describe_call("reduce_scatter", in, label, op));
  if (native(in)) {
    return native_work(call, {out, in}, [&] {
      auto to = flat_view(out), from = flat_view(in);
      c10d::ReduceScatterOptions options;
      options.reduceOp = native_op(op);
      return core_->group()._reduce_scatter_base(to, from, options);
    });
  }
  const at::Tensor to = flat_view(out), from = flat_view(in);
  const int64_t n = to.numel();
  const Rows rows(*core_, from, n);
  Messages messages(*core_, call);
  others([&](int peer) { messages.receive(rows.others, rows.of(peer), peer); });
  others([&](int peer) { messages.send(from, {peer * n, n}, peer); });
  const auto sum = [=]() -> std::vector<Transfer> {
    rows.sum(to.mutable_data_ptr(), bytes_of(from, rows.me * n), op);
    return {};
  };
  return Pending(std::make_unique<C10dWork>(core_, call, messages.take(), std::vector{out, in}, sum, rows.buffer));
}

std::vector<Transfer> C10dGroup::share_chunks(C10dCore& core, const Call& call, const at::Tensor& flat) {
  const int me = core.rank(), count = core.size();
  const int64_t total = flat.numel();
  Messages messages(core, call, true);
  for (int d = 1; d < count; ++d) {
    const int peer = (me + d) % count;
    messages.receive(flat, chunk(total, peer, count), peer);
  }
  for (int d = 1; d < count; ++d)
    messages.send(flat, chunk(total, me, count), (me + d) % count);
  return messages.take();
}

Pending C10dGroup::small_all_reduce(const at::Tensor& flat, const Call& call) {
  const int64_t n = flat.numel();
  const ReduceOp op = call.info.op;
  const Rows rows(*core_, flat, n);
  Messages messages(*core_, call);
  others([&](int peer) { messages.receive(rows.others, rows.of(peer), peer); });
  others([&](int peer) { messages.send(flat, {0, n}, peer); });
  const auto sum = [=]() -> std::vector<Transfer> {
    rows.sum(flat.mutable_data_ptr(), flat.const_data_ptr(), op);
    return {};
  };
  return Pending(std::make_unique<C10dWork>(core_, call, messages.take(), std::vector{flat}, sum, rows.buffer));
}

Pending C10dGroup::do_all_reduce(at::Tensor tensor, ReduceOp op, Label label) {
  const Call call = begin(describe_call("all_reduce", tensor, label, op));
  if (native(tensor)) {
    return native_work(call, {tensor}, [&] {
      std::vector<at::Tensor> one = {flat_view(tensor)};
      c10d::AllreduceOptions options;
      options.reduceOp = native_op(op);
      return core_->group().allreduce(one, options);
    });
  }
  const at::Tensor flat = flat_view(tensor);
  const int me = rank(), count = size();
  if (call.info.bytes * count <= kSmallBytes) return small_all_reduce(flat, call);
  const int64_t total = flat.numel();
  const Span mine = chunk(total, me, count);
  const Rows rows(*core_, flat, mine.count);
  Messages messages(*core_, call);
  others([&](int peer) { messages.receive(rows.others, rows.of(peer), peer); });
  others([&](int peer) { messages.send(flat, chunk(total, peer, count), peer); });
  const auto sum_and_share = [=, core = core_] {
    char* own = bytes_of(flat, mine.begin);
    rows.sum(own, own, op);
    return share_chunks(*core, call, flat);
  };
  return Pending(
      std::make_unique<C10dWork>(core_, call, messages.take(), std::vector{tensor}, sum_and_share, rows.buffer));
}

Pending C10dGroup::do_broadcast(at::Tensor tensor, int root, Label label) {
  const Call call = begin(describe_call("broadcast", tensor, label, ReduceOp::Sum, root));
  if (native(tensor)) {
    return native_work(call, {tensor}, [&] {
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
  const bool chunks = count > 2 && call.info.bytes > kSmallBytes;
  const auto span = [&](int r) { return chunks ? chunk(total, r, count) : Span{0, total}; };
  Messages messages(*core_, call);
  if (me == root) {
    others([&](int peer) { messages.send(flat, span(peer), peer); });
  } else {
    messages.receive(flat, span(me), root);
  }
  C10dWork::Then then;
  if (chunks) {
    then = [=, core = core_] { return share_chunks(*core, call, flat); };
  }
  return Pending(std::make_unique<C10dWork>(core_, call, messages.take(), std::vector{tensor}, then, at::Tensor()));
}

Pending C10dGroup::do_all_to_all(at::Tensor out, at::Tensor in, std::vector<int64_t> out_splits,
                                 std::vector<int64_t> in_splits, Label label) {
  const OpInfo info = describe_call("all_to_all", in, label);
  TESSERA_CHECK_VALUE(out_splits[rank()] == in_splits[rank()], "comm", describe(info), ": rank ", rank(), " sends ",
                      in_splits[rank()], " elements to itself and expects ", out_splits[rank()]);
  const auto bytes = [&](std::vector<int64_t> splits) {
    for (int64_t& split : splits)
      split *= static_cast<int64_t>(in.element_size());
    return splits;
  };
  const Call call = begin(info, {.sent = bytes(in_splits), .received = bytes(out_splits)});
  const at::Tensor to = flat_view(out), from = flat_view(in);
  if (native(in)) {
    return native_work(call, {out, in}, [&] {
      auto target = to, source = from;
      return core_->group().alltoall_base(target, source, out_splits, in_splits);
    });
  }
  const std::vector<Span> received = spans(out_splits), sent = spans(in_splits);
  Messages messages(*core_, call);
  others([&](int peer) { messages.receive(to, received[peer], peer); });
  others([&](int peer) { messages.send(from, sent[peer], peer); });
  copy_span(to, received[rank()].begin, from, sent[rank()]);
  return Pending(std::make_unique<C10dWork>(core_, call, messages.take(), std::vector{out, in}, nullptr, at::Tensor()));
}

// Round k: tell the rank 2^k further, hear from the one 2^k before; after log2(n) rounds all have heard of all.
void C10dGroup::do_barrier(Label label) {
  const Call call = begin({.name = "barrier", .label = std::string(label)});
  if (path_ == C10dPath::Native || !core_->group().hasBackends() ||
      core_->group().getDeviceTypes().front().type() != at::kCPU) {
    native_work(call, {}, [&] { return core_->group().barrier(); }).wait();
    return;
  }
  const auto launched = Clock::now();
  const at::Tensor token = at::zeros({2}, at::TensorOptions(at::kByte));
  for (int distance = 1; distance < size(); distance *= 2) {
    Messages messages(*core_, call);
    messages.receive(token, {1, 1}, (rank() - distance + size()) % size());
    messages.send(token, {0, 1}, (rank() + distance) % size());
    auto transfers = messages.take();
    core_->finish(transfers, call, launched);
  }
  core_->calls().done(call.instance, call.number);
}

}  // namespace

GroupPtr make_c10d_group(std::shared_ptr<void> keep_alive, c10::intrusive_ptr<c10d::ProcessGroup> group,
                         C10dPath path) {
  auto core = make_owned<C10dCore>(std::move(keep_alive), std::move(group));
  const int64_t instance = core->instance();
  return std::make_shared<C10dGroup>(std::move(core), path, instance);
}

namespace {

// Whether the tensors of the group can only be CPU tensors that Gloo, or we ourselves, would carry.
bool only_cpu(c10d::ProcessGroup& group) {
  if (!compat::has_backend_for(group, c10::DeviceType::CPU)) return false;
  const std::string name = group.getBackend(c10::DeviceType::CPU)->getBackendName();
  const bool accelerator = at::accelerator::getAccelerator() && at::accelerator::deviceCount() > 0;
  return (name == "gloo" || name == "tessera") && (!accelerator || group.getDeviceTypes().size() == 1);
}

std::chrono::milliseconds timeout_of(c10d::ProcessGroup& group) {
  try {
    return group.getBackend(c10::DeviceType::CPU)->getBackendOptions()->timeout;
  } catch (const c10::Error&) {
    return kBackendDefaultTimeout;  // a wrapper for debugging does not tell
  }
}

GroupPtr best_group(std::shared_ptr<void> keep_alive, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  struct {  // let go in this order: what keeps alive has the last word
    std::shared_ptr<void> keep_alive;
    c10::intrusive_ptr<c10d::ProcessGroup> group;
  } const both{std::move(keep_alive), group};
  const auto over_group = [both] { return make_c10d_group(both.keep_alive, both.group, C10dPath::ByDevice); };
  const auto store = group->getStore();
  if (!store || group->getSize() == 1 || !only_cpu(*group)) return over_group();
  const int rank = group->getRank(), size = group->getSize();
  try {
    FaultBoard board = job_board(store, rank, size);
    board.show_process();
    const auto fresh = fresh_store(store, "transport/" + group->getGroupName(), rank);
    const auto watched = c10::make_intrusive<WatchedStore>(fresh, std::move(board), rank, size);
    return choose_transport(watched, rank, size, timeout_of(*group), over_group);
  } catch (const c10::DistNetworkError& error) {
    store_lost(rank, size, error);
  }
}

}  // namespace

GroupPtr c10d_group(std::shared_ptr<void> keep_alive, c10d::ProcessGroup& group) {
  return best_group(std::move(keep_alive),
                    c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(&group));
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
  return best_group(nullptr, group);
}

}  // namespace tessera::comm
