// Checkpoints of an engine (format: checkpoint/manifest.h). What a front end keeps itself goes along as ClientPart.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tessera/checkpoint/deepspeed/save.h"
#include "tessera/checkpoint/writer.h"
#include "tessera/engine/engine.h"
#include "tessera/engine/restore.h"

namespace tessera::engine {

struct SaveOptions {
  std::string tag = {};  // empty: "global_step<N>"
  bool latest = true;    // the tag that a load without one takes
  bool frozen = true;    // also parameters that are not optimized
  // Not given: a front end's configuration decides, else no, 0, and Ignore.
  std::optional<bool> asynchronous = {};  // returns once everything is copied to host memory
  std::optional<int> keep_last =
      {};  // older checkpoints in the folder are removed once this one is complete; 0: all stay
  // What happens where ranks name different tags; rank 0's tag holds.
  enum class Tags { Ignore, Warn, Fail };
  std::optional<Tags> tags = {};
  // Writes DeepSpeed's files, as that many ranks have them, in place of ours; not in the background.
  std::optional<checkpoint::DeepSpeedLayout> deepspeed = {};
};

// A whole tensor of the front end's; the first rank writes it, as the value of all ranks. A "buffer" that differs on
// other ranks is written by these too (kRankBuffer in logical.h).
struct ClientTensor {
  std::string name, kind;
  at::Tensor tensor;
};
// Values that a client's optimizer keeps for this rank's elements of a parameter (StateAccess::local_range()).
struct ClientState {
  int param = 0;
  std::string kind;
  at::Tensor values;
};

struct ClientPart {
  std::string run = "{}";                    // a JSON object; rank 0's is kept
  std::map<std::string, std::string> blobs;  // bytes, by names that no other rank uses
  std::vector<ClientTensor> tensors;
  std::vector<ClientState> states;
  std::map<std::string, std::vector<std::string>> aliases;  // other names of a parameter
};

// How a load finds what DeepSpeed wrote.
struct Foreign {
  std::string latest = "latest";  // the file in the folder that names the newest tag; another name: it must be there
  checkpoint::Objects objects = checkpoint::Objects::Inert;
  // Parameters by group, as in checkpoint::DeepSpeedHints; none: the engine's parameters in their order.
  std::optional<checkpoint::DeepSpeedHints::Groups> groups = {};
};

// The parameters of an engine by group, in their order.
checkpoint::DeepSpeedHints::Groups names_by_group(Engine& engine);

// Note [Checkpoints of several engines]
//   Engines that are parts of one program, each on other ranks, save into one folder: span() gives the Checkpointer of each
//   the ranks of all of them, which from then on make every call together. Names of parameters and buffers tell the
//   engines apart, and nothing in the folder says which engine had which: it loads into one engine, or into other parts. A
//   tensor that several engines hold (tied weights) is written by one. Counters, loss scale and hyper-parameters are those of
//   the first rank's engine; they have stepped together.

// Calls are collective: all ranks of the engine make them, on a folder that all of them see. An error of one rank is an error
// on all, after which the engine is as it was.
class Checkpointer {
 public:
  // `ranks`: those of the engine, in groups that nobody else uses. They are made where the engine is built, so that other ranks
  // see a rank that waits in its first save.
  Checkpointer(Engine& engine, zero::Ranks ranks) : engine_(engine), ranks_(std::move(ranks)) {}
  // Waits for nobody: a save in the background that is not complete goes on by itself, with a warning, and the process waits for
  // it when it ends. Call wait() first to have its error.
  ~Checkpointer();

  // See Note [Checkpoints of several engines]. `group`: all ranks of all engines, in the order of the parts. `copies`:
  // parameters of this engine that another one writes.
  void span(comm::GroupPtr group, std::vector<int> copies);
  bool spans() const { return spans_; }
  // This rank's number among those of the engine (or of all engines); number 0 writes what is the same on all.
  int place() { return ranks_.place(); }
  // Returns the texts of all ranks, by number; an error text of one rank is an error on all.
  std::vector<std::string> exchange(const std::string& text, const std::string& error);
  // Runs f on every rank: an error of one is an error on all. In f nothing is collective but calls that fail on all ranks of this
  // engine alike.
  void on_all(const std::function<void()>& f);
  // Returns the tag. The last complete checkpoint stays complete until the new one is.
  std::string save(const std::string& dir, const SaveOptions& options, ClientPart client = {});
  // Waits until an asynchronous save is complete; throws its error, once. save() and load() do so first. Other calls wait too.
  void wait();
  // Opens a checkpoint for a load. `tag` empty: the tag of `latest`; nothing where there is no such file.
  std::optional<Restore> open(const std::string& dir, const std::string& tag, const Restore::Options& options,
                              const Foreign& foreign = {});

 private:
  struct Job;
  struct Background;
  std::string save_as_deepspeed(const std::string& dir, const SaveOptions& options, ClientPart client);
  std::vector<ClientTensor> own_buffers(const ClientPart& client);
  std::vector<checkpoint::Item> items(const SaveOptions& options, const ClientPart& client);
  checkpoint::Manifest manifest(const SaveOptions& options, const ClientPart& client);
  void stage(std::vector<checkpoint::Item>& items);
  void finish();

  bool is_first_of_engine() const;
  bool is_copy(int param) const;

  Engine& engine_;
  zero::Ranks ranks_;  // a save in the background has its collectives to itself
  bool spans_ = false;
  std::vector<int> copies_;
  std::vector<at::Tensor> staging_;  // host memory that asynchronous saves keep
  std::shared_ptr<Background> background_;
  std::thread thread_;
};

}  // namespace tessera::engine
