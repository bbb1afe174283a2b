#include "tessera/engine/checkpoint.h"
#include "tessera/checkpoint/deepspeed/save.h"
#include "tessera/checkpoint/export.h"
#include "tessera/checkpoint/misfits.h"
#include "tessera/engine/export.h"
#include "tessera/engine/group_fields.h"
#include "tessera/engine/saved_run.h"
#include "tessera/engine/together.h"

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <string>
#include <variant>

#include "bindings.h"
#include "tessera/base/error.h"
#include "tessera/io/data_order.h"
#include "tessera/io/file.h"

namespace tessera::python {

using NoGil = py::call_guard<py::gil_scoped_release>;
using engine::Engine;
using engine::Restore;

namespace {

using Tensors = std::vector<std::tuple<std::string, std::string, at::Tensor>>;  // name, kind, values
using States = std::vector<std::tuple<int, std::string, at::Tensor>>;           // parameter, kind, values

// Runs f() without the interpreter's lock; what the core warns of is a warning of Python's.
template <class F>
std::string with_warnings(const F& f) {
  torch::PyWarningHandler handler;
  try {
    const py::gil_scoped_release release;
    return f();
  } catch (...) {
    handler.set_in_exception();
    throw;
  }
}

std::string save(Engine& engine, const std::string& dir, const engine::SaveOptions& options, std::string run,
                 std::map<std::string, std::string> blobs, const Tensors& tensors, const States& states,
                 std::map<std::string, std::vector<std::string>> aliases) {
  engine::ClientPart part{std::move(run), std::move(blobs), {}, {}, std::move(aliases)};
  for (const auto& [name, kind, tensor] : tensors)
    part.tensors.push_back({name, kind, tensor});
  for (const auto& [param, kind, values] : states)
    part.states.push_back({param, kind, values});
  const py::gil_scoped_release release;
  return engine.checkpoints().save(dir, options, std::move(part));
}

}  // namespace

void bind_checkpoint(py::module_& m) {
  using checkpoint::Reader;
  py::class_<engine::SaveOptions>(m, "SaveOptions")
      .def(py::init([](std::string tag, bool latest, bool frozen, bool asynchronous, int keep_last,
                       const std::string& tags, std::optional<std::pair<int, int64_t>> deepspeed) {
             const auto rule = tags == "fail"   ? engine::SaveOptions::Tags::Fail
                               : tags == "warn" ? engine::SaveOptions::Tags::Warn
                                                : engine::SaveOptions::Tags::Ignore;
             engine::SaveOptions options{std::move(tag), latest, frozen, asynchronous, keep_last, rule, {}};
             if (deepspeed) options.deepspeed = {deepspeed->first, deepspeed->second};
             return options;
           }),
           py::arg("tag"), py::arg("latest"), py::arg("frozen"), py::arg("asynchronous"), py::arg("keep_last"),
           py::arg("tags"), py::arg("deepspeed"));

  py::class_<checkpoint::ParamRecord>(m, "CheckpointParam")
      .def_readonly("name", &checkpoint::ParamRecord::name)
      .def_readonly("shape", &checkpoint::ParamRecord::shape)
      .def_property_readonly("dtype", [](const checkpoint::ParamRecord& p) { return p.dtype; })
      .def_readonly("trained", &checkpoint::ParamRecord::trained)
      .def_readonly("step", &checkpoint::ParamRecord::step)
      .def_readonly("aliases", &checkpoint::ParamRecord::aliases);

  py::class_<Reader>(m, "CheckpointReader")
      .def("params", [](const Reader& r) { return r.manifest().params; })
      // Name, kind, shape, dtype and bytes of every tensor.
      .def("tensors",
           [](const Reader& r) {
             std::vector<std::tuple<std::string, std::string, std::vector<int64_t>, at::ScalarType>> all;
             for (const auto& record : r.manifest().tensors)
               all.emplace_back(record.name, record.kind, record.shape, record.dtype);
             return all;
           })
      .def("files",
           [](const Reader& r) {
             std::vector<std::pair<std::string, int64_t>> all;
             for (const auto& file : r.manifest().files)
               all.emplace_back(file.name, file.bytes);
             return all;
           })
      .def("run",
           [](const Reader& r) {
             engine::SavedRun(r.manifest().run, r.folder());  // throws where the values cannot be
             return r.manifest().run;
           })
      .def("blobs",
           [](const Reader& r) {
             std::vector<std::string> names;
             for (const auto& [name, file] : r.manifest().blobs)
               names.push_back(name);
             return names;
           })
      .def(
          "blob", [](const Reader& r, const std::string& name) { return py::bytes(r.blob(name)); }, py::arg("name"))
      .def(
          "read",
          [](const Reader& r, const std::string& name, const std::string& kind) -> std::optional<at::Tensor> {
            if (r.find(name, kind) == nullptr) return std::nullopt;
            return r.read_whole(name, kind);
          },
          py::arg("name"), py::arg("kind"), NoGil())
      .def(
          "read_range",
          [](const Reader& r, const std::string& name, const std::string& kind, int64_t begin, int64_t end) {
            return r.read_range(name, kind, {begin, end});
          },
          py::arg("name"), py::arg("kind"), py::arg("begin"), py::arg("end"), NoGil())
      .def("verify", &Reader::verify_all, NoGil());

  py::class_<Restore>(m, "Restore")
      .def_property_readonly("folder", &Restore::folder)
      .def_property_readonly("tag", &Restore::tag)
      .def_property_readonly("run", &Restore::client_run)
      .def_property_readonly("missing", &Restore::missing)
      .def_property_readonly("unexpected", &Restore::unexpected)
      .def_property_readonly("reader", &Restore::reader, py::return_value_policy::reference_internal)
      .def(
          "client_state",
          [](const Restore& r, int param, const std::string& kind) -> std::optional<at::Tensor> {
            at::Tensor state = r.client_state(param, kind);
            if (!state.defined()) return std::nullopt;
            return state;
          },
          py::arg("param"), py::arg("kind"), NoGil())
      .def("buffers", &Restore::buffers, py::arg("here"), NoGil())
      .def("apply", &Restore::apply, NoGil());

  m.attr("NOTHING_EXPORTED") = engine::kNothingExported;
  m.def(
      "export_checkpoint",
      [](const Reader& reader, const std::string& folder, const std::string& name, std::optional<at::ScalarType> dtype,
         int64_t max_shard_bytes,
         bool frozen) { return checkpoint::export_weights(reader, folder, name, {dtype, max_shard_bytes, frozen}); },
      py::arg("reader"), py::arg("folder"), py::arg("name"), py::arg("dtype"), py::arg("max_shard_bytes"),
      py::arg("frozen"), NoGil());
  using checkpoint::ExportTensor;
  using checkpoint::WeightTensor;
  py::class_<WeightTensor>(m, "WeightTensor")
      .def_readonly("names", &WeightTensor::names)
      .def_property_readonly("dtype",
                             [](const WeightTensor& tensor) -> std::variant<at::ScalarType, std::string> {
                               if (tensor.dtype == at::ScalarType::Undefined) return tensor.unknown;
                               return tensor.dtype;
                             })
      .def_readonly("shape", &WeightTensor::shape);
  py::class_<ExportTensor, WeightTensor>(m, "ExportTensor");
  m.def(
      "list_export",
      [](const Reader& reader, std::optional<at::ScalarType> dtype, bool frozen) {
        return checkpoint::list_export(reader, {dtype, 0, frozen});
      },
      py::arg("reader"), py::arg("dtype"), py::arg("frozen"));
  m.def("read_export", &checkpoint::read_export, py::arg("reader"), py::arg("tensor"), NoGil());
  py::class_<engine::LiveWeights>(m, "LiveWeights")
      .def(py::init<Engine&>(), py::arg("engine"), py::keep_alive<1, 2>())
      .def(
          "whole",
          [](engine::LiveWeights& weights, int param) -> std::optional<at::Tensor> {
            const at::Tensor value = weights.whole(param);
            if (!value.defined()) return std::nullopt;
            return value;
          },
          py::arg("param"), NoGil());
  m.def(
      "export_weights",
      [](Engine& engine,
         const std::vector<std::tuple<std::vector<std::string>, int, std::optional<at::Tensor>>>& tensors,
         const std::string& folder, const std::string& name, int64_t max_shard_bytes) {
        std::vector<engine::LiveTensor> all;
        for (const auto& [names, param, tensor] : tensors)
          all.push_back({names, param, tensor.value_or(at::Tensor())});
        return engine::export_weights(engine, all, folder, name, max_shard_bytes);
      },
      py::arg("engine"), py::arg("tensors"), py::arg("folder"), py::arg("name"), py::arg("max_shard_bytes"), NoGil());
  using checkpoint::Objects;
  py::enum_<Objects>(m, "Objects")
      .value("Inert", Objects::Inert)
      .value("Refused", Objects::Refused)
      .value("Kept", Objects::Kept);
  m.def(
      "read_checkpoint",
      [](const std::string& dir, const std::string& tag, bool optimizer, Objects objects) {
        return checkpoint::open(dir, tag, {{}, {}, optimizer, objects});
      },
      py::arg("dir"), py::arg("tag") = "", py::arg("optimizer") = false, py::arg("objects") = Objects::Inert, NoGil());
  m.def("why_no_latest", &checkpoint::why_no_latest, py::arg("dir"), py::arg("latest"));
  m.def("tags", &checkpoint::tags, py::arg("dir"), NoGil());
  m.def("latest_tag", &checkpoint::latest_tag, py::arg("dir"), py::arg("file") = "latest");
  using checkpoint::WeightReader;
  // Value error for values that tensors of a module cannot take: name, value, the module's own.
  m.def(
      "check_fit",
      [](const std::vector<std::tuple<std::string, at::Tensor, at::Tensor>>& values) {
        checkpoint::Misfits misfits;
        for (const auto& [name, value, own] : values)
          misfits.add(name, checkpoint::misfit(value, own));
        misfits.check();
      },
      py::arg("values"));
  m.def(
      "write_weights",
      [](const std::string& folder, const std::string& name,
         const std::vector<std::pair<std::string, at::Tensor>>& tensors, int64_t max_shard_bytes,
         const std::map<std::string, std::string>& metadata) {
        checkpoint::NamedTensors named;
        for (const auto& [key, value] : tensors)
          named.insert(key, value);
        return checkpoint::write_weights(folder, name, named, {max_shard_bytes, metadata});
      },
      py::arg("folder"), py::arg("name"), py::arg("tensors"), py::arg("max_shard_bytes"), py::arg("metadata"), NoGil());
  py::class_<WeightReader>(m, "WeightReader")
      .def("tensors", [](const WeightReader& reader) { return reader.tensors(); })
      .def("metadata", [](const WeightReader& reader) { return reader.metadata(); })
      .def(py::init<const std::string&>(), py::arg("path"), NoGil())
      .def(py::init<const std::vector<std::string>&>(), py::arg("files"), NoGil())
      .def(
          "shape",
          [](const WeightReader& reader, const std::string& name) -> std::optional<std::vector<int64_t>> {
            const checkpoint::WeightTensor* found = reader.find(name);
            if (found == nullptr) return std::nullopt;
            return found->shape;
          },
          py::arg("name"))
      .def("read", py::overload_cast<const std::string&>(&WeightReader::read, py::const_), py::arg("name"), NoGil())
      .def(
          "read",
          [](const WeightReader& reader, const std::string& name, int64_t dim,
             const std::vector<std::pair<int64_t, int64_t>>& ranges) {
            checkpoint::Slice slice{dim, {}};
            for (const auto& [begin, end] : ranges)
              slice.ranges.push_back({begin, end});
            return reader.read(name, slice);
          },
          py::arg("name"), py::arg("dim"), py::arg("ranges"), NoGil());
  m.def("save_checkpoint", &save, py::arg("engine"), py::arg("dir"), py::arg("options"), py::arg("run"),
        py::arg("blobs"), py::arg("tensors"), py::arg("states"), py::arg("aliases"));
  m.def(
      "span_checkpoints",
      [](Engine& engine, const comm::GroupPtr& group, std::vector<int> copies) {
        engine.checkpoints().span(group, std::move(copies));
      },
      py::arg("engine"), py::arg("group"), py::arg("copies"), NoGil());
  m.def("checkpoint_place", [](Engine& engine) { return engine.checkpoints().place(); }, py::arg("engine"), NoGil());
  m.def(
      "checkpoint_exchange",
      [](Engine& engine, const std::string& text, const std::string& error) {
        return engine.checkpoints().exchange(text, error);
      },
      py::arg("engine"), py::arg("text"), py::arg("error"), NoGil());
  m.def(
      "to_deepspeed",
      [](const std::string& dir, const std::string& out, const std::string& tag, int stage, int64_t ranks,
         Objects objects) {
        return with_warnings([&] { return checkpoint::to_deepspeed(dir, out, tag, {stage, ranks}, objects); });
      },
      py::arg("dir"), py::arg("out"), py::arg("tag"), py::arg("stage"), py::arg("ranks"), py::arg("objects"));
  m.def(
      "to_universal",
      [](const std::string& dir, const std::string& out, const std::string& tag, Objects objects,
         const std::string& name) {
        return with_warnings([&] { return checkpoint::to_universal(dir, out, tag, objects, name); });
      },
      py::arg("dir"), py::arg("out"), py::arg("tag"), py::arg("objects"), py::arg("name"));
  m.def("check_client_keys", &checkpoint::deepspeed::check_client_keys, py::arg("keys"), py::arg("as_deepspeed"));
  m.def("wrong_field", &engine::wrong_field, py::arg("name"), py::arg("value"));
  m.def(
      "group_fields",
      [](optim::GroupOptions group) {
        py::dict fields;
        engine::each_field(group, [&](const char* name, auto& value) { fields[name] = value; });
        return fields;
      },
      py::arg("group"));
  m.def("put_script", &checkpoint::deepspeed::put_script, py::arg("dir"), py::arg("part"));
  // See io/file.h. At the end of a `with` the file is dropped, unless it is finished.
  py::class_<io::WholeFile>(m, "WholeFile")
      .def(py::init<std::string>(), py::arg("path"), NoGil())
      .def_property_readonly("part", &io::WholeFile::part)
      .def("finish", &io::WholeFile::finish, NoGil())
      .def(
          "__enter__", [](io::WholeFile& whole) -> io::WholeFile& { return whole; }, py::return_value_policy::reference)
      .def("__exit__", [](io::WholeFile& whole, const py::args&) { whole.drop(); });
  m.def(
      "check_position",
      [](int64_t epoch, int64_t samples, int64_t of, std::optional<int64_t> of_workers, int64_t size,
         std::optional<int64_t> workers) { io::check_position({epoch, samples, of, of_workers}, size, workers); },
      py::arg("epoch"), py::arg("samples"), py::arg("of"), py::arg("of_workers"), py::arg("size"), py::arg("workers"));
  m.def(
      "rank_order",
      [](int64_t size, int rank, int ranks, bool shuffle, uint64_t seed, bool drop_last, int64_t epoch,
         int64_t samples) { return io::rank_order(size, rank, ranks, {shuffle, seed, drop_last}, {epoch, samples}); },
      py::arg("size"), py::arg("rank"), py::arg("ranks"), py::arg("shuffle"), py::arg("seed"), py::arg("drop_last"),
      py::arg("epoch"), py::arg("samples"), NoGil());
  m.def("replace_text", &io::replace_text, py::arg("path"), py::arg("text"), NoGil());
  m.def(
      "set_latest", [](const std::string& dir, const std::string& tag) { checkpoint::set_latest(dir, tag); },
      py::arg("dir"), py::arg("tag"));
  m.def("check_tag", &checkpoint::check_tag, py::arg("tag"));
  m.def("wait_for_checkpoint", [](Engine& engine) { engine.checkpoints().wait(); }, py::arg("engine"), NoGil());
  m.def(
      "open_checkpoint",
      [](Engine& engine, const std::string& dir, const std::string& tag, bool strict, bool optimizer, bool run,
         bool from_master, const std::string& latest, Objects objects,
         std::optional<checkpoint::DeepSpeedHints::Groups> groups) {
        return engine.checkpoints().open(dir, tag, {strict, optimizer, run, from_master},
                                         {latest, objects, std::move(groups)});
      },
      py::arg("engine"), py::arg("dir"), py::arg("tag"), py::arg("strict"), py::arg("optimizer"), py::arg("run"),
      py::arg("from_master"), py::arg("latest"), py::arg("objects"), py::arg("groups"), NoGil(),
      py::keep_alive<0, 1>());
}

}  // namespace tessera::python
