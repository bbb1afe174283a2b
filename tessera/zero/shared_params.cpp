#include "tessera/zero/shared_params.h"

#include "tessera/base/error.h"

namespace tessera::zero {

SharedParams::SharedParams(comm::GroupPtr group, int64_t bytes) : group_(std::move(group)) {
  arena_ = group_->shared_memory(bytes, "compute parameters");
  TESSERA_CHECK_VALUE(arena_.defined(), "zero", "tessera.shared_parameters needs the ", group_->size(),
                      " ranks that share model states on one host, over shared memory (TESSERA_TRANSPORT auto or "
                      "shared_memory); they talk through ",
                      group_->name(),
                      ". Switch it off, or on several hosts set zero_optimization.mics_shard_size to the ranks of one");
}

int64_t SharedParams::bytes_of(const shard::Layout& layout, at::ScalarType dtype) {
  constexpr int64_t kLine = 64;
  const int64_t bytes = layout.size() * static_cast<int64_t>(c10::elementSize(dtype));
  return (bytes + kLine - 1) / kLine * kLine;
}

at::Tensor SharedParams::take(const shard::Layout& layout, at::ScalarType dtype) {
  if (!on()) return {};
  const int64_t begin = taken_;
  taken_ += bytes_of(layout, dtype);
  TESSERA_ASSERT(taken_ <= bytes());
  return arena_.narrow(0, begin, layout.size() * static_cast<int64_t>(c10::elementSize(dtype))).view(dtype);
}

void SharedParams::readers_done(comm::Label why) const {
  if (on()) group_->barrier("before " + std::string(why));
}

void SharedParams::written(comm::Label why) const {
  if (on()) group_->barrier("after " + std::string(why));
}

}  // namespace tessera::zero
