#include "tessera/comm/op_info.h"

#include <algorithm>
#include <cstdio>

#include "tessera/base/error.h"

namespace tessera::comm {

OpInfo describe_call(const char* name, const at::Tensor& full, Label label, ReduceOp op, int root) {
  return {.name = name,
          .label = std::string(label),
          .bytes = static_cast<int64_t>(full.nbytes()),
          .dtype = full.scalar_type(),
          .op = op,
          .root = root};
}

const char* reduce_op_name(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
      return "sum";
    case ReduceOp::Avg:
      return "avg";
    case ReduceOp::Min:
      return "min";
    case ReduceOp::Max:
      return "max";
    case ReduceOp::Product:
      return "product";
    case ReduceOp::BitAnd:
      return "bitwise and";
    case ReduceOp::BitOr:
      return "bitwise or";
    case ReduceOp::BitXor:
      return "bitwise xor";
  }
  return "?";
}

namespace {

bool reduces(const OpInfo& info) {
  const std::string_view name = info.name;
  return name == "reduce_scatter" || name == "all_reduce" || name == "reduce";
}

bool any_size(const OpInfo& info) {
  return std::string_view(info.name) == "all_to_all";
}

std::string head(const OpInfo& info) {
  std::string text = std::string(info.name) + " (";
  if (!info.label.empty()) text += info.label + ", ";
  return text + std::to_string(info.bytes) + " B";
}

std::string tail(const OpInfo& info) {
  std::string text;
  if (info.dtype != c10::ScalarType::Undefined) text += std::string(", ") + c10::toString(info.dtype);
  if (reduces(info)) text += std::string(", ") + reduce_op_name(info.op);
  if (info.root >= 0) text += ", root " + std::to_string(info.root);
  return text + ")";
}

// FNV-1a over the bytes of a text and over those of a number, lowest first.
struct Hash {
  uint64_t value = 0xcbf29ce484222325u;

  void add(unsigned char byte) { value = (value ^ byte) * 0x100000001b3u; }
  void add(std::string_view text) {
    for (const char c : text)
      add(static_cast<unsigned char>(c));
    add(static_cast<unsigned char>(0));
  }
  void add(int64_t number) {
    for (unsigned i = 0; i < 8; ++i)
      add(static_cast<unsigned char>(static_cast<uint64_t>(number) >> (8 * i)));
  }
};

}  // namespace

std::string describe(const OpInfo& info) {
  return head(info) + ")";
}

std::string describe_fully(const OpInfo& info) {
  return head(info) + tail(info);
}

bool same_call(const OpInfo& a, const OpInfo& b) {
  const std::string_view name = a.name;
  return name == b.name && a.label == b.label && a.dtype == b.dtype && a.root == b.root &&
         (!reduces(a) || a.op == b.op) && (a.bytes == b.bytes || any_size(a));
}

std::string agreement(const OpInfo& info) {
  OpInfo part = info;
  if (any_size(info)) part.bytes = 0;
  return describe_fully(part);
}

uint64_t agreement_hash(const OpInfo& info) {
  Hash hash;
  hash.add(std::string_view(info.name));
  hash.add(std::string_view(info.label));
  hash.add(any_size(info) ? int64_t{0} : info.bytes);
  hash.add(static_cast<int64_t>(info.dtype));
  hash.add(reduces(info) ? static_cast<int64_t>(info.op) : int64_t{0});
  hash.add(static_cast<int64_t>(info.root));
  return hash.value;
}

std::string disagreement(int rank_a, std::string_view a, int rank_b, std::string_view b) {
  std::string text = std::string(kDisagreement) + ": rank " + std::to_string(rank_a) + " called ";
  text += a;
  text += ", rank " + std::to_string(rank_b) + " called ";
  text += b;
  const auto is_norm = [](std::string_view call) { return call.find(kGradientNorm) != std::string_view::npos; };
  if (is_norm(a) != is_norm(b)) text.append("; ").append(kCountsQuestion);
  return text;
}

std::string split_disagreement(std::string_view call, int from, int64_t sent, int to, int64_t expected) {
  std::string text = std::string(kDisagreement) + ": in ";
  text += call;
  return text + " rank " + std::to_string(from) + " sends " + std::to_string(sent) + " B to rank " +
         std::to_string(to) + ", which expects " + std::to_string(expected) + " B";
}

std::string join(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks)
    text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

void throw_failed(int rank, int size, const OpInfo& info, double seconds, const std::string& cause) {
  char after[32];
  std::snprintf(after, sizeof(after), "%.2f s", seconds);
  TESSERA_CHECK_DIST(false, "comm", "rank ", rank, " of ", size, ": ", describe(info), " failed after ", after, ": ",
                     cause);
}

std::string cause_of(const std::exception& error) {
  std::string text = error.what();
  text.resize(std::min(text.find('\n'), text.size()));
  const auto after = text.find(" failed after ");
  const auto end = after == std::string::npos ? after : text.find(" s: ", after);
  if (text.starts_with("[comm] rank ") && end != std::string::npos) text.erase(0, end + 4);
  return text;
}

}  // namespace tessera::comm
