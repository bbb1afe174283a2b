#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "tessera/config/partition_rules.h"
#include "tessera/parallel/attention.h"
#include "tessera/parallel/cost.h"
#include "tessera/parallel/cutting.h"
#include "tessera/parallel/functions.h"
#include "tessera/parallel/inside.h"
#include "tessera/parallel/layers.h"
#include "tessera/parallel/plan.h"
#include "tessera/parallel/sequence_batch.h"
#include "tessera/parallel/sequence_regions.h"
#include "tessera/parallel/sizes.h"
#include "tessera/parallel/tiles.h"
#include "tessera/parallel/vocabulary.h"

namespace tessera::python {

using NoGil = py::call_guard<py::gil_scoped_release>;
using Pair = std::pair<int64_t, int64_t>;

namespace {

std::vector<Pair> pairs(const parallel::Ranges& ranges) {
  std::vector<Pair> result;
  for (const shard::Range& range : ranges)
    result.emplace_back(range.begin, range.end);
  return result;
}

void bind_sizes(py::module_& m) {
  using namespace parallel;
  m.def(
      "part_sizes",
      [](int64_t total, int parts, int64_t heads, int64_t grain) { return part_sizes(total, parts, {heads, grain}); },
      py::arg("total"), py::arg("parts"), py::arg("heads") = 0, py::arg("grain") = 1);
  m.def(
      "heads_for",
      [](const std::string& name, int64_t total, int64_t kv_heads) { return rule_for(name, total, kv_heads).heads; },
      py::arg("name"), py::arg("total"), py::arg("kv_heads"));
  py::class_<PackedShape>(m, "PackedShape");
}

using Along = at::Tensor (*)(const at::Tensor&, const comm::GroupPtr&, int64_t, const parallel::Sizes&, comm::Label);
using Whole = at::Tensor (*)(const at::Tensor&, const comm::GroupPtr&, comm::Label);

void bind_functions(py::module_& m) {
  using namespace parallel;
  m.def(
      "take_slice", [](const at::Tensor& whole, const CutArgs& cut) { return take_slice(whole, *to_cut(cut)); },
      py::arg("whole"), py::arg("cut"), NoGil());
  m.def(
      "join_slices",
      [](const at::Tensor& slice, const CutArgs& cut, const comm::GroupPtr& group, const std::string& label) {
        return join_slices(slice, *to_cut(cut), group, label);
      },
      py::arg("slice"), py::arg("cut"), py::arg("group"), py::arg("label"), NoGil());
  for (const auto& [name, function] : {std::pair<const char*, Whole>("copy_to_ranks", &copy_to_ranks),
                                       std::pair<const char*, Whole>("reduce_from_ranks", &reduce_from_ranks)})
    m.def(
        name,
        [function = function](const at::Tensor& x, const comm::GroupPtr& group, const std::string& label) {
          return function(x, group, label);
        },
        py::arg("x"), py::arg("group"), py::arg("label") = "", NoGil());
  for (const auto& [name, function] : {std::pair<const char*, Along>("gather_from_ranks", &gather_from_ranks),
                                       std::pair<const char*, Along>("split_to_ranks", &split_to_ranks),
                                       std::pair<const char*, Along>("gather_for_use", &gather_for_use),
                                       std::pair<const char*, Along>("scatter_sum", &scatter_sum)})
    m.def(
        name,
        [function = function](const at::Tensor& x, const comm::GroupPtr& group, int64_t dim, const Sizes& sizes,
                              const std::string& label) { return function(x, group, dim, sizes, label); },
        py::arg("x"), py::arg("group"), py::arg("dim"), py::arg("sizes") = Sizes(), py::arg("label") = "", NoGil());
  m.def(
      "exchange",
      [](const std::vector<at::Tensor>& tensors, const comm::GroupPtr& group, int64_t scatter_dim, int64_t gather_dim,
         const std::vector<Sizes>& scatter_sizes, const Sizes& gather_sizes, const std::string& label) {
        return exchange(tensors, group, scatter_dim, gather_dim, scatter_sizes, gather_sizes, label);
      },
      py::arg("tensors"), py::arg("group"), py::arg("scatter_dim"), py::arg("gather_dim"),
      py::arg("scatter_sizes") = std::vector<Sizes>(), py::arg("gather_sizes") = Sizes(), py::arg("label") = "",
      NoGil());
}

void bind_layers(py::module_& m) {
  using namespace parallel;
  py::class_<Entrance, std::shared_ptr<Entrance>>(m, "Entrance")
      .def(py::init<int>(), py::arg("uses"))
      .def("open", &Entrance::open, py::arg("x"), py::arg("region"), NoGil());
  py::class_<Region>(m, "Region")
      .def(py::init([](const comm::GroupPtr& group, int64_t sequence_dim, const Sizes& sequence_sizes, bool overlap,
                       const std::string& label, bool keep_gathered, const std::shared_ptr<Entrance>& entrance) {
             return Region{group, sequence_dim, sequence_sizes, overlap, label, keep_gathered, entrance};
           }),
           py::arg("group"), py::arg("sequence_dim") = -1, py::arg("sequence_sizes") = Sizes(),
           py::arg("overlap") = true, py::arg("label") = "", py::arg("keep_gathered") = false,
           py::arg("entrance") = nullptr)
      .def_readonly("group", &Region::group)
      .def_readwrite("sequence_dim", &Region::sequence_dim)
      .def_readwrite("sequence_sizes", &Region::sequence_sizes)
      .def_readwrite("overlap", &Region::overlap)
      .def_readwrite("label", &Region::label)
      .def_readwrite("keep_gathered", &Region::keep_gathered)
      .def_readwrite("entrance", &Region::entrance);
  m.def("column_linear", &column_linear, py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("region"), NoGil());
  m.def("row_linear", &row_linear, py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("region"), NoGil());
  m.def(
      "join_outputs",
      [](const at::Tensor& own, const comm::GroupPtr& group, bool gather, const Sizes& sizes, const Sizes& tail,
         const std::string& label) { return join_outputs(own, group, gather, sizes, tail, label); },
      py::arg("own"), py::arg("group"), py::arg("gather"), py::arg("sizes"), py::arg("tail"), py::arg("label"),
      NoGil());
  m.def(
      "own_inputs",
      [](const at::Tensor& x, const comm::GroupPtr& group, int64_t total, const std::vector<Pair>& pairs,
         const std::string& label) {
        Ranges ranges;
        for (const auto& [begin, end] : pairs)
          ranges.push_back({begin, end});
        return own_inputs(x, group, total, ranges, label);
      },
      py::arg("x"), py::arg("group"), py::arg("total"), py::arg("ranges"), py::arg("label"), NoGil());
  m.def(
      "share_outputs",
      [](const at::Tensor& out, const comm::GroupPtr& group, const Pair& own_use, const std::string& label) {
        return share_outputs(out, group, {own_use.first, own_use.second}, label);
      },
      py::arg("out"), py::arg("group"), py::arg("own_use"), py::arg("label"), NoGil());
  py::class_<RegionParam>(m, "RegionParam")
      .def(py::init([](std::string name, const at::Tensor& param, bool settled, std::string layer) {
             return RegionParam{std::move(name), param, settled, std::move(layer)};
           }),
           py::arg("name"), py::arg("param"), py::arg("settled") = false, py::arg("layer") = "");
  m.def(
      "whole_inside",
      [](const std::string& path, const at::Tensor& x, const std::vector<RegionParam>& params,
         const std::vector<std::string>& lists) { return whole_inside(path, x, params, lists); },
      py::arg("path"), py::arg("x"), py::arg("params"), py::arg("lists"), NoGil());
  m.def("refuse_weight_alone", &refuse_weight_alone, py::arg("path"));
  m.def("vocab_embedding", &vocab_embedding, py::arg("indices"), py::arg("weight"), py::arg("begin"),
        py::arg("vocabulary"), py::arg("padding_idx"), py::arg("region"), NoGil());
  m.def("vocab_cross_entropy", &vocab_cross_entropy, py::arg("logits"), py::arg("target"), py::arg("begin"),
        py::arg("vocabulary"), py::arg("group"), py::arg("ignore_index") = -100, py::arg("give_away") = false, NoGil());
  m.def("sequence_cross_entropy", &sequence_cross_entropy, py::arg("logits"), py::arg("target"), py::arg("group"),
        py::arg("ignore_index") = -100, py::arg("sizes") = Sizes(), NoGil());
  m.def("mean_over_sequence", &mean_over_sequence, py::arg("loss"), py::arg("labels"), py::arg("group"),
        py::arg("ignore_index") = -100, NoGil());
}

void bind_attention(py::module_& m) {
  using namespace parallel;
  py::class_<SequenceCut>(m, "SequenceCut")
      .def(py::init([](const comm::GroupPtr& group, int64_t sequence_dim, const Sizes& lengths, int parts) {
             return SequenceCut{group, sequence_dim, lengths, parts};
           }),
           py::arg("group"), py::arg("sequence_dim") = 0, py::arg("lengths") = Sizes(), py::arg("parts") = 1);
  py::class_<Heads>(m, "Heads")
      .def_readonly("queries", &Heads::queries)
      .def_readonly("keys", &Heads::keys)
      .def_readonly("repeat", &Heads::repeat);
  m.def("check_parts", &parallel::detail::check_parts, py::arg("parts"), py::arg("label"));
  m.def("deal_heads", &deal_heads, py::arg("queries"), py::arg("keys"), py::arg("ranks"),
        py::arg("label") = "parallel");
  py::class_<HeadParts>(m, "HeadParts")
      .def(py::init<const at::Tensor&, const at::Tensor&, const at::Tensor&, const SequenceCut&>(), py::arg("query"),
           py::arg("key"), py::arg("value"), py::arg("cut"), NoGil())
      .def("__len__", &HeadParts::size)
      .def(
          "take",
          [](HeadParts& parts, int part) {
            Dealt dealt = parts.take(part);
            return std::tuple(dealt.query, dealt.key, dealt.value, dealt.heads);
          },
          py::arg("part"), NoGil())
      .def("give", &HeadParts::give, py::arg("part"), py::arg("result"), NoGil())
      .def("join", &HeadParts::join, NoGil());
}

void bind_cost(py::module_& m) {
  using namespace parallel;
  py::class_<BlockStack>(m, "BlockStack")
      .def(py::init<>())
      .def_readwrite("layers", &BlockStack::layers)
      .def_readwrite("hidden", &BlockStack::hidden)
      .def_readwrite("heads", &BlockStack::heads)
      .def_readwrite("kv_heads", &BlockStack::kv_heads)
      .def_readwrite("head_dim", &BlockStack::head_dim)
      .def_readwrite("inner", &BlockStack::inner)
      .def_readwrite("vocabulary", &BlockStack::vocabulary)
      .def_readwrite("gated", &BlockStack::gated)
      .def_readwrite("bias", &BlockStack::bias);
  py::class_<Training>(m, "Training")
      .def(py::init<>())
      .def_readwrite("ranks", &Training::ranks)
      .def_readwrite("stage", &Training::stage)
      .def_readwrite("batch", &Training::batch)
      .def_readwrite("length", &Training::length)
      .def_readwrite("micro_batches", &Training::micro_batches)
      .def_readwrite("activation_bytes", &Training::activation_bytes)
      .def_readwrite("parameter_bytes", &Training::parameter_bytes)
      .def_readwrite("gradient_bytes", &Training::gradient_bytes)
      .def_readwrite("sequence_regions", &Training::sequence_regions)
      .def_readwrite("whole_ends", &Training::whole_ends)
      .def_readwrite("keep_gathered", &Training::keep_gathered)
      .def_readwrite("shared_inputs", &Training::shared_inputs)
      .def_readwrite("vocab_parallel", &Training::vocab_parallel)
      .def_readwrite("recompute", &Training::recompute);
  py::class_<Traffic>(m, "Traffic").def_readonly("calls", &Traffic::calls).def_readonly("bytes", &Traffic::bytes);
  py::class_<Cost>(m, "Cost")
      .def_readonly("axes", &Cost::axes)
      .def_readonly("parameters", &Cost::parameters)
      .def("bytes", &Cost::bytes, py::arg("axis"))
      .def("text", &Cost::text);
  m.def("parallel_cost", &cost, py::arg("model"), py::arg("training"));
}

void bind_plan_input(py::module_& m) {
  using namespace parallel;
  py::enum_<Module::Kind>(m, "ModuleKind")
      .value("Other", Module::Kind::Other)
      .value("Linear", Module::Kind::Linear)
      .value("Conv1D", Module::Kind::Conv1D)
      .value("Embedding", Module::Kind::Embedding)
      .value("Norm", Module::Kind::Norm)
      .value("Experts", Module::Kind::Experts)
      .value("List", Module::Kind::List);
  py::enum_<Partition>(m, "Partition")
      .value("Column", Partition::Column)
      .value("Row", Partition::Row)
      .value("Skip", Partition::Skip);
  py::class_<Module>(m, "PlanModule")
      .def(py::init([](std::string path, std::string class_name, Module::Kind kind, Sizes weight_sizes, int64_t bias,
                       int64_t weight_identity, std::string param, std::map<std::string, int64_t> attributes,
                       int64_t params) {
             return Module{
                 std::move(path),  std::move(class_name), kind,  std::move(weight_sizes), bias, weight_identity,
                 std::move(param), std::move(attributes), params};
           }),
           py::arg("path"), py::arg("class_name"), py::arg("kind"), py::arg("weight_sizes") = Sizes(),
           py::arg("bias") = 0, py::arg("weight_identity") = 0, py::arg("param") = "weight",
           py::arg("attributes") = std::map<std::string, int64_t>(), py::arg("params") = 0);
  py::class_<ModelFacts>(m, "ModelFacts")
      .def(py::init<>())
      .def_readwrite("model_type", &ModelFacts::model_type)
      .def_readwrite("heads", &ModelFacts::heads)
      .def_readwrite("kv_heads", &ModelFacts::kv_heads)
      .def_readwrite("head_dim", &ModelFacts::head_dim)
      .def_readwrite("hidden", &ModelFacts::hidden)
      .def_readwrite("vocabulary", &ModelFacts::vocabulary)
      .def_readwrite("parts", &ModelFacts::parts);
  py::class_<parallel::Rule>(m, "PartitionRule")
      .def(py::init<>())
      .def_readwrite("matches", &parallel::Rule::matches)
      .def_readwrite("pattern", &parallel::Rule::pattern)
      .def_readwrite("source", &parallel::Rule::source)
      .def_readwrite("partition", &parallel::Rule::partition)
      .def_readwrite("shape", &parallel::Rule::shape)
      .def_readwrite("model_types", &parallel::Rule::model_types)
      .def_readwrite("gather_output", &parallel::Rule::gather_output)
      .def_readwrite("sum_gradient", &parallel::Rule::sum_gradient);
  py::class_<PlanOptions>(m, "PlanOptions")
      .def(py::init<>())
      .def_readwrite("size", &PlanOptions::size)
      .def_readwrite("rules", &PlanOptions::rules)
      .def_readwrite("strict", &PlanOptions::strict)
      .def_readwrite("grain", &PlanOptions::grain)
      .def_readwrite("expert_grain", &PlanOptions::expert_grain)
      .def_readwrite("embedding_dim", &PlanOptions::embedding_dim)
      .def_readwrite("head_names", &PlanOptions::head_names)
      .def_readwrite("vocab_parallel", &PlanOptions::vocab_parallel);
  m.def(
      "left_whole",
      [](const std::vector<parallel::Rule>& rules, const std::vector<std::string>& names) {
        parallel::LeftWhole left = left_whole(rules, names);
        return std::pair(std::move(left.names), std::move(left.summed));
      },
      py::arg("rules"), py::arg("names"));
  using config::PartitionRules;
  py::class_<PartitionRules>(m, "PartitionRules")
      .def(py::init<>())
      .def_readwrite("rules", &PartitionRules::rules)
      .def_readwrite("source", &PartitionRules::source);
  m.def("partition_rules", &config::partition_rules, py::arg("config"), py::arg("facts"), py::arg("size"),
        py::arg("matcher"));
  m.def("plan_options", &config::plan_options, py::arg("config"), py::arg("size"), py::arg("rules"));
  m.def("overlaps_tensor_parallel", &config::overlaps_tensor_parallel, py::arg("config"));
}

void bind_plan(py::module_& m) {
  using namespace parallel;
  py::class_<Decision>(m, "Decision")
      .def_readonly("path", &Decision::path)
      .def_readonly("param", &Decision::param)
      .def_readonly("partition", &Decision::partition)
      .def_readonly("dim", &Decision::dim)
      .def_readonly("total", &Decision::total)
      .def_property_readonly("ranges",
                             [](const Decision& decision) {
                               std::vector<std::vector<Pair>> result;
                               for (const Ranges& ranges : decision.ranges)
                                 result.push_back(pairs(ranges));
                               return result;
                             })
      .def_property_readonly("sizes", &Decision::sizes)
      .def_readonly("gather_output", &Decision::gather_output)
      .def_readonly("sum_gradient", &Decision::sum_gradient)
      .def_property_readonly("own_use",
                             [](const Decision& decision) -> std::optional<Pair> {
                               if (decision.own_use.empty()) return std::nullopt;
                               return Pair(decision.own_use.begin, decision.own_use.end);
                             })
      .def_readonly("tail", &Decision::tail)
      .def_readonly("vocabulary", &Decision::vocabulary)
      .def_readonly("rule", &Decision::rule);
  py::class_<Plan>(m, "ParallelPlan")
      .def_readonly("size", &Plan::size)
      .def_readonly("decisions", &Plan::decisions)
      .def_readonly("whole", &Plan::whole)
      .def_readonly("warnings", &Plan::warnings)
      .def_readonly("widths", &Plan::widths)
      .def("text", &Plan::text);
  m.def("check_matrix", &check_matrix, py::arg("path"), py::arg("dims"), py::arg("rule"));
  m.def(
      "check_bias",
      [](const std::string& path, const at::Tensor& bias, int64_t outputs) { check_bias(path, bias.sizes(), outputs); },
      py::arg("path"), py::arg("bias"), py::arg("outputs"));
  m.def("check_same_ranks", &check_same_ranks, py::arg("rank"), py::arg("size"), py::arg("group"));
  using Regions = SequenceRegions;
  py::class_<Regions>(m, "SequenceRegions")
      .def_readonly("first", &Regions::first)
      .def_readonly("last", &Regions::last)
      .def_readonly("inner", &Regions::inner)
      .def_readonly("norms", &Regions::norms)
      .def_readonly("mixed", &Regions::mixed)
      .def_readonly("sums", &Regions::sums)
      .def_readonly("whole", &Regions::whole)
      .def("summed", &Regions::summed)
      .def("text", &Regions::text)
      .def(py::pickle(
          [](const Regions& r) { return py::make_tuple(r.first, r.last, r.inner, r.norms, r.mixed, r.sums, r.whole); },
          [](const py::tuple& t) {
            using Paths = std::vector<std::string>;
            return Regions{t[0].cast<std::string>(), t[1].cast<std::string>(), t[2].cast<Paths>(), t[3].cast<Paths>(),
                           t[4].cast<Paths>(),       t[5].cast<Paths>(),       t[6].cast<Paths>()};
          }));
  m.attr("NO_SEQUENCE_REGIONS") = kNoRegions;
  m.def("stays_whole", &stays_whole, py::arg("x"), py::arg("ranks"), py::arg("path"));
  m.def(
      "find_sequence_regions",
      [](const std::vector<Module>& modules, const std::vector<Decision>& decisions, std::string model_type,
         bool router_loss, std::set<std::string> jitter) {
        return find_sequence_regions(
            modules, decisions,
            {.model_type = std::move(model_type), .router_loss = router_loss, .jitter = std::move(jitter)});
      },
      py::arg("modules"), py::arg("decisions"), py::arg("model_type"), py::arg("router_loss"), py::arg("jitter"));
  m.def("make_plan", &make_plan, py::arg("modules"), py::arg("facts"), py::arg("options"));
  m.def("width_names", &width_names);
  m.def("preset_names", &preset_names);
  m.def("preset_rules", &preset_rules, py::arg("name"), py::arg("facts"), py::arg("matcher"));
}

// Functions of Python take the GIL for their calls, which autograd may make on any thread.
void bind_tiles(py::module_& m) {
  using parallel::TileReduction;
  py::enum_<TileReduction>(m, "TileReduction").value("Mean", TileReduction::Mean).value("Sum", TileReduction::Sum);
  m.def(
      "tiled",
      [](parallel::TileFunction f, std::vector<at::Tensor> tensors, std::vector<bool> cut, int64_t count,
         std::vector<std::string> names, int64_t join, std::optional<TileReduction> reduction,
         const std::optional<at::Tensor>& valid) {
        const parallel::Tiled tiles{.f = std::move(f),
                                    .tensors = std::move(tensors),
                                    .cut = std::move(cut),
                                    .count = count,
                                    .names = std::move(names)};
        return reduction ? parallel::tiled(tiles, join, *reduction, valid.value_or(at::Tensor()))
                         : parallel::tiled(tiles, join);
      },
      py::arg("f"), py::arg("tensors"), py::arg("cut"), py::arg("count"), py::arg("names"), py::arg("join"),
      py::arg("reduction"), py::arg("valid"), NoGil());
  m.def("tiled_mlp", &parallel::tiled_mlp, py::arg("layer"), py::arg("x"), py::arg("tiles"), NoGil());
  m.def(
      "tiled_loss",
      [](const std::function<at::Tensor(const std::vector<at::Tensor>&)>& loss, const at::Tensor& x,
         const at::Tensor& labels, const std::optional<at::Tensor>& mask, int64_t tiles, TileReduction reduction) {
        const parallel::TileLoss of_three = [loss](const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
          return loss(c.defined() ? std::vector{a, b, c} : std::vector{a, b});
        };
        return parallel::tiled_loss(of_three, x, labels, tiles, reduction, mask.value_or(at::Tensor()));
      },
      py::arg("loss"), py::arg("x"), py::arg("labels"), py::arg("mask"), py::arg("tiles"), py::arg("reduction"),
      NoGil());
  m.def(
      "cut_batch",
      [](parallel::SequenceTensors batch, int ranks, const std::vector<std::string>& others) {
        return parallel::cut_batch(std::move(batch), ranks, parallel::Positions::Given, others);
      },
      py::arg("batch"), py::arg("ranks"), py::arg("others"), NoGil());
  m.def("check_dense", &parallel::check_dense, py::arg("tensors"), NoGil());
}

}  // namespace

void bind_parallel(py::module_& m) {
  bind_sizes(m);
  bind_functions(m);
  bind_layers(m);
  bind_attention(m);
  bind_cost(m);
  bind_plan_input(m);
  bind_plan(m);
  bind_tiles(m);
}

}  // namespace tessera::python
