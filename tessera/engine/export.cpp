#include "tessera/engine/export.h"

#include <ATen/Functions.h>

#include <optional>

#include "tessera/base/error.h"
#include "tessera/checkpoint/numbering.h"
#include "tessera/checkpoint/weight_files.h"
#include "tessera/engine/logical.h"
#include "tessera/engine/together.h"

namespace tessera::engine {

namespace {

struct Row {
  LiveTensor tensor;
  std::vector<checkpoint::Along> place;
};

std::vector<Row> rows_of(const Engine& engine, const std::vector<LiveTensor>& tensors) {
  std::vector<Row> rows;
  for (const LiveTensor& tensor : tensors) {
    if (tensor.param < 0) {
      rows.push_back({tensor, {}});
      continue;
    }
    for (const auto& place : places_of(engine, engine.params()[tensor.param])) {
      rows.push_back({tensor, place});
      for (std::string& name : rows.back().tensor.names)
        name += checkpoint::suffix_of(place);
    }
  }
  return rows;
}

}  // namespace

LiveWeights::LiveWeights(Engine& engine) : engine_(engine), weights_(engine.params().size()) {
  for (const shard::NamedShard& shard : engine.states().named_shards())
    if (shard.quantity == Quantity::Weight) weights_[shard.param] = shard;
}

at::Tensor LiveWeights::whole(int param, const std::vector<checkpoint::Along>& place) {
  const c10::AutoGradMode no_grad(false);
  const ParamSpec& spec = engine_.params().at(param);
  const comm::Mesh& mesh = engine_.mesh();
  const bool first =
      mesh.rank(comm::Axis::DpReplicate) == 0 && mesh.rank(comm::kStateAxes) == 0 && mesh.rank(comm::kModelAxes) == 0;
  const bool travels = engine_.regions().partition_of(param).partitioned || spec.cut || !place.empty();
  if (!travels) return first ? spec.tensor.detach() : at::Tensor();
  const shard::Form form = engine_.states().form(param);
  const shard::NamedShard& mine = weights_[param];
  const std::vector<int64_t> shape = whole_shape(spec, form);
  const at::ScalarType dtype = spec.tensor.scalar_type();
  // One rank has each element, the others zeros: summed as bytes, in which every dtype is exact.
  at::Tensor words = at::zeros({c10::multiply_integers(shape) * static_cast<int64_t>(c10::elementSize(dtype))},
                               at::TensorOptions(at::kByte).device(spec.tensor.device()));
  const at::Tensor full = words.view(dtype);
  if (mine.param == param && mine.replica == 0 && place_of(engine_, spec) == place) {
    const at::Tensor values = engine_.states().read_shard(mine);
    const auto slices = slice_of(spec.cut);
    for (const checkpoint::Run& run : checkpoint::runs_of(shape, slices.empty() ? nullptr : slices.data(), mine.range))
      full.narrow(0, run.begin, run.size).copy_(values.narrow(0, run.local - mine.range.begin, run.size));
  }
  const std::string label = "whole values of '" + spec.name + "'";
  mesh.group(comm::kStateAxes)->all_reduce(words, comm::ReduceOp::Sum, label).wait();
  for (const comm::Axis axis : {comm::Axis::DpReplicate, comm::Axis::Tp})
    if (spec.varies.has(axis)) mesh.group(axis)->all_reduce(words, comm::ReduceOp::Sum, label).wait();
  if (!first) return {};
  return spec.cut ? full.view(shape) : shard::view_as_param(full, {0, full.numel()}, form);
}

std::vector<std::string> export_weights(Engine& engine, const std::vector<LiveTensor>& tensors,
                                        const std::string& folder, const std::string& name, int64_t max_bytes) {
  engine.finish_update();
  const zero::Ranks ranks = ranks_of(engine);
  const std::vector<Row> rows = rows_of(engine, tensors);
  std::vector<checkpoint::WeightTensor> all;
  for (const Row& row : rows) {
    const at::Tensor& tensor = row.tensor.param < 0 ? row.tensor.tensor : engine.params()[row.tensor.param].tensor;
    const auto shape = row.tensor.param < 0
                           ? tensor.sizes().vec()
                           : whole_shape(engine.params()[row.tensor.param], engine.states().form(row.tensor.param));
    all.push_back({row.tensor.names, tensor.scalar_type(), shape});
  }
  const bool first = ranks.place() == 0;
  LiveWeights weights(engine);
  std::optional<checkpoint::WeightFiles> files;
  const auto plans = together(ranks, "start of an export", [&] {
    if (first) files.emplace(folder, name, all, max_bytes);
    std::string plan;
    for (const checkpoint::WeightTensor& tensor : all)
      plan += c10::str(tensor.names[0], at::IntArrayRef(tensor.shape), tensor.dtype, ";");
    return std::to_string(std::hash<std::string>()(plan));
  });
  for (const std::string& plan : plans)
    TESSERA_CHECK_VALUE(plan == plans[0], "export", "ranks name other tensors for the files");
  size_t next = 0;
  for (const size_t count : checkpoint::plan_files(all, max_bytes)) {
    std::exception_ptr error;
    for (const size_t last = next + count; next < last; ++next) {
      const Row& row = rows[next];
      const at::Tensor value = row.tensor.param < 0 ? row.tensor.tensor : weights.whole(row.tensor.param, row.place);
      try {
        if (first && !error) files->write(value);
      } catch (...) {
        error =
            std::current_exception();  // the others are on their way to the next value: thrown at the end of the file
      }
    }
    together(ranks, "a file of an export", [&] {
      if (error) std::rethrow_exception(error);
      return std::string();
    });
  }
  std::vector<std::string> names;
  const auto texts = together(ranks, "end of an export", [&] {
    std::string text;
    if (first)
      for (const std::string& file : files->finish())
        text += file + "\n";
    return text;
  });
  for (size_t begin = 0, end = 0; (end = texts[0].find('\n', begin)) != std::string::npos; begin = end + 1)
    names.push_back(texts[0].substr(begin, end - begin));
  return names;
}

}  // namespace tessera::engine
