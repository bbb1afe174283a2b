#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "bindings.h"
#include "tessera/base/error.h"
#include "tessera/config/config.h"
#include "tessera/engine/engine.h"
#include "tessera/pipeline/alike.h"
#include "tessera/pipeline/deal.h"
#include "tessera/pipeline/partition.h"
#include "tessera/pipeline/runner.h"
#include "tessera/pipeline/schedule.h"
#include "tessera/pipeline/together.h"

namespace tessera::python {

namespace {

// What others are to know of an exception of Python. The interpreter's lock is held.
pipeline::Failure failure_of(const py::handle& error) {
  const auto is = [&](const char* module, const char* name) {
    return py::isinstance(error, py::module_::import(module).attr(name));
  };
  const std::string text = py::str(error);
  if (is("tessera.errors", "StageFailed")) return {.text = text, .announced = true};
  if (is("torch.distributed", "DistBackendError"))  // as the core has thrown it
    return pipeline::failure_of(std::make_exception_ptr(c10::DistBackendError({}, text)));
  const std::string name = py::str(py::type::handle_of(error).attr("__name__"));
  return {.text = name + ": " + text, .lost = !is("builtins", "Exception")};
}

// The name of Python's class for an error of the core.
const char* class_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const UsageError&) {
    return "UsageError";
  } catch (const c10::ValueError&) {
    return "ConfigError";
  } catch (const c10::NotImplementedError&) {
    return "NotImplementedError";
  } catch (...) {
    return "RuntimeError";
  }
}

// A batch of a stage in Python: _batch.py. It lives for one call, so that no engine holds itself; the core runs without the
// interpreter's lock, and each call here takes it. Backwards begin in Python, whose autograd engine has its rules for that.
class Batch final : public pipeline::EngineStage<engine::Engine> {
 public:
  Batch(engine::Engine& engine, const py::object& batch) : EngineStage(engine), batch_(batch) {}

  Made forward(int chunk, int micro, pipeline::Message inputs) override {
    const py::gil_scoped_acquire locked;
    auto [tensors, note, loss] = batch_.attr("forward")(chunk, micro, std::move(inputs.tensors), inputs.note)
                                     .cast<std::tuple<pipeline::Tensors, std::string, std::optional<at::Tensor>>>();
    return {{std::move(tensors), std::move(note)}, loss.value_or(at::Tensor())};
  }
  void backward(const at::Tensor& loss) override { call("backward_of_loss", loss); }
  void backward(const pipeline::Tensors& outputs, const pipeline::Tensors& gradients) override {
    call("backward", outputs, gradients);
  }
  void count_micro_batch() override { call("count_micro_batch"); }
  void join() override { call("join"); }
  int64_t read(int64_t wanted) override {
    const py::gil_scoped_acquire locked;
    return batch_.attr("read")(wanted).cast<int64_t>();
  }
  void end_of_data() override { call("end_of_data"); }
  void step(const std::vector<int>& copies) override { call("step", copies); }
  void forget_gradients() override { call("forget_gradients"); }

  pipeline::Failure explain(const std::exception_ptr& error) const override {
    try {
      std::rethrow_exception(error);
    } catch (const py::error_already_set& raised) {
      const py::gil_scoped_acquire locked;
      return failure_of(raised.value());
    } catch (...) {
      pipeline::Failure failure = pipeline::failure_of(error);
      if (!failure.announced && !failure.lost) failure.text = c10::str(class_of(error), ": ", failure.text);
      return failure;
    }
  }

 private:
  template <class... A>
  void call(const char* name, const A&... a) {
    const py::gil_scoped_acquire locked;
    batch_.attr(name)(a...);
  }

  const py::object& batch_;
};

// An engine of Python that steps with others: _together.py. As Batch does, it takes the interpreter's lock in each call.
class Member final : public pipeline::Stepping {
 public:
  explicit Member(py::object member) : member_(std::move(member)) {}
  const void* engine() const override {
    const py::gil_scoped_acquire locked;
    return py::object(member_.attr("engine")).ptr();
  }
  bool at_boundary() override { return call<bool>("at_boundary"); }
  void check(bool at_boundary) override { call<py::object>("check", at_boundary); }
  void checked() override { call<py::object>("checked"); }
  double square(bool whole) override { return call<double>("square", whole); }
  bool step(std::optional<double> norm) override { return call<bool>("step", norm); }

 private:
  template <class R, class... A>
  R call(const char* name, const A&... a) {
    const py::gil_scoped_acquire locked;
    try {
      const py::object result = member_.attr(name)(a...);
      if constexpr (!std::is_same_v<R, py::object>)
        return result.template cast<R>();
      else
        return py::object();
    } catch (const py::error_already_set& error) {
      if (failure_of(error.value()).lost && error.matches(PyExc_Exception))  // as the core has thrown it
        throw c10::DistBackendError({}, py::str(error.value()));
      throw;
    }
  }

  py::object member_;
};

std::optional<double> step_together(const std::vector<py::object>& members, const comm::GroupPtr& everyone,
                                    c10::Device device) {
  std::vector<Member> stepping(members.begin(), members.end());
  std::vector<pipeline::Stepping*> engines;
  for (Member& member : stepping)
    engines.push_back(&member);
  const py::gil_scoped_release unlocked;
  return pipeline::step_together(engines, everyone.get(), device).norm;
}

// Binds a call of the core about one batch.
template <class Part, class R, class... A>
auto of_batch(R (Part::*method)(pipeline::Stage&, A...)) {
  return [method](Part& part, engine::Engine& engine, const py::object& batch, A... a) -> R {
    Batch stage(engine, batch);
    const py::gil_scoped_release unlocked;
    return (part.*method)(stage, std::forward<A>(a)...);
  };
}

std::shared_ptr<pipeline::Ties> make_ties(
    const pipeline::Ranks& ranks,
    std::vector<std::tuple<std::string, std::vector<int>, std::vector<std::pair<std::string, at::Tensor>>>> tied,
    const pipeline::Building& building) {
  std::vector<pipeline::Tied> all;
  for (auto& [key, stages, params] : tied)
    all.push_back({key, std::move(stages), std::move(params)});
  const py::gil_scoped_release unlocked;
  return {new pipeline::Ties(ranks, all, building), Unlocked<pipeline::Ties>()};
}

void bind_runner(py::module_& m) {
  using namespace pipeline;
  using NoGil = py::call_guard<py::gil_scoped_release>;

  py::class_<Ranks, std::shared_ptr<Ranks>>(m, "PipelineRanks")
      .def(py::init([](int stages, int size, int rank, comm::GroupPtr everyone, c10::Device device,
                       comm::PointToPointPtr forwards, comm::PointToPointPtr backwards, std::vector<int> peers) {
             return std::shared_ptr<Ranks>(new Ranks{stages, size, rank, std::move(everyone), device,
                                                     std::move(forwards), std::move(backwards), std::move(peers)},
                                           Unlocked<Ranks>());
           }),
           py::arg("stages"), py::arg("size"), py::arg("rank"), py::arg("everyone"), py::arg("device"),
           py::arg("forwards"), py::arg("backwards"), py::arg("peers"))
      .def("name", py::overload_cast<int>(&Ranks::name, py::const_), py::arg("rank"));
  py::class_<Building, std::unique_ptr<Building, Unlocked<Building>>>(m, "Building")
      .def(py::init([](comm::GroupPtr everyone, std::string where, c10::Device device) {
             return std::unique_ptr<Building, Unlocked<Building>>(
                 new Building(std::move(everyone), std::move(where), device));
           }),
           py::arg("everyone"), py::arg("where"), py::arg("device"))
      .def("set_where", &Building::set_where, py::arg("where"))
      .def("agree", &Building::agree, NoGil())
      .def(
          "fail",
          [](const Building& building, const py::object& error) {
            const Failure failure = failure_of(error);
            const py::gil_scoped_release unlocked;
            building.fail(failure);
          },
          py::arg("error"));
  m.def("check_chunks", &check_chunks, py::arg("chunks"), py::arg("stages"));
  m.def("check_pipeline", &check_served, py::arg("config"), py::arg("stages"));
  m.def("check_ties", &check_ties, py::arg("config"), py::arg("tied"));
  m.def("check_one_stage", &pipeline::check_one_stage, py::arg("call"), py::arg("stages"));
  m.def(
      "check_alike",
      [](const comm::GroupPtr& everyone, const Config& config, std::vector<Named> more, c10::Device device) {
        const auto same = alike_of(config);
        more.insert(more.end(), same.begin(), same.end());
        const py::gil_scoped_release unlocked;
        check_alike(*everyone, more, device);
      },
      py::arg("everyone"), py::arg("config"), py::arg("more"), py::arg("device"));
  m.def(
      "check_optimizers",
      [](const Ranks& ranks, const std::optional<std::pair<std::string, std::vector<std::vector<Named>>>>& own) {
        const py::gil_scoped_release unlocked;
        check_optimizers(ranks, own ? std::optional(OptimizerForm{own->first, own->second}) : std::nullopt);
      },
      py::arg("ranks"), py::arg("own"));
  m.def("check_groups_take", &check_groups_take, py::arg("ranks"), py::arg("taken"), NoGil());
  m.def(
      "deal",
      [](comm::Group& group, const std::vector<std::pair<std::vector<at::Tensor>, std::string>>& parts,
         const std::string& problem, bool of_values, c10::Device device) {
        Hand own{.parts = {}, .problem = problem, .of_values = of_values};
        for (const auto& [tensors, note] : parts)
          own.parts.push_back({tensors, note});
        std::optional<std::vector<std::pair<std::vector<at::Tensor>, std::string>>> result;
        const auto dealt = deal(group, own, "SequenceLoader", "the batch of rank", device);
        if (!dealt) return result;
        result.emplace();
        for (const Message& part : *dealt)
          result->emplace_back(part.tensors, part.note);
        return result;
      },
      py::arg("group"), py::arg("parts"), py::arg("problem"), py::arg("of_values"), py::arg("device"), NoGil());
  m.def("texts_of", &texts_of, py::arg("everyone"), py::arg("own"), py::arg("label"), py::arg("device"), NoGil());

  m.def("step_together", &python::step_together, py::arg("members"), py::arg("everyone"), py::arg("device"));

  py::class_<Ties, std::shared_ptr<Ties>>(m, "Ties")
      .def(py::init(&make_ties), py::arg("ranks"), py::arg("tied"), py::arg("building"))
      .def("attach", of_batch(&Ties::attach), py::arg("engine"), py::arg("batch"))
      .def(
          "copies",
          [](const Ties& ties, engine::Engine& engine, const py::object& batch) {
            return ties.copies(Batch(engine, batch));
          },
          py::arg("engine"), py::arg("batch"));

  py::class_<Runner, std::shared_ptr<Runner>>(m, "PipelineRunner")
      .def(py::init([](const Ranks& ranks, std::shared_ptr<Ties> ties, int chunks, c10::Device device,
                       std::vector<comm::GroupPtr> beside) {
             return std::shared_ptr<Runner>(new Runner(ranks, std::move(ties), chunks, device, std::move(beside)),
                                            Unlocked<Runner>());
           }),
           py::arg("ranks"), py::arg("ties"), py::arg("chunks"), py::arg("device"), py::arg("beside"))
      .def("train_batch", of_batch(&Runner::train_batch), py::arg("engine"), py::arg("batch"), py::arg("table"),
           py::arg("shape"))
      .def("eval_batch", of_batch(&Runner::eval_batch), py::arg("engine"), py::arg("batch"), py::arg("table"),
           py::arg("shape"))
      .def("check", &Runner::check, py::arg("call"))
      .def_property_readonly("call", &Runner::call)
      .def_property_readonly("most_live", &Runner::most_live);
}

}  // namespace

void bind_pipeline(py::module_& m) {
  using namespace pipeline;

  py::class_<Action>(m, "StageAction");  // of tables, which Python hands back as they are

  py::class_<Shape>(m, "PipelineShape")
      .def(py::init<int, int, int>(), py::arg("stages"), py::arg("micro_batches"), py::arg("chunks") = 1)
      .def("is_first", &Shape::is_first, py::arg("stage"), py::arg("chunk"))
      .def("is_last", &Shape::is_last, py::arg("stage"), py::arg("chunk"))
      .def_readonly("micro_batches", &Shape::micro_batches);
  m.def("training_table", &training, py::arg("name"), py::arg("shape"), py::arg("stage"));
  m.def("forward_table", &forward_only, py::arg("shape"), py::arg("stage"));
  m.def("split_weights", &split, py::arg("weights"), py::arg("parts"));
  m.def("check_stages", &check_stages, py::arg("ranks"), py::arg("stages"));
  m.def(
      "check_listed_once",
      [](const std::vector<py::object>& modules, const std::function<std::string(int)>& class_name,
         const std::string& remedy) {
        std::vector<const void*> ids;
        for (const py::object& module : modules)
          ids.push_back(module.is_none() ? nullptr : module.ptr());
        check_listed_once(ids, class_name, remedy);
      },
      py::arg("modules"), py::arg("class_name"), py::arg("remedy"));
  m.def(
      "partition_bounds",
      [](const std::string& method, int parts, int count, std::function<int64_t(int)> trained_elements,
         std::function<std::string(int)> class_name,
         std::function<ListedLayers::Predicate(const std::string&)> matcher) {
        return bounds_of(method, parts,
                         {count, std::move(trained_elements), std::move(class_name), std::move(matcher)});
      },
      py::arg("method"), py::arg("parts"), py::arg("count"), py::arg("trained_elements"), py::arg("class_name"),
      py::arg("matcher"));
  bind_runner(m);
}

}  // namespace tessera::python
