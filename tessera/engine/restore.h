// Loading a checkpoint into an engine: what the engine needs of it, checked before anything changes.
//
// Note [Another number of micro-batches]
//   A checkpoint between two updates starts at a boundary, whatever gradient_accumulation_steps was. One that was saved after
//   b of n micro-batches holds the part b/n of an update's gradient: where the number is m here, it counts as b*m/n of them,
//   and the update is that of the run that went on, if the batch of an update is the same. Where that is no whole number, or
//   a backward has no step() yet that says whether it belongs to them, the accumulation begins anew, with a warning.
//   micro_steps becomes what it would be had the number always been m, as in DeepSpeed: clients count with it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/checkpoint/reader.h"
#include "tessera/engine/accumulation.h"

namespace tessera::io {
class Progress;
}

namespace tessera::engine {

struct SavedRun;

// Counters of the run that saved a checkpoint, as Engine counts. IoError for numbers that cannot be.
struct RunCounters {
  int64_t micro_steps = 0, global_steps = 0, skipped_steps = 0, global_samples = 0;
};
RunCounters counters_of(const checkpoint::Reader& reader);

// A checkpoint that was found good and fits the engine, before anything has changed.
class Restore {
 public:
  struct Options {
    bool strict = true;     // names must be the same on both sides
    bool optimizer = true;  // moments and steps
    bool run = true;        // counters, loss scale, hyper-parameters
    bool from_master =
        true;  // weights come from fp32 masters where there are any, else from what the module computed in
    std::vector<std::string> client_kinds = {};  // kinds of ClientState that client_state() will be asked for
  };

  const std::string& folder() const { return folder_; }
  const std::string& tag() const { return tag_; }
  const std::string& client_run() const;
  // Whether the checkpoint was saved inside an accumulation that cannot go on here: RestoredAccumulation::fits(), the note above.
  bool accumulation_begins_anew() const { return !anew_.empty(); }
  const std::vector<std::string>& missing() const { return missing_; }
  const std::vector<std::string>& unexpected() const { return unexpected_; }
  const checkpoint::Reader& reader() const { return *reader_; }
  // A client's state of this rank's elements; undefined where the checkpoint has none.
  at::Tensor client_state(int param, const std::string& kind) const;
  // Pairs buffers of the model, by name, with the values that they shall have: this rank's own where as many ranks saved them. Value
  // error for another shape, and where the load is strict for names; else these are among missing() and unexpected().
  using Buffers = std::vector<std::pair<at::Tensor, at::Tensor>>;
  Buffers buffers(const std::map<std::string, at::Tensor>& here);
  // Puts the checkpoint into the engine. Collective. A disk's error in the middle leaves the engine changed in part and says so.
  void apply();

 private:
  friend class Checkpointer;
  struct Piece {
    const checkpoint::TensorRecord* record;
    checkpoint::Want want;
    int param;
    shard::Quantity quantity;
  };
  void plan(Engine& engine);
  std::string other_optimizer() const;
  void plan_accumulation();
  void check_room() const;
  void read_parts(io::Progress& progress);
  void verify() const;
  const checkpoint::TensorRecord* buffer_of(const std::string& name) const;
  void warn_of_buffers() const;
  void follow_writes();
  void check(const std::vector<std::string>& problems) const;
  void check_unexpected(const std::vector<std::string>& of_all_ranks);
  const checkpoint::ParamRecord* record_of(const ParamSpec& spec, std::vector<std::string>& problems) const;

  Engine* engine_ = nullptr;
  int place_ = 0;  // this rank's place among all
  const zero::Ranks* ranks_ = nullptr;
  Options options_;
  bool same_ranks_ = false;  // the ranks are as those that saved
  bool of_several_ = false;  // what is not in this engine may be in another one
  std::string folder_, tag_;
  std::unique_ptr<checkpoint::Reader> reader_;
  std::vector<Piece> parts_;
  std::vector<std::pair<int, shard::Quantity>> unborn_;  // states of parameters that had not been updated yet
  std::vector<const checkpoint::ParamRecord*> records_;  // by parameter; null: missing
  std::vector<std::string> missing_, unexpected_;
  std::unique_ptr<RestoredAccumulation> accumulation_;
  std::string anew_;                     // why there is no accumulation, although one was saved
  int64_t begun_ = 0, micro_steps_ = 0;  // as they will be after the load
  std::shared_ptr<const SavedRun> run_;
};

}  // namespace tessera::engine
