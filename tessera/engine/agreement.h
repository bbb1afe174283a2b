// What all ranks of an engine must have alike: compared by a number, and told by name where it differs.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/optim/optimizer.h"
#include "tessera/zero/ranks.h"

namespace tessera::engine {

// FNV-1a, cut to what a double holds exactly.
class Digest {
 public:
  void add(std::string_view bytes);
  void add(double number);
  double value() const { return static_cast<double>(hash_ >> 12); }

 private:
  uint64_t hash_ = 14695981039346656037ULL;
};

// Value error on all ranks, "[origin] what: rank 0 has X, rank 1 has Y; advice", where their lines differ: the first that
// does. Collective.
void check_same(const zero::Ranks& ranks, const std::vector<std::string>& mine, const char* origin, const char* what,
                const char* advice);

// Note [What ranks step by]
//   A rank that differs in a rate, in the number of micro-batches, or in a call would follow its own course, silently: updates
//   are of slices, and collectives that mean different steps still match. So the digest of these goes with the norm, which
//   all ranks exchange at every update anyway, and costs no collective. Where it differs, all of them know, before anything is
//   updated or counted, and find out what it is.
struct StepTerms {
  const char* call;
  int64_t accumulation_steps;
  int64_t empty_steps;  // calls of step() for this update that no backward preceded
  const std::vector<optim::GroupOptions>& groups;
  std::string_view fault = {};           // why this rank cannot step
  std::vector<std::string> params = {};  // of those that begin or cease to be trained, what they do

  double digest() const;
  // Where digests differ. Collective; value error, always.
  [[noreturn]] void refuse(const zero::Ranks& ranks) const;
};

}  // namespace tessera::engine
