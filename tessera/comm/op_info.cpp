#include "tessera/comm/op_info.h"

#include <cstdio>

#include "tessera/base/error.h"

namespace tessera::comm {

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
  }
  return "?";
}

namespace {

bool reduces(const OpInfo& info) {
  const std::string_view name = info.name;
  return name == "reduce_scatter" || name == "all_reduce";
}

std::string head(const OpInfo& info) {
  std::string text = std::string(info.name) + " (";
  if (!info.label.empty()) text += info.label + ", ";
  return text + std::to_string(info.bytes) + " B";
}

}  // namespace

std::string describe(const OpInfo& info) {
  return head(info) + ")";
}

std::string describe_fully(const OpInfo& info) {
  std::string text = head(info);
  if (info.dtype != c10::ScalarType::Undefined) text += std::string(", ") + c10::toString(info.dtype);
  if (reduces(info)) text += std::string(", ") + reduce_op_name(info.op);
  if (info.root >= 0) text += ", root " + std::to_string(info.root);
  return text + ")";
}

bool same_call(const OpInfo& a, const OpInfo& b) {
  const std::string_view name = a.name;
  return name == b.name && a.label == b.label && a.dtype == b.dtype && a.root == b.root &&
         (!reduces(a) || a.op == b.op) && (a.bytes == b.bytes || name == "all_to_all");
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

}  // namespace tessera::comm
