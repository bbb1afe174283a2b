#include "tests/stand_in/uses.h"

#include <algorithm>

namespace tessera::stand_in {
namespace {

constexpr int64_t kPieces = 4096;  // what has more counts as a whole

struct Dim {
  int64_t stride, size;  // in bytes; elements
};

// Outermost first; those that change the address.
std::vector<Dim> dims_of(const at::Tensor& t) {
  std::vector<Dim> dims;
  for (int64_t i = 0; i < t.dim(); ++i)
    if (t.size(i) > 1 && t.stride(i) != 0)
      dims.push_back({t.stride(i) * static_cast<int64_t>(t.itemsize()), t.size(i)});
  std::sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) { return a.stride > b.stride; });
  return dims;
}

}  // namespace

Bytes whole(const at::Tensor& t) {
  if (t.numel() == 0) return {};
  size_t size = t.itemsize();
  for (const Dim& dim : dims_of(t))
    size += static_cast<size_t>(dim.stride * (dim.size - 1));
  return bytes_at(t.data_ptr(), size);
}

void add_uses(std::vector<Use>& uses, const at::Tensor& t, bool writes, const char* part) {
  if (t.numel() == 0) return;
  std::vector<Dim> dims = dims_of(t);
  auto run = static_cast<int64_t>(t.itemsize());
  for (; !dims.empty() && dims.back().stride == run; dims.pop_back())
    run *= dims.back().size;
  int64_t pieces = 1;
  for (const Dim& dim : dims)
    pieces *= dim.size;
  if (pieces > kPieces) {
    uses.push_back({whole(t), writes, part});
    return;
  }
  const Bytes first = bytes_at(t.data_ptr(), static_cast<size_t>(run));
  for (int64_t piece = 0; piece < pieces; ++piece) {
    int64_t offset = 0, rest = piece;
    for (auto dim = dims.rbegin(); dim != dims.rend(); rest /= dim->size, ++dim)
      offset += rest % dim->size * dim->stride;
    uses.push_back(
        {{first.begin + static_cast<uintptr_t>(offset), first.end + static_cast<uintptr_t>(offset)}, writes, part});
  }
}

}  // namespace tessera::stand_in
