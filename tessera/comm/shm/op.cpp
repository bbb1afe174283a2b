#include "tessera/comm/shm/op.h"

#include <cstring>

#include "tessera/comm/shm/pieces.h"

namespace tessera::comm {

OpInfo info_of_list(const char* name, int size, const ShmTensors& list, Label label, ReduceOp op) {
  TESSERA_CHECK_VALUE(static_cast<int>(list.size()) == size, "comm", name, " (", label, "): ", list.size(),
                      " tensors for ", size, " ranks");
  OpInfo info = info_of(name, list[0], label, op);
  bool equal = true;
  info.bytes = 0;
  for (const at::Tensor& t : list) {
    TESSERA_CHECK_VALUE(t.is_cpu() && t.scalar_type() == list[0].scalar_type(), "comm", name, " (", label,
                        "): the tensors of a list must be CPU tensors of one dtype, got ", t.scalar_type(), " on ",
                        t.device(), " beside ", list[0].scalar_type());
    info.bytes += static_cast<int64_t>(t.nbytes());
    equal = equal && t.nbytes() == list[0].nbytes();
  }
  if (!equal) {
    for (const at::Tensor& t : list) {
      if (!info.label.empty()) info.label += ' ';
      info.label += std::to_string(t.nbytes());
    }
  }
  return info;
}

namespace {

// Part r of `parts` comes from rank r.
class AllGather final : public ShmOp {
 public:
  AllGather(int rank, int size, OpInfo info, std::vector<Piece> parts, ShmTensors out, const at::Tensor& in)
      : ShmOp(std::move(info), rank, size), parts_(std::move(parts)), out_(std::move(out)), in_(in) {
    for (int r = 0; r < size; ++r) {
      const bool list = out_.size() > 1;
      to_.push_back(bytes_of(out_[list ? r : 0]) + parts_[r].begin);
      largest_ = std::max(largest_, parts_[r].count);
    }
    from_ = bytes_of(in);
    if (size == 1) copy_result(to_[rank], from_, parts_[rank].count, info_.bytes);  // nothing is written into rings
  }

  std::optional<int64_t> steps() const override { return steps_for(largest_, kRecordBytes); }
  void write(int64_t step, char* record) override {
    const auto [begin, count] = piece(parts_[rank_].count, kRecordBytes, step);
    copy_to_ring(record, from_ + begin, count, info_.bytes);
    copy_result(to_[rank_] + begin, from_ + begin, count, info_.bytes);  // while the bytes are in the cache
  }
  std::string read(int64_t step, const char* const* records) override {
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const auto [begin, count] = piece(parts_[r].count, kRecordBytes, step);
      copy_result(to_[r] + begin, records[r], count, info_.bytes);
    }
    return {};
  }

 private:
  std::vector<Piece> parts_;
  ShmTensors out_;
  at::Tensor in_;
  std::vector<char*> to_;
  const char* from_;
  int64_t largest_ = 0;
};

class Broadcast final : public ShmOp {
 public:
  Broadcast(int rank, int size, const at::Tensor& tensor, int root, Label label)
      : ShmOp(info_of("broadcast", tensor, label, ReduceOp::Sum, root), rank, size),
        tensor_(tensor),
        data_(bytes_of(tensor)) {}

  std::optional<int64_t> steps() const override { return steps_for(info_.bytes, kRecordBytes); }
  void write(int64_t step, char* record) override {
    const auto [begin, count] = piece(info_.bytes, kRecordBytes, step);
    if (rank_ == info_.root) copy_to_ring(record, data_ + begin, count, info_.bytes);
  }
  std::string read(int64_t step, const char* const* records) override {
    const auto [begin, count] = piece(info_.bytes, kRecordBytes, step);
    if (rank_ != info_.root) copy_result(data_ + begin, records[info_.root], count, info_.bytes);
    return {};
  }

 private:
  at::Tensor tensor_;
  char* data_;
};

class Gather final : public ShmOp {
 public:
  Gather(int rank, int size, const ShmTensors& out, const at::Tensor& in, int root, Label label)
      : ShmOp(info_of("gather", in, label, ReduceOp::Sum, root), rank, size), out_(out), in_(in) {
    if (rank == root) copy_result(bytes_of(out[rank]), bytes_of(in), info_.bytes, info_.bytes * size);
  }

  std::optional<int64_t> steps() const override { return steps_for(info_.bytes, kRecordBytes); }
  void write(int64_t step, char* record) override {
    const auto [begin, count] = piece(info_.bytes, kRecordBytes, step);
    if (rank_ != info_.root) copy_to_ring(record, bytes_of(in_) + begin, count, info_.bytes);
  }
  std::string read(int64_t step, const char* const* records) override {
    const auto [begin, count] = piece(info_.bytes, kRecordBytes, step);
    for (int r = 0; r < size_ && rank_ == info_.root; ++r) {
      if (r != rank_) copy_result(bytes_of(out_[r]) + begin, records[r], count, info_.bytes * size_);
    }
    return {};
  }

 private:
  ShmTensors out_;
  at::Tensor in_;
};

// A record of the root has a row for each other rank.
class Scatter final : public ShmOp {
 public:
  Scatter(int rank, int size, const at::Tensor& out, const ShmTensors& in, int root, Label label)
      : ShmOp(info_of("scatter", out, label, ReduceOp::Sum, root), rank, size),
        out_(out),
        in_(in),
        each_(row_elements(size - 1, 1)) {
    if (rank == root) copy_result(bytes_of(out), bytes_of(in[rank]), info_.bytes, info_.bytes);
  }

  std::optional<int64_t> steps() const override { return steps_for(info_.bytes, each_); }
  void write(int64_t step, char* record) override {
    const auto [begin, count] = piece(info_.bytes, each_, step);
    for (int r = 0; r < size_ && rank_ == info_.root; ++r) {
      if (r != rank_) copy_to_ring(record + row_of(r, rank_) * each_, bytes_of(in_[r]) + begin, count, info_.bytes);
    }
  }
  std::string read(int64_t step, const char* const* records) override {
    const auto [begin, count] = piece(info_.bytes, each_, step);
    const int root = info_.root;
    if (rank_ == root) return {};
    copy_result(bytes_of(out_) + begin, records[root] + row_of(rank_, root) * each_, count, info_.bytes);
    return {};
  }

 private:
  at::Tensor out_;
  ShmTensors in_;
  int64_t each_;
};

// The place of one tensor in a call.
struct Span {
  char* data = nullptr;
  int64_t bytes = 0;
};

// Records begin with what their writer sends to each rank in all, in bytes: so everybody knows after step 0 how many
// steps there are.
class AllToAll final : public ShmOp {
 public:
  AllToAll(int rank, int size, OpInfo info, std::vector<Span> out, std::vector<Span> in, ShmTensors held)
      : ShmOp(std::move(info), rank, size),
        held_(std::move(held)),
        received_(std::move(out)),
        sent_(std::move(in)),
        head_(ceil_div(size * static_cast<int64_t>(sizeof(int64_t)), kLine) * kLine),
        each_((kRecordBytes - head_) / std::max(1, size - 1) / kLine * kLine) {
    for (const Span& place : received_)
      total_ += place.bytes;
    copy_result(received_[rank].data, sent_[rank].data, sent_[rank].bytes, total_);
    int64_t largest = 0;
    for (int r = 0; r < size_; ++r) {
      if (r != rank_) largest = std::max(largest, sent_[r].bytes);
    }
    at_least_ = steps_for(largest, each_);
  }

  std::optional<int64_t> steps() const override { return steps_; }
  int64_t steps_at_least() const override { return at_least_; }
  void write(int64_t step, char* record) override {
    for (int r = 0; r < size_; ++r) {
      std::memcpy(record + r * sizeof(int64_t), &sent_[r].bytes, sizeof(int64_t));
      if (r == rank_) continue;
      const auto [begin, count] = piece(sent_[r].bytes, each_, step);
      copy_to_ring(record + head_ + row_of(r, rank_) * each_, sent_[r].data + begin, count, info_.bytes);
    }
  }
  std::string read(int64_t step, const char* const* records) override {
    if (step == 0) {
      if (auto text = learn_steps(records); !text.empty()) return text;
    }
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const auto [begin, count] = piece(received_[r].bytes, each_, step);
      copy_result(received_[r].data + begin, records[r] + head_ + row_of(rank_, r) * each_, count, total_);
    }
    return {};
  }

 private:
  std::string learn_steps(const char* const* records) {
    int64_t steps = at_least_;
    for (int from = 0; from < size_; ++from) {
      if (from == rank_) continue;
      for (int to = 0; to < size_; ++to) {
        int64_t bytes = 0;
        std::memcpy(&bytes, records[from] + to * sizeof(int64_t), sizeof(int64_t));
        if (to == rank_ && bytes != received_[from].bytes) {
          return split_disagreement(describe(info_), number(from), bytes, number(rank_), received_[from].bytes);
        }
        if (to != from) steps = std::max(steps, steps_for(bytes, each_));
      }
    }
    steps_ = steps;
    return {};
  }

  ShmTensors held_;
  std::vector<Span> received_, sent_;
  int64_t total_ = 0;  // bytes of all that is received
  int64_t head_, each_;
  int64_t at_least_ = 1;
  std::optional<int64_t> steps_;
};

std::vector<Span> places_of(const at::Tensor& t, const std::vector<int64_t>& splits) {
  std::vector<Span> result;
  char* data = bytes_of(t);
  for (const int64_t split : splits) {
    const int64_t bytes = split * static_cast<int64_t>(t.element_size());
    result.push_back({data, bytes});
    data += bytes;
  }
  return result;
}

std::vector<Span> places_of(const ShmTensors& list) {
  std::vector<Span> result;
  for (const at::Tensor& t : list)
    result.push_back({bytes_of(t), static_cast<int64_t>(t.nbytes())});
  return result;
}

class Barrier final : public ShmOp {
 public:
  Barrier(int rank, int size, Label label) : ShmOp({.name = "barrier", .label = std::string(label)}, rank, size) {}
  std::optional<int64_t> steps() const override { return 1; }
  void write(int64_t, char*) override {}
  std::string read(int64_t, const char* const*) override { return {}; }
};

}  // namespace

ShmOpPtr shm_all_gather(int rank, int size, const at::Tensor& out, const at::Tensor& in, Label label) {
  const auto bytes = static_cast<int64_t>(in.nbytes());
  std::vector<Piece> parts;
  parts.reserve(size);
  for (int r = 0; r < size; ++r)
    parts.push_back({r * bytes, bytes});
  return std::make_shared<AllGather>(rank, size, info_of("all_gather", out, label), parts, ShmTensors{out}, in);
}

ShmOpPtr shm_all_gather(int rank, int size, const ShmTensors& out, const at::Tensor& in, Label label) {
  OpInfo info = info_of_list("all_gather", size, out, label);
  TESSERA_CHECK_VALUE(in.nbytes() == out[rank].nbytes() && in.scalar_type() == info.dtype, "comm", describe(info),
                      ": the input has ", in.nbytes(), " B, its place in the output ", out[rank].nbytes(), " B");
  std::vector<Piece> parts;
  for (const at::Tensor& t : out)
    parts.push_back({0, static_cast<int64_t>(t.nbytes())});
  return std::make_shared<AllGather>(rank, size, std::move(info), parts, out, in);
}

ShmOpPtr shm_broadcast(int rank, int size, const at::Tensor& tensor, int root, Label label) {
  return std::make_shared<Broadcast>(rank, size, tensor, root, label);
}

namespace {

// Checks the list that only the root of a gather or scatter has.
void check_root_list(const char* name, int size, const ShmTensors& list, const at::Tensor& own, Label label) {
  const OpInfo info = info_of_list(name, size, list, label);
  for (const at::Tensor& t : list) {
    TESSERA_CHECK_VALUE(t.nbytes() == own.nbytes() && t.scalar_type() == own.scalar_type(), "comm", describe(info),
                        ": the list has a tensor of ", t.nbytes(), " B (", t.scalar_type(), "), this rank's own has ",
                        own.nbytes(), " B (", own.scalar_type(), ")");
  }
}

}  // namespace

ShmOpPtr shm_gather(int rank, int size, const ShmTensors& out, const at::Tensor& in, int root, Label label) {
  if (rank == root) check_root_list("gather", size, out, in, label);
  return std::make_shared<Gather>(rank, size, out, in, root, label);
}

ShmOpPtr shm_scatter(int rank, int size, const at::Tensor& out, const ShmTensors& in, int root, Label label) {
  if (rank == root) check_root_list("scatter", size, in, out, label);
  return std::make_shared<Scatter>(rank, size, out, in, root, label);
}

ShmOpPtr shm_all_to_all(int rank, int size, const at::Tensor& out, const at::Tensor& in,
                        std::vector<int64_t> out_splits, std::vector<int64_t> in_splits, Label label) {
  OpInfo info = info_of("all_to_all", in, label);
  TESSERA_CHECK_VALUE(out_splits[rank] == in_splits[rank], "comm", describe(info), ": rank ", rank, " sends ",
                      in_splits[rank], " elements to itself and expects ", out_splits[rank]);
  return std::make_shared<AllToAll>(rank, size, std::move(info), places_of(out, out_splits), places_of(in, in_splits),
                                    ShmTensors{out, in});
}

ShmOpPtr shm_all_to_all(int rank, int size, const ShmTensors& out, const ShmTensors& in, Label label) {
  const OpInfo wanted = info_of_list("all_to_all", size, out, label);
  OpInfo info = info_of_list("all_to_all", size, in, label);
  info.label = std::string(label);  // sizes are between two ranks here
  TESSERA_CHECK_VALUE(wanted.dtype == info.dtype, "comm", describe(info), ": outputs are ", wanted.dtype,
                      " and inputs are ", info.dtype);
  TESSERA_CHECK_VALUE(out[rank].numel() == in[rank].numel(), "comm", describe(info), ": rank ", rank, " sends ",
                      in[rank].numel(), " elements to itself and expects ", out[rank].numel());
  ShmTensors held = out;
  held.insert(held.end(), in.begin(), in.end());
  return std::make_shared<AllToAll>(rank, size, std::move(info), places_of(out), places_of(in), std::move(held));
}

ShmOpPtr shm_barrier(int rank, int size, Label label) {
  return std::make_shared<Barrier>(rank, size, label);
}

}  // namespace tessera::comm
