// Schedules: for every stage the order in which it receives, computes and sends, as a table of actions.
//
// A pipeline of `stages` ranks whose model is cut into `stages * chunks` parts: part p is chunk p / stages of stage
// p % stages. Every micro-batch goes forward through all parts and backward through them; a schedule is the order of these passes
// on one stage. Tables of different stages fit together: what one sends comes in the order in which the other receives it,
// so that sends which nobody waits for cannot deadlock. Both front ends interpret these tables.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::pipeline {

enum class Kind : uint8_t {
  ReceiveActivations,
  Forward,
  SendActivations,
  ReceiveGradients,
  Backward,
  SendGradients,
};
const char* kind_name(Kind kind);  // "receive activations", "forward", ...

struct Action {
  Kind kind = Kind::Forward;
  int micro = 0, chunk = 0;
  bool operator==(const Action&) const = default;
};
using Table = std::vector<Action>;

// The shape of a pipeline.
struct Shape {
  int stages = 1, micro_batches = 1, chunks = 1;

  bool is_first(int stage, int chunk) const { return stage == 0 && chunk == 0; }
  bool is_last(int stage, int chunk) const { return stage == stages - 1 && chunk == chunks - 1; }
  int part(int stage, int chunk) const { return chunk * stages + stage; }
  bool operator==(const Shape&) const = default;
};

// The names of schedules: "1f1b", "gpipe", "interleaved".
const std::vector<std::string>& schedules();
// The table of one stage for one optimizer step. With several chunks "1f1b" is "interleaved". Value error for what the
// schedule cannot do.
Table training(const std::string& name, const Shape& shape, int stage);
// The table of one stage for an evaluation. At most kAhead messages over one boundary are under way: a sender waits
// until the receiver has taken those before. Two keep both busy; tables of all stages come to their ends with it.
inline constexpr int kAhead = 2;
Table forward_only(const Shape& shape, int stage);
// The most micro-batches (times chunks) whose activations a stage holds at one time.
int live_bound(const std::string& name, const Shape& shape, int stage);

}  // namespace tessera::pipeline
