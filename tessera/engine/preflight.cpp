#include "tessera/engine/preflight.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <unordered_map>

#include "tessera/base/error.h"
#include "tessera/comm/backends.h"
#include "tessera/engine/agreement.h"
#include "tessera/engine/impl.h"
#include "tessera/optim/types.h"
#include "tessera/shard/storage.h"
#include "tessera/zero/hooks.h"

namespace tessera::engine {

namespace {

// Bytes from the first element to the last.
int64_t span_of(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d)
    last += (tensor.size(d) - 1) * tensor.stride(d);
  return (last + 1) * tensor.element_size();
}

// Whether two tensors overlap, by their storages alone, which may be those of partitioned parameters.
bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0 || !a.has_storage() || !b.has_storage()) return false;
  if (a.storage().unsafeGetStorageImpl() != b.storage().unsafeGetStorageImpl()) return false;
  const int64_t first = a.storage_offset() * a.element_size(), second = b.storage_offset() * b.element_size();
  return first < second + span_of(b) && second < first + span_of(a);
}

// Two parameters with common memory are one value for torch and two for an engine, which would untie them.
void check_apart(const std::vector<ParamSpec>& params) {
  struct Bytes {
    const char *begin, *end;
    const ParamSpec* spec;
  };
  std::vector<Bytes> all;
  for (const ParamSpec& spec : params) {
    const at::Tensor& t = spec.tensor;
    if (t.numel() == 0 || spec.restore || !t.has_storage() || t.storage().data() == nullptr) continue;
    const auto* begin = static_cast<const char*>(t.const_data_ptr());
    all.push_back({begin, begin + span_of(t), &spec});
  }
  std::sort(all.begin(), all.end(), [](const Bytes& a, const Bytes& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < all.size(); ++i) {
    TESSERA_CHECK_VALUE(all[i].begin >= all[i - 1].end, "engine", "parameters '", all[i - 1].spec->name, "' and '",
                        all[i].spec->name,
                        "' lie in the same memory (the data of one was set to that of the other, or they are views of "
                        "one tensor), but are two parameters; register one and the same parameter in both modules (in "
                        "Python x.weight = y.weight does), or clone one");
  }
}

bool trains(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

// `whole`: leave out what differs along the model.
std::string text_of(const ParamSpec& spec, bool whole) {
  std::ostringstream text;
  text << "parameter '" << spec.name << "', ";
  if (spec.cut) text << "of a whole of " << spec.cut->numel() << " elements, ";
  if (!whole || !spec.varies.has(comm::Axis::Tp)) text << "shape " << spec.tensor.sizes();
  if (!spec.varies.empty()) text << ", differs along " << spec.varies.name();
  if (!shard::Form(spec.tensor).strides.empty() && !spec.tensor.is_contiguous())
    text << ", strides " << spec.tensor.strides();
  if (spec.tensor.scalar_type() != at::kFloat) text << ", " << spec.tensor.scalar_type();
  text << (spec.group < 0 ? ", not optimized" : ", param group " + std::to_string(spec.group)) << ", unit '"
       << spec.unit << "'";
  if (spec.comm) text << ", travels in " << *spec.comm;
  return text.str();
}

std::string text_of(const optim::GroupOptions& g, size_t number) {
  std::ostringstream text;
  text.precision(17);
  text << "param group " << number << ": lr " << g.lr << ", betas " << g.beta1 << " " << g.beta2 << ", eps " << g.eps
       << ", weight decay " << g.weight_decay << (g.decoupled ? " (decoupled)" : "")
       << (g.bias_correction ? "" : ", no bias correction") << ", momentum " << g.momentum << ", dampening "
       << g.dampening << (g.nesterov ? ", nesterov" : "") << ", lr decay " << g.lr_decay << ", initial accumulator "
       << g.initial_accumulator_value << (g.maximize ? ", maximize" : "");
  return text.str();
}

// One line for each thing that must be the same on all ranks.
std::vector<std::string> lines_of(const Options& options, const std::vector<ParamSpec>& params,
                                  const std::vector<optim::GroupOptions>& groups, bool whole) {
  std::vector<std::string> lines;
  const auto add = [&](const auto&... parts) {
    std::ostringstream line;
    line.precision(17);
    (line << ... << parts);
    lines.push_back(line.str());
  };
  const zero::Options& zero = options.zero;
  const amp::PrecisionPolicy& p = zero.precision;
  add("ZeRO stage ", zero.stage);
  add("precision: parameters ", p.param, ", gradients ", p.grad, ", states ", p.state, ", master ", int(p.master),
      ", rounding ", int(p.rounding), " ", int(p.grad_rounding), ", skips overflows ", p.skip_nonfinite);
  add("optimizer ", int(options.rule), " ", options.client_optimizer);
  add("scheduler ", options.schedule);
  add("gradient_accumulation_steps ", options.gradient_accumulation_steps);
  add("gradient_clipping ", options.gradient_clipping);
  add("managed_gradient_accumulation ", options.managed_accumulation, ", reduction in the step ", zero.reduce_at_step);
  const amp::ScalerOptions& s = options.scaler;
  add("loss scale: dynamic ", s.dynamic, ", ", s.initial, ", window ", s.window, s.late_growth ? "+" : "",
      ", hysteresis ", s.hysteresis, " ", s.refill_on_good, ", minimum ", s.minimum, " ", s.error_at_minimum);
  add("torch_autocast ", options.autocast.enabled, " ", options.autocast.dtype);
  add("reduce_bucket_size ", zero.reduce_bucket_size, ", smallest unit ", zero.min_unit_elements, ", overlap_comm ",
      zero.overlap, ", gradient factor ", zero.gradient_factor.value_or(0));
  add("communication_data_type ", int(zero.communication.value_or(at::ScalarType::Undefined)));
  const zero::GatherOptions& g = zero.gather;
  add("stage 3: prefetch ", g.prefetch, ", max live ", g.max_live, ", reuse distance ", g.reuse_distance,
      ", persistence ", g.persistence_threshold, " ", g.model_persistence);
  add("states elsewhere: ", bool(zero.home), ", ratio ", options.offload.finds_ratio ? -1 : zero.ratio,
      ", device share ", options.offload.finds_share ? -1 : zero.device_share, " (-1: found out)");
  add("seed ", zero.seed, ", shared parameters ", zero.share_params);
  add("update in the backward ", zero.update_in_backward, ", clipping by unit ", zero.unit_clipping,
      ", by the norm before ", zero.previous_clipping, ", runs on ", zero.update_runs_on);
  for (size_t i = 0; i < groups.size(); ++i)
    lines.push_back(text_of(groups[i], i));
  add("number of parameters ", params.size());
  for (const ParamSpec& spec : params)
    lines.push_back(text_of(spec, whole));
  return lines;
}

void check_tensor(const ParamSpec& spec) {
  const at::Tensor& tensor = spec.tensor;
  TESSERA_CHECK_VALUE(!tensor.is_meta(), "engine", "parameter '", spec.name,
                      "' is on the meta device and has no values; materialize the module first (to_empty(), then its "
                      "initialization), or build it partitioned where it is too large for one rank");
  TESSERA_CHECK_VALUE(!tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python), "engine", "parameter '",
                      spec.name,
                      "' is a tensor subclass with operators of its own (a DTensor, a quantized weight), whose memory "
                      "an engine cannot lay out; hand over plain tensors (dtensor.full_tensor() or .to_local())");
  TESSERA_CHECK_VALUE(!spec.cut || tensor.is_contiguous(), "engine", "parameter '", spec.name,
                      "' is cut and not contiguous; make it so before");
  TESSERA_CHECK_VALUE(!zero::Hooks::is_watched(tensor), "engine", "parameter '", spec.name,
                      "' already belongs to a live engine; call destroy() on that engine first");
}

}  // namespace

void check_params(const std::vector<ParamSpec>& params, const amp::PrecisionPolicy& precision) {
  std::unordered_map<const void*, const ParamSpec*> seen;
  for (const ParamSpec& spec : params) {
    check_tensor(spec);
    const auto [first, added] = seen.emplace(spec.tensor.unsafeGetTensorImpl(), &spec);
    TESSERA_CHECK_VALUE(added, "engine", "parameter '", spec.name, "' is given more than once, also as '",
                        first->second->name, "'");
    if (spec.group >= 0) zero::check_real(spec);
  }
  check_apart(params);
  amp::check(precision);
}

void check_added(std::span<const ParamSpec> present, const ParamSpec& param) {
  check_tensor(param);
  zero::check_real(param);
  for (const ParamSpec& spec : present) {
    TESSERA_CHECK_VALUE(!spec.tensor.is_same(param.tensor), "engine", "parameter '", param.name,
                        "' is given more than once, also as '", spec.name, "'");
    TESSERA_CHECK_VALUE(!overlap(spec.tensor, param.tensor), "engine", "parameter '", param.name,
                        "' lies in the memory of '", spec.name,
                        "', and is another Parameter; use that one itself, or clone its values");
    TESSERA_CHECK_VALUE(spec.name != param.name, "engine", "there are two parameters '", param.name, "'");
  }
  TESSERA_CHECK_VALUE(trains(param.tensor.scalar_type()), "engine", "parameter '", param.name, "' is ",
                      param.tensor.scalar_type(), ", which is not trained: convert it to fp32, bf16 or fp16");
}

amp::PrecisionPolicy precision_of_model(const std::vector<ParamSpec>& params, std::optional<at::ScalarType> grad) {
  const ParamSpec* first = nullptr;
  for (const ParamSpec& spec : params) {
    if (spec.group < 0) continue;
    zero::check_real(spec);
    const at::ScalarType dtype = spec.tensor.scalar_type();
    TESSERA_CHECK_VALUE(trains(dtype), "engine", "parameter '", spec.name, "' is ", dtype,
                        ", which is not trained: convert the model to fp32, or enable bf16 or fp16 in the "
                        "configuration, which casts it");
    if (first == nullptr) first = &spec;
    TESSERA_CHECK_VALUE(dtype == first->tensor.scalar_type(), "engine", "parameters have several dtypes: '",
                        first->name, "' is ", first->tensor.scalar_type(), ", '", spec.name, "' ", dtype,
                        "; without a precision section nothing is cast: convert the model to one dtype, "
                        "or enable bf16 or fp16 in the configuration");
  }
  const at::ScalarType dtype = first == nullptr ? at::kFloat : first->tensor.scalar_type();
  // torch keeps moments in the dtype of the parameter; fp16 ones would overflow, and no kernel has them.
  return {dtype, grad.value_or(dtype), amp::Master::Weight, dtype == at::kHalf ? at::kFloat : dtype};
}

std::string wrong_in_groups(const Options& options, const std::vector<optim::GroupOptions>& groups, size_t first) {
  const bool external = options.rule == optim::Rule::External;
  const optim::Type* const type = external ? options.client_type : &optim::type_of(options.rule);
  for (size_t number = 0; type != nullptr && number < groups.size(); ++number)
    if (const std::string wrong = optim::wrong_in(*type, groups[number]); !wrong.empty())
      return c10::str("param group ", first + number, ": ", wrong);
  return "";
}

void check_bounds(const Options& options, const std::vector<optim::GroupOptions>& groups, size_t first) {
  const std::string wrong = wrong_in_groups(options, groups, first);
  TESSERA_CHECK_VALUE(wrong.empty(), "engine", wrong);
}

void check_update_in_backward(const Options& options, const comm::Mesh& mesh) {
  std::vector<std::string> all = zero::UpdateInBackward::excluded(options.zero, options.rule, mesh);
  if (options.gradient_accumulation_steps > 1) all.emplace_back("gradient_accumulation_steps above 1");
  if (options.gradient_clipping > 0)
    all.push_back(c10::str("gradient_clipping ", options.gradient_clipping,
                           ", which needs the norm of all gradients (set 0, or tessera.clip)"));
  if (options.scaler.dynamic || options.scaler.initial != 1) all.emplace_back("a loss scale");
  std::string text;
  for (const std::string& line : all)
    text += "\n  " + line;
  TESSERA_CHECK_VALUE(all.empty(), "engine", "tessera.update_in_backward is excluded by:", text);
}

void check_alike(const zero::Ranks& ranks, const Options& options, const std::vector<ParamSpec>& params,
                 const std::vector<optim::GroupOptions>& groups) {
  zero::Ranks data = ranks;
  data.model = comm::single_group();
  const auto check = [&](const zero::Ranks& among, bool whole) {
    check_same(
        among, lines_of(options, params, groups, whole), "engine", "ranks build different engines",
        "give all ranks the same model, optimizer and configuration (a module that iterates over a set registers "
        "its parameters in another order in every process)");
  };
  check(data, /*whole=*/false);
  if (ranks.model->size() > 1) check(ranks, /*whole=*/true);
}

void Engine::check_live(const char* call) const {
  impl_->live(call);
}

void Engine::check_not_captured(const char* call) const {
  impl_->live(call).units.check_not_captured(call);
}

}  // namespace tessera::engine
