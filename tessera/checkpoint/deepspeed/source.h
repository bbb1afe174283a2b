// A checkpoint that is read for conversion, in terms of what DeepSpeed's files hold.
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
  // `objects`: objects of unknown classes are Refused or Kept. The reader outlives the source. IoError where a blob is damaged.
  Source(const Reader& reader, Objects objects);

  // The values made for the file that is being written; renew() frees those made for earlier files.
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
  bool is_low() const;  // a trained parameter is not fp32
  // Whether DeepSpeed runs this configuration with an optimizer of torch.optim, rather than its own of the same name.
  bool has_torch_optimizer() const;

  // The trained parameters' names by param group, in the optimizer's order.
  std::vector<Names> groups() const;
  // The param groups' hyper-parameters, with `numbers` as their "params".
  Value param_groups(const std::vector<Shape>& numbers);
  // The most updates that any of these parameters had; step() gives it in the form that DeepSpeed's optimizer has.
  int64_t updates(const Names& names) const;
  Value step(const Names& names);
  // The updates of each parameter that had fewer than its flat group's most, as it joined later; {} where there is none. It goes
  // under a key of ours, as DeepSpeed has one number for a whole group.
  Value steps_beside(const std::vector<Names>& groups);
  // A new dict of the states that a flat group has besides its tensors.
  Value scalars(const Names& names);
  Names moments(const std::string& name) const;
  std::string value_kind(const std::string& name) const;
  // Value error where the parameter has states that DeepSpeed's files cannot hold.
  void check_states(const std::string& name) const;

  // Gives elements [begin, end) of the flattened tensor to `sink`, in pieces of bounded size.
  void chunks(const std::string& name, const std::string& kind, at::ScalarType dtype, shard::Range range,
              const Streamed::Sink& sink) const;
  Value whole(const std::string& name, const std::string& kind, at::ScalarType dtype);
  // The state dict in the dtypes that the module computed in; tied names share one tensor, buffers are those of `rank`.
  Value module(int64_t rank);
  Names buffers() const;
  // The buffers that differ from rank 0's; an empty dict where all ranks have the same.
  Value rank_buffers();
  Value schedule();
  Value loss_scaler();
  // The attributes of the object that loss_scaler() returns.
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
  std::map<std::string, Value> numbers_;  // by parameter: its states that are not one value for each element
  Names trained_, frozen_;
};

}  // namespace tessera::checkpoint::deepspeed
