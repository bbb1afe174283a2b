// Deferred: constructors of modules that run without memory. What they compute is written down, and computed afterwards, a piece at
// a time.
//
// Note [Constructors without memory]
//   LibTorch calls nobody when a module has been built or registered: Module::register_module() is no virtual function, and the
//   classes of torch::nn take no device. So what is seen is not the module but its operators: while a Recording lives, this
//   thread's all go to a dispatch key of modes that torch gives no meaning (TESTING_ONLY_GenericMode; DeferredInit is taken, Note [Keys
//   of parameters]). Tensors are made on the meta device there, and each operator is kept with where its arguments lie (storage, sizes,
//   strides). run() calls the operators again with memory, in the same order, so that random numbers are
//   those of a plain construction. A storage gets its memory with the first operator that uses it and is finished with the
//   last one; the tensors that the program holds then are given it, as the same objects.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace tessera::nn {

class Deferred {
 public:
  Deferred();
  ~Deferred();
  Deferred(const Deferred&) = delete;
  Deferred& operator=(const Deferred&) = delete;

  // Operators of this thread are written down while the object lives. State error where another one lives.
  class [[nodiscard]] Recording {
   public:
    explicit Recording(Deferred& deferred);
    ~Recording();
    Recording(const Recording&) = delete;
    Recording& operator=(const Recording&) = delete;

   private:
    struct Guard;
    std::unique_ptr<Guard> guard_;
  };

  // Who keeps tensors, other than whole, between the operators that use them.
  struct Keeper {
    std::function<bool(const at::Tensor&)> keeps;
    std::function<void(const at::Tensor&)> put;   // it has values, and is used no more or not soon
    std::function<void(const at::Tensor&)> take;  // it was put, and is used again: makes it whole
  };
  // Says in an error of torch that a constructor wanted values, where it did.
  static void explain(c10::Error& error);
  // Gives all tensors their values, those that operators made and the program still has, and `held`, on `device` where one is
  // given. UsageError for an operator that does something else with memory than it did without. Call it once, with no Recording
  // alive.
  void run(const Keeper& keeper, const std::vector<at::Tensor>& held, std::optional<c10::Device> device);

 private:
  struct Tape;
  friend struct Recorder;
  std::unique_ptr<Tape> tape_;
};

}  // namespace tessera::nn
