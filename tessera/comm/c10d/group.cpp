// Collectives over a torch process group.
//
// Note [Messages between pairs]
//   For CPU tensors every collective is made of send and recv. Measured against the native ones of Gloo (docs/comm.md)
//   this is as fast or faster, because data goes from tensor to tensor: Gloo's reduce_scatter all-reduces the whole
//   buffer, and its all_gather copies through a temporary. It also keeps Note [Order of summation], and a wait on a
//   message can be interrupted when another rank fails. all_reduce and a large broadcast have a second round of messages
//   that is sent in wait().
#include "tessera/comm/c10d/group.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <functional>

#include "tessera/base/error.h"
#include "tessera/comm/backends.h"
#include "tessera/comm/c10d/compat.h"
#include "tessera/comm/c10d/core.h"
#include "tessera/comm/c10d/messages.h"
#include "tessera/comm/c10d/own_group.h"
#include "tessera/comm/c10d/transport.h"
#include "tessera/comm/c10d/watched_store.h"
#include "tessera/comm/reduce_rows.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kSmallBytes = 64 * 1024;  // up to here one round of whole tensors beats two rounds of parts

Span chunk(int64_t total, int index, int parts) {
  const int64_t begin = total * index / parts;
  return {begin, total * (index + 1) / parts - begin};
}

// Spans of so many elements, one after the other.
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

// Turns to `then` (may be empty) once the first messages are through; `then` may post a second round. `own`: the group that a
// sibling's native collective runs on.
class C10dWork final : public Pending::Work {
 public:
  using Then = std::function<std::vector<Transfer>()>;

  C10dWork(std::shared_ptr<C10dCore> core, Call call, std::vector<Transfer> transfers, std::vector<at::Tensor> held,
           Then then, at::Tensor buffer, std::shared_ptr<OwnGroup> own = nullptr)
      : core_(std::move(core)),
        own_(std::move(own)),
        call_(std::move(call)),
        held_(std::move(held)),
        buffer_(std::move(buffer)),
        transfers_(std::move(transfers)),
        then_(std::move(then)) {}

  void wait() override {
    core_->finish(transfers_, call_, launched_);
    if (own_) own_->mark_end();
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

  // wait() on a device has the current stream wait, and with Gloo the host: nobody asks for it.
  void release(std::unique_ptr<Work>) override {
    if (held_.front().is_cpu() && wait_for({})) return wait();
    core_->calls().done(call_.instance, call_.number);
    held_.push_back(std::move(buffer_));
    LeftTransfers left{std::move(held_), std::move(transfers_)};
    own_ ? own_->keep(std::move(left)) : core_->keep(std::move(left));
  }

 private:
  // A transfer cannot be asked whether it is through (a Gloo wait with a limit ends the connection), but the byte of a
  // mark tells: it is sent behind the data. What all peers have sent, they have launched: ours gets through, too.
  bool arrived(Clock::time_point end) const {
    if (!held_.front().is_cpu()) return true;  // waiting orders streams
    for (;; std::this_thread::sleep_for(std::chrono::microseconds(100))) {
      const std::optional<bool> come = core_->marks_have_come(transfers_);
      if (!come || *come || Clock::now() >= end) return come.value_or(false);
    }
  }

  std::shared_ptr<C10dCore> core_;
  std::shared_ptr<OwnGroup> own_;
  Call call_;
  std::vector<at::Tensor> held_;
  at::Tensor buffer_;
  std::vector<Transfer> transfers_;  // destroyed before the memory they use
  Then then_;
  Clock::time_point launched_ = Clock::now();
};

char* address_of(const at::Tensor& flat, int64_t element) {
  return static_cast<char*>(flat.mutable_data_ptr()) + element * static_cast<int64_t>(flat.element_size());
}

// The summands of one call, `n` elements a rank: this rank's where they are, the others' in a buffer.
struct SplitRows {
  SplitRows(C10dCore& core, const at::Tensor& like, int64_t elements)
      : me(core.rank()), count(core.size()), n(elements) {
    const int64_t bytes = n * static_cast<int64_t>(like.element_size()) * (count - 1);
    buffer = core.take_buffer(bytes);
    others = buffer.narrow(0, 0, bytes).view(like.scalar_type());
  }
  Span of(int peer) const { return {(peer < me ? peer : peer - 1) * n, n}; }
  // `out` may be `own`.
  void sum(void* out, const void* own, ReduceOp op) const {
    std::vector<const void*> pointers(count);
    for (int r = 0; r < count; ++r)
      pointers[r] = r == me ? own : address_of(others, of(r).begin);
    reduce_rows(out, pointers.data(), count, n, others.scalar_type(), op);
  }

  int me, count;
  int64_t n;
  at::Tensor buffer, others;
};

class C10dGroup final : public Group {
 public:
  // `host` carries the CPU tensors, if there is one.
  C10dGroup(std::shared_ptr<C10dCore> core, C10dPath path, GroupPtr host)
      : core_(std::move(core)), path_(path), instance_(core_->instance()), host_(std::move(host)) {}
  // A sibling for tensors of `device`.
  C10dGroup(std::shared_ptr<C10dCore> core, C10dPath path, int64_t instance, c10::Device device)
      : core_(std::move(core)), path_(path), instance_(instance), sibling_of_(device.type()) {
    if (core_->size() > 1 && native(device)) own_ = make_owned<OwnGroup>(core_, instance, device);
  }

  int rank() const override { return core_->rank(); }
  int size() const override { return core_->size(); }
  std::string name() const override;
  void abort(const std::string& reason) override {
    if (host_) host_->abort(reason);
    core_->abort(reason);
  }

 protected:
  Pending do_all_gather(at::Tensor out, at::Tensor in, Label label) override;
  Pending do_reduce_scatter(at::Tensor out, at::Tensor in, ReduceOp op, Label label) override;
  Pending do_all_reduce(at::Tensor tensor, ReduceOp op, Label label) override;
  Pending do_broadcast(at::Tensor tensor, int root, Label label) override;
  Pending do_all_to_all(at::Tensor out, at::Tensor in, std::vector<int64_t> out_splits, std::vector<int64_t> in_splits,
                        Label label) override;
  void do_barrier(Label label) override;
  // The sibling has the same core: what fails one group fails both.
  GroupPtr do_sibling(c10::Device device) override {
    if (host_ && device.is_cpu()) return host_->sibling(device);
    return std::make_shared<C10dGroup>(core_, path_, core_->count_instance(), device);
  }
  at::Tensor do_shared_memory(int64_t bytes, Label label) override {
    return host_ ? host_->shared_memory(bytes, label) : at::Tensor();
  }

 private:
  Call begin(OpInfo info, Splits splits = {});
  bool on_host(const at::Tensor& t) const { return host_ && t.is_cpu(); }
  bool native(c10::Device device) const { return path_ == C10dPath::Native || !device.is_cpu(); }
  bool native(const at::Tensor& t) const { return native(t.device()); }
  // The process group that the back end's own collectives for `device` run on.
  c10d::ProcessGroup& native_group(const OpInfo& info, c10::Device device) const;
  // launch(process group) starts a collective, for tensors of `device`.
  Pending native_work(const Call& call, c10::Device device, std::vector<at::Tensor> held,
                      const std::function<c10::intrusive_ptr<c10d::Work>(c10d::ProcessGroup&)>& launch);
  Pending small_all_reduce(const at::Tensor& flat, const Call& call);
  // Second round: sends this rank's chunk of `flat` to all others and receives theirs.
  static std::vector<Transfer> share_chunks(C10dCore& core, const Call& call, const at::Tensor& flat);
  // Calls f(peer) for the other ranks, nearest first, so that not all ranks begin with the same one.
  template <class F>
  void others(const F& f) const {
    for (int d = 1; d < size(); ++d)
      f((rank() + d) % size());
  }

  std::shared_ptr<C10dCore> core_;
  const C10dPath path_;
  const int64_t instance_;
  const std::optional<c10::DeviceType> sibling_of_{};
  const GroupPtr host_{};
  std::shared_ptr<OwnGroup> own_{};
};

// The back end's name, and the accelerator's where that is another one.
std::string C10dGroup::name() const {
  c10d::ProcessGroup& group = core_->group();
  if (!host_) return group.getBackendName();
  const auto accelerator = at::accelerator::getAccelerator();
  if (!accelerator || !compat::has_backend_for(group, *accelerator)) return host_->name();
  const std::string there = group.getBackend(*accelerator)->getBackendName();
  return there == group.getBackend(c10::DeviceType::CPU)->getBackendName() ? host_->name()
                                                                           : host_->name() + " and " + there;
}

c10d::ProcessGroup& C10dGroup::native_group(const OpInfo& info, c10::Device device) const {
  if (!sibling_of_ || core_->size() == 1) return core_->group();
  TESSERA_CHECK(own_ && own_->device() == device, "comm", describe(info), ": this group is a sibling for tensors of ",
                *sibling_of_, ", not of ", device, "; call sibling() with their device");
  return own_->group();
}

at::Tensor flat_view(const at::Tensor& t) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return t.view(-1);
}

void copy_span(const at::Tensor& to, int64_t to_begin, const at::Tensor& from, Span span) {
  char* target = address_of(to, to_begin);
  const char* source = address_of(from, span.begin);
  if (span.count > 0 && target != source) std::memcpy(target, source, span.count * from.element_size());
}

Call C10dGroup::begin(OpInfo info, Splits splits) {
  core_->check_alive(info);
  const int64_t number = core_->calls().add(instance_, info, std::move(splits));
  return {std::move(info), instance_, number};
}

Pending C10dGroup::native_work(const Call& call, c10::Device device, std::vector<at::Tensor> held,
                               const std::function<c10::intrusive_ptr<c10d::Work>(c10d::ProcessGroup&)>& launch) {
  c10d::ProcessGroup& group = native_group(call.info, device);
  std::vector<Transfer> transfers;
  try {
    const at::AutoDispatchBelowADInplaceOrView guard;
    transfers.push_back({launch(group), -1});
  } catch (const std::exception& error) {
    core_->fail(call.info, Clock::now(), -1, error.what());
  }
  return Pending(
      std::make_unique<C10dWork>(core_, call, std::move(transfers), std::move(held), nullptr, at::Tensor(), own_));
}

Pending C10dGroup::do_all_gather(at::Tensor out, at::Tensor in, Label label) {
  if (on_host(out)) return host_->all_gather(std::move(out), std::move(in), label);
  const Call call = begin(describe_call("all_gather", out, label));
  if (native(out)) {
    return native_work(call, in.device(), {out, in}, [&](c10d::ProcessGroup& group) {
      auto to = flat_view(out), from = flat_view(in);
      return group._allgather_base(to, from);
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
  if (on_host(in)) return host_->reduce_scatter(std::move(out), std::move(in), op, label);
  const Call call = begin(describe_call("reduce_scatter", in, label, op));
  if (native(in)) {
    return native_work(call, in.device(), {out, in}, [&](c10d::ProcessGroup& group) {
      auto to = flat_view(out), from = flat_view(in);
      c10d::ReduceScatterOptions options;
      options.reduceOp = native_op(op);
      return group._reduce_scatter_base(to, from, options);
    });
  }
  const at::Tensor to = flat_view(out), from = flat_view(in);
  const int64_t n = to.numel();
  const SplitRows rows(*core_, from, n);
  Messages messages(*core_, call);
  others([&](int peer) { messages.receive(rows.others, rows.of(peer), peer); });
  others([&](int peer) { messages.send(from, {peer * n, n}, peer); });
  const auto sum = [=]() -> std::vector<Transfer> {
    rows.sum(to.mutable_data_ptr(), address_of(from, rows.me * n), op);
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
  const SplitRows rows(*core_, flat, n);
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
  if (on_host(tensor)) return host_->all_reduce(std::move(tensor), op, label);
  const Call call = begin(describe_call("all_reduce", tensor, label, op));
  if (native(tensor)) {
    return native_work(call, tensor.device(), {tensor}, [&](c10d::ProcessGroup& group) {
      std::vector<at::Tensor> one = {flat_view(tensor)};
      c10d::AllreduceOptions options;
      options.reduceOp = native_op(op);
      return group.allreduce(one, options);
    });
  }
  const at::Tensor flat = flat_view(tensor);
  const int me = rank(), count = size();
  if (call.info.bytes * count <= kSmallBytes) return small_all_reduce(flat, call);
  const int64_t total = flat.numel();
  const Span mine = chunk(total, me, count);
  const SplitRows rows(*core_, flat, mine.count);
  Messages messages(*core_, call);
  others([&](int peer) { messages.receive(rows.others, rows.of(peer), peer); });
  others([&](int peer) { messages.send(flat, chunk(total, peer, count), peer); });
  const auto sum_and_share = [=, core = core_] {
    char* own = address_of(flat, mine.begin);
    rows.sum(own, own, op);
    return share_chunks(*core, call, flat);
  };
  return Pending(
      std::make_unique<C10dWork>(core_, call, messages.take(), std::vector{tensor}, sum_and_share, rows.buffer));
}

Pending C10dGroup::do_broadcast(at::Tensor tensor, int root, Label label) {
  if (on_host(tensor)) return host_->broadcast(std::move(tensor), root, label);
  const Call call = begin(describe_call("broadcast", tensor, label, ReduceOp::Sum, root));
  if (native(tensor)) {
    return native_work(call, tensor.device(), {tensor}, [&](c10d::ProcessGroup& group) {
      std::vector<at::Tensor> one = {flat_view(tensor)};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      return group.broadcast(one, options);
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
  if (on_host(in))  // splits count elements by now
    return host_->all_to_all(flat_view(out), flat_view(in), std::move(out_splits), std::move(in_splits), label);
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
    return native_work(call, in.device(), {out, in}, [&](c10d::ProcessGroup& group) {
      auto target = to, source = from;
      return group.alltoall_base(target, source, out_splits, in_splits);
    });
  }
  const std::vector<Span> received = spans(out_splits), sent = spans(in_splits);
  Messages messages(*core_, call);
  others([&](int peer) { messages.receive(to, received[peer], peer); });
  others([&](int peer) { messages.send(from, sent[peer], peer); });
  copy_span(to, received[rank()].begin, from, sent[rank()]);
  return Pending(std::make_unique<C10dWork>(core_, call, messages.take(), std::vector{out, in}, nullptr, at::Tensor()));
}

// Round k: send to the rank 2^k further, receive from the one 2^k before; after log2(n) rounds each has a word of all.
void C10dGroup::do_barrier(Label label) {
  if (host_) return host_->barrier(label);
  const Call call = begin({.name = "barrier", .label = std::string(label)});
  if (path_ == C10dPath::Native || !compat::has_backend_for(core_->group(), c10::DeviceType::CPU)) {
    c10d::BarrierOptions options;
    if (own_) options.device = own_->device();
    const auto launch = [&](c10d::ProcessGroup& group) { return group.barrier(options); };
    native_work(call, options.device.value_or(c10::kCPU), {}, launch).wait();
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

bool is_c10d_group(const Group& group) {
  return dynamic_cast<const C10dGroup*>(&group) != nullptr;
}

GroupPtr make_c10d_group(const HoldProcessGroup& hold, c10::intrusive_ptr<c10d::ProcessGroup> group, C10dPath path,
                         GroupPtr host) {
  return std::make_shared<C10dGroup>(make_owned<C10dCore>(hold, std::move(group)), path, std::move(host));
}

namespace {

// Whether Gloo, or we ourselves, would carry the group's CPU tensors.
bool is_ours(c10d::ProcessGroup& group) {
  if (!compat::has_backend_for(group, c10::DeviceType::CPU)) return false;
  const std::string name = group.getBackend(c10::DeviceType::CPU)->getBackendName();
  return name == "gloo" || name == "tessera";
}

// Whether the group may get tensors of a device: torch's "gloo" is for those of every accelerator too.
bool takes_devices(c10d::ProcessGroup& group) {
  return at::accelerator::getAccelerator() && at::accelerator::deviceCount() > 0 && group.getDeviceTypes().size() > 1;
}

std::chrono::milliseconds timeout_of(c10d::ProcessGroup& group) {
  try {
    return group.getBackend(c10::DeviceType::CPU)->getBackendOptions()->timeout;
  } catch (const c10::Error&) {
    return kBackendDefaultTimeout;  // a wrapper for debugging does not tell
  }
}

c10::intrusive_ptr<c10d::ProcessGroup> shared(c10d::ProcessGroup& group) {
  return c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(&group);
}

GroupPtr best_group(const HoldProcessGroup& hold, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const auto over_group = [hold, held = hold_group(hold, group)](GroupPtr host = nullptr) {
    return make_c10d_group(hold, shared(*held), C10dPath::ByDevice, std::move(host));
  };
  const auto store = group->getStore();
  if (!store || group->getSize() == 1 || !is_ours(*group)) return over_group();
  const int rank = group->getRank(), size = group->getSize();
  try {
    const auto watched = watch_fresh_store(store, "transport/" + group->getGroupName(), rank, size);
    GroupPtr host = choose_transport(watched, rank, size, timeout_of(*group), over_group);
    return is_c10d_group(*host) || !takes_devices(*group) ? host : over_group(std::move(host));
  } catch (const c10::DistNetworkError& error) {
    store_lost(rank, size, error);
  }
}

}  // namespace

GroupPtr c10d_group(const HoldProcessGroup& hold, c10d::ProcessGroup& group) {
  return best_group(hold, shared(group));
}

GroupPtr c10d_group(const std::string& name) {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  try {
    group = c10d::resolve_process_group(name);
  } catch (const std::exception& error) {
    const std::string text = error.what();
    TESSERA_CHECK_VALUE(
        false, "comm", "no torch process group is registered under '", name,
        "'; make it first, in Python with torch.distributed.init_process_group() or new_group(), in C++ with "
        "c10d::register_process_group() (",
        text.substr(0, text.find('\n')), ")");
  }
  return best_group(nullptr, group);
}

}  // namespace tessera::comm
