// What files call the tensors of an engine: names, shapes and kinds that say nothing of how it spreads them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/manifest.h"
#include "tessera/engine/engine.h"

namespace tessera::engine {

inline constexpr const char* kWeight = "weight";
inline constexpr const char* kMaster = "master";
inline constexpr const char* kBuffer = "buffer";  // of the first rank
// A rank's buffer where it differs from the first's (statistics of a batch): named for the rank, which loads it where
// spread_of() is the same. No other rank reads it.
inline constexpr const char* kRankBuffer = "rank_buffer";
// "weight", "master" or the state's name in torch.
std::string kind_of(Engine& engine, Quantity quantity);

// The parameter's number. Value error for a tensor that is none of the engine's.
int number_of(const Engine& engine, const at::Tensor& param);

std::vector<int64_t> whole_shape(const ParamSpec& spec, const shard::Form& form);
std::vector<checkpoint::Slice> slice_of(const shard::CutPtr& cut);

// A parameter that differs along axes of several ranks and does not say by a cut what it is part of is a tensor of its own at
// each place along these axes. place_of(): this rank's place, places_of(): all; none, and one without axes, for other parameters.
std::vector<checkpoint::Along> place_of(const Engine& engine, const ParamSpec& spec);
std::vector<std::vector<checkpoint::Along>> places_of(const Engine& engine, const ParamSpec& spec);
// The parameter's name with this rank's place.
std::string file_name_of(const Engine& engine, const ParamSpec& spec);

// Why a state of this name, of the family of optim::family_of(), cannot have these values: empty where it can. "step" is one count of
// updates; of second moments and sums of squares torch takes roots.
std::string wrong_state(const std::string& family, const std::string& key, const at::Tensor& value);

// What the core's optimizer keeps of a trained parameter, by the key of torch's optimizer state: "exp_avg", and where the rule
// counts updates "step", a tensor without dims. Values as of StateAccess, in fp32; undefined before there is one. Value error for
// a missing key, not-implemented error where a client's optimizer has the states. Full values are collective.
class OptimizerStates {
 public:
  explicit OptimizerStates(Engine& engine) : engine_(engine) {}
  at::Tensor get_full(int param, const std::string& key) const;
  void set_full(int param, const std::string& key, const at::Tensor& value) const;
  at::Tensor get_local(int param, const std::string& key) const;
  void set_local(int param, const std::string& key, const at::Tensor& value) const;

 private:
  std::optional<Quantity> quantity(const std::string& key) const;  // none: "step"
  void check(const std::string& key, const at::Tensor& value) const;

  Engine& engine_;
};

// How ranks lie on axes, as a text.
std::string spread_of(const comm::Mesh& mesh);
// The name of a rank's own buffer; `place` is the rank's among all that save.
std::string buffer_name_of(const std::string& name, int place);

// All ranks of the engine, whose groups may take tensors of its device only.
zero::Ranks ranks_of(const Engine& engine);

}  // namespace tessera::engine
