#include "tessera/parallel/transfers.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <c10/core/WrapDimMinimal.h>

#include <algorithm>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/comm/reduce_rows.h"

namespace tessera::parallel {
namespace {

bool even(const Sizes& sizes) {
  return std::ranges::all_of(sizes, [&](int64_t size) { return size == sizes.front(); });
}

// Whether slices along `dim` are contiguous one after the other.
bool outermost(at::IntArrayRef sizes, int64_t dim) {
  return std::all_of(sizes.begin(), sizes.begin() + dim, [](int64_t size) { return size == 1; });
}

Sizes with(at::IntArrayRef sizes, int64_t dim, int64_t size) {
  Sizes result = sizes.vec();
  result[dim] = size;
  return result;
}

int64_t product(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

int64_t dim_of(const at::Tensor& x, int64_t dim, const std::string& label) {
  TESSERA_CHECK_VALUE(x.defined() && dim >= -x.dim() && dim < x.dim(), "parallel", label, ": a tensor of ",
                      x.defined() ? x.dim() : 0, " dims has no dim ", dim);
  return dim < 0 ? dim + x.dim() : dim;
}

// The ranks' sizes along a dim of which this rank has its part.
Sizes sizes_of_parts(const at::Tensor& x, int64_t dim, const Sizes& given, const comm::Group& group,
                     const std::string& label) {
  if (given.empty()) return Sizes(group.size(), x.size(dim));
  TESSERA_CHECK_VALUE(static_cast<int>(given.size()) == group.size(), "parallel", label, ": ", given.size(),
                      " sizes for ", group.size(), " ranks");
  TESSERA_CHECK_VALUE(given[group.rank()] == x.size(dim), "parallel", label, ": rank ", group.rank(), " has ",
                      x.size(dim), " elements along dim ", dim, ", its size is given as ", given[group.rank()]);
  return given;
}

// The ranks' sizes along a dim of which this rank has the whole.
Sizes sizes_of_whole(const at::Tensor& x, int64_t dim, const Sizes& given, const comm::Group& group,
                     const std::string& label) {
  const int64_t size = x.size(dim);
  if (given.empty()) {
    TESSERA_CHECK_VALUE(size % group.size() == 0, "parallel", label, ": ", size, " elements along dim ", dim,
                        " do not divide among ", group.size(), " ranks; give their sizes");
    return Sizes(group.size(), size / group.size());
  }
  TESSERA_CHECK_VALUE(static_cast<int>(given.size()) == group.size(), "parallel", label, ": ", given.size(),
                      " sizes for ", group.size(), " ranks");
  TESSERA_CHECK_VALUE(sum_of(given) == size, "parallel", label, ": sizes of the ranks add up to ", sum_of(given),
                      ", the tensor has ", size, " elements along dim ", dim);
  return given;
}

int64_t begin_of(const Sizes& sizes, int rank) {
  return std::accumulate(sizes.begin(), sizes.begin() + rank, int64_t{0});
}

// The parts of x along dim, each contiguous, one after the other; x itself where they lie so.
at::Tensor parts_in_order(const at::Tensor& x, int64_t dim, const Sizes& sizes) {
  if (outermost(x.sizes(), dim)) return x.contiguous().view({-1});
  at::Tensor result = at::empty({x.numel()}, x.options());
  int64_t begin = 0, place = 0;
  for (const int64_t size : sizes) {
    const at::Tensor part = x.narrow(dim, begin, size);
    result.narrow(0, place, part.numel()).view(part.sizes()).copy_(part);
    begin += size;
    place += part.numel();
  }
  return result;
}

// Joins parts_in_order() again.
at::Tensor joined(const at::Tensor& parts, at::IntArrayRef whole, int64_t dim, const Sizes& sizes) {
  if (outermost(whole, dim)) return parts.view(whole);
  at::Tensor result = at::empty(whole, parts.options());
  int64_t begin = 0, place = 0;
  for (const int64_t size : sizes) {
    const at::Tensor part = result.narrow(dim, begin, size);
    part.copy_(parts.narrow(0, place, part.numel()).view(part.sizes()));
    begin += size;
    place += part.numel();
  }
  return result;
}

Sizes scaled(Sizes sizes, int64_t factor) {
  for (int64_t& size : sizes)
    size *= factor;
  return sizes;
}

// The sum of `rows`, [ranks, ...], in rank order, rounded once.
at::Tensor sum_of_rows(const at::Tensor& rows) {
  if (!rows.is_cpu()) {
    const bool small = rows.is_floating_point() && rows.element_size() < 4;
    return small ? at::sum(rows, {0}, false, at::kFloat).to(rows.scalar_type()) : at::sum(rows, {0});
  }
  at::Tensor result = at::empty(rows.sizes().slice(1), rows.options());
  std::vector<const void*> pointers;
  for (int64_t r = 0; r < rows.size(0); ++r)
    pointers.push_back(static_cast<const char*>(rows.const_data_ptr()) + r * static_cast<int64_t>(result.nbytes()));
  comm::reduce_rows(result.mutable_data_ptr(), pointers.data(), static_cast<int>(rows.size(0)), result.numel(),
                    rows.scalar_type(), comm::ReduceOp::Sum);
  return result;
}

}  // namespace

bool is_only_holder(const at::Tensor& x) {
  return x.use_count() == 1 && x.has_storage() && x.storage().use_count() == 1 && x.is_contiguous() &&
         !x.requires_grad();
}

Transfer<at::Tensor> start_sum(const at::Tensor& x, const Along& along, bool in_place) {
  if (along.group->size() == 1) return Transfer<at::Tensor>(x);
  at::Tensor sum = in_place ? x : x.clone(at::MemoryFormat::Contiguous);
  comm::Pending pending = along.group->all_reduce(sum, comm::ReduceOp::Sum, along.label);
  return {std::move(pending), [sum] { return sum; }};
}

Transfer<at::Tensor> start_gather(const at::Tensor& x, const Along& along) {
  comm::Group& group = *along.group;
  const int64_t dim = dim_of(x, along.dim, along.label);
  const Sizes sizes = sizes_of_parts(x, dim, along.sizes, group, along.label);
  if (group.size() == 1) return Transfer<at::Tensor>(x);
  const Sizes whole = with(x.sizes(), dim, sum_of(sizes));
  at::Tensor parts = at::empty({product(whole)}, x.options());
  at::Tensor sent = x.contiguous();
  comm::Pending pending;
  if (even(sizes)) {
    pending = group.all_gather(parts, sent, along.label);
  } else {
    // Each rank gets its copy: ranks with less to send send less.
    sent = sent.view({1, -1}).expand({group.size(), -1}).contiguous().view({-1});
    const int64_t one = product(with(x.sizes(), dim, 1));
    pending = group.all_to_all(parts, sent, scaled(sizes, one), Sizes(group.size(), x.numel()), along.label);
  }
  return {std::move(pending), [=] {
            (void)sent;
            return joined(parts, whole, dim, sizes);
          }};
}

Transfer<at::Tensor> start_scatter_sum(const at::Tensor& x, const Along& along) {
  comm::Group& group = *along.group;
  const int64_t dim = dim_of(x, along.dim, along.label);
  const Sizes sizes = sizes_of_whole(x, dim, along.sizes, group, along.label);
  if (group.size() == 1) return Transfer<at::Tensor>(x);
  const Sizes own = with(x.sizes(), dim, sizes[group.rank()]);
  const at::Tensor sent = parts_in_order(x, dim, sizes);
  if (even(sizes)) {
    const at::Tensor sum = at::empty(own, x.options());
    return {group.reduce_scatter(sum, sent, comm::ReduceOp::Sum, along.label), [=] {
              (void)sent;
              return sum;
            }};
  }
  Sizes rows = own;
  rows.insert(rows.begin(), group.size());
  const at::Tensor parts = at::empty(rows, x.options());
  const int64_t one = product(with(x.sizes(), dim, 1));
  return {group.all_to_all(parts.view({-1}), sent, Sizes(group.size(), product(own)), scaled(sizes, one), along.label),
          [=] {
            (void)sent;
            return sum_of_rows(parts);
          }};
}

at::Tensor own_part(const at::Tensor& x, const Along& along) {
  const comm::Group& group = *along.group;
  const int64_t dim = dim_of(x, along.dim, along.label);
  const Sizes sizes = sizes_of_whole(x, dim, along.sizes, group, along.label);
  if (group.size() == 1) return x;
  return x.narrow(dim, begin_of(sizes, group.rank()), sizes[group.rank()]).clone(at::MemoryFormat::Contiguous);
}

namespace {

// Tensors on both sides of an exchange, and how one rank's message to another is laid out.
struct Blocks {
  int64_t scatter_dim, gather_dim;
  std::vector<Sizes> scatter, gather;  // [tensor][rank]
  std::vector<Sizes> before, after;    // sizes of the tensors
  // Messages are blocks of all tensors joined along scatter_dim. What comes from all ranks is then one tensor, of which the
  // results are views.
  bool joint = false;
};

Blocks blocks_of(const std::vector<at::Tensor>& tensors, const Exchange& x) {
  const comm::Group& group = *x.group;
  const size_t count = tensors.size();
  TESSERA_CHECK_VALUE(count > 0, "parallel", x.label, ": nothing to exchange");
  TESSERA_CHECK_VALUE(
      (x.scatter.empty() || x.scatter.size() == count) && (x.gather.empty() || x.gather.size() == count), "parallel",
      x.label, ": sizes for ", std::max(x.scatter.size(), x.gather.size()), " tensors, ", count, " are given");
  Blocks blocks;
  blocks.scatter_dim = dim_of(tensors[0], x.scatter_dim, x.label);
  blocks.gather_dim = dim_of(tensors[0], x.gather_dim, x.label);
  TESSERA_CHECK_VALUE(blocks.scatter_dim != blocks.gather_dim, "parallel", x.label, ": dim ", blocks.gather_dim,
                      " cannot be cut and joined at once");
  for (size_t i = 0; i < count; ++i) {
    const at::Tensor& t = tensors[i];
    TESSERA_CHECK_VALUE(t.defined() && t.dim() == tensors[0].dim() && t.scalar_type() == tensors[0].scalar_type() &&
                            t.device() == tensors[0].device(),
                        "parallel", x.label,
                        ": tensors of one exchange have one dtype, device and number of dims; tensor ", i, " differs");
    blocks.scatter.push_back(
        sizes_of_whole(t, blocks.scatter_dim, x.scatter.empty() ? Sizes() : x.scatter[i], group, x.label));
    blocks.gather.push_back(
        sizes_of_parts(t, blocks.gather_dim, x.gather.empty() ? Sizes() : x.gather[i], group, x.label));
    blocks.before.push_back(t.sizes().vec());
    blocks.after.push_back(with(with(t.sizes(), blocks.scatter_dim, blocks.scatter[i][group.rank()]), blocks.gather_dim,
                                sum_of(blocks.gather[i])));
  }
  // Dims are compared whose size is the same everywhere, so all ranks decide alike.
  blocks.joint = blocks.scatter_dim > blocks.gather_dim && outermost(blocks.before[0], blocks.gather_dim);
  for (size_t i = 1; i < count; ++i)
    blocks.joint = blocks.joint && blocks.gather[i] == blocks.gather[0] &&
                   with(blocks.before[i], blocks.scatter_dim, 1) == with(blocks.before[0], blocks.scatter_dim, 1);
  return blocks;
}

int64_t joint_size(const Blocks& blocks, int rank) {
  int64_t size = 0;
  for (const Sizes& sizes : blocks.scatter)
    size += sizes[rank];
  return size;
}

at::Tensor packed(const std::vector<at::Tensor>& tensors, const Blocks& blocks, int ranks) {
  if (tensors.size() == 1) return parts_in_order(tensors[0], blocks.scatter_dim, blocks.scatter[0]);
  int64_t numel = 0, place = 0;
  for (const at::Tensor& t : tensors)
    numel += t.numel();
  at::Tensor sent = at::empty({numel}, tensors[0].options());
  for (int r = 0; r < ranks; ++r) {
    at::Tensor block;
    if (blocks.joint) {
      const Sizes sizes = with(blocks.before[0], blocks.scatter_dim, joint_size(blocks, r));
      block = sent.narrow(0, place, product(sizes)).view(sizes);
    }
    int64_t inside = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const int64_t size = blocks.scatter[i][r];
      const at::Tensor part = tensors[i].narrow(blocks.scatter_dim, begin_of(blocks.scatter[i], r), size);
      (blocks.joint ? block.narrow(blocks.scatter_dim, inside, size)
                    : sent.narrow(0, place, part.numel()).view(part.sizes()))
          .copy_(part);
      inside += size;
      place += part.numel();
    }
  }
  return sent;
}

// A tensor over part of `buffer` that autograd does not take for a view of it: the results may be changed in place.
at::Tensor alias(const at::Tensor& buffer, const at::Tensor& view) {
  return at::empty({0}, buffer.options()).set_(buffer.storage(), view.storage_offset(), view.sizes(), view.strides());
}

std::vector<at::Tensor> unpacked(const at::Tensor& received, const Blocks& blocks, int ranks, int rank) {
  std::vector<at::Tensor> results;
  if (blocks.joint) {
    const at::Tensor whole = received.view(with(blocks.after[0], blocks.scatter_dim, joint_size(blocks, rank)));
    int64_t begin = 0;
    for (const Sizes& sizes : blocks.scatter) {
      results.push_back(alias(received, whole.narrow(blocks.scatter_dim, begin, sizes[rank])));
      begin += sizes[rank];
    }
    return results;
  }
  for (const Sizes& sizes : blocks.after)
    results.push_back(at::empty(sizes, received.options()));
  int64_t place = 0;
  for (int r = 0; r < ranks; ++r) {
    for (size_t i = 0; i < results.size(); ++i) {
      const at::Tensor part = results[i].narrow(blocks.gather_dim, begin_of(blocks.gather[i], r), blocks.gather[i][r]);
      part.copy_(received.narrow(0, place, part.numel()).view(part.sizes()));
      place += part.numel();
    }
  }
  return results;
}

}  // namespace

Transfer<std::vector<at::Tensor>> start_exchange(const std::vector<at::Tensor>& tensors, const Exchange& exchange) {
  comm::Group& group = *exchange.group;
  const int ranks = group.size(), rank = group.rank();
  const Blocks blocks = blocks_of(tensors, exchange);
  if (ranks == 1) return Transfer<std::vector<at::Tensor>>(tensors);
  Sizes in_splits(ranks, 0), out_splits(ranks, 0);
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (int r = 0; r < ranks; ++r) {
      in_splits[r] += product(with(blocks.before[i], blocks.scatter_dim, blocks.scatter[i][r]));
      out_splits[r] += product(with(blocks.after[i], blocks.gather_dim, blocks.gather[i][r]));
    }
  }
  const at::Tensor sent = packed(tensors, blocks, ranks);
  const at::Tensor received = at::empty({sum_of(out_splits)}, sent.options());
  return {group.all_to_all(received, sent, out_splits, in_splits, exchange.label), [=] {
            (void)sent;
            return unpacked(received, blocks, ranks, rank);
          }};
}

}  // namespace tessera::parallel
