// FlopsProfile: operations, parameters and times by module of the forwards of a thread, for both front ends, and a text of them. Front
// ends say which modules there are and when those run.
#pragma once

#include <c10/core/Storage.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/engine/flops.h"

namespace tessera::engine {

// One module, everything below it included.
struct ProfileRow {
  std::string name;  // its path; "" is the model
  std::string kind;  // its class
  int64_t parameters = 0;
  int64_t operations = 0;
  double seconds = 0;  // on a device: until its kernels were launched
  bool timed = false;  // it was seen running
  int64_t depth() const;
};

struct ProfileText {
  int64_t step = 1;         // that the text names
  int64_t depth = -1;       // the deepest level; -1: all
  int64_t top_modules = 1;  // named for every level, those with most operations
  bool detailed = true;     // a line for each module
};

class FlopsProfile : private FlopCounter::Listener {
 public:
  // `factor`: the share of the forward that is computed again in the backward.
  explicit FlopsProfile(double factor = 0) : recompute(factor) {}
  ~FlopsProfile() override = default;
  FlopsProfile(const FlopsProfile&) = delete;
  FlopsProfile& operator=(const FlopsProfile&) = delete;

  struct Weight {
    at::Tensor tensor;
    int row;
  };
  // Counts in this thread from here on, from zero. `rows`: the model, then what is in it, as named_modules() gives them. An operation
  // belongs to the modules that run and to those around them; while none runs it is nobody's.
  //   With `weights`, for a front end that does not see every module run: an operation that reads one of them, or a view, slice, cast
  // or copy of it, belongs to its module and those around that, too; while nothing runs, any other belongs to the model. Of several
  // modules with the same weight that is the one with most around it that runs, then the last. A backward that begins while nothing
  // runs is left out, with what it recomputes.
  // Usage error while it counts.
  void start(std::vector<ProfileRow> rows, std::optional<std::vector<Weight>> weights = {});
  void stop();  // what was counted stays
  bool started() const { return counter_.has_value(); }
  void reset() { rows_.clear(); }

  // Around a call of the module of that row, which may be inside another one of its own. Other threads are not seen, nor is a call
  // before start(). What an exception has left open ends with what is around it.
  void enter(int row);
  void leave(int row);

  const std::vector<ProfileRow>& rows() const { return rows_; }
  // Of the model.
  int64_t operations() const;     // with what is recomputed
  int64_t multiply_adds() const;  // of the forward
  double seconds() const;
  int64_t parameters() const;
  std::string text(const ProfileText& options = {}) const;

  double recompute;

 private:
  struct Call {
    int row;
    std::chrono::steady_clock::time_point at;
    bool outermost;  // of its row
  };
  struct Copy {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::vector<int> rows;
  };
  void counted(double operations, c10::ArrayRef<const c10::IValue> inputs, bool in_backward) override;
  void copied(const at::Tensor& from, const at::Tensor& to) override;
  bool seen(int row) const;
  bool runs(int row) const;
  std::vector<int> rows_with(const at::Tensor& tensor) const;
  std::optional<int> owner_of(c10::ArrayRef<const c10::IValue> inputs) const;
  int depth_that_runs(int row) const;
  std::string line(const ProfileRow& row) const;
  const ProfileRow& model() const;

  std::vector<ProfileRow> rows_;
  std::vector<int> around_;  // each row's; -1: none
  std::optional<std::vector<Weight>> weights_;
  std::vector<Copy> copies_;
  std::vector<Call> calls_;  // under way
  std::thread::id thread_;
  std::optional<FlopCounter> counter_;
};

// 2.5e9 and "FLOPs": "2.50 GFLOPs".
std::string number_text(double value, const std::string& unit);

}  // namespace tessera::engine
