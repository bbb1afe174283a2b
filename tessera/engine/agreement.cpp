#include "tessera/engine/agreement.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <sstream>
#include <type_traits>

#include "tessera/base/error.h"

namespace tessera::engine {

namespace {

constexpr comm::Label kLabel = "what ranks have alike";

// `text` of the rank with place() `root`, on all ranks.
std::string broadcast(const zero::Ranks& ranks, const std::string& text, int root) {
  const bool mine = ranks.place() == root;
  at::Tensor size = at::zeros({1}, at::kDouble);
  if (mine) size.fill_(static_cast<double>(text.size()));
  ranks.agree(size, comm::ReduceOp::Max, kLabel);
  const at::Tensor bytes = at::zeros({std::max<int64_t>(1, static_cast<int64_t>(size.item<double>()))}, at::kByte);
  if (mine) std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  ranks.agree(bytes, comm::ReduceOp::Max, kLabel);
  return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(size.item<double>())};
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);)
    lines.push_back(line);
  return lines;
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines)
    text += line + "\n";
  return text;
}

// Visits the numbers that a loss scale goes by from here on.
void each_number(const amp::GradScaler::State& scaler, const auto& visit) {
  visit("loss scale", scaler.scale);
  visit("loss_scaler.overridden", scaler.overridden ? 1.0 : 0.0);
  visit("loss_scaler.steps", static_cast<double>(scaler.steps));
  visit("loss_scaler.good_steps", static_cast<double>(scaler.good_steps));
  visit("loss_scaler.budget", static_cast<double>(scaler.budget));
}

}  // namespace

std::string text_of(double number) {
  std::array<char, 32> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), number).ptr};
}

void Digest::add(std::string_view bytes) {
  for (const char c : bytes)
    hash_ = (hash_ ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
}

void Digest::add(double number) {
  const auto bits = std::bit_cast<std::array<char, sizeof number>>(number);
  add(std::string_view(bits.data(), bits.size()));
}

void check_same(const zero::Ranks& ranks, const std::vector<std::string>& mine, const char* origin, const char* what,
                const char* advice) {
  if (ranks.all() == 1) return;
  Digest digest;
  digest.add(joined(mine));
  at::Tensor bounds = at::tensor({digest.value(), -digest.value()}, at::kDouble);
  ranks.agree(bounds, comm::ReduceOp::Max, kLabel);
  if (bounds[0].item<double>() == -bounds[1].item<double>()) return;

  const std::vector<std::string> first = split(broadcast(ranks, joined(mine), 0));
  size_t at = 0;
  while (at < first.size() && at < mine.size() && first[at] == mine[at])
    ++at;
  const bool differs = at < first.size() || at < mine.size();
  at::Tensor other = at::tensor({differs ? -ranks.place() : -ranks.all()}, at::kDouble);
  ranks.agree(other, comm::ReduceOp::Max, kLabel);
  const int rank = static_cast<int>(-other.item<double>());
  const auto line = [&](const std::vector<std::string>& lines) { return at < lines.size() ? lines[at] : "nothing"; };
  const std::string difference =
      broadcast(ranks, "rank 0 has " + line(first) + ", rank " + std::to_string(rank) + " has " + line(mine), rank);
  TESSERA_FAIL(::c10::ValueError, "[", origin, "] ", what, ": ", difference, "; ", advice);
}

// Note [What ranks step by]
double StepTerms::digest() const {
  Digest digest;
  digest.add(call);
  digest.add(static_cast<double>(accumulation_steps));
  digest.add(static_cast<double>(empty_steps));
  digest.add(static_cast<double>(begun));
  digest.add(static_cast<double>(unstepped));
  digest.add(fault);
  digest.add(gradient_scale);
  digest.add(previous_norm.value_or(-1));
  each_number(scaler, [&](const char*, double value) { digest.add(value); });
  for (const optim::GroupOptions& group : groups)
    each_field(group, [&](const char*, auto value) { digest.add(static_cast<double>(value)); });
  for (const std::string& line : client)
    digest.add(line);
  for (const std::string& line : params)
    digest.add(line);
  return digest.value();
}

// Bits are multiplied by odd numbers, so that each term counts in its place.
at::Tensor StepTerms::shown() const {
  if (on_device.empty()) return {};
  std::vector<at::Tensor> terms;
  const auto announced = static_cast<int64_t>(digest());
  for (size_t i = 0; i < on_device.size(); ++i) {
    const auto factor = static_cast<int64_t>(0x9E3779B97F4A7C15ULL * (2 * i + 1));
    const at::Tensor value = on_device[i].value.detach().to(on_device[0].value.device(), at::kDouble);
    terms.push_back(value.reshape({1}).view(at::kLong) * factor);
  }
  const at::Tensor sum = at::cat(terms).sum() + announced;
  return sum.bitwise_right_shift(12).bitwise_and((int64_t{1} << 52) - 1).to(at::kDouble);
}

void StepTerms::refuse(const zero::Ranks& ranks) const {
  std::vector<std::string> lines{fault.empty() ? "nothing that keeps it from a step" : std::string(fault),
                                 c10::str("a call of engine.", call),
                                 c10::str("gradient_accumulation_steps ", accumulation_steps),
                                 c10::str(empty_steps, " calls of engine.step() without a backward before them"),
                                 c10::str(begun + 1, " calls of engine.step() in this update"),
                                 c10::str(unstepped, " micro-batches without a step() of their own in this update")};
  each_number(scaler, [&](const char* name, double value) { lines.push_back(c10::str(name, " ", text_of(value))); });
  lines.push_back(c10::str("gradients of loss scale ", text_of(gradient_scale)));
  lines.push_back(c10::str("norm ", text_of(previous_norm.value_or(-1)), " (-1: none) of the step before"));
  for (size_t i = 0; i < groups.size(); ++i)
    each_field(groups[i], [&]<class T>(const char* name, T value) {
      const std::string text = std::is_same_v<T, bool> ? (value ? "true" : "false") : text_of(value);
      lines.push_back(c10::str(name, " ", text, " in param group ", i));
    });
  lines.insert(lines.end(), client.begin(), client.end());
  for (const DeviceTerm& term : on_device)
    lines.push_back(c10::str(term.name, " ", text_of(term.value.item<double>()), " ", term.where));
  lines.insert(lines.end(), params.begin(), params.end());
  check_same(
      ranks, lines, "engine.step", "ranks do not step alike",
      "all ranks call forward, backward and step() alike (what a rank has more of belongs into no_sync()), train "
      "the same parameters and have the same rates and loss scale (a schedule that follows a loss needs one that all "
      "ranks have reduced)");
  TESSERA_CHECK(fault.empty(), "engine.step", fault);
  TESSERA_CHECK_VALUE(false, "engine.step", "ranks do not step alike");
}

}  // namespace tessera::engine
