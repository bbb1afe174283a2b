#include "tessera/engine/flops_profile.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <set>
#include <unordered_map>

#include "tessera/base/error.h"

namespace tessera::engine {
namespace {

template <class... A>
std::string printed(const char* format, A... arguments) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), format, arguments...);
  return text.data();
}

// For every row the one around it, the nearest that there is.
std::vector<int> rows_around(const std::vector<ProfileRow>& rows) {
  std::unordered_map<std::string, int> by_name;
  for (size_t i = 0; i < rows.size(); ++i)
    by_name.emplace(rows[i].name, static_cast<int>(i));
  std::vector<int> around;
  for (const ProfileRow& row : rows) {
    int found = -1;
    for (std::string name = row.name; found < 0 && !name.empty();) {
      const size_t dot = name.rfind('.');
      name.resize(dot == std::string::npos ? 0 : dot);
      if (const auto at = by_name.find(name); at != by_name.end()) found = at->second;
    }
    around.push_back(found);
  }
  return around;
}

bool is_tensor(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().has_storage();
}

int64_t first_byte(const at::Tensor& tensor) {
  return tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
}

// Whether `tensor` begins inside the elements of `weight`. Storages stay when partitioned values move (Note [Released parameters] in
// shard/storage.h).
bool is_of(const at::Tensor& tensor, const at::Tensor& weight) {
  if (!weight.has_storage() || tensor.storage().unsafeGetStorageImpl() != weight.storage().unsafeGetStorageImpl())
    return false;
  int64_t reach = 1;
  for (int64_t dim = 0; dim < weight.dim(); ++dim)
    reach += std::max<int64_t>(0, weight.size(dim) - 1) * weight.stride(dim);
  const int64_t begin = first_byte(weight), at = first_byte(tensor);
  return begin <= at && at < begin + reach * static_cast<int64_t>(weight.itemsize());
}

}  // namespace

std::string number_text(double value, const std::string& unit) {
  constexpr std::array<std::pair<double, const char*>, 4> prefixes{{{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "K"}}};
  for (const auto& [factor, prefix] : prefixes)
    if (std::abs(value) >= factor) return printed("%.2f %s", value / factor, prefix) + unit;
  return printed("%g", value) + (unit.empty() ? "" : " " + unit);
}

int64_t ProfileRow::depth() const {
  return name.empty() ? 0 : 1 + std::ranges::count(name, '.');
}

void FlopsProfile::start(std::vector<ProfileRow> rows, std::optional<std::vector<Weight>> weights) {
  TESSERA_CHECK(!started(), "flops_profiler", "it counts already: call stop() before start()");
  rows_ = std::move(rows);
  around_ = rows_around(rows_);
  weights_ = std::move(weights);
  thread_ = std::this_thread::get_id();
  counter_.emplace(static_cast<Listener*>(this));
}

void FlopsProfile::stop() {
  counter_.reset();
  calls_.clear();
  copies_.clear();
  weights_.reset();
}

bool FlopsProfile::seen(int row) const {
  return started() && std::this_thread::get_id() == thread_ && row >= 0 && static_cast<size_t>(row) < rows_.size();
}

bool FlopsProfile::runs(int row) const {
  return std::ranges::any_of(calls_, [&](const Call& call) { return call.row == row; });
}

void FlopsProfile::enter(int row) {
  if (!seen(row) || (calls_.empty() && FlopCounter::in_backward())) return;
  calls_.push_back({row, std::chrono::steady_clock::now(), !runs(row)});
}

void FlopsProfile::leave(int row) {
  if (!seen(row) || !runs(row)) return;
  while (calls_.back().row != row)
    calls_.pop_back();
  const Call call = calls_.back();
  calls_.pop_back();
  if (!call.outermost) return;
  ProfileRow& found = rows_[static_cast<size_t>(row)];
  found.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - call.at).count();
  found.timed = true;
}

std::vector<int> FlopsProfile::rows_with(const at::Tensor& tensor) const {
  std::vector<int> found;
  for (const Weight& weight : *weights_)
    if (is_of(tensor, weight.tensor)) found.push_back(weight.row);
  for (const Copy& copy : copies_)
    if (copy.storage._unsafe_get_target() == tensor.storage().unsafeGetStorageImpl())
      found.insert(found.end(), copy.rows.begin(), copy.rows.end());
  return found;
}

// How deep the deepest module lies that runs and is the row's own or around it; -1: none.
int FlopsProfile::depth_that_runs(int row) const {
  for (; row >= 0; row = around_[static_cast<size_t>(row)])
    if (runs(row)) return static_cast<int>(rows_[static_cast<size_t>(row)].depth());
  return -1;
}

// Weights come after what they are multiplied with: (x, weight), (bias, x, weight), (image, weight, bias).
std::optional<int> FlopsProfile::owner_of(c10::ArrayRef<const c10::IValue> inputs) const {
  if (!weights_) return {};
  for (size_t i = std::min<size_t>(3, inputs.size()); i-- > 0;) {
    if (!is_tensor(inputs[i])) continue;
    const std::vector<int> found = rows_with(inputs[i].toTensor());
    if (found.empty()) continue;
    int best = found[0];
    for (const int row : found)
      if (std::pair(depth_that_runs(row), row) > std::pair(depth_that_runs(best), best)) best = row;
    return best;
  }
  return {};
}

void FlopsProfile::counted(double operations, c10::ArrayRef<const c10::IValue> inputs, bool in_backward) {
  if (rows_.empty() || (calls_.empty() && (!weights_ || in_backward))) return;
  std::set<int> rows;
  const auto add = [&](int row) {
    for (; row >= 0; row = around_[static_cast<size_t>(row)])
      rows.insert(row);
  };
  for (const Call& call : calls_)
    add(call.row);
  if (const std::optional<int> owner = owner_of(inputs); owner || calls_.empty()) add(owner.value_or(0));
  for (const int row : rows)
    rows_[static_cast<size_t>(row)].operations += static_cast<int64_t>(operations);
}

void FlopsProfile::copied(const at::Tensor& from, const at::Tensor& to) {
  if (!weights_ || !from.has_storage() || !to.has_storage()) return;
  std::erase_if(copies_, [](const Copy& copy) { return copy.storage.expired(); });
  if (std::vector<int> rows = rows_with(from); !rows.empty())
    copies_.push_back({to.storage().getWeakStorageImpl(), std::move(rows)});
}

const ProfileRow& FlopsProfile::model() const {
  static const ProfileRow none;
  return rows_.empty() ? none : rows_[0];
}

int64_t FlopsProfile::operations() const {
  return static_cast<int64_t>(static_cast<double>(model().operations) * (1 + recompute));
}

int64_t FlopsProfile::multiply_adds() const {
  return model().operations / 2;
}

double FlopsProfile::seconds() const {
  return model().seconds;
}

int64_t FlopsProfile::parameters() const {
  return model().parameters;
}

std::string FlopsProfile::line(const ProfileRow& row) const {
  const auto all = static_cast<double>(model().operations), own = static_cast<double>(row.operations);
  return (row.name.empty() ? "model" : row.name) + " (" + row.kind +
         "): " + number_text(static_cast<double>(row.parameters), "params") + ", " + number_text(own, "FLOPs") +
         printed(" (%.0f%%)", all > 0 ? 100 * own / all : 0) +
         (row.timed ? printed(", %.2f ms", row.seconds * 1e3) : "");
}

std::string FlopsProfile::text(const ProfileText& options) const {
  int64_t last = 0;
  for (const ProfileRow& row : rows_)
    last = std::max(last, row.depth());
  if (options.depth >= 0) last = std::min(last, options.depth);
  const auto forward = static_cast<double>(model().operations);
  std::string text = "flops profile of step " + std::to_string(options.step) + ": " + model().kind + "\n  parameters " +
                     number_text(static_cast<double>(parameters()), "") + ", forward " +
                     number_text(static_cast<double>(multiply_adds()), "MACs") + ", " + number_text(forward, "FLOPs") +
                     (model().timed ? printed(", %.2f ms", seconds() * 1e3) : "") + "\n  with backward " +
                     number_text(2 * forward + static_cast<double>(operations()), "FLOPs");
  for (int64_t depth = 1; depth <= last; ++depth) {
    std::vector<const ProfileRow*> level;
    for (const ProfileRow& row : rows_)
      if (row.depth() == depth) level.push_back(&row);
    std::ranges::stable_sort(level, std::greater(), &ProfileRow::operations);
    level.resize(std::min(level.size(), static_cast<size_t>(std::max<int64_t>(0, options.top_modules))));
    for (size_t i = 0; i < level.size(); ++i)
      text += (i == 0 ? "\n  depth " + std::to_string(depth) + ": " : ", ") + line(*level[i]);
  }
  if (!options.detailed) return text;
  text += "\n  modules:";
  for (const ProfileRow& row : rows_)
    if (row.depth() <= last) text += "\n    " + std::string(2 * static_cast<size_t>(row.depth()), ' ') + line(row);
  return text;
}

}  // namespace tessera::engine
