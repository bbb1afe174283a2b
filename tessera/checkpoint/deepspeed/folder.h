// A folder of DeepSpeed's, its files opened and its parameters and optimizer states found, in any of the layouts:
//   stage 0       everything in mp_rank_00_model_states.pt; masters and moments by parameter, or flat by param group
//   stages 1, 2   every param group flat, padded, cut into equal parts: one *_optim_states.pt for each rank
//   stage 3       every parameter cut into equal parts, padded; a rank's parts of a (sub) group one after the other
//   universal     zero/<parameter>/<state>.pt, whole tensors
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/checkpoint/deepspeed/pieces.h"
#include "tessera/checkpoint/deepspeed/pt_file.h"
#include "tessera/checkpoint/reader.h"

namespace tessera::checkpoint::deepspeed {

// A parameter that the optimizer has.
struct Trained {
  std::string name;
  Shape shape;
  int64_t step = 0;
  Value numbers;  // a dict of the states that are not one value for each element, or None
  std::vector<std::pair<std::string, Held>> tensors;  // by kind
};
struct Scaler {
  double scale = 1;
  int64_t steps = 0, good_steps = 0, budget = 1;
};

struct Folder {
  Folder(std::string path, const std::vector<std::string>& names, const DeepSpeedHints& hints);

  PtFile& open(const std::string& name);
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    TESSERA_FAIL(IoError, "[checkpoint] '", path, "' ", parts...);
  }
  // The tensor of that name in the module's state dict; null where there is none.
  const TensorRef* held(const std::string& name) const;
  const Trained* find(const std::string& name) const;
  bool is_buffer(const std::string& name) const { return buffers.contains(name); }
  // Names of tied parameters besides the first, each with the name under which the values are kept.
  std::vector<std::pair<std::string, std::string>> aliases() const;
  // Names and shapes of the parameters of each param group, or of each sub-group of one.
  std::vector<std::vector<std::pair<std::string, Shape>>> shapes() const;

  std::string path;
  DeepSpeedHints hints;
  Values values;  // values made while the folder is read
  std::vector<std::pair<std::string, std::unique_ptr<PtFile>>> files;
  const PtFile* model_file = nullptr;     // the first rank's file
  std::map<int64_t, std::string> models;  // file names by data-parallel rank; -1: one file for all ranks
  Value state;                            // what model_file holds
  int64_t stage = 0;
  bool universal = false, has_own_buffers = false;
  std::map<std::string, bool> buffers;  // by name: whether the module has a tensor for the buffer
  std::vector<std::string> buffer_names;
  std::vector<Trained> trained;
  Items groups;  // hyper-parameters of each param group, a dict each
  std::vector<std::vector<std::string>> group_names;
  std::optional<Scaler> scaler;

 private:
  using Models = std::map<std::pair<int64_t, int64_t>, std::string>;
  using Optims = std::map<int64_t, std::string>;
  void sort_names(const std::vector<std::string>& names, Models& all, Optims& optims);
  void read_module();
  int64_t read_states(const Optims& optims, bool is_sharded);
  Trained& add(const std::string& name, const Shape& shape, int64_t step, const Value& numbers);
  int64_t step_of(const PtFile& file, const Value& value) const;
  void read_own_steps(const PtFile& file, const Value& holder);
  void set_scaler(const Value& state);
  void set_scaler(const Object& state);
  template <class Find>
  void set_scaler_from(const Find& find);
  void set_groups(const Value& given);

  // A flat group's states: by kind what each rank has, the step count, and states that are no tensors of the group's length.
  struct Flat {
    std::vector<std::pair<std::string, std::vector<const TensorRef*>>> parts;
    int64_t step = 0;
    Value numbers;
  };
  Flat flat_states(const std::vector<const TensorRef*>& masters, const std::vector<Value>& states,
                   const std::vector<const PtFile*>& of);
  void read_flat(const std::vector<const PtFile*>& of, const Items& states);
  void read_sharded(const std::vector<const PtFile*>& of, const Items& states);
  void read_stage0();
  void read_whole_states(const Value& saved, const Value& group, const Value& states, size_t number,
                         const std::vector<std::string>& names);
  void read_stage0_flat(const TensorRef& master, const Value& state, const std::vector<std::string>& names);
  std::optional<std::vector<std::vector<std::string>>> named_groups(const Items& given, const Value* flat) const;
  int64_t read_universal(bool is_sharded);
  void read_universal_param(const PtFile& common, const std::string& name, const Shape& shape, const Value& state);

  std::unordered_map<std::string, const TensorRef*> module_;
  std::unordered_map<std::string, size_t> index_;   // a name's index in `trained`
  std::unordered_map<std::string, size_t> opened_;  // a name's index in `files`
};

}  // namespace tessera::checkpoint::deepspeed
