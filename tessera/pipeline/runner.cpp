#include "tessera/pipeline/runner.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::pipeline {

Runner::Runner(Ranks ranks, std::shared_ptr<Ties> ties, int chunks, at::Device device,
               std::vector<comm::GroupPtr> beside)
    : ranks_(std::move(ranks)), ties_(std::move(ties)), wires_(ranks_, chunks, device), beside_(std::move(beside)) {}

void Runner::check(const std::string& call) const {
  TESSERA_CHECK(refused_.empty(), "engine", call, ": a batch has failed before (", refused_,
                "): stages are not at the same place any more; build a new engine and load a checkpoint");
  TESSERA_CHECK(call_.empty(), "engine", call, ": inside ", call_);
}

void Runner::begin(const std::string& call) {
  check(call);
  call_ = call;
  under_way_ = false;
}

void Runner::fail(const Failure& failure) {
  if (failure.lost) announce(failure);
  if (failure.lost || under_way_) refused_ = first_line(failure.text);
  end();
}

std::optional<double> Runner::train_batch(Stage& stage, const Table& table, const Shape& shape) {
  return in_call("train_batch", stage, [&] {
    ties_->follow(stage);
    read(stage, shape.micro_batches);
    const auto loss = run(stage, table, shape, /*trains=*/true).loss;
    if (loss) stage.set_loss(*loss);
    try {
      sum_gradients(stage);
      stage.step(ties_->copies(stage));
    } catch (...) {
      stage.forget_gradients();
      throw;
    }
    return loss;
  });
}

std::optional<double> Runner::eval_batch(Stage& stage, const Table& table, const Shape& shape) {
  return in_call("eval_batch", stage, [&] {
    read(stage, shape.micro_batches);
    return run(stage, table, shape, /*trains=*/false).loss;
  });
}

// Returns once all ranks have their data.
void Runner::read(Stage& stage, int64_t micro_batches) const {
  const auto wanted = static_cast<double>(micro_batches);
  const auto rows = agreed_rows(
      ranks_, "read its data", [&](const std::exception_ptr& error) { return stage.explain(error); }, 2,
      [&] { return std::vector<double>{wanted, static_cast<double>(stage.read(micro_batches))}; },
      "the data of a batch");
  int readers = 0, ended = 0, first_ended = -1;
  for (int rank = 0; rank < static_cast<int>(rows.size()); ++rank) {
    const double count = rows[rank][0], has = rows[rank][1];
    TESSERA_CHECK(count == wanted, "pipeline", ranks_.name(rank), " has ", count, " micro-batches for this batch, ",
                  ranks_.name(), " has ", wanted, "; they must be the same on all stages");
    TESSERA_CHECK(has <= 0 || has >= wanted, "pipeline", "the data of ", ranks_.name(rank), " ended after ", has,
                  " of ", wanted,
                  " micro-batches; give whole batches, as an iterator over a loader with drop_last, or "
                  "a RepeatingLoader");
    readers += has >= 0 ? 1 : 0;
    if (has == 0 && ended++ == 0) first_ended = rank;
  }
  if (ended == 0) return;
  TESSERA_CHECK(ended == readers, "pipeline", "the data of rank ", first_ended,
                " has ended, that of other ranks has not");
  stage.end_of_data();
}

std::vector<std::vector<double>> Runner::amid_messages(const Stage& stage, size_t count, comm::Label label,
                                                       const std::function<std::vector<double>()>& work) {
  under_way_ = true;
  Attempt mine = attempt([&](const std::exception_ptr& error) { return stage.explain(error); }, work);
  Failure& failure = mine.failure;
  if (mine.problem) {
    if (!failure.announced && !failure.lost)
      failure.text = c10::str("[pipeline] ", ranks_.name(), kFailed, failure.text);
    announce(failure);
    if (failure.lost) std::rethrow_exception(mine.problem);
  }
  std::vector<std::vector<double>> rows;
  try {
    rows = rows_of_all(ranks_, mine, count, label, [&] { end_failed(mine.problem, failure); });
  } catch (const StageFailed&) {
    throw;
  } catch (const c10::DistBackendError&) {
    if (mine.problem) std::rethrow_exception(mine.problem);
    throw;
  }
  ranks_.flush();
  under_way_ = false;
  return rows;
}

Runner::Result Runner::run(Stage& stage, const Table& table, const Shape& shape, bool trains) {
  Run run(stage, wires_, shape, ranks_.stage(), trains);
  const auto rows = amid_messages(stage, 2, "the loss of a batch", [&] {
    run.execute(table);
    return std::vector<double>{run.losses.empty() ? 0.0 : 1.0, mean_of(run.losses)};
  });
  double sum = 0, count = 0;
  for (const auto& row : rows) {
    count += row[0];
    sum += row[0] != 0 ? row[1] : 0;
  }
  most_live_ = std::max(most_live_, run.most_live);
  Result result{{}, run.most_live, run.most_under_way};
  if (count > 0) result.loss = sum / count;
  return result;
}

void Runner::sum_gradients(Stage& stage) {
  if (ties_->empty()) return;
  const Ties::Used used = ties_->used(stage);
  amid_messages(stage, 0, "gradients of tied weights", [&] {
    ties_->sum_gradients(stage, used);
    return std::vector<double>();
  });
}

// The mean over micro-batches, added up in fp32.
double Runner::mean_of(const Tensors& losses) const {
  if (losses.empty()) return 0;
  at::Tensor total = at::zeros({}, losses[0].options());
  for (const at::Tensor& loss : losses)
    total = total + loss.reshape({});
  return (total / static_cast<double>(losses.size())).item<double>();
}

// Some rank could not go on: throws its error there, and on all others what it announces.
void Runner::end_failed(const std::exception_ptr& problem, const Failure& failure) const {
  const bool own = problem && !failure.announced;
  const auto texts = ranks_.texts(own ? failure.text : "", "why a batch has failed");
  if (problem && own) std::rethrow_exception(problem);
  const auto text = std::ranges::find_if(texts, [](const std::string& each) { return !each.empty(); });
  TESSERA_FAIL(StageFailed, text != texts.end() ? *text : failure.text,
               "; this engine has ended with it, build a new one and load a checkpoint");
}

void Runner::announce(const Failure& failure) {
  auto wires = wires_.all();
  for (Wire* wire : ties_->outgoing())
    wires.push_back(wire);
  for (Wire* wire : wires)
    wire->try_to_send_failure(failure.text);
  const std::string text = first_line(failure.text);
  for (const comm::GroupPtr& group : beside_)
    if (group->size() > 1) group->abort(text);
  if (failure.lost) ranks_.everyone->abort(text);
}

}  // namespace tessera::pipeline
