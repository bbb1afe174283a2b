#include "tessera/pipeline/boxes.h"

#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <map>

#include "tessera/base/error.h"

namespace tessera::pipeline {
namespace {

using List = c10::IntArrayRef;  // for errors

enum class Lies { Batch, Sequence, Both };

// What lies along a dim, by dim.
std::map<int, Lies> cut_dims(const Layout& layout, const Dims& dims, const Sizes& shape, const std::string& where) {
  std::map<int, Lies> cut;
  const int count = static_cast<int>(shape.size());
  const auto add = [&](const char* name, std::optional<int> dim, int ranks, Lies what) {
    if (ranks == 1 || !dim) return;
    TESSERA_CHECK_VALUE(-count <= *dim && *dim < count, "hybrid", where, ": ", name, " is ", *dim,
                        ", but a tensor has the sizes ", List(shape));
    const auto [found, fresh] = cut.try_emplace((*dim + count) % count, what);
    if (!fresh) found->second = Lies::Both;
  };
  add("batch_dim", dims.batch, layout.batch, Lies::Batch);
  add("sequence_dim", dims.sequence, layout.sequence, Lies::Sequence);
  return cut;
}

std::vector<List> rows_in(const Sizes& sizes, int row) {
  std::vector<List> rows;
  for (size_t i = 0; i < sizes.size(); i += row)
    rows.push_back(List(sizes).slice(i, row));
  return rows;
}

// Where along a dim each part begins.
Sizes begins_of(const Sizes& sizes, Lies what, const Layout& layout, int dim, const std::string& where) {
  Sizes begins(sizes.size(), 0);
  const int row = layout.sequence;
  for (int part = 0; part < static_cast<int>(sizes.size()); ++part) {
    const int place = part % row, before = part - (what == Lies::Batch ? row : 1);
    if (what == Lies::Batch) {
      TESSERA_CHECK_VALUE(sizes[part] == sizes[part - place], "hybrid", where, ": ranks that share a sequence have ",
                          List(sizes), " rows along dim ", dim);
    } else if (what == Lies::Sequence) {
      TESSERA_CHECK_VALUE(sizes[part] == sizes[place], "hybrid", where,
                          ": batches have sequences of other lengths along dim ", dim, ": ",
                          c10::ArrayRef<List>(rows_in(sizes, row)));
      if (place == 0) continue;
    }
    if (before >= 0) begins[part] = begins[before] + sizes[before];
  }
  return begins;
}

std::pair<int64_t, int64_t> nth(std::pair<int64_t, int64_t> rows, int parts, int number) {
  const int64_t size = (rows.second - rows.first) / parts, larger = (rows.second - rows.first) % parts;
  const int64_t begin = rows.first + number * size + std::min<int64_t>(number, larger);
  return {begin, begin + size + (number < larger ? 1 : 0)};
}

std::pair<int64_t, int64_t> rows_held_by(int number, int ranks, int64_t rows, const std::optional<Sizes>& samples,
                                         const std::string& where) {
  if (!samples) return nth({0, rows}, ranks, number);
  Sizes ends{0};
  for (const int64_t size : *samples)
    ends.push_back(ends.back() + size);
  TESSERA_CHECK_VALUE(ends.back() == rows, "hybrid", where, ": samples of ", List(*samples), " rows are ", ends.back(),
                      ", a tensor has ", rows);
  const auto [begin, end] = nth({0, static_cast<int64_t>(samples->size())}, ranks, number);
  return {ends[begin], ends[end]};
}

}  // namespace

Layout Layout::of(const comm::MeshShape& shape) {
  return {shape.size(comm::kBatchAxes), shape.size(comm::Axis::Sp), shape.size(comm::kModelAxes)};
}

void check(const Dims& dims, const Layout& layout, const std::string& where) {
  TESSERA_CHECK_VALUE(layout.sequence == 1 || dims.sequence, "hybrid", where, ": ", layout.sequence,
                      " ranks share a sequence; say sequence_dim, its dim");
}

WholeTensor whole_of(const Layout& layout, const Dims& dims, const std::vector<Sizes>& shapes,
                     const std::string& where) {
  const Sizes& first = shapes[0];
  WholeTensor whole{first, std::vector<Box>(shapes.size())};
  const auto cut = first.empty() ? std::map<int, Lies>() : cut_dims(layout, dims, first, where);
  for (size_t part = 0; part < shapes.size(); ++part) {
    bool fits = shapes[part].size() == first.size();
    for (int d = 0; fits && d < static_cast<int>(first.size()); ++d) {
      fits = cut.contains(d) || shapes[part][d] == first[d];
      whole.held[part].emplace_back(0, shapes[part][d]);
    }
    TESSERA_CHECK_VALUE(fits, "hybrid", where, ": the parts of ranks 0 and ", part * layout.replicas,
                        " do not fit together: ", List(first), " and ", List(shapes[part]));
  }
  for (const auto& [dim, what] : cut) {
    Sizes sizes;
    for (const Sizes& shape : shapes)
      sizes.push_back(shape[dim]);
    const Sizes begins = begins_of(sizes, what, layout, dim, where);
    for (size_t part = 0; part < shapes.size(); ++part) {
      whole.held[part][dim] = {begins[part], begins[part] + sizes[part]};
      whole.sizes[dim] = std::max(whole.sizes[dim], begins[part] + sizes[part]);
    }
  }
  return whole;
}

std::vector<Box> wanted_of(const Layout& layout, const Dims& dims, const Sizes& whole,
                           const std::optional<Sizes>& samples, const std::string& where) {
  Box all;
  for (const int64_t size : whole)
    all.emplace_back(0, size);
  std::vector<Box> boxes(layout.parts(), all);
  if (whole.empty()) return boxes;
  for (const auto& [dim, what] : cut_dims(layout, dims, whole, where)) {
    for (int part = 0; part < layout.parts(); ++part) {
      auto rows = all[dim];
      if (what != Lies::Sequence) rows = rows_held_by(part / layout.sequence, layout.batch, whole[dim], samples, where);
      boxes[part][dim] = what == Lies::Batch ? rows : nth(rows, layout.sequence, part % layout.sequence);
    }
  }
  return boxes;
}

std::optional<Box> route(const std::vector<Box>& held, int part, const Box& wanted) {
  if (wanted.empty()) return part == 0 ? std::optional(Box()) : std::nullopt;
  Box both;
  for (size_t d = 0; d < wanted.size(); ++d) {
    both.emplace_back(std::max(held[part][d].first, wanted[d].first), std::min(held[part][d].second, wanted[d].second));
    if (both.back().first >= both.back().second) return std::nullopt;
  }
  return both;
}

}  // namespace tessera::pipeline
