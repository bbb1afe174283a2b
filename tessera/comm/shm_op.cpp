#include "tessera/comm/shm_op.h"

#include <algorithm>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/comm/reduce_rows.h"

namespace tessera::comm {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kOneRound = 64 * 1024;  // all_reduce up to this size over all ranks: everybody adds everything

OpInfo info_of(const char* name, const at::Tensor& full, Label label, ReduceOp op = ReduceOp::Sum, int root = -1) {
  TESSERA_CHECK_VALUE(full.is_cpu(), "comm", name, " (", label, "): a group over shared memory takes CPU tensors, got ",
                      full.device());
  return describe_call(name, full, label, op, root);
}

char* bytes_of(const at::Tensor& t) {
  return static_cast<char*>(t.mutable_data_ptr());
}

void copy(char* to, const char* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
}

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// The part of `total` that step `step` covers when a step covers `each`.
struct Piece {
  int64_t begin = 0, count = 0;
};
Piece piece(int64_t total, int64_t each, int64_t step) {
  const int64_t begin = std::min(total, step * each);
  return {begin, std::min(each, total - begin)};
}

// Elements of `width` bytes in one of `rows` rows of a record, each row on a cache line of its own.
int64_t row_elements(int64_t rows, int64_t width) {
  return kRecordBytes / rows / kLine * kLine / width;
}

// Rows for all ranks but the writer: the place of that for rank `reader`.
int row_of(int reader, int writer) {
  return reader < writer ? reader : reader - 1;
}

class AllGather final : public ShmOp {
 public:
  AllGather(int rank, int size, const at::Tensor& out, const at::Tensor& in, Label label)
      : ShmOp(info_of("all_gather", out, label), rank, size),
        out_(out),
        in_(in),
        to_(bytes_of(out)),
        from_(bytes_of(in)),
        part_(static_cast<int64_t>(in.nbytes())) {
    copy(to_ + rank * part_, from_, part_);
  }

  std::optional<int64_t> steps() const override { return std::max<int64_t>(1, ceil_div(part_, kRecordBytes)); }
  void write(int64_t step, char* record) override {
    const auto [begin, count] = piece(part_, kRecordBytes, step);
    copy(record, from_ + begin, count);
  }
  std::string read(int64_t step, const char* const* records) override {
    const auto [begin, count] = piece(part_, kRecordBytes, step);
    for (int r = 0; r < size_; ++r) {
      if (r != rank_) copy(to_ + r * part_ + begin, records[r], count);
    }
    return {};
  }

 private:
  at::Tensor out_, in_;
  char* to_;
  const char* from_;
  int64_t part_;
};

class ReduceScatter final : public ShmOp {
 public:
  ReduceScatter(int rank, int size, const at::Tensor& out, const at::Tensor& in, ReduceOp op, Label label)
      : ShmOp(info_of("reduce_scatter", in, label, op), rank, size),
        out_(out),
        in_(in),
        to_(bytes_of(out)),
        from_(bytes_of(in)),
        width_(static_cast<int64_t>(in.element_size())),
        part_(out.numel()),
        each_(row_elements(size - 1, width_)),
        rows_(size) {}

  std::optional<int64_t> steps() const override { return std::max<int64_t>(1, ceil_div(part_, each_)); }
  void write(int64_t step, char* record) override {
    const auto [begin, count] = piece(part_, each_, step);
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      copy(record + row_of(r, rank_) * each_ * width_, from_ + (r * part_ + begin) * width_, count * width_);
    }
  }
  std::string read(int64_t step, const char* const* records) override {
    const auto [begin, count] = piece(part_, each_, step);
    for (int r = 0; r < size_; ++r) {
      rows_[r] = r == rank_ ? from_ + (rank_ * part_ + begin) * width_ : records[r] + row_of(rank_, r) * each_ * width_;
    }
    reduce_rows(to_ + begin * width_, rows_.data(), size_, count, info_.dtype, info_.op);
    return {};
  }

 private:
  at::Tensor out_, in_;
  char* to_;
  const char* from_;
  int64_t width_, part_, each_;
  std::vector<const void*> rows_;
};

// One round: everybody sends everything and adds everything.
class AllReduceOnce final : public ShmOp {
 public:
  AllReduceOnce(int rank, int size, const at::Tensor& tensor, ReduceOp op, Label label)
      : ShmOp(info_of("all_reduce", tensor, label, op), rank, size),
        tensor_(tensor),
        data_(bytes_of(tensor)),
        width_(static_cast<int64_t>(tensor.element_size())),
        total_(tensor.numel()),
        each_(row_elements(1, width_)),
        rows_(size) {}

  std::optional<int64_t> steps() const override { return std::max<int64_t>(1, ceil_div(total_, each_)); }
  void write(int64_t step, char* record) override {
    const auto [begin, count] = piece(total_, each_, step);
    copy(record, data_ + begin * width_, count * width_);
  }
  std::string read(int64_t step, const char* const* records) override {
    const auto [begin, count] = piece(total_, each_, step);
    char* const mine = data_ + begin * width_;
    for (int r = 0; r < size_; ++r)
      rows_[r] = r == rank_ ? mine : records[r];
    reduce_rows(mine, rows_.data(), size_, count, info_.dtype, info_.op);
    return {};
  }

 private:
  at::Tensor tensor_;
  char* data_;
  int64_t width_, total_, each_;
  std::vector<const void*> rows_;
};

// Two rounds per window of the tensor: every rank adds its row of the window, then the rows are shared. The script of
// m windows is add 0, add 1, share 0, add 2, share 1, ..., add m-1, share m-2, share m-1: one window of lead, so that
// nobody waits for a sum that was only just begun.
class AllReduceTwice final : public ShmOp {
 public:
  AllReduceTwice(int rank, int size, const at::Tensor& tensor, ReduceOp op, Label label)
      : ShmOp(info_of("all_reduce", tensor, label, op), rank, size),
        tensor_(tensor),
        data_(bytes_of(tensor)),
        width_(static_cast<int64_t>(tensor.element_size())),
        total_(tensor.numel()),
        each_(row_elements(size - 1, width_)),
        windows_(std::max<int64_t>(1, ceil_div(total_, each_ * size))),
        rows_(size) {}

  std::optional<int64_t> steps() const override { return 2 * windows_; }
  bool ready(int64_t step, int64_t received) const override {
    const Round round = round_of(step);
    return round.adds || received > (round.window == 0 ? 0 : 2 * round.window - 1);
  }
  void write(int64_t step, char* record) override {
    const Round round = round_of(step);
    if (!round.adds) {
      const auto [begin, count] = row(round.window, rank_);
      copy(record, data_ + begin * width_, count * width_);
      return;
    }
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const auto [begin, count] = row(round.window, r);
      copy(record + row_of(r, rank_) * each_ * width_, data_ + begin * width_, count * width_);
    }
  }
  std::string read(int64_t step, const char* const* records) override {
    const Round round = round_of(step);
    if (round.adds) {
      const auto [begin, count] = row(round.window, rank_);
      char* const mine = data_ + begin * width_;
      for (int r = 0; r < size_; ++r)
        rows_[r] = r == rank_ ? mine : records[r] + row_of(rank_, r) * each_ * width_;
      reduce_rows(mine, rows_.data(), size_, count, info_.dtype, info_.op);
      return {};
    }
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const auto [begin, count] = row(round.window, r);
      copy(data_ + begin * width_, records[r], count * width_);
    }
    return {};
  }

 private:
  struct Round {
    bool adds = false;
    int64_t window = 0;
  };
  Round round_of(int64_t step) const {
    if (step == 0) return {true, 0};
    if (step == 2 * windows_ - 1) return {false, windows_ - 1};
    return step % 2 == 1 ? Round{true, (step + 1) / 2} : Round{false, step / 2 - 1};
  }
  // What rank r adds of a window. The last one is cut into smaller rows.
  Piece row(int64_t window, int r) const {
    const auto [begin, count] = piece(total_, each_ * size_, window);
    const int64_t from = count * r / size_;
    return {begin + from, count * (r + 1) / size_ - from};
  }

  at::Tensor tensor_;
  char* data_;
  int64_t width_, total_, each_, windows_;
  std::vector<const void*> rows_;
};

class Broadcast final : public ShmOp {
 public:
  Broadcast(int rank, int size, const at::Tensor& tensor, int root, Label label)
      : ShmOp(info_of("broadcast", tensor, label, ReduceOp::Sum, root), rank, size),
        tensor_(tensor),
        data_(bytes_of(tensor)) {}

  std::optional<int64_t> steps() const override { return std::max<int64_t>(1, ceil_div(info_.bytes, kRecordBytes)); }
  void write(int64_t step, char* record) override {
    const auto [begin, count] = piece(info_.bytes, kRecordBytes, step);
    if (rank_ == info_.root) copy(record, data_ + begin, count);
  }
  std::string read(int64_t step, const char* const* records) override {
    const auto [begin, count] = piece(info_.bytes, kRecordBytes, step);
    if (rank_ != info_.root) copy(data_ + begin, records[info_.root], count);
    return {};
  }

 private:
  at::Tensor tensor_;
  char* data_;
};

// A record begins with what its writer sends to each rank in all, in bytes: so everybody knows after step 0 how many
// steps there are.
class AllToAll final : public ShmOp {
 public:
  AllToAll(int rank, int size, const at::Tensor& out, const at::Tensor& in, std::vector<int64_t> out_splits,
           std::vector<int64_t> in_splits, Label label)
      : ShmOp(info_of("all_to_all", in, label), rank, size),
        out_(out),
        in_(in),
        received_(places(out_splits, static_cast<int64_t>(out.element_size()))),
        sent_(places(in_splits, static_cast<int64_t>(in.element_size()))),
        head_(ceil_div(size * static_cast<int64_t>(sizeof(int64_t)), kLine) * kLine),
        each_((kRecordBytes - head_) / (size - 1) / kLine * kLine) {
    TESSERA_CHECK_VALUE(received_[rank].count == sent_[rank].count, "comm", describe(info_), ": rank ", rank, " sends ",
                        in_splits[rank], " elements to itself and expects ", out_splits[rank]);
    copy(bytes_of(out) + received_[rank].begin, bytes_of(in) + sent_[rank].begin, sent_[rank].count);
    at_least_ = needed(largest(sent_));
  }

  std::optional<int64_t> steps() const override { return steps_; }
  int64_t steps_at_least() const override { return at_least_; }
  void write(int64_t step, char* record) override {
    for (int r = 0; r < size_; ++r) {
      std::memcpy(record + r * sizeof(int64_t), &sent_[r].count, sizeof(int64_t));
      if (r == rank_) continue;
      const auto [begin, count] = piece(sent_[r].count, each_, step);
      copy(record + head_ + row_of(r, rank_) * each_, bytes_of(in_) + sent_[r].begin + begin, count);
    }
  }
  std::string read(int64_t step, const char* const* records) override {
    if (step == 0) {
      if (auto text = learn_steps(records); !text.empty()) return text;
    }
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const auto [begin, count] = piece(received_[r].count, each_, step);
      copy(bytes_of(out_) + received_[r].begin + begin, records[r] + head_ + row_of(rank_, r) * each_, count);
    }
    return {};
  }

 private:
  static std::vector<Piece> places(const std::vector<int64_t>& splits, int64_t width) {
    std::vector<Piece> result;
    int64_t begin = 0;
    for (const int64_t split : splits) {
      result.push_back({begin, split * width});
      begin += split * width;
    }
    return result;
  }
  int64_t needed(int64_t bytes) const { return std::max<int64_t>(1, ceil_div(bytes, each_)); }
  int64_t largest(const std::vector<Piece>& sent) const {
    int64_t bytes = 0;
    for (int r = 0; r < size_; ++r) {
      if (r != rank_) bytes = std::max(bytes, sent[r].count);
    }
    return bytes;
  }
  std::string learn_steps(const char* const* records) {
    int64_t steps = at_least_;
    for (int from = 0; from < size_; ++from) {
      if (from == rank_) continue;
      for (int to = 0; to < size_; ++to) {
        int64_t bytes = 0;
        std::memcpy(&bytes, records[from] + to * sizeof(int64_t), sizeof(int64_t));
        if (to == rank_ && bytes != received_[from].count) {
          return split_disagreement(describe(info_), from, bytes, rank_, received_[from].count);
        }
        if (to != from) steps = std::max(steps, needed(bytes));
      }
    }
    steps_ = steps;
    return {};
  }

  at::Tensor out_, in_;
  std::vector<Piece> received_, sent_;  // bytes
  int64_t head_, each_;
  int64_t at_least_ = 1;
  std::optional<int64_t> steps_;
};

class Barrier final : public ShmOp {
 public:
  Barrier(int rank, int size, Label label) : ShmOp({.name = "barrier", .label = std::string(label)}, rank, size) {}
  std::optional<int64_t> steps() const override { return 1; }
  void write(int64_t, char*) override {}
  std::string read(int64_t, const char* const*) override { return {}; }
};

}  // namespace

ShmOpPtr shm_all_gather(int rank, int size, const at::Tensor& out, const at::Tensor& in, Label label) {
  return std::make_shared<AllGather>(rank, size, out, in, label);
}

ShmOpPtr shm_reduce_scatter(int rank, int size, const at::Tensor& out, const at::Tensor& in, ReduceOp op, Label label) {
  return std::make_shared<ReduceScatter>(rank, size, out, in, op, label);
}

ShmOpPtr shm_all_reduce(int rank, int size, const at::Tensor& tensor, ReduceOp op, Label label) {
  // Over two ranks the sums of two rounds would save nothing.
  if (size == 2 || static_cast<int64_t>(tensor.nbytes()) * size <= kOneRound) {
    return std::make_shared<AllReduceOnce>(rank, size, tensor, op, label);
  }
  return std::make_shared<AllReduceTwice>(rank, size, tensor, op, label);
}

ShmOpPtr shm_broadcast(int rank, int size, const at::Tensor& tensor, int root, Label label) {
  return std::make_shared<Broadcast>(rank, size, tensor, root, label);
}

ShmOpPtr shm_all_to_all(int rank, int size, const at::Tensor& out, const at::Tensor& in,
                        std::vector<int64_t> out_splits, std::vector<int64_t> in_splits, Label label) {
  return std::make_shared<AllToAll>(rank, size, out, in, std::move(out_splits), std::move(in_splits), label);
}

ShmOpPtr shm_barrier(int rank, int size, Label label) {
  return std::make_shared<Barrier>(rank, size, label);
}

}  // namespace tessera::comm
