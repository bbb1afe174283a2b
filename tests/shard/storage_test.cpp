#include "tessera/shard/storage.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/shard/part.h"
#include "tests/support/errors.h"

namespace tessera::shard {

TEST(Storage, ABoundParameterHasAStorageOfItsOwn) {
  const at::Tensor flat = at::arange(128, at::kFloat);
  at::Tensor param = at::zeros({4, 5}, at::kFloat).requires_grad_(true);
  auto* identity = param.unsafeGetTensorImpl();
  const auto version = param._version();
  bind(param, flat, {32, 52}, param);
  EXPECT_EQ(param.unsafeGetTensorImpl(), identity);
  EXPECT_EQ(param._version(), version);
  EXPECT_TRUE(param.requires_grad());
  EXPECT_EQ(param.storage().nbytes(), 20 * sizeof(float));
  EXPECT_EQ(param.storage_offset(), 0);
  EXPECT_TRUE(param.detach().flatten().equal(flat.narrow(0, 32, 20)));
  EXPECT_TRUE(is_bound(param, flat, {32, 52}, param));
  EXPECT_FALSE(is_bound(param, flat, {64, 84}, param));
  flat[33] = -1.0;
  EXPECT_EQ(param.detach()[0][1].item<float>(), -1.0F);
}

TEST(Storage, TheBufferLivesAsLongAsItsParameters) {
  at::Tensor param = at::zeros({3}, at::kFloat);
  {
    const at::Tensor flat = at::full({32}, 7.0, at::kFloat);
    bind(param, flat, {0, 3}, param);
  }
  EXPECT_TRUE(param.equal(at::full({3}, 7.0)));
}

TEST(Storage, APartIsMemoryOfTheWhole) {
  at::Tensor part;
  {
    const at::Tensor flat = at::arange(100, at::kBFloat16).narrow(0, 10, 80);
    part = part_of(flat, {5, 12});
    EXPECT_TRUE(part.is_same(part_of(part, {0, 7})));
    EXPECT_EQ(part.const_data_ptr(), flat.narrow(0, 5, 7).const_data_ptr());
    const auto version = flat._version();
    part.add_(1);
    EXPECT_EQ(flat._version(), version);
    EXPECT_TRUE(flat.narrow(0, 5, 7).equal(part));
  }
  EXPECT_TRUE(part.equal(at::arange(16, 23, at::kBFloat16)));
  EXPECT_EQ(part_of(part, {3, 3}).numel(), 0);
}

TEST(Storage, KeepsDenseStridesAndTakesTheBuffersDtype) {
  const at::Tensor flat = at::zeros({64}, at::kBFloat16);
  at::Tensor transposed = at::rand({3, 5}).t();
  const at::Tensor values = transposed.clone();
  view_as_param(flat, {0, 15}, transposed).copy_(transposed);
  bind(transposed, flat, {0, 15}, transposed);
  EXPECT_EQ(transposed.strides(), (at::IntArrayRef{1, 5}));
  EXPECT_EQ(transposed.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(transposed.equal(values.to(at::kBFloat16)));

  at::Tensor strided = at::rand({3}).expand({2, 3});  // not dense: becomes contiguous
  bind(strided, flat, {32, 38}, strided);
  EXPECT_TRUE(strided.is_contiguous());
}

TEST(Storage, FlattenFollowsTheParametersMemoryOrder) {
  const at::Tensor param = at::zeros({3, 5}).t();  // memory order is the transposed one
  const at::Tensor grad = at::arange(15, at::kFloat).view({5, 3});
  EXPECT_TRUE(flatten_like_param(grad, param).equal(grad.t().contiguous().flatten()));
  const at::Tensor same = at::arange(15, at::kFloat).view({3, 5}).t();
  const at::Tensor flat = flatten_like_param(same, param);
  EXPECT_EQ(flat.data_ptr(), same.data_ptr()) << "equal strides need no copy";
}

TEST(Storage, AReplacedDataPointerIsNoticed) {
  const at::Tensor flat = at::zeros({32});
  at::Tensor param = at::ones({4});
  bind(param, flat, {0, 4}, param);
  param.set_data(at::ones({4}));
  EXPECT_FALSE(is_bound(param, flat, {0, 4}, param));
}

TEST(Storage, AReleasedParameterSaysWhyEachTime) {
  const at::Tensor flat = at::arange(8, at::kFloat);
  at::Tensor param = at::zeros({8}, at::kFloat);
  c10::StorageImpl* storage = make_released(param, Form(param), flat.options(), "not here now");
  const auto refuses = [&] {
    EXPECT_HAS(testing::error_of([&] { param.data_ptr(); }), "not here now");
    EXPECT_HAS(testing::error_of([&] { param.mutable_data_ptr(); }), "not here now");
    EXPECT_HAS(testing::error_of([&] { param.sum(); }), "not here now");
  };
  refuses();
  for (int round = 0; round < 2; ++round) {
    point(*storage, flat.mutable_data_ptr());
    EXPECT_TRUE(param.equal(flat));
    param.add_(1);
    release_again(*storage);
    refuses();
  }
}

}  // namespace tessera::shard
