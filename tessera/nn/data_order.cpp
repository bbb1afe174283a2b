#include "tessera/nn/data_order.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/io/crc32c.h"

namespace tessera::nn {
namespace {

class FunctionOrder : public PassOrder {
 public:
  FunctionOrder(OrderFunction order, uint64_t seed) : order_(std::move(order)), seed_(seed) {}
  at::Tensor order(int64_t epoch) override {
    return order_(epoch, at::detail::createCPUGenerator(seed_ + static_cast<uint64_t>(epoch)));
  }

 private:
  OrderFunction order_;
  uint64_t seed_;
};

}  // namespace

std::shared_ptr<PassOrder> order_by(OrderFunction order, uint64_t seed) {
  TESSERA_CHECK_VALUE(order != nullptr, "data", "order_by: the function is empty");
  return std::make_shared<FunctionOrder>(std::move(order), seed);
}

namespace detail {

std::vector<int64_t> order_of(PassOrder& order, int64_t epoch, int64_t size) {
  const at::Tensor made = order.order(epoch);
  TESSERA_CHECK_VALUE(made.defined() && made.dim() == 1 && at::isIntegralType(made.scalar_type(), false), "data",
                      "the order of pass ", epoch, " must be a tensor of one dim of whole numbers, got ",
                      made.defined() ? c10::str(made.dim(), " dims of ", made.scalar_type()) : "none");
  TESSERA_CHECK_VALUE(made.numel() > 0, "data", "the order of pass ", epoch, " is empty");
  const at::Tensor numbers = made.to(at::kCPU, at::kLong).contiguous();
  const auto* data = numbers.const_data_ptr<int64_t>();
  std::vector<int64_t> result(data, data + numbers.numel());
  const auto wrong = std::ranges::find_if(result, [&](int64_t number) { return number < 0 || number >= size; });
  TESSERA_CHECK_VALUE(wrong == result.end(), "data", "the order of pass ", epoch, " has example ", *wrong,
                      ", and the dataset has ", size, ", numbered from 0");
  return result;
}

std::string line_of(const std::vector<int64_t>& order) {
  const auto bytes = static_cast<int64_t>(order.size() * sizeof(int64_t));
  return c10::str(order.size(), " examples from ", order.front(), " to ", order.back(), " (checksum ",
                  io::crc32c(order.data(), bytes), ")");
}

}  // namespace detail
}  // namespace tessera::nn
