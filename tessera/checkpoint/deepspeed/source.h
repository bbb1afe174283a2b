// A checkpoint that is read, in terms of what DeepSpeed's files hold.
#pragma once

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/checkpoint/deepspeed/pt_file.h"
#include "tessera/checkpoint/reader.h"

namespace tessera::checkpoint::deepspeed {

using Names = std::vector<std::string>;

class Source {
 public:
  // `objects`: of classes that are not plain data, Refused or Kept. The reader outlives it. IoError where a blob is damaged.
  Source(const Reader& reader, Objects objects);

  // What is made for a file; renew() lets go of what was made for others.
  Values& values() { return *values_; }
  void renew() { values_ = std::make_unique<Values>(); }
  const Reader& reader() const { return reader_; }
  const nlohmann::ordered_json& run() const { return run_; }
  const Value& config() const { return config_; }
  const Value& client() const { return client_; }
  const Names& frozen() const { return frozen_; }
  const std::vector<ParamRecord>& params() const { return reader_.manifest().params; }
  const ParamRecord& param(const std::string& name) const { return *params_.at(name); }
  int64_t numel(const std::string& name) const;
  bool is_bf16() const;
  bool is_low() const;  // a trained parameter has 16 bits
  // Whether the optimizer there is one of torch.optim, rather than DeepSpeed's own of the same name.
  bool has_torch_optimizer() const;

  // Names by param group, in the optimizer's order.
  std::vector<Names> groups() const;
  // Hyper-parameters, with these numbers as "params".
  Value param_groups(const std::vector<Shape>& numbers);
  // The most updates of any of them; in the form that the optimizer there has.
  int64_t updates(const Names& names) const;
  Value step(const Names& names);
  // Of parameters that had fewer updates than their flat group, as they joined later: how many; none: {}. A key of our own, as
  // DeepSpeed has one number for all of a group.
  Value steps_beside(const std::vector<Names>& groups);
  // States that a flat group has beside its tensors, into a new dict.
  Value scalars(const Names& names);
  Names moments(const std::string& name) const;
  std::string value_kind(const std::string& name) const;
  // Value error for states of the parameter that DeepSpeed's files cannot hold.
  void check_states(const std::string& name) const;

  // Elements [begin, end) of the flattened tensor, in pieces of bounded size.
  void chunks(const std::string& name, const std::string& kind, at::ScalarType dtype, shard::Range range,
              const Streamed::Sink& sink) const;
  Value whole(const std::string& name, const std::string& kind, at::ScalarType dtype);
  // The state dict in the dtypes that the module computed in; tied names have one tensor. Buffers as `rank` has them.
  Value module(int64_t rank);
  Names buffers() const;
  // Those that ranks have otherwise than rank 0; an empty dict where all have the same.
  Value rank_buffers();
  Value schedule();
  Value loss_scaler();
  // The object's attributes.
  const Items& scaler_state(const Value& scaler) const { return *scaler.object->steps[0].values[0].items; }

 private:
  Value blob(const std::string& name, bool is_list = false);
  Value part(const std::string& name, bool is_list = false);
  void read_numbers();
  const Value* section(const char* name) const;

  const Reader& reader_;
  const Objects objects_;
  Values held_;
  std::unique_ptr<Values> values_ = std::make_unique<Values>();
  std::vector<std::unique_ptr<PtFile>> blobs_;
  nlohmann::ordered_json run_;
  Value python_, client_, config_, extra_, schedule_, group_names_, param_groups_;
  std::unordered_map<std::string, const ParamRecord*> params_;
  std::unordered_map<std::string, std::vector<const TensorRecord*>> tensors_;
  std::map<std::string, Value> numbers_;  // states that are not one value for each element, by parameter
  Names trained_, frozen_;
};

}  // namespace tessera::checkpoint::deepspeed
