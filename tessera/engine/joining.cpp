// Parameters that begin to be trained while the engine lives: Note [Joining] in zero/joining.h.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "tessera/engine/agreement.h"
#include "tessera/engine/impl.h"
#include "tessera/engine/preflight.h"
#include "tessera/optim/norm.h"
#include "tessera/shard/storage.h"
#include "tessera/zero/update_lane.h"

namespace tessera::engine {

// Summarizes the gradients as they are, and those that join with it. Value error where ranks differ in what they step by.
zero::GradientSummary Engine::Impl::summarize(const std::string& call, int64_t empty, std::optional<double> norm,
                                              const Fault& fault, bool updated) {
  const std::vector<int> waiting = model->driver.waiting();
  const StepTerms terms = this->terms(call, empty, fault.text, waiting, updated);
  zero::GradientSummary summary = model->updater.summarize(norm, terms.digest(), terms.shown(), fault.text.empty());
  if (summary.alike && fault.own) std::rethrow_exception(fault.own);
  if (!summary.alike || !fault.text.empty()) terms.refuse(model->units.ranks());
  if (waiting.empty()) return summary;
  join(waiting);
  model->driver.ensure_reduced();
  return model->updater.summarize(norm);
}

StepTerms Engine::Impl::terms(const std::string& call, int64_t empty, const std::string& why,
                              const std::vector<int>& waiting, bool updated) const {
  StepTerms terms{.call = call,
                  .accumulation_steps = options.gradient_accumulation_steps,
                  .empty_steps = empty,
                  .begun = begun,
                  .unstepped = options.managed_accumulation ? model->driver.unstepped() : 0,
                  .fault = why,
                  .params = joining_lines(waiting)};
  if (updated) return terms;
  terms.gradient_scale = scaling.gradient_scale();
  if (clips_by_previous()) terms.previous_norm = previous_norm.get();
  terms.scaler = scaling.scaler().state();
  terms.groups = model->units.groups();
  terms.client = client_terms;
  if (model->units.ranks().all() > 1) terms.on_device = device_terms;
  for (std::string& line : model->driver.given_lines())
    terms.params.push_back(std::move(line));
  for (const int id : model->units.ranks().all() > 1 ? model->units.trained_ids() : std::vector<int>())
    if (!params[id].tensor.requires_grad()) terms.params.push_back("parameter '" + params[id].name + "' frozen");
  return terms;
}

void Engine::Impl::compare_in_backward() {
  const auto terms_of = [this](const std::string& why) {
    return terms("backward()", empty_steps, why, model->driver.waiting(), false);
  };
  model->early.compare_by(
      [this, terms_of] {
        const std::string why = why_not_update();
        const double norm = clips_by_previous() ? previous_norm.get().value_or(0) : 0;
        return zero::UpdateInBackward::Terms{.announced = terms_of(why).digest(),
                                             .refuses = !why.empty(),
                                             .scale = optim::clip_coefficient(norm, options.zero.previous_clipping)};
      },
      [this, terms_of](const zero::Ranks& ranks) {
        const std::string why = why_not_update();
        terms_of(why).refuse(ranks);
      });
}

std::string Engine::Impl::why_not_update() const {
  std::string wrong = fault.empty() ? group_fault() : fault;
  if (wrong.empty()) wrong = model->regions.why_no_update();
  if (!wrong.empty() || !clips_by_previous()) return wrong;
  const double norm = previous_norm.get().value_or(0);
  if (std::isfinite(norm)) return "";
  return c10::str("the norm of step ", global_steps, ", which tessera.clip \"previous\" goes by, is ", norm,
                  ": that step has updated the model with gradients that are not finite; load a checkpoint of before");
}

std::vector<std::string> Engine::Impl::joining_lines(const std::vector<int>& waiting) const {
  std::vector<std::string> lines;
  for (const int id : waiting)
    lines.push_back(c10::str("parameter '", params[id].name, "' of shape ", params[id].tensor.sizes(),
                             " trained from here on in param group ", params[id].joins));
  return lines;
}

// Joins `waiting`, which all ranks do.
void Engine::Impl::join(const std::vector<int>& waiting) {
  model->units.lane().finish();
  for (const int id : waiting)
    params[id].group = params[id].joins;
  try {
    model->joining.join(waiting);
  } catch (...) {
    for (const int id : waiting)
      params[id].group = -1;
    throw;
  }
  joined.insert(joined.end(), waiting.begin(), waiting.end());
}

void Engine::check_addition(const std::vector<optim::GroupOptions>& groups, const std::vector<ParamSpec>& params,
                            const std::vector<int>& known) const {
  zero::Units& units = impl_->here("add_group").units;
  std::vector<optim::GroupOptions> all = units.groups();
  const size_t present = all.size();
  all.insert(all.end(), groups.begin(), groups.end());
  const optim::Rule rule = impl_->options.rule;
  check_bounds(impl_->options, groups, present);
  TESSERA_CHECK_VALUE(
      present == 0 || optim::state_names(rule, all).count == optim::state_names(rule, units.groups()).count, "engine",
      "the new param group has momentum, and the engine was built of groups without, which left out the memory for it: "
      "give it momentum 0, or destroy() the engine and build a new one with this group");
  for (const ParamSpec& param : params) {
    check_added(impl_->params, param);
    check_added({params.data(), &param}, param);
    TESSERA_CHECK_VALUE(param.joins < static_cast<int>(all.size()), "engine", "parameter '", param.name,
                        "' names param group ", param.joins, " of ", all.size());
    if (!impl_->options.zero.cast) units.check_joins(param);
  }
  for (const int id : known)
    if (const ParamSpec& param = impl_->params.at(id); param.tensor.requires_grad()) units.check_joins(param);
}

std::string Engine::Impl::group_fault() const {
  const std::vector<optim::GroupOptions>& groups = model->units.groups();
  if (groups.size() != group_count)
    return c10::str("groups() has ", groups.size(), " param groups, and the engine was given ", group_count,
                    ": change those that are there; add_param_group() makes one more");
  if (const std::string wrong = wrong_in_groups(options, groups); !wrong.empty()) return wrong;
  if (optim::state_names(options.rule, groups).count <= state_count) return "";
  return "a param group has momentum now, and the engine was built of groups without, which left out the memory for "
         "it: "
         "set it back to 0, or destroy() the engine and build a new one";
}

void Engine::check_groups(const char* call) const {
  impl_->live(call);
  const std::string wrong = impl_->group_fault();
  if (!wrong.empty()) TESSERA_FAIL(c10::ValueError, "[engine.", call, "] ", wrong);
}

int Engine::add_group(const optim::GroupOptions& group) {
  const OneThread::Call call(impl_->thread, "add_group");
  check_addition({group}, {});
  std::vector<optim::GroupOptions>& groups = impl_->model->units.groups();
  groups.push_back(group);
  impl_->group_count = groups.size();
  impl_->state_count = optim::state_names(impl_->options.rule, groups).count;
  return static_cast<int>(groups.size()) - 1;
}

int Engine::add_param(ParamSpec param) {
  const OneThread::Call call(impl_->thread, "add_param");
  check_addition({}, {param});
  zero::ShardedModel& model = *impl_->model;
  const zero::Options& zero = impl_->options.zero;
  if (param.restore) std::exchange(param.restore, nullptr)();
  if (zero.cast) shard::set_data(param.tensor, param.tensor.detach().to(zero.precision.param));
  impl_->params.push_back(std::move(param));
  model.joining.params_changed();
  return static_cast<int>(impl_->params.size()) - 1;
}

void Engine::set_joins(int param, int group) {
  zero::ShardedModel& model = impl_->here("set_joins");
  ParamSpec& spec = impl_->params.at(param);
  TESSERA_CHECK_VALUE(group < static_cast<int>(model.units.groups().size()), "engine.set_joins",
                      "there is no param group ", group);
  check_addition({}, {}, {param});
  spec.joins = group;
  model.joining.params_changed();
}

void Engine::join() try {
  const OneThread::Call call = impl_->enter_all("join");
  zero::ShardedModel& model = impl_->here("join");
  finish_update();
  const std::vector<int> waiting = model.driver.waiting();
  std::vector<std::string> lines = impl_->joining_lines(waiting);
  std::ranges::move(model.driver.given_lines(), std::back_inserter(lines));
  std::exception_ptr fault;
  try {
    model.driver.follow_waiting();
  } catch (const c10::Error& error) {
    fault = std::current_exception();
    lines.emplace_back(error.what_without_backtrace());
  }
  check_same(model.units.ranks(), lines, "engine", "ranks do not train the same parameters",
             "all ranks call requires_grad_() and add_param_group() alike");
  if (fault) std::rethrow_exception(fault);
  if (!waiting.empty()) impl_->join(waiting);
} catch (c10::OutOfMemoryError& error) {
  impl_->model->units.fail_alone(error);
}

std::vector<int> Engine::take_joined() {
  return std::exchange(impl_->joined, {});
}

void Engine::Impl::check_all_used() const {
  std::vector<std::string> unused;
  for (const int id : model->units.trained_ids())
    if (!model->states.local_view(id, Quantity::Gradient).defined()) unused.push_back(params[id].name);
  TESSERA_CHECK(unused.empty(), "engine.step", c10::Join(", ", unused),
                ": no part in the loss, which zero_optimization.ignore_unused_parameters false makes an error; set it "
                "to true, or freeze them (requires_grad false) before the engine is made");
}

void Engine::Impl::check_trains(int64_t empty, const std::vector<bool>& present) const {
  const auto& trained = model->units.trained_ids();
  const auto came = [&](int id) { return !present.empty() && present[id]; };
  const auto trains = [&](int id) { return params[id].tensor.requires_grad(); };
  if (counts_empty || empty <= begun || std::ranges::any_of(trained, came)) return;
  TESSERA_CHECK(std::ranges::none_of(trained, trains), "engine.step",
                "no backward has reached this engine since the last update, and no parameter has a gradient: this step "
                "would train nothing; call step() once after each backward");
}

}  // namespace tessera::engine
