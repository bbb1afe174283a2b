#include "tessera/pipeline/schedule.h"

#include <algorithm>
#include <array>

#include "tessera/base/error.h"

namespace tessera::pipeline {
namespace {

// Forwards in rounds of `stages` micro-batches, each round through one chunk after the other, so that no stage waits long.
Table forwards(const Shape& shape) {
  Table table;
  for (int begin = 0; begin < shape.micro_batches; begin += shape.stages)
    for (int chunk = 0; chunk < shape.chunks; ++chunk)
      for (int micro = begin; micro < std::min(begin + shape.stages, shape.micro_batches); ++micro)
        table.push_back({Kind::Forward, micro, chunk});
  return table;
}

// Backwards in such rounds, the last chunk first. Micro-batches ascend: gradients add up as without a pipeline.
Table backwards(const Shape& shape) {
  Table table = forwards(shape);
  for (Action& action : table)
    action = {Kind::Backward, action.micro, shape.chunks - 1 - action.chunk};
  return table;
}

// Alternates: `warm_up` forwards, then a forward and a backward in turn, then the backwards that are left.
Table alternating(const Shape& shape, int warm_up) {
  const Table ahead = forwards(shape), back = backwards(shape);
  Table table(ahead.begin(), ahead.begin() + warm_up);
  auto next = back.begin();
  for (auto forward = ahead.begin() + warm_up; forward != ahead.end(); ++forward) {
    table.push_back(*forward);
    table.push_back(*next++);
  }
  table.insert(table.end(), next, back.end());
  return table;
}

// How many forwards precede the first backward: the way to the end of the pipeline and back, and all chunks but the last.
int warm_up(const Shape& shape, int stage) {
  const int ahead = 2 * (shape.stages - stage - 1) + (shape.chunks - 1) * shape.stages;
  return std::min(ahead, shape.micro_batches * shape.chunks);
}

Table interleaved(const Shape& shape, int stage) {
  TESSERA_CHECK_VALUE(shape.micro_batches % shape.stages == 0, "pipeline",
                      "the interleaved schedule goes in rounds of as many micro-batches as there are stages: "
                      "gradient_accumulation_steps (",
                      shape.micro_batches, ") must be a multiple of ", shape.stages,
                      R"(; use another number, or "pipeline": {"schedule": "gpipe"})");
  return alternating(shape, warm_up(shape, stage));
}

Table gpipe(const Shape& shape) {
  Table table = forwards(shape);
  const Table back = backwards(shape);
  table.insert(table.end(), back.begin(), back.end());
  return table;
}

Table with_transfers(const Table& computing, const Shape& shape, int stage) {
  Table table;
  for (const Action& action : computing) {
    const auto [kind, micro, chunk] = action;
    const bool ahead = kind == Kind::Forward;
    const bool first = shape.is_first(stage, chunk), last = shape.is_last(stage, chunk);
    if (ahead ? !first : !last)
      table.push_back({ahead ? Kind::ReceiveActivations : Kind::ReceiveGradients, micro, chunk});
    table.push_back(action);
    if (ahead ? !last : !first) table.push_back({ahead ? Kind::SendActivations : Kind::SendGradients, micro, chunk});
  }
  return table;
}

}  // namespace

const char* kind_name(Kind kind) {
  static constexpr std::array names{"receive activations", "forward",  "send activations",
                                    "receive gradients",   "backward", "send gradients"};
  return names.at(static_cast<size_t>(kind));
}

const std::vector<std::string>& schedules() {
  static const std::vector<std::string> names{"1f1b", "gpipe", "interleaved"};
  return names;
}

Table training(const std::string& name, const Shape& shape, int stage) {
  const auto& known = schedules();
  TESSERA_CHECK_VALUE(std::find(known.begin(), known.end(), name) != known.end(), "pipeline", "there is no schedule '",
                      name, "'; use one of 1f1b, gpipe, interleaved");
  if (name == "gpipe") return with_transfers(gpipe(shape), shape, stage);
  if (shape.chunks > 1) return with_transfers(interleaved(shape, stage), shape, stage);
  TESSERA_CHECK_VALUE(name != "interleaved", "pipeline",
                      "the interleaved schedule needs PipelineModule(num_chunks=...) of 2 at least");
  return with_transfers(alternating(shape, std::min(shape.stages - stage - 1, shape.micro_batches)), shape, stage);
}

Table forward_only(const Shape& shape, int stage) {
  return with_transfers(forwards(shape), shape, stage);
}

int live_bound(const std::string& name, const Shape& shape, int stage) {
  if (name == "gpipe") return shape.micro_batches * shape.chunks;
  if (shape.chunks > 1) return std::min(warm_up(shape, stage) + 1, shape.micro_batches * shape.chunks);
  return std::min(shape.stages - stage, shape.micro_batches);
}

}  // namespace tessera::pipeline
