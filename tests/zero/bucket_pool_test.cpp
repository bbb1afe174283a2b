#include "tessera/zero/bucket_pool.h"

#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

namespace tessera::zero {

TEST(BucketPool, LendsTheSmallestThatFitsAndKeepsTheLargest) {
  BucketPool pool(2);
  const auto fp32 = at::TensorOptions().dtype(at::kFloat);
  const at::Tensor a = pool.acquire(10, fp32), b = pool.acquire(20, fp32), c = pool.acquire(30, fp32);
  EXPECT_EQ(pool.bytes(), 4 * 60);
  const void *at_b = b.data_ptr(), *at_c = c.data_ptr();
  for (const at::Tensor& bucket : {c, a, b})
    pool.release(bucket);
  EXPECT_EQ(pool.bytes(), 4 * 50) << "the smallest is freed";
  const at::Tensor again = pool.acquire(15, fp32);
  EXPECT_EQ(again.numel(), 15);
  EXPECT_EQ(again.data_ptr(), at_b);
  pool.release(again);
  EXPECT_EQ(pool.acquire(25, fp32).data_ptr(), at_c);
  EXPECT_EQ(pool.bytes(), 4 * 50);
  EXPECT_EQ(pool.peak_bytes(), 4 * 60);
}

TEST(BucketPool, LendsNoLargeOneToASmallUnit) {
  BucketPool pool(2);
  pool.release(pool.acquire(100, at::kFloat));
  const at::Tensor small = pool.acquire(10, at::kFloat);
  EXPECT_EQ(pool.bytes(), 4 * 110);
  EXPECT_EQ(pool.acquire(50, at::kFloat).storage().nbytes(), 4 * 100);
  EXPECT_EQ(pool.bytes(), 4 * 110);
}

TEST(BucketPool, ALargerOneReplacesOneOfNearlyItsSize) {
  BucketPool pool(2);
  pool.release(pool.acquire(90, at::kFloat));
  pool.release(pool.acquire(10, at::kFloat));
  EXPECT_EQ(pool.bytes(), 4 * 100);
  pool.acquire(100, at::kFloat);
  EXPECT_EQ(pool.bytes(), 4 * 110);
  EXPECT_EQ(pool.peak_bytes(), 4 * 110);
}

TEST(BucketPool, LendsBucketsOfTheDtypeAskedFor) {
  BucketPool pool(2);
  pool.release(pool.acquire(10, at::kBFloat16));
  EXPECT_EQ(pool.acquire(10, at::kFloat).scalar_type(), at::kFloat);
  EXPECT_EQ(pool.acquire(10, at::kBFloat16).scalar_type(), at::kBFloat16);
  EXPECT_EQ(pool.bytes(), 60);
}

TEST(BucketPool, BucketsOfInferenceModeCanBeWrittenToOutside) {
  BucketPool pool(1);
  at::Tensor bucket;
  {
    const c10::InferenceMode inference;
    bucket = pool.acquire(4, at::TensorOptions().dtype(at::kFloat));
  }
  EXPECT_FALSE(bucket.is_inference());
}

}  // namespace tessera::zero
