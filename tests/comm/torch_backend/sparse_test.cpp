#include "tessera/comm/torch_backend/sparse.h"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>

#include "tests/comm/shm/play.h"

namespace tessera::comm {
namespace {

using testing::message_of;
using testing::play;
using testing::same_bits;

// `entries` of them, some at one place, in a tensor of 50 x 7 x 3 whose first two dimensions are sparse.
at::Tensor some(int rank, int64_t entries, at::ScalarType dtype) {
  const auto places = at::cat({testing::input(rank, 1, entries, at::kLong).remainder(50).view({1, entries}),
                               testing::input(rank, 2, entries, at::kLong).remainder(7).view({1, entries})});
  return at::_sparse_coo_tensor_unsafe(places, testing::input(rank, 3, entries * 3, dtype).view({entries, 3}),
                                       {50, 7, 3});
}

at::Tensor summed(int size, const std::function<at::Tensor(int)>& of_rank) {
  std::vector<ShmOpPtr> ops;
  for (int r = 0; r < size; ++r)
    ops.push_back(std::make_shared<ShmSparseSum>(r, size, of_rank(r), "x"));
  EXPECT_EQ(play(ops, size), "");
  const at::Tensor first = static_cast<const ShmSparseSum&>(*ops[0]).sum();
  for (const auto& op : ops) {
    const at::Tensor other = static_cast<const ShmSparseSum&>(*op).sum();
    EXPECT_TRUE(other.is_coalesced() && other._nnz() == first._nnz());
    EXPECT_TRUE(same_bits(other.to_dense(), first.to_dense()));
  }
  return first;
}

TEST(ShmSparse, AddsRanksWithDifferentNumbersOfEntries) {
  for (const int size : {1, 2, 3, 5}) {
    for (const int64_t n : {0, 1, 40, 9000}) {  // the last: several records
      for (const auto dtype : {at::kFloat, at::kDouble, at::kLong}) {
        const auto of_rank = [&](int r) { return some(r, r == 1 ? 0 : n + r, dtype); };
        at::Tensor want = at::zeros({50, 7, 3}, dtype);
        for (int r = 0; r < size; ++r)
          want += of_rank(r).to_dense();
        EXPECT_TRUE(summed(size, of_rank).to_dense().allclose(want, 1e-4, 1e-4)) << size << " ranks, " << n;
      }
    }
  }
}

// 1 and twice 1/256 in bf16: rounded at every step it would stay 1.
TEST(ShmSparse, SixteenBitsAreRoundedOnce) {
  const auto one_place = [](double value) {
    return at::_sparse_coo_tensor_unsafe(at::zeros({1, 1}, at::kLong), at::full({1}, value, at::kBFloat16), {4});
  };
  const auto sum = summed(3, [&](int r) { return one_place(r == 0 ? 1.0 : 1.0 / 256); });
  EXPECT_EQ(sum.scalar_type(), at::kBFloat16);
  EXPECT_EQ(sum.to_dense()[0].item<double>(), 1.0 + 1.0 / 128);
}

TEST(ShmSparse, SizesThatDifferAreDifferentCalls) {
  const auto empty = [](std::vector<int64_t> sizes, int64_t sparse_dim) {
    const int64_t rest = sparse_dim == 1 ? sizes[1] : 1;
    return at::_sparse_coo_tensor_unsafe(at::zeros({sparse_dim, 0}, at::kLong),
                                         sparse_dim == 1 ? at::zeros({0, rest}) : at::zeros({0}), sizes);
  };
  const ShmSparseSum a(0, 2, empty({4, 5}, 1), "x"), b(1, 2, empty({4, 5}, 2), "x"), c(1, 2, empty({5, 4}, 1), "x"),
      d(1, 2, empty({4, 5}, 1), "x");
  EXPECT_NE(a.hash(), b.hash());
  EXPECT_NE(a.hash(), c.hash());
  EXPECT_EQ(a.hash(), d.hash());
  EXPECT_HAS(describe(a.info()), "x sparse 4 of 5, 80 B");
}

TEST(ShmSparse, RefusesWhatItCannotAdd) {
  const auto text = [](const at::Tensor& t) {
    return message_of<c10::ValueError>([&] { ShmSparseSum(0, 2, t, "x"); });
  };
  EXPECT_HAS(text(at::ones({3})), "takes sparse tensors in COO layout");
  EXPECT_HAS(text(at::ones({3}, at::kBool).to_sparse()), "sum does not take dtype Bool");
}

}  // namespace
}  // namespace tessera::comm
