#include "tessera/nn/outputs.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>

namespace example {
struct Output {
  at::Tensor logits, loss;
};
void collect_tensors(const Output& output, std::vector<at::Tensor>& tensors) {
  tensors.push_back(output.logits);
  tensors.push_back(output.loss);
}
}  // namespace example

namespace tessera::nn {
namespace {

template <class T>
std::vector<double> values(const T& output) {
  std::vector<at::Tensor> tensors;
  append_tensors(output, tensors);
  std::vector<double> result;
  for (const auto& tensor : tensors) {
    result.push_back(tensor.item<double>());
  }
  return result;
}

at::Tensor t(double value) {
  return at::scalar_tensor(value, at::kDouble);
}
using Values = std::vector<double>;

TEST(Outputs, EveryKindOfOutput) {
  EXPECT_EQ(values(t(1)), (Values{1}));
  EXPECT_EQ(values(std::vector<at::Tensor>{t(1), t(2)}), (Values{1, 2}));
  EXPECT_EQ(values(std::array<at::Tensor, 2>{t(1), t(2)}), (Values{1, 2}));
  EXPECT_EQ(values(std::tuple<at::Tensor, int, at::Tensor>{t(1), 7, t(2)}), (Values{1, 2}));
  EXPECT_EQ(values(std::pair<at::Tensor, std::vector<at::Tensor>>{t(1), {t(2), t(3)}}), (Values{1, 2, 3}));
  EXPECT_EQ(values(std::map<std::string, at::Tensor>{{"a", t(1)}, {"b", t(2)}}), (Values{1, 2}));
  EXPECT_EQ(values(std::optional<at::Tensor>{t(1)}), (Values{1}));
  EXPECT_EQ(values(std::optional<at::Tensor>{}), (Values{}));
  EXPECT_EQ(values(0.5), (Values{}));
}

TEST(Outputs, AStructOfTheUser) {
  EXPECT_EQ(values(example::Output{t(1), t(2)}), (Values{1, 2}));
  EXPECT_EQ(values(std::vector<example::Output>{{t(1), t(2)}, {t(3), t(4)}}), (Values{1, 2, 3, 4}));
}

}  // namespace
}  // namespace tessera::nn
