// Batches of a stage, which end alike on all stages: with the loss, or with the error of one of them.
//
// Note [A call that failed]
//   An engine of a pipeline has one call at a time: a batch, with what all stages do before and behind it. An error of one stage is
//   an error of all. Where no messages are under way the error leaves all stages at one place, and the next call may come: the
//   data has ended, ranks cannot step. Amid a batch messages may still be on their way, and gradients of stages differ; where a
//   rank is lost, the others may be anywhere. After such an error every call is refused.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/pipeline/run.h"
#include "tessera/pipeline/ties.h"

namespace tessera::pipeline {

class Runner {
 public:
  // `beside`: groups in which the ranks of this stage wait for each other. Messages come to `device`.
  Runner(Ranks ranks, std::shared_ptr<Ties> ties, int chunks, at::Device device, std::vector<comm::GroupPtr> beside);

  // One optimizer step: what was thawed joins, all ranks have their data, the batch, gradients of tied weights, and the step of all
  // stages. Returns the mean loss. Errors as of run(); UsageError where ranks have other numbers of micro-batches, or only some have any
  // left. Collective over all ranks of all stages.
  std::optional<double> train_batch(Stage& stage, const Table& table, const Shape& shape);
  // Does the same without gradients and step; returns no loss where the last stage computes none.
  std::optional<double> eval_batch(Stage& stage, const Table& table, const Shape& shape);

  struct Result {
    std::optional<double>
        loss;           // the mean over micro-batches and ranks of the last stage; none where these compute none
    int most_live = 0;  // see Run
    int64_t most_under_way = 0;
  };
  // Runs this stage's part of a batch. An error of one rank is one of all: there it is thrown as it is, elsewhere as StageFailed
  // with its text, or as DistBackendError where ranks were lost. Collective over all ranks of all stages.
  Result run(Stage& stage, const Table& table, const Shape& shape, bool trains);
  // Behind run(), and before the step: every copy of a tied weight gets the gradients of all. Errors as of run(); an error from
  // before anything is sent leaves all stages at one place. Collective.
  void sum_gradients(Stage& stage);

  // ---- Note [A call that failed]
  // UsageError within another call, and where an earlier one has failed so that none may come. Local, as all of these calls are.
  void check(const std::string& call) const;
  void begin(const std::string& call);
  void end() { call_.clear(); }
  // Takes the place of end() after a failure. Where ranks are lost it announces that to all.
  void fail(const Failure& failure);
  template <class F>
  auto in_call(const std::string& call, const Stage& stage, const F& body) {
    begin(call);
    try {
      auto result = body();
      end();
      return result;
    } catch (...) {
      fail(stage.explain(std::current_exception()));
      throw;
    }
  }
  // The call that is under way; empty: none.
  const std::string& call() const { return call_; }
  // The most micro-batches that were live at a time (see Run), of all batches so far.
  int most_live() const { return most_live_; }

  const Ranks& ranks() const { return ranks_; }
  Ties& ties() { return *ties_; }

 private:
  // Returns what work() makes, `count` numbers, of all ranks, as rows; an error of one rank is one of all, also of those that wait
  // for its messages or beside it. Collective.
  std::vector<std::vector<double>> amid_messages(const Stage& stage, size_t count, comm::Label label,
                                                 const std::function<std::vector<double>()>& work);
  // Ranks that wait for this one, now or later, get the failure in place of what they wait for. Local.
  void announce(const Failure& failure);
  void read(Stage& stage, int64_t micro_batches) const;
  double mean_of(const Tensors& losses) const;
  [[noreturn]] void end_failed(const std::exception_ptr& problem, const Failure& failure) const;

  const Ranks ranks_;
  const std::shared_ptr<Ties> ties_;
  Wires wires_;
  const std::vector<comm::GroupPtr> beside_;
  std::string call_;        // the call that is under way; empty: none
  bool under_way_ = false;  // messages are on their way
  std::string refused_;     // why no call may come
  int most_live_ = 0;
};

}  // namespace tessera::pipeline
