#include "tessera/engine/whole_shards.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <cmath>

#include "tessera/base/error.h"
#include "tessera/shard/placement.h"

namespace tessera::engine {
namespace {

at::IntArrayRef whole_sizes(const ParamSpec& spec) {
  return spec.cut != nullptr ? at::IntArrayRef(spec.cut->sizes) : spec.tensor.sizes();
}

class EngineShards final : public optim::Shards {
 public:
  EngineShards(Engine& engine, bool cut)
      : engine_(engine), group_(cut ? engine.mesh().group(comm::kStateAxes) : nullptr) {}

  at::Tensor whole(int param, const at::Tensor& part) override {
    return group_ == nullptr && part.sizes() == whole_sizes(engine_.params()[param])
               ? part
               : engine_.states().gather_full(param, part);
  }

  at::IntArrayRef sizes(int param, const at::Tensor& /*part*/) const override {
    return whole_sizes(engine_.params()[param]);
  }

  at::Tensor mine(int param, const at::Tensor& full) override { return engine_.states().local_part(param, full); }

  std::vector<double> norms(const std::vector<std::pair<int, at::Tensor>>& parts) override {
    std::vector<at::Tensor> sums;
    for (const auto& [param, values] : parts)
      sums.push_back(optim::squares(is_of_cut_model(param) ? whole(param, values) : values));
    const at::Tensor mine = at::stack(sums);
    const auto count = static_cast<int64_t>(parts.size());
    at::Tensor total = mine;
    if (group_ != nullptr) {
      const at::Tensor rows = at::empty({group_->size() * count}, mine.options());
      group_->all_gather(rows, mine, "norms of parameters").wait();
      total = rows.view({group_->size(), count}).sum(0);
    }
    const at::Tensor own = mine.to(at::kCPU), all = total.to(at::kCPU);
    std::vector<double> norms;
    for (int64_t i = 0; i < count; ++i) {
      const at::Tensor& sum = is_of_cut_model(parts[i].first) ? own : all;
      norms.push_back(std::sqrt(sum.const_data_ptr<double>()[i]));
    }
    return norms;
  }

 private:
  // Whether a slice of a model (tensor parallelism) may hold an element twice: then the whole counts.
  bool is_of_cut_model(int param) const {
    const ParamSpec& spec = engine_.params()[param];
    return spec.tensor.sizes() != whole_sizes(spec);
  }

  Engine& engine_;
  const comm::GroupPtr group_;  // ranks that states are cut over; null where they are not
};

}  // namespace

optim::ShardsPtr shards_of(Engine& engine, const std::string& optimizer) {
  const comm::Axes sharing{comm::Axis::DpReplicate, comm::Axis::DpShard, comm::Axis::Sp};
  const bool cut =
      shard::placements_of_stage(engine.options().zero.stage).shards_states() && engine.mesh().size(sharing) > 1;
  std::string own;
  for (const ParamSpec& spec : engine.params())
    if (spec.varies != comm::Axes() && spec.tensor.sizes() == whole_sizes(spec))
      own += (own.empty() ? "" : ", ") + spec.name;
  TESSERA_CHECK_BUILT(own.empty() || !cut, "initialize", optimizer, " needs whole parameters, and ", own,
                      " differ between ranks: use an optimizer that updates element by element");
  return std::make_shared<EngineShards>(engine, cut);
}

}  // namespace tessera::engine
