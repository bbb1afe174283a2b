#include "tessera/comm/torch_backend/backend.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/comm/c10d/compat.h"
#include "tessera/comm/torch_backend/messages.h"
#include "tessera/comm/torch_backend/sparse.h"
#include "tessera/comm/torch_backend/work.h"

namespace tessera::comm {
namespace {

using at::Tensor;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using OptionsPtr = c10::intrusive_ptr<c10d::Backend::Options>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using c10d::OpType;

constexpr auto kName = "tessera";
constexpr auto kPrefix = "tessera:";  // of the titles that profilers show, as those of other back ends

ReduceOp reduction(const c10d::ReduceOp& op, c10::ScalarType dtype) {
  const bool boolean = dtype == c10::ScalarType::Bool;
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return boolean ? ReduceOp::BitOr : ReduceOp::Sum;
    case c10d::ReduceOp::PRODUCT:
      return boolean ? ReduceOp::BitAnd : ReduceOp::Product;
    case c10d::ReduceOp::AVG:
      return ReduceOp::Avg;
    case c10d::ReduceOp::MIN:
      return ReduceOp::Min;
    case c10d::ReduceOp::MAX:
      return ReduceOp::Max;
    case c10d::ReduceOp::BAND:
      return ReduceOp::BitAnd;
    case c10d::ReduceOp::BOR:
      return ReduceOp::BitOr;
    case c10d::ReduceOp::BXOR:
      return ReduceOp::BitXor;
    default:
      TESSERA_CHECK_VALUE(false, "comm", "shared memory: PREMUL_SUM is not supported; scale the tensor first");
  }
}

// The tensors of one call in the form that the scripts of steps need: contiguous ones as they are, others by a copy.
class CallArguments {
 public:
  explicit CallArguments(const char* title)
      : label{.title = title, .inputs = {}}, name_(title + std::strlen(kPrefix)) {}

  Tensor in(const Tensor& t) {
    check(t);
    label.inputs.push_back(t);
    return plain(t) ? t : t.resolve_conj().resolve_neg().contiguous();
  }
  Tensors in(const Tensors& list) {
    Tensors result;
    for (const Tensor& t : list)
      result.push_back(in(t));
    return result;
  }
  Tensor out(const Tensor& t) {
    check(t);
    result.tensors.push_back(t);
    if (plain(t)) return t;
    result.copies.emplace_back(t, at::empty(t.sizes(), t.options()));
    return result.copies.back().second;
  }
  Tensors out(const Tensors& list) {
    Tensors prepared;
    for (const Tensor& t : list)
      prepared.push_back(out(t));
    return prepared;
  }
  Tensor inout(const Tensor& t) {
    const Tensor prepared = out(t);
    label.inputs.push_back(t);
    const at::NoGradGuard guard;
    if (!prepared.is_same(t)) prepared.copy_(t);
    return prepared;
  }
  Tensors inout(const Tensors& list) {
    Tensors prepared;
    for (const Tensor& t : list)
      prepared.push_back(inout(t));
    return prepared;
  }
  void sparse(const Tensor& t, std::function<void()> finish) {
    label.inputs.push_back(t);
    result.tensors.push_back(t);
    result.finish = std::move(finish);
  }
  template <class T>
  const T& only(const std::vector<T>& list, const char* what) const {
    TESSERA_CHECK_VALUE(list.size() == 1, "comm", name_, ": ", what, " must be a list of one, got ", list.size());
    return list[0];
  }
  void same_length(size_t outputs, size_t inputs) const {
    TESSERA_CHECK_VALUE(outputs == inputs, "comm", name_, ": ", outputs, " outputs and ", inputs, " inputs");
  }

  ShmWork::Label label;
  ShmWork::Result result;

 private:
  void check(const Tensor& t) const {
    TESSERA_CHECK_VALUE(t.defined() && t.layout() == at::kStrided, "comm", name_, ": takes dense tensors");
  }
  static bool plain(const Tensor& t) { return t.is_contiguous() && !t.is_conj() && !t.is_neg(); }

  const char* name_;  // in messages
};

void check_parts(const char* name, const Tensor& whole, const Tensor& part, int size) {
  TESSERA_CHECK_VALUE(whole.numel() == part.numel() * size && whole.scalar_type() == part.scalar_type(), "comm", name,
                      ": ", size, " ranks times ", part.numel(), " elements (", part.scalar_type(),
                      ") are needed in the large tensor; it has ", whole.numel(), " (", whole.scalar_type(), ")");
}

// Elements for each rank, from rows of dim 0; no rows: equal parts.
std::vector<int64_t> elements(const Tensor& t, std::vector<int64_t> rows, int size) {
  const int64_t all = t.dim() == 0 ? 1 : t.size(0);
  if (rows.empty()) {
    TESSERA_CHECK_VALUE(all % size == 0, "comm", "all_to_all: ", all, " rows cannot be split among ", size, " ranks");
    rows.assign(size, all / size);
  }
  int64_t total = 0;
  for (const int64_t n : rows)
    total += n;
  TESSERA_CHECK_VALUE(static_cast<int>(rows.size()) == size && total == all, "comm", "all_to_all: ", rows.size(),
                      " splits of ", total, " rows for ", size, " ranks and ", all, " rows");
  for (int64_t& n : rows)
    n *= all == 0 ? 0 : t.numel() / all;
  return rows;
}

class ShmBackend final : public c10d::Backend {
 public:
  ShmBackend(ShmSharePtr share, MakeBackend make, SideThreadsPtr threads)
      : Backend(share->world->rank(), share->world->size()),
        share_(std::move(share)),
        messages_(std::make_shared<ShmMessages>(share_->world->segment(), share_->channel, rank_, size_)),
        messages_channel_(share_->world->attach(messages_)),
        progress_thread_(std::make_shared<ProgressThread>(share_->world, std::move(threads))),
        make_(std::move(make)) {}

  const std::string getBackendName() const override { return kName; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>(kName, world().timeout());
  }
  void setTimeout(std::chrono::milliseconds timeout) override { world().set_timeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return number_; }
  void enableCollectivesTiming() override {}  // profilers are always told
  void abort() override { world().abort("the process group was aborted"); }

  // Groups of some of these ranks, and with others: made as this one was, each over memory of its own.
  bool supportsSplitting() const override { return make_ != nullptr; }
  BackendPtr split(const StorePtr& store, const std::vector<int>& ranks, const OptionsPtr& options) override {
    const auto place = std::find(ranks.begin(), ranks.end(), rank_);
    if (place == ranks.end()) return {};
    return merge(store, options, static_cast<int>(place - ranks.begin()), static_cast<int>(ranks.size()));
  }
  BackendPtr merge(const StorePtr& store, const OptionsPtr& options, const int& rank, const int& size) override {
    TESSERA_CHECK_VALUE(make_ != nullptr, "comm", "this group cannot be split or merged");
    return make_(store, rank, size, options ? options->timeout : world().timeout());
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_splits, std::vector<int64_t>& in_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  ShmWorld& world() const { return *share_->world; }
  void check_rank(const char* name, int64_t rank) const {
    TESSERA_CHECK_VALUE(rank >= 0 && rank < size_, "comm", name, ": there is no rank ", rank, " in a group of ", size_);
  }
  // Options that all kinds of calls have.
  template <class Options>
  WorkPtr launch(const std::vector<ShmOpPtr>& ops, CallArguments&& args, const Options& options, OpType type) {
    std::vector<ShmWork::Call> calls;
    calls.reserve(ops.size());
    for (const ShmOpPtr& op : ops)
      calls.push_back({share_->channel, op});
    const auto work = handle(std::move(calls), std::move(args), options.timeout, type);
    for (const ShmOpPtr& op : ops)
      world().launch(share_->channel, op);
    if (!options.asyncOp) {
      work->wait(kNoTimeout);
    } else if (!work->settle_if_finished()) {
      progress_thread_->add(work);
    }
    return work;
  }
  WorkPtr receive_from(Tensors& tensors, int from, int tag, OpType type);
  ShmWorkPtr handle(std::vector<ShmWork::Call> calls, CallArguments&& args, std::chrono::milliseconds timeout,
                    OpType type) {
    const auto limit = timeout < kNoTimeout ? std::nullopt : std::optional(timeout);
    return c10::make_intrusive<ShmWork>(share_, progress_thread_, std::move(calls), std::move(args.result), args.label,
                                        limit, type, number_++);
  }

  const ShmSharePtr share_;
  const std::shared_ptr<ShmMessages> messages_;  // used within launches of the world
  const int messages_channel_;
  const std::shared_ptr<ProgressThread> progress_thread_;
  const MakeBackend make_;
  std::atomic<uint64_t> number_ = 0;
};

WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  CallArguments args("tessera:all_reduce");
  const Tensor& tensor = args.only(tensors, "tensors");
  if (tensor.defined() && tensor.is_sparse()) {
    TESSERA_CHECK_VALUE(options.reduceOp == c10d::ReduceOp::SUM, "comm",
                        "all_reduce: sparse tensors can only be added, with SUM");
    const auto op = std::make_shared<ShmSparseSum>(rank_, size_, tensor, Label());
    args.sparse(tensor, [tensor, op] { tensor.copy_(op->sum()); });
    return launch({op}, std::move(args), options, OpType::_ALLREDUCE_SPARSE);
  }
  const Tensor t = args.inout(tensor);
  const auto op = shm_all_reduce(rank_, size_, t, reduction(options.reduceOp, t.scalar_type()), {});
  return launch({op}, std::move(args), options, OpType::ALLREDUCE);
}

WorkPtr ShmBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  CallArguments args("tessera:all_reduce");
  std::vector<ShmOpPtr> ops;
  for (const Tensor& t : args.inout(tensors))
    ops.push_back(shm_all_reduce(rank_, size_, t, reduction(options.reduceOp, t.scalar_type()), {}));
  return launch(ops, std::move(args), options, OpType::ALLREDUCE_COALESCED);
}

WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  CallArguments args("tessera:reduce");
  check_rank("reduce", options.rootRank);
  const Tensor& tensor = args.only(tensors, "tensors");
  const Tensor t = rank_ == options.rootRank ? args.inout(tensor) : args.in(tensor);
  if (rank_ != options.rootRank) args.result.tensors.push_back(tensor);
  const auto op =
      shm_reduce(rank_, size_, t, reduction(options.reduceOp, t.scalar_type()), static_cast<int>(options.rootRank), {});
  return launch({op}, std::move(args), options, OpType::REDUCE);
}

WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  CallArguments args("tessera:broadcast");
  check_rank("broadcast", options.rootRank);
  const Tensor t = args.inout(args.only(tensors, "tensors"));
  const auto op = shm_broadcast(rank_, size_, t, static_cast<int>(options.rootRank), {});
  return launch({op}, std::move(args), options, OpType::BROADCAST);
}

WorkPtr ShmBackend::allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) {
  CallArguments args("tessera:all_gather");
  const Tensor from = args.in(args.only(in, "inputs"));
  const auto op = shm_all_gather(rank_, size_, args.out(args.only(out, "outputs")), from, {});
  return launch({op}, std::move(args), options, OpType::ALLGATHER);
}

WorkPtr ShmBackend::_allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) {
  CallArguments args("tessera:all_gather");
  check_parts("all_gather", out, in, size_);
  const Tensor from = args.in(in);
  const auto op = shm_all_gather(rank_, size_, args.out(out), from, {});
  return launch({op}, std::move(args), options, OpType::_ALLGATHER_BASE);
}

// out[r][i] is tensor i of rank r.
WorkPtr ShmBackend::allgather_coalesced(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) {
  CallArguments args("tessera:all_gather");
  std::vector<ShmOpPtr> ops;
  for (size_t i = 0; i < in.size(); ++i) {
    Tensors to;
    for (const Tensors& of_rank : out) {
      args.same_length(of_rank.size(), in.size());
      to.push_back(of_rank[i]);
    }
    ops.push_back(shm_all_gather(rank_, size_, args.out(to), args.in(in[i]), {}));
  }
  return launch(ops, std::move(args), options, OpType::ALLGATHER_COALESCED);
}

WorkPtr ShmBackend::allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) {
  CallArguments args("tessera:all_gather");
  args.same_length(out.size(), in.size());
  std::vector<ShmOpPtr> ops;
  for (size_t i = 0; i < in.size(); ++i) {
    check_parts("all_gather", out[i], in[i], size_);
    ops.push_back(shm_all_gather(rank_, size_, args.out(out[i]), args.in(in[i]), {}));
  }
  return launch(ops, std::move(args), options, OpType::ALLGATHER_COALESCED);
}

WorkPtr ShmBackend::gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) {
  CallArguments args("tessera:gather");
  check_rank("gather", options.rootRank);
  const Tensor from = args.in(args.only(in, "inputs"));
  Tensors to;
  if (rank_ == options.rootRank) to = args.out(args.only(out, "outputs"));
  const auto op = shm_gather(rank_, size_, to, from, static_cast<int>(options.rootRank), {});
  return launch({op}, std::move(args), options, OpType::GATHER);
}

WorkPtr ShmBackend::scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) {
  CallArguments args("tessera:scatter");
  check_rank("scatter", options.rootRank);
  Tensors from;
  if (rank_ == options.rootRank) from = args.in(args.only(in, "inputs"));
  const Tensor to = args.out(args.only(out, "outputs"));
  const auto op = shm_scatter(rank_, size_, to, from, static_cast<int>(options.rootRank), {});
  return launch({op}, std::move(args), options, OpType::SCATTER);
}

WorkPtr ShmBackend::reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& options) {
  CallArguments args("tessera:reduce_scatter");
  const Tensors from = args.in(args.only(in, "inputs"));
  const Tensor to = args.out(args.only(out, "outputs"));
  const auto op = shm_reduce_scatter(rank_, size_, to, from, reduction(options.reduceOp, to.scalar_type()), {});
  return launch({op}, std::move(args), options, OpType::REDUCE_SCATTER);
}

WorkPtr ShmBackend::_reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) {
  CallArguments args("tessera:reduce_scatter");
  check_parts("reduce_scatter", in, out, size_);
  const Tensor from = args.in(in), to = args.out(out);
  const auto op = shm_reduce_scatter(rank_, size_, to, from, reduction(options.reduceOp, to.scalar_type()), {});
  return launch({op}, std::move(args), options, OpType::_REDUCE_SCATTER_BASE);
}

WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in,
                                                    const c10d::ReduceScatterOptions& options) {
  CallArguments args("tessera:reduce_scatter");
  args.same_length(out.size(), in.size());
  std::vector<ShmOpPtr> ops;
  for (size_t i = 0; i < in.size(); ++i) {
    check_parts("reduce_scatter", in[i], out[i], size_);
    const Tensor from = args.in(in[i]), to = args.out(out[i]);
    ops.push_back(shm_reduce_scatter(rank_, size_, to, from, reduction(options.reduceOp, to.scalar_type()), {}));
  }
  return launch(ops, std::move(args), options, compat::reduce_scatter_coalesced<OpType>());
}

WorkPtr ShmBackend::alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_splits,
                                  std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& options) {
  CallArguments args("tessera:all_to_all");
  TESSERA_CHECK_VALUE(out.scalar_type() == in.scalar_type(), "comm", "all_to_all: the output is ", out.scalar_type(),
                      " and the input ", in.scalar_type());
  const Tensor from = args.in(in), to = args.out(out);
  const auto op =
      shm_all_to_all(rank_, size_, to, from, elements(to, out_splits, size_), elements(from, in_splits, size_), {});
  return launch({op}, std::move(args), options, OpType::ALLTOALL_BASE);
}

WorkPtr ShmBackend::alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& options) {
  CallArguments args("tessera:all_to_all");
  const Tensors from = args.in(in), to = args.out(out);
  return launch({shm_all_to_all(rank_, size_, to, from, {})}, std::move(args), options, OpType::ALLTOALL);
}

WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return launch({shm_barrier(rank_, size_, {})}, CallArguments("tessera:barrier"), options, OpType::BARRIER);
}

void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool) {
  barrier(options)->wait();  // every barrier names who is missing
}

WorkPtr ShmBackend::send(Tensors& tensors, int to, int tag) {
  CallArguments args("tessera:send");
  check_rank("send", to);
  const auto message = shm_send(args.in(args.only(tensors, "tensors")), to, tag);
  const auto work = handle({{messages_channel_, message}}, std::move(args), c10d::kUnsetTimeout, OpType::SEND);
  world().launch(messages_channel_, *message, [&] { messages_->send(message); });
  if (!work->settle_if_finished()) progress_thread_->add(work);  // the calls go on whatever this rank does
  return work;
}

WorkPtr ShmBackend::receive_from(Tensors& tensors, int from, int tag, OpType type) {
  CallArguments args("tessera:recv");
  const auto message = shm_receive(args.out(args.only(tensors, "tensors")), from, tag);
  args.label.inputs = tensors;
  const auto work = handle({{messages_channel_, message}}, std::move(args), c10d::kUnsetTimeout, type);
  world().launch(messages_channel_, *message, [&] { messages_->receive(message); });
  work->settle_if_finished();
  return work;
}

WorkPtr ShmBackend::recv(Tensors& tensors, int from, int tag) {
  check_rank("recv", from);
  return receive_from(tensors, from, tag, OpType::RECV);
}

WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return receive_from(tensors, -1, tag, OpType::RECVANYSOURCE);
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> shm_backend(ShmSharePtr share, MakeBackend make, SideThreadsPtr threads) {
  return c10::make_intrusive<ShmBackend>(std::move(share), std::move(make), std::move(threads));
}

}  // namespace tessera::comm
