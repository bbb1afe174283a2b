// The collectives that add, in rank order: see Note [Order of summation] in group.h.
#include "tessera/comm/reduce_rows.h"
#include "tessera/comm/shm/pieces.h"

namespace tessera::comm {
namespace {

constexpr int64_t kOneRound = 64 * 1024;  // all_reduce up to this size over all ranks: everybody adds everything

// Part r is what all send to rank r, in elements from `from[r]`.
class ReduceScatter final : public ShmOp {
 public:
  ReduceScatter(int rank, int size, OpInfo info, const at::Tensor& out, std::vector<const char*> from,
                std::vector<int64_t> counts, ShmTensors held)
      : ShmOp(std::move(info), rank, size),
        out_(out),
        held_(std::move(held)),
        to_(bytes_of(out)),
        from_(std::move(from)),
        counts_(std::move(counts)),
        width_(static_cast<int64_t>(out.element_size())),
        each_(row_elements(size - 1, width_)),
        largest_(*std::max_element(counts_.begin(), counts_.end())),
        rows_(size) {}

  std::optional<int64_t> steps() const override { return steps_for(largest_, each_); }
  void write(int64_t step, char* record) override {
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const auto [begin, count] = piece(counts_[r], each_, step);
      copy_to_ring(record + row_of(r, rank_) * each_ * width_, from_[r] + begin * width_, count * width_, info_.bytes);
    }
  }
  std::string read(int64_t step, const char* const* records) override {
    const auto [begin, count] = piece(counts_[rank_], each_, step);
    for (int r = 0; r < size_; ++r)
      rows_[r] = r == rank_ ? from_[r] + begin * width_ : records[r] + row_of(rank_, r) * each_ * width_;
    reduce_rows(to_ + begin * width_, rows_.data(), size_, count, info_.dtype, info_.op,
                static_cast<int64_t>(out_.nbytes()));
    return {};
  }

 private:
  at::Tensor out_;
  ShmTensors held_;
  char* to_;
  std::vector<const char*> from_;
  std::vector<int64_t> counts_;
  int64_t width_, each_, largest_;
  std::vector<const void*> rows_;
};

// What both ways of summing a whole tensor know. A record has `rows` rows of `each_` elements.
class AllReduce : public ShmOp {
 protected:
  AllReduce(int rank, int size, const at::Tensor& tensor, ReduceOp op, Label label, int rows)
      : ShmOp(info_of("all_reduce", tensor, label, op), rank, size),
        tensor_(tensor),
        data_(bytes_of(tensor)),
        width_(static_cast<int64_t>(tensor.element_size())),
        total_(tensor.numel()),
        each_(row_elements(rows, width_)),
        rows_(size) {}

  // The sum of all ranks' rows of `mine` becomes this rank's row. `row_of(r)` is where the row of another rank r is.
  template <class F>
  void add_rows(const Piece& mine, const F& row_of) {
    char* const to = data_ + mine.begin * width_;
    for (int r = 0; r < size_; ++r)
      rows_[r] = r == rank_ ? to : row_of(r);
    reduce_rows(to, rows_.data(), size_, mine.count, info_.dtype, info_.op);
  }

  at::Tensor tensor_;
  char* data_;
  int64_t width_, total_, each_;
  std::vector<const void*> rows_;
};

// One round: everybody sends everything and adds everything.
class AllReduceOnce final : public AllReduce {
 public:
  AllReduceOnce(int rank, int size, const at::Tensor& tensor, ReduceOp op, Label label)
      : AllReduce(rank, size, tensor, op, label, 1) {}

  std::optional<int64_t> steps() const override { return steps_for(total_, each_); }
  void write(int64_t step, char* record) override {
    const auto [begin, count] = piece(total_, each_, step);
    copy_to_ring(record, data_ + begin * width_, count * width_, info_.bytes);
  }
  std::string read(int64_t step, const char* const* records) override {
    add_rows(piece(total_, each_, step), [&](int r) { return records[r]; });
    return {};
  }
};

// Two rounds per window of the tensor: every rank adds its row of the window, then the rows are shared. The script of
// m windows is add 0, add 1, share 0, add 2, share 1, ..., add m-1, share m-2, share m-1: one window of lead, so that
// nobody waits for a sum that was only just begun.
class AllReduceTwice final : public AllReduce {
 public:
  AllReduceTwice(int rank, int size, const at::Tensor& tensor, ReduceOp op, Label label)
      : AllReduce(rank, size, tensor, op, label, size - 1), windows_(steps_for(total_, each_ * size)) {}

  std::optional<int64_t> steps() const override { return 2 * windows_; }
  bool ready(int64_t step, int64_t received) const override {
    const Round round = round_of(step);
    return round.adds || received > (round.window == 0 ? 0 : 2 * round.window - 1);
  }
  void write(int64_t step, char* record) override {
    const Round round = round_of(step);
    if (!round.adds) {
      const auto [begin, count] = row(round.window, rank_);
      copy_bytes(record, data_ + begin * width_, count * width_);
      return;
    }
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const auto [begin, count] = row(round.window, r);
      copy_to_ring(record + row_of(r, rank_) * each_ * width_, data_ + begin * width_, count * width_, info_.bytes);
    }
  }
  std::string read(int64_t step, const char* const* records) override {
    const Round round = round_of(step);
    if (round.adds) {
      add_rows(row(round.window, rank_), [&](int r) { return records[r] + row_of(rank_, r) * each_ * width_; });
      return {};
    }
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const auto [begin, count] = row(round.window, r);
      copy_bytes(data_ + begin * width_, records[r], count * width_);
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
  // What rank r adds of a window. The last window is cut into smaller rows.
  Piece row(int64_t window, int r) const {
    const auto [begin, count] = piece(total_, each_ * size_, window);
    const int64_t from = count * r / size_;
    return {begin + from, count * (r + 1) / size_ - from};
  }

  const int64_t windows_;
};

// Everybody sends everything to the root.
class Reduce final : public ShmOp {
 public:
  Reduce(int rank, int size, const at::Tensor& tensor, ReduceOp op, int root, Label label)
      : ShmOp(info_of("reduce", tensor, label, op, root), rank, size),
        tensor_(tensor),
        width_(static_cast<int64_t>(tensor.element_size())),
        each_(row_elements(1, width_)),
        rows_(size) {}

  std::optional<int64_t> steps() const override { return steps_for(tensor_.numel(), each_); }
  void write(int64_t step, char* record) override {
    const auto [begin, count] = piece(tensor_.numel(), each_, step);
    if (rank_ != info_.root) copy_to_ring(record, bytes_of(tensor_) + begin * width_, count * width_, info_.bytes);
  }
  std::string read(int64_t step, const char* const* records) override {
    if (rank_ != info_.root) return {};
    const auto [begin, count] = piece(tensor_.numel(), each_, step);
    char* const mine = bytes_of(tensor_) + begin * width_;
    for (int r = 0; r < size_; ++r)
      rows_[r] = r == rank_ ? mine : records[r];
    reduce_rows(mine, rows_.data(), size_, count, info_.dtype, info_.op);
    return {};
  }

 private:
  at::Tensor tensor_;
  int64_t width_, each_;
  std::vector<const void*> rows_;
};

void check_reduction(const OpInfo& info) {
  TESSERA_CHECK_VALUE(can_reduce(info.dtype, info.op), "comm", describe(info), ": ", reduce_op_name(info.op),
                      " does not take dtype ", info.dtype);
}

}  // namespace

ShmOpPtr shm_reduce_scatter(int rank, int size, const at::Tensor& out, const at::Tensor& in, ReduceOp op, Label label) {
  OpInfo info = info_of("reduce_scatter", in, label, op);
  check_reduction(info);
  std::vector<const char*> from;
  from.reserve(size);
  for (int r = 0; r < size; ++r)
    from.push_back(bytes_of(in) + r * static_cast<int64_t>(out.nbytes()));
  return std::make_shared<ReduceScatter>(rank, size, std::move(info), out, std::move(from),
                                         std::vector<int64_t>(size, out.numel()), ShmTensors{in});
}

ShmOpPtr shm_reduce_scatter(int rank, int size, const at::Tensor& out, const ShmTensors& in, ReduceOp op, Label label) {
  OpInfo info = info_of_list("reduce_scatter", size, in, label, op);
  check_reduction(info);
  TESSERA_CHECK_VALUE(out.nbytes() == in[rank].nbytes() && out.scalar_type() == info.dtype, "comm", describe(info),
                      ": the output has ", out.nbytes(), " B, its part of the input ", in[rank].nbytes(), " B");
  std::vector<const char*> from;
  std::vector<int64_t> counts;
  for (const at::Tensor& t : in) {
    from.push_back(bytes_of(t));
    counts.push_back(t.numel());
  }
  return std::make_shared<ReduceScatter>(rank, size, std::move(info), out, std::move(from), std::move(counts), in);
}

ShmOpPtr shm_all_reduce(int rank, int size, const at::Tensor& tensor, ReduceOp op, Label label) {
  check_reduction(info_of("all_reduce", tensor, label, op));
  // Over two ranks the sums of two rounds would save nothing.
  if (size <= 2 || static_cast<int64_t>(tensor.nbytes()) * size <= kOneRound) {
    return std::make_shared<AllReduceOnce>(rank, size, tensor, op, label);
  }
  return std::make_shared<AllReduceTwice>(rank, size, tensor, op, label);
}

ShmOpPtr shm_reduce(int rank, int size, const at::Tensor& tensor, ReduceOp op, int root, Label label) {
  check_reduction(info_of("reduce", tensor, label, op, root));
  return std::make_shared<Reduce>(rank, size, tensor, op, root, label);
}

}  // namespace tessera::comm
