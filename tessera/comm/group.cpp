#include "tessera/comm/group.h"

#include "tessera/base/error.h"
#include "tessera/comm/reduce_rows.h"

namespace tessera::comm {

Pending& Pending::operator=(Pending&& other) noexcept {
  if (this != &other) {
    Pending old(std::move(*this));
    work_ = std::move(other.work_);
  }
  return *this;
}

Pending::~Pending() {
  if (!work_) return;
  if (std::uncaught_exceptions() > exceptions_) {
    release();
    return;
  }
  try {
    wait();
  } catch (...) {
    // The owner did not ask for the result; the group remembers the failure and reports it at its
    // next call.
  }
}

void Pending::wait() {
  if (!work_) return;
  // The collective is complete from here on, also when the wait throws.
  const auto work = std::move(work_);
  work->wait();
}

void Pending::release() noexcept {
  if (!work_) return;
  try {
    Work& work = *work_;
    work.release(std::move(work_));
  } catch (...) {
    // The owner did not ask, as in the destructor.
  }
  work_.reset();
}

namespace {

const char* first_byte(const at::Tensor& t) {
  return static_cast<const char*>(t.const_data_ptr());
}

bool apart(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == 0 || b.nbytes() == 0 || first_byte(a) + a.nbytes() <= first_byte(b) ||
         first_byte(b) + b.nbytes() <= first_byte(a);
}

// One call under validation: every message names the operation and its label.
struct CheckedCall {
  const char* name;
  Label label;

  std::string text() const {
    std::string result = name;
    if (!label.empty()) result += " (" + std::string(label) + ")";
    return result + ": ";
  }

  void tensor(const at::Tensor& t, const char* what) const {
    TESSERA_CHECK_VALUE(t.defined(), "comm", text(), "'", what, "' is undefined");
    TESSERA_CHECK_VALUE(t.layout() == at::kStrided && t.is_contiguous(), "comm", text(), "'", what,
                        "' must be contiguous; sizes ", t.sizes());
  }

  void same_kind(const at::Tensor& out, const at::Tensor& in) const {
    TESSERA_CHECK_VALUE(out.scalar_type() == in.scalar_type(), "comm", text(), "'out' is ", out.scalar_type(),
                        " and 'in' is ", in.scalar_type(), "; they must have one dtype");
    TESSERA_CHECK_VALUE(out.device() == in.device(), "comm", text(), "'out' is on ", out.device(), " and 'in' on ",
                        in.device(), "; they must be on one device");
  }

  // `part` must be part `rank` of `full` (parts of part.numel() elements), or lie wholly outside
  // it.
  void in_place(const at::Tensor& full, const at::Tensor& part, int rank) const {
    if (apart(full, part)) return;
    const ptrdiff_t offset = first_byte(part) - first_byte(full);
    const ptrdiff_t expected = rank * static_cast<ptrdiff_t>(part.nbytes());
    TESSERA_CHECK_VALUE(offset == expected, "comm", text(), "the small tensor overlaps the large one at byte ", offset,
                        "; only part ", rank, " of it (byte ", expected, ") may be used in place by this rank");
  }

  void reduction(const at::Tensor& t, ReduceOp op) const {
    TESSERA_CHECK_VALUE(can_reduce(t.scalar_type(), op), "comm", text(), "this reduction does not take dtype ",
                        t.scalar_type(), op == ReduceOp::Avg ? "; Avg takes floating tensors" : "");
  }
};

// Splits in rows of dim 0 -> splits in elements; empty -> equal parts.
std::vector<int64_t> element_splits(const CheckedCall& call, const at::Tensor& t, std::vector<int64_t> splits, int size,
                                    const char* what) {
  if (splits.empty()) {
    TESSERA_CHECK_VALUE(t.numel() % size == 0, "comm", call.text(), "'", what, "' has ", t.numel(),
                        " elements, not divisible by ", size, " ranks; give splits");
    return std::vector<int64_t>(size, t.numel() / size);
  }
  TESSERA_CHECK_VALUE(t.dim() >= 1 && static_cast<int>(splits.size()) == size, "comm", call.text(), "'", what, "' has ",
                      splits.size(), " splits for ", size, " ranks");
  int64_t total = 0;
  for (const int64_t split : splits) {
    TESSERA_CHECK_VALUE(split >= 0, "comm", call.text(), "split ", split, " of '", what, "' is negative");
    total += split;
  }
  TESSERA_CHECK_VALUE(total == t.size(0), "comm", call.text(), "the splits of '", what, "' add up to ", total,
                      " rows, the tensor has ", t.size(0));
  const int64_t row = t.size(0) == 0 ? 0 : t.numel() / t.size(0);
  for (int64_t& split : splits)
    split *= row;
  return splits;
}

int64_t shared_bytes(const at::Tensor& full, int size) {
  return static_cast<int64_t>(full.nbytes()) / size * (size - 1);
}

}  // namespace

Pending Group::all_gather(at::Tensor out, at::Tensor in, Label label) {
  const CheckedCall call{"all_gather", label};
  call.tensor(out, "out");
  call.tensor(in, "in");
  call.same_kind(out, in);
  TESSERA_CHECK_VALUE(out.numel() == size() * in.numel(), "comm", call.text(), "'out' has ", out.numel(), " elements; ",
                      size(), " ranks times ", in.numel(), " elements of 'in' are needed");
  call.in_place(out, in, rank());
  count(&CommStats::all_gather, shared_bytes(out, size()));
  return do_all_gather(std::move(out), std::move(in), label);
}

Pending Group::reduce_scatter(at::Tensor out, at::Tensor in, ReduceOp op, Label label) {
  const CheckedCall call{"reduce_scatter", label};
  call.tensor(out, "out");
  call.tensor(in, "in");
  call.same_kind(out, in);
  call.reduction(in, op);
  TESSERA_CHECK_VALUE(in.numel() == size() * out.numel(), "comm", call.text(), "'in' has ", in.numel(), " elements; ",
                      size(), " ranks times ", out.numel(), " elements of 'out' are needed");
  call.in_place(in, out, rank());
  count(&CommStats::reduce_scatter, shared_bytes(in, size()));
  return do_reduce_scatter(std::move(out), std::move(in), op, label);
}

Pending Group::all_reduce(at::Tensor tensor, ReduceOp op, Label label) {
  const CheckedCall call{"all_reduce", label};
  call.tensor(tensor, "tensor");
  call.reduction(tensor, op);
  count(&CommStats::all_reduce, 2 * static_cast<int64_t>(tensor.nbytes()) * (size() - 1) / size());
  return do_all_reduce(std::move(tensor), op, label);
}

Pending Group::broadcast(at::Tensor tensor, int root, Label label) {
  const CheckedCall call{"broadcast", label};
  call.tensor(tensor, "tensor");
  TESSERA_CHECK_VALUE(root >= 0 && root < size(), "comm", call.text(), "root ", root, " is no rank of a group of ",
                      size());
  count(&CommStats::broadcast, size() == 1 ? 0 : static_cast<int64_t>(tensor.nbytes()));
  return do_broadcast(std::move(tensor), root, label);
}

Pending Group::all_to_all(at::Tensor out, at::Tensor in, std::vector<int64_t> out_splits,
                          std::vector<int64_t> in_splits, Label label) {
  const CheckedCall call{"all_to_all", label};
  call.tensor(out, "out");
  call.tensor(in, "in");
  call.same_kind(out, in);
  out_splits = element_splits(call, out, std::move(out_splits), size(), "out");
  in_splits = element_splits(call, in, std::move(in_splits), size(), "in");
  TESSERA_CHECK_VALUE(apart(out, in), "comm", call.text(), "'out' and 'in' overlap");
  count(&CommStats::all_to_all, shared_bytes(in, size()));
  return do_all_to_all(std::move(out), std::move(in), std::move(out_splits), std::move(in_splits), label);
}

GroupPtr Group::sibling(c10::Device device) {
  GroupPtr group = do_sibling(device);
  group->counts_ = counts_;
  return group;
}

CommStats Group::stats() const {
  const std::scoped_lock lock(counts_->mutex);
  return counts_->stats;
}

void Group::reset_stats() {
  const std::scoped_lock lock(counts_->mutex);
  counts_->stats = {};
}

void Group::count(OpStats CommStats::* op, int64_t bytes) {
  const std::scoped_lock lock(counts_->mutex);
  OpStats& of_op = counts_->stats.*op;
  of_op.calls += 1;
  of_op.bytes += bytes;
}

at::Tensor Group::shared_memory(int64_t bytes, Label label) {
  TESSERA_CHECK_VALUE(bytes >= 0, "comm", CheckedCall{"shared_memory", label}.text(), bytes, " bytes");
  return do_shared_memory(bytes, label);
}

void Group::barrier(Label label) {
  count(&CommStats::barrier, 0);
  do_barrier(label);
}

}  // namespace tessera::comm
