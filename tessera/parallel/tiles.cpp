#include "tessera/parallel/tiles.h"

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_set>

#include "tessera/base/compat.h"
#include "tessera/base/error.h"
#include "tessera/base/generators.h"
#include "tessera/parallel/held.h"

namespace tessera::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using TileTensors = std::vector<at::Tensor>;
using TileRange = std::pair<int64_t, int64_t>;
using TileWeights = std::optional<std::vector<double>>;

constexpr int64_t kIgnoredLabel = -100;  // of tokens that do not count

at::Device device_of_tiles(const TileTensors& tensors) {
  for (const at::Tensor& t : tensors)
    if (!t.is_cpu()) return t.device();
  return at::kCPU;
}

// Autocast and random numbers of a forward, for computing it again.
struct TileAround {
  explicit TileAround(const TileTensors& tensors)
      : device(device_of_tiles(tensors)), random(Generators(device).states()) {
    for (const at::DeviceType type : {at::kCPU, device.type()})
      if (at::autocast::is_autocast_enabled(type)) autocast[type] = at::autocast::get_autocast_dtype(type);
  }
  void forward_is_over() { drew = !device.is_cpu() || !random[0].equal(Generators(at::kCPU).states()[0]); }

  at::Device device;
  TileTensors random;
  std::map<at::DeviceType, at::ScalarType> autocast;
  bool drew = true;
};

// The autocast of the forward, without its cache: a weight that it cast for one tile would belong to that tile's graph.
class TileRegion {
 public:
  explicit TileRegion(const TileAround& around) : cached_(at::autocast::is_autocast_cache_enabled()) {
    for (const auto& [type, dtype] : around.autocast) {
      before_.push_back({type, at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)});
      at::autocast::set_autocast_enabled(type, true);
      at::autocast::set_autocast_dtype(type, dtype);
      at::autocast::increment_nesting();
    }
    if (!before_.empty()) at::autocast::set_autocast_cache_enabled(false);
  }
  ~TileRegion() {
    for (const Before& each : before_) {
      if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(each.type, each.enabled);
      at::autocast::set_autocast_dtype(each.type, each.dtype);
    }
    if (!before_.empty()) at::autocast::set_autocast_cache_enabled(cached_);
  }
  TileRegion(const TileRegion&) = delete;
  TileRegion& operator=(const TileRegion&) = delete;

 private:
  struct Before {
    at::DeviceType type;
    bool enabled;
    at::ScalarType dtype;
  };
  const bool cached_;
  std::vector<Before> before_;
};

// Draws the same random numbers again, where some were drawn.
class TileDraws {
 public:
  explicit TileDraws(const TileAround& around) : generators_(around.device) {
    if (!around.drew) return;
    before_ = generators_.states();
    generators_.set(around.random);
  }
  ~TileDraws() {
    if (!before_.empty()) generators_.set(before_);
  }
  TileDraws(const TileDraws&) = delete;
  TileDraws& operator=(const TileDraws&) = delete;

 private:
  Generators generators_;
  TileTensors before_;
};

// The sum of a tensor's gradients over the tiles.
struct TileSum {
  explicit TileSum(at::Tensor of) : like(std::move(of)) {}
  void add(const at::Tensor& gradient) {
    if (!gradient.defined()) return;
    if (sum.defined()) {
      sum.add_(gradient);
      return;
    }
    const at::ScalarType dtype = like.scalar_type();
    const bool narrow = dtype == at::kHalf || dtype == at::kBFloat16;
    sum = at::empty_like(like.detach(), like.options().dtype(narrow ? at::kFloat : dtype).requires_grad(false));
    sum.copy_(gradient);  // other holders may see the gradient
  }
  at::Tensor value() const { return sum.defined() ? sum.to(like.scalar_type()) : sum; }

  at::Tensor like, sum;
};

// The gradient of a tensor that is cut, put together from the tiles'.
struct TileJoin {
  TileJoin(at::Tensor of, int64_t along) : like(std::move(of)), dim(along) {}
  void add(const at::Tensor& gradient, const TileRange& range) {
    if (!joined.defined()) joined = at::empty_like(like.detach());
    const at::Tensor part = joined.narrow(dim, range.first, range.second);
    if (gradient.defined())
      part.copy_(gradient);
    else
      part.zero_();
  }

  at::Tensor like;
  int64_t dim;
  at::Tensor joined;
};

// A tile with what the tile's backward needs.
struct TileGraph {
  TileTensors leaves;  // the tile's tensors that require gradients
  at::Tensor output;
};

int64_t length_to_cut(const Tiled& tiles) {
  const auto name = [&](size_t k) { return tiles.names.empty() ? "tensor " + std::to_string(k) : tiles.names[k]; };
  const size_t first = std::ranges::find(tiles.cut, true) - tiles.cut.begin();
  TESSERA_CHECK_VALUE(first < tiles.cut.size(), "tiled", "there is no tensor to cut");
  const at::IntArrayRef sizes = tiles.tensors[first].sizes();
  for (size_t k = first; k < tiles.tensors.size(); ++k) {
    const at::IntArrayRef other = tiles.tensors[k].sizes();
    const bool fits = other.size() > static_cast<size_t>(tiles.dim) && other[tiles.dim] == sizes[tiles.dim];
    TESSERA_CHECK_VALUE(!tiles.cut[k] || fits, "tiled", name(k), " has the sizes ", other, ", ", name(first), " ",
                        sizes, ": dim ", tiles.dim, " of all that is cut must be the sequence");
  }
  return sizes[tiles.dim];
}

struct TilePlan {
  explicit TilePlan(const Tiled& given) : TilePlan(given, TileAround(given.tensors)) {}
  TilePlan(const Tiled& given, TileAround before) : tiles(given), around(std::move(before)) {
    ranges = tile_ranges(length_to_cut(tiles), tiles.count);
    for (size_t k = 0; k < tiles.tensors.size(); ++k)
      if (tiles.tensors[k].requires_grad()) wanted.push_back(k);
  }

  // The tensors of a tile, as leaves of a new graph.
  TileTensors pieces(size_t number) const {
    const auto& [begin, length] = ranges[number];
    TileTensors result;
    for (size_t k = 0; k < tiles.tensors.size(); ++k) {
      const at::Tensor whole = tiles.tensors[k].detach();
      const at::Tensor piece = tiles.cut[k] ? whole.narrow(tiles.dim, begin, length).contiguous() : whole;
      result.push_back(piece.requires_grad_(tiles.tensors[k].requires_grad()));
    }
    return result;
  }
  TileGraph graph(size_t number) const {
    const at::AutoGradMode records(true);
    const TileTensors all = pieces(number);
    TileGraph made;
    for (const size_t k : wanted)
      made.leaves.push_back(all[k]);
    made.output = tiles.f(all);
    return made;
  }
  at::Tensor plain(size_t number) const {
    const at::NoGradGuard no_grad;
    return tiles.f(pieces(number));
  }
  // Makes graph(0), and notes the parameters.
  TileGraph first();
  TileTensors tensors_and_params() const {
    TileTensors all = tiles.tensors;
    all.insert(all.end(), params.begin(), params.end());
    return all;
  }

  Tiled tiles;
  TileAround around;
  std::vector<TileRange> ranges;
  std::vector<size_t> wanted;
  TileTensors params;
};

// The leaves of `output`'s graph but for `own`. Value error where the graph leads to nodes older than `oldest`.
TileTensors leaves_of(const at::Tensor& output, const TileTensors& own, uint64_t oldest) {
  std::unordered_set<const void*> known, seen{nullptr};
  for (const at::Tensor& leaf : own)
    known.insert(leaf.unsafeGetTensorImpl());
  TileTensors found;
  std::vector<torch::autograd::Node*> stack{output.grad_fn().get()};
  while (!stack.empty()) {
    torch::autograd::Node* const node = stack.back();
    stack.pop_back();
    if (!seen.insert(node).second) continue;
    const at::Tensor leaf = compat::leaf_of(*node);
    if (leaf.defined()) {
      if (known.insert(leaf.unsafeGetTensorImpl()).second) found.push_back(leaf);
      continue;
    }
    TESSERA_CHECK_VALUE(node->sequence_nr() >= oldest, "tiled",
                        "the function uses a tensor that was computed outside of it and requires gradients (by ",
                        node->name(), "); pass it as an argument");
    for (const torch::autograd::Edge& edge : node->next_edges())
      stack.push_back(edge.function.get());
  }
  return found;
}

TileGraph TilePlan::first() {
  uint64_t mark = 0;
  {
    const at::AutoGradMode records(true);
    mark = at::zeros({}).requires_grad_().clone().grad_fn()->sequence_nr();
  }
  TileGraph made = graph(0);
  params = leaves_of(made.output, made.leaves, mark);
  return made;
}

// Gradients of the tensors of a plan and of its parameters.
class TileGradients {
 public:
  explicit TileGradients(const TilePlan& plan) : plan_(plan) {
    for (const size_t k : plan.wanted) {
      if (plan.tiles.cut[k])
        joined_.emplace(k, TileJoin(plan.tiles.tensors[k], plan.tiles.dim));
      else
        sums_.emplace(k, TileSum(plan.tiles.tensors[k]));
    }
    for (const at::Tensor& param : plan.params)
      params_.emplace_back(param);
  }

  // Adds the backward of one tile. Not `use`: it takes part in what ranks do together, and its gradients are dropped.
  void add(size_t number, const TileGraph& tile, const at::Tensor& incoming, bool use) {
    TileTensors targets = tile.leaves;
    targets.insert(targets.end(), plan_.params.begin(), plan_.params.end());
    TileTensors found(targets.size());
    if (tile.output.requires_grad() && !targets.empty())
      found = torch::autograd::grad({tile.output}, targets, {incoming}, /*retain_graph=*/std::nullopt,
                                    /*create_graph=*/false, /*allow_unused=*/true);
    if (!use) found.assign(targets.size(), at::Tensor());
    for (size_t i = 0; i < plan_.wanted.size(); ++i) {
      const size_t k = plan_.wanted[i];
      if (const auto part = joined_.find(k); part != joined_.end())
        part->second.add(found[i], plan_.ranges[number]);
      else
        sums_.at(k).add(found[i]);
    }
    for (size_t i = 0; i < params_.size(); ++i)
      params_[i].add(found[plan_.wanted.size() + i]);
  }
  // A gradient for each tensor and then for each parameter.
  TileTensors values() const {
    TileTensors all(plan_.tiles.tensors.size());
    for (const auto& [k, each] : joined_)
      all[k] = each.joined;
    for (const auto& [k, each] : sums_)
      all[k] = each.value();
    for (const TileSum& each : params_)
      all.push_back(each.value());
    return all;
  }

 private:
  const TilePlan& plan_;
  std::map<size_t, TileJoin> joined_;
  std::map<size_t, TileSum> sums_;
  std::vector<TileSum> params_;
};

// All outputs as one, and their sizes along `join` where they are joined.
std::pair<at::Tensor, std::vector<int64_t>> combined_tiles(const TilePlan& plan, const at::Tensor& first, int64_t join,
                                                           const TileWeights& weights) {
  const auto output = [&](size_t number) { return number == 0 ? first : plan.plain(number); };
  if (weights) {
    const auto dtype = at::promote_types(first.scalar_type(), at::kFloat);
    at::Tensor total = at::zeros_like(first, first.options().dtype(dtype));
    for (size_t number = 0; number < plan.ranges.size(); ++number) {
      const at::Tensor each = output(number);
      if ((*weights)[number] != 0) total += each * (*weights)[number];
    }
    return {total.to(first.scalar_type()), {}};
  }
  std::vector<int64_t> sizes;
  if (first.size(join) != plan.ranges[0].second) {  // the tile is not of the same sequence
    TileTensors outputs;
    for (size_t number = 0; number < plan.ranges.size(); ++number) {
      outputs.push_back(output(number));
      sizes.push_back(outputs.back().size(join));
    }
    return {at::cat(outputs, join), sizes};
  }
  std::vector<int64_t> shape = first.sizes().vec();
  shape[join < 0 ? join + first.dim() : join] = plan.ranges.back().first + plan.ranges.back().second;
  const at::Tensor joined = at::empty(shape, first.options());
  for (size_t number = 0; number < plan.ranges.size(); ++number) {
    joined.narrow(join, plan.ranges[number].first, plan.ranges[number].second).copy_(output(number));
    sizes.push_back(plan.ranges[number].second);
  }
  return {joined, sizes};
}

// Gradients that carry no graph: a second derivative through them is an error, and not a wrong number.
template <class F>
variable_list once_differentiable(const variable_list& incoming, const F& gradients) {
  variable_list all;
  {
    const at::NoGradGuard no_grad;
    all = gradients();
  }
  const auto has_graph = [](const at::Tensor& t) { return t.defined() && t.requires_grad(); };
  if (!at::GradMode::is_enabled() || std::ranges::none_of(incoming, has_graph)) return all;
  for (at::Tensor& gradient : all)
    if (gradient.defined()) gradient = gradient.detach().requires_grad_(at::isFloatingType(gradient.scalar_type()));
  torch::autograd::DelayedError error("[tiled] a layer or loss in tiles has no second derivative",
                                      static_cast<int64_t>(all.size()));
  return error.apply(std::move(all));
}

struct TilesAgain {
  std::shared_ptr<TilePlan> plan;
  int64_t join = 0;
  std::vector<int64_t> sizes;
  TileWeights weights;
};

struct Recomputed : torch::autograd::Function<Recomputed> {
  static at::Tensor forward(AutogradContext* ctx, at::TensorList /*tensors and parameters*/,
                            const std::shared_ptr<TilePlan>& plan, const at::Tensor& first, int64_t join,
                            const TileWeights& weights) {
    ctx->set_materialize_grads(false);
    at::Tensor output;
    std::vector<int64_t> sizes;
    {
      const TileRegion region(plan->around);
      std::tie(output, sizes) = combined_tiles(*plan, first.detach(), join, weights);
    }
    plan->around.forward_is_over();
    ctx->save_for_backward(plan->tiles.tensors);
    plan->tiles.tensors.clear();  // what autograd saved it hands out again; the rest of the plan stays
    hold(ctx, TilesAgain{plan, join, std::move(sizes), weights});
    return output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& incoming) {
    return once_differentiable(incoming, [&] { return gradients_of(ctx, incoming); });
  }

  static variable_list gradients_of(AutogradContext* ctx, const variable_list& incoming) {
    const TilesAgain again = held<TilesAgain>(ctx);
    const TileTensors saved = ctx->get_saved_variables();
    const size_t count = saved.size() + again.plan->params.size() + 4;
    if (!incoming[0].defined()) return variable_list(count);
    Tiled tiles = again.plan->tiles;
    tiles.tensors = saved;
    TilePlan plan(tiles, again.plan->around);
    plan.params = again.plan->params;
    TileGradients gradients(plan);
    const TileDraws draws(plan.around);
    const TileRegion region(plan.around);
    int64_t begin = 0;
    for (size_t number = 0; number < plan.ranges.size(); ++number) {
      const TileGraph tile = plan.graph(number);
      if (again.weights) {
        const double weight = (*again.weights)[number];
        const at::Tensor part = (incoming[0] * weight).to(tile.output.scalar_type()).reshape(tile.output.sizes());
        gradients.add(number, tile, part, weight != 0);
      } else {
        gradients.add(number, tile, incoming[0].narrow(again.join, begin, again.sizes[number]), true);
        begin += again.sizes[number];
      }
    }
    variable_list all = gradients.values();
    all.resize(count);
    return all;
  }
};

// A value whose gradients are known already, but for the factor that comes in.
struct HandedOver : torch::autograd::Function<HandedOver> {
  static at::Tensor forward(AutogradContext* ctx, at::TensorList /*tensors and parameters*/, const at::Tensor& value,
                            const std::shared_ptr<TileTensors>& gradients) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward(*gradients);
    return value.clone();
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& incoming) {
    return once_differentiable(incoming, [&] {
      variable_list all = ctx->get_saved_variables();
      for (at::Tensor& gradient : all) {
        if (!incoming[0].defined()) gradient = at::Tensor();
        if (gradient.defined()) gradient = (gradient * incoming[0]).to(gradient.scalar_type());
      }
      all.resize(all.size() + 2);
      return all;
    });
  }
};

// The weight of each tile's loss: 1 in a sum, the tile's share of the tokens (those that are `valid`) in a mean.
std::vector<double> tile_factors(const std::vector<TileRange>& ranges, TileReduction reduction,
                                 const at::Tensor& valid) {
  if (reduction == TileReduction::Sum) return std::vector<double>(ranges.size(), 1.0);
  std::vector<double> counts;
  if (valid.defined()) {
    TileTensors parts;
    for (const auto& [begin, length] : ranges)
      parts.push_back(valid.narrow(1, begin, length).sum());
    const at::Tensor all = at::stack(parts).to(at::kCPU, at::kDouble);
    counts.assign(all.const_data_ptr<double>(), all.const_data_ptr<double>() + all.numel());
  } else {
    for (const TileRange& range : ranges)
      counts.push_back(static_cast<double>(range.second));
  }
  const double sum = std::max(std::accumulate(counts.begin(), counts.end(), 0.0), 1.0);
  for (double& count : counts)
    count /= sum;
  return counts;
}

}  // namespace

std::vector<std::pair<int64_t, int64_t>> tile_ranges(int64_t length, int64_t count) {
  TESSERA_CHECK_VALUE(count >= 1, "tiled", "there must be 1 tile at least, got ", count);
  const int64_t step = std::max<int64_t>(1, (length + count - 1) / count);
  std::vector<TileRange> ranges;
  for (int64_t begin = 0; begin < length; begin += step)
    ranges.emplace_back(begin, std::min(step, length - begin));
  if (ranges.empty()) ranges.emplace_back(0, 0);
  return ranges;
}

at::Tensor tiled(const Tiled& tiles, int64_t join, const std::function<std::vector<double>()>& weights) {
  const auto plan = std::make_shared<TilePlan>(tiles);
  const bool records = at::GradMode::is_enabled();
  at::Tensor first;
  {
    const TileRegion region(plan->around);
    first = records ? plan->first().output.detach() : plan->plain(0);
  }
  TESSERA_CHECK_VALUE(first.dim() > 0 || weights, "tiled",
                      "the function returns a scalar: say how those of the tiles are reduced");
  const TileWeights factors = first.dim() == 0 ? TileWeights(weights()) : std::nullopt;
  if (!records) {
    const TileRegion region(plan->around);
    return combined_tiles(*plan, first, join, factors).first;
  }
  const TileTensors inputs = plan->tensors_and_params();
  return Recomputed::apply(at::TensorList(inputs), plan, first, join, factors);
}

at::Tensor tiled(const Tiled& tiles, int64_t join, TileReduction reduction, const at::Tensor& valid) {
  return tiled(tiles, join,
               [&] { return tile_factors(tile_ranges(length_to_cut(tiles), tiles.count), reduction, valid); });
}

at::Tensor tiled_with_gradients(const Tiled& tiles, const std::vector<double>& weights) {
  TilePlan plan(tiles);
  at::Tensor total;
  at::ScalarType dtype = at::kFloat;
  std::optional<TileGradients> gradients;
  {
    const TileRegion region(plan.around);
    for (size_t number = 0; number < weights.size(); ++number) {
      const TileGraph tile = number == 0 ? plan.first() : plan.graph(number);
      const at::Tensor loss = tile.output.detach();
      TESSERA_CHECK_VALUE(loss.dim() == 0, "tiled_loss", "the function must return a scalar, got the sizes ",
                          loss.sizes());
      if (!gradients) gradients.emplace(plan);
      dtype = loss.scalar_type();
      if (!total.defined()) total = at::zeros_like(loss, loss.options().dtype(at::promote_types(dtype, at::kFloat)));
      const double weight = weights[number];
      if (weight != 0) total += loss * weight;
      gradients->add(number, tile, at::full_like(loss, weight), weight != 0);
    }
  }
  const TileTensors inputs = plan.tensors_and_params();
  return HandedOver::apply(at::TensorList(inputs), total.to(dtype), std::make_shared<TileTensors>(gradients->values()));
}

at::Tensor tiled_mlp(const std::function<at::Tensor(const at::Tensor&)>& layer, const at::Tensor& x, int64_t tiles) {
  TESSERA_CHECK_VALUE(x.dim() >= 2, "tiled_mlp", "x must be [..., sequence, hidden], got the sizes ", x.sizes());
  const TileFunction f = [layer](const TileTensors& pieces) { return layer(pieces[0]); };
  return tiled({.f = f, .tensors = {x}, .cut = {true}, .dim = x.dim() - 2, .count = tiles}, x.dim() - 2);
}

at::Tensor tiled_loss(const TileLoss& loss, const at::Tensor& x, const at::Tensor& y, int64_t tiles,
                      TileReduction reduction, const at::Tensor& mask) {
  TileTensors given{x, y};
  if (mask.defined()) given.push_back(mask);
  constexpr std::array names{"x", "labels", "mask"};
  for (size_t k = 0; k < given.size(); ++k) {
    const at::IntArrayRef sizes = given[k].sizes();
    const bool fits = x.dim() >= 2 && sizes.size() >= 2 && sizes.slice(0, 2) == x.sizes().slice(0, 2);
    TESSERA_CHECK_VALUE(fits, "tiled_loss", names[k], " has the sizes ", sizes, ", x ", x.sizes(),
                        ": all begin with [batch, sequence]");
  }
  const TileFunction f = [loss](const TileTensors& pieces) {
    return loss(pieces[0], pieces[1], pieces.size() > 2 ? pieces[2] : at::Tensor());
  };
  const Tiled all{.f = f, .tensors = given, .cut = std::vector<bool>(given.size(), true), .count = tiles};
  at::Tensor valid;
  if (!y.is_floating_point()) valid = y.dim() > 2 ? (y != kIgnoredLabel).flatten(2).any(2) : y != kIgnoredLabel;
  if (mask.defined()) valid = valid.defined() ? valid & (mask != 0) : mask != 0;
  const TileAround around(given);
  const bool fp16 = x.scalar_type() == at::kHalf ||
                    std::ranges::any_of(around.autocast, [](const auto& each) { return each.second == at::kHalf; });
  if (fp16 || !at::GradMode::is_enabled()) return tiled(all, 0, reduction, valid);
  return tiled_with_gradients(all, tile_factors(tile_ranges(x.size(1), tiles), reduction, valid));
}

}  // namespace tessera::parallel
