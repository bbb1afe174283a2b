#include "tessera/parallel/sizes.h"

#include <algorithm>
#include <numeric>
#include <string_view>

#include "tessera/base/error.h"

namespace tessera::parallel {

SizeRule rule_for(const std::string& name, int64_t total, int64_t kv_heads, int64_t grain) {
  static constexpr std::string_view kNoHeads[] = {"mlp", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"};
  const bool plain = name == "lm_head" || name == "embed_out" ||
                     std::ranges::any_of(kNoHeads, [&](std::string_view part) { return name.find(part) != name.npos; });
  return {!plain && kv_heads > 0 && total % kv_heads == 0 ? kv_heads : 0, grain};
}

Sizes part_sizes(int64_t total, int parts, SizeRule rule) {
  TESSERA_CHECK_VALUE(total > 0 && parts > 0 && rule.heads >= 0 && rule.grain > 0, "parallel", "cannot deal out ",
                      total, " elements to ", parts, " ranks by ", rule.heads, " heads or in grains of ", rule.grain,
                      ": the numbers must be positive");
  TESSERA_CHECK_VALUE(rule.heads == 0 || total % rule.heads == 0, "parallel",
                      "cannot deal out whole heads: ", rule.heads, " heads do not divide ", total, " elements");
  const int64_t unit = rule.heads > 0 ? total / rule.heads : rule.grain;
  const int64_t units = total / unit;
  Sizes sizes;
  for (int rank = 0; rank < parts; ++rank)
    sizes.push_back((units / parts + (rank < units % parts ? 1 : 0)) * unit);
  sizes.back() += total % unit;
  return sizes;
}

int64_t sum_of(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

Ranges ranges_of(const Sizes& sizes) {
  Ranges ranges;
  int64_t begin = 0;
  for (const int64_t size : sizes) {
    ranges.push_back({begin, begin + size});
    begin += size;
  }
  return ranges;
}

namespace {

int64_t product(Sizes::const_iterator begin, Sizes::const_iterator end) {
  return std::accumulate(begin, end, int64_t{1}, std::multiplies<>());
}

std::string text(const PackedShape& shape) {
  std::string result = "(";
  for (size_t i = 0; i < shape.entries.size(); ++i) {
    if (i > 0) result += ", ";
    const bool nested = static_cast<int>(i) == shape.nested;
    if (nested) result += "(";
    for (size_t j = 0; j < shape.entries[i].size(); ++j)
      result += c10::str(j > 0 ? ", " : "", shape.entries[i][j]);
    if (nested) result += ")";
  }
  return result + ")";
}

}  // namespace

void check_shape(const PackedShape& shape, const std::string& where) {
  const auto entries = static_cast<int>(shape.entries.size());
  TESSERA_CHECK_VALUE(entries >= 2, "parallel", where, ": shape ", text(shape),
                      " needs the outputs and the inputs of the weight, so two entries at least");
  TESSERA_CHECK_VALUE(shape.dim >= 0 && shape.dim < entries, "parallel", where, ": partition_dim ", shape.dim,
                      " is out of range for shape ", text(shape));
  TESSERA_CHECK_VALUE(shape.nested < 0 || shape.nested == shape.dim, "parallel", where, ": shape ", text(shape),
                      " has a nested list at entry ", shape.nested, "; a nested tuple only allowed at partition_dim (",
                      shape.dim, ")");
  int inferred = 0;
  for (int i = 0; i < entries; ++i) {
    const Sizes& entry = shape.entries[i];
    const bool nested = i == shape.nested;
    TESSERA_CHECK_VALUE(!entry.empty() && (nested || entry.size() == 1), "parallel", where, ": entry ", i,
                        " of a shape is ", entry.empty() ? "empty" : "a list", "; it must be a number",
                        nested ? " or a list of sizes" : "");
    for (const int64_t size : entry)
      TESSERA_CHECK_VALUE(size > 0 || (size == -1 && !nested), "parallel", where, ": shape ", text(shape), " has ",
                          size, nested ? "; sizes of sub-parameters are positive" : "; sizes are positive or -1");
    if (entry.front() == -1) ++inferred;
  }
  TESSERA_CHECK_VALUE(inferred <= 1, "parallel", where, ": shape ", text(shape), " has ", inferred,
                      " entries of -1; one at most can be inferred");
}

SubParams resolve(const PackedShape& shape, const Sizes& weight_sizes, const std::string& where) {
  check_shape(shape, where);
  TESSERA_CHECK_VALUE(weight_sizes.size() == 2, "parallel", where,
                      ": a shape describes a weight of two dims, this one has ", weight_sizes.size());
  const int64_t outputs = weight_sizes[0], inputs = weight_sizes[1];
  const auto last = static_cast<int>(shape.entries.size()) - 1;
  SubParams result;
  int unknown = -1;
  for (int i = 0; i <= last; ++i) {
    const Sizes& entry = shape.entries[i];
    const bool is_count = i == shape.dim && i != shape.nested;
    int64_t size = is_count ? -1 : sum_of(entry);
    if (size == -1 && i == last) size = inputs;
    if (size == -1) {
      TESSERA_CHECK_VALUE(unknown < 0, "parallel", where, ": entries ", unknown, " and ", i, " of shape ", text(shape),
                          " would both have to be inferred");
      unknown = i;
      size = 1;
    }
    result.view.push_back(size);
  }
  TESSERA_CHECK_VALUE(result.view[last] == inputs, "parallel", where, ": the last entry of shape ", text(shape), " is ",
                      result.view[last], ", the weight has ", inputs, " inputs");
  const int64_t known = product(result.view.begin(), result.view.end() - 1);
  TESSERA_CHECK_VALUE(unknown >= 0 ? outputs % known == 0 : outputs == known, "parallel", where, ": shape ",
                      text(shape), " is of ", known, unknown >= 0 ? " times so many" : "", " outputs, the weight has ",
                      outputs);
  if (unknown >= 0) result.view[unknown] = outputs / known;

  const int64_t size = result.view[shape.dim];
  Sizes subs = shape.entries[shape.dim];
  if (shape.dim != shape.nested) {
    const int64_t count = std::max<int64_t>(subs.front(), 1);  // -1: one, of whatever size
    TESSERA_CHECK_VALUE(size % count == 0, "parallel", where, ": ", count, " equal sub-parameters do not divide ", size,
                        " (shape ", text(shape), ")");
    subs.assign(count, size / count);
  }
  result.dim = shape.dim == last ? 1 : 0;
  const int64_t outer = result.dim == 1 ? 1 : product(result.view.begin(), result.view.begin() + shape.dim);
  result.unit = result.dim == 1 ? 1 : product(result.view.begin() + shape.dim + 1, result.view.end() - 1);
  for (int64_t o = 0; o < outer; ++o)
    for (const int64_t sub : subs)
      result.sizes.push_back(sub * result.unit);
  return result;
}

std::vector<Ranges> packed_ranges(const Sizes& sub_sizes, int parts, const std::vector<SizeRule>& rules) {
  TESSERA_CHECK_VALUE(rules.size() == 1 || rules.size() == sub_sizes.size(), "parallel", rules.size(), " rules for ",
                      sub_sizes.size(), " sub-parameters");
  TESSERA_CHECK_VALUE(parts > 0, "parallel", "cannot cut a weight for ", parts, " ranks");
  std::vector<Ranges> result(parts);
  int64_t begin = 0;
  for (size_t i = 0; i < sub_sizes.size(); ++i) {
    const Ranges pieces = ranges_of(part_sizes(sub_sizes[i], parts, rules[rules.size() == 1 ? 0 : i]));
    for (int rank = 0; rank < parts; ++rank) {
      const shard::Range piece{begin + pieces[rank].begin, begin + pieces[rank].end};
      if (piece.empty()) continue;
      Ranges& mine = result[rank];
      if (!mine.empty() && mine.back().end == piece.begin)
        mine.back().end = piece.end;
      else
        mine.push_back(piece);
    }
    begin += sub_sizes[i];
  }
  for (Ranges& ranges : result)
    if (ranges.empty()) ranges.push_back({0, 0});
  return result;
}

}  // namespace tessera::parallel
