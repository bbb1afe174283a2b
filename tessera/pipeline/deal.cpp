#include "tessera/pipeline/deal.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <nlohmann/json.hpp>

#include <utility>

#include "tessera/pipeline/ranks.h"

namespace tessera::pipeline {
namespace {

using Json = nlohmann::json;

Json form_of(const Message& part) {
  Json tensors = Json::array();
  for (const at::Tensor& each : part.tensors)
    tensors.push_back(Json::array({static_cast<int>(each.scalar_type()), each.sizes().vec()}));
  return {{"note", part.note}, {"tensors", tensors}};
}

// What this rank has, as the others get to know it.
std::string text_of(const Hand& own) {
  Json parts = Json::array();
  for (const Message& part : own.parts)
    parts.push_back(form_of(part));
  return Json{{"parts", parts}, {"problem", own.problem}, {"of_values", own.of_values}}.dump(
      -1, ' ', false, Json::error_handler_t::replace);
}

at::Tensor bytes_of(const Message& part, at::Device device) {
  std::vector<at::Tensor> bytes{at::empty({0}, at::TensorOptions(at::kByte).device(device))};
  for (const at::Tensor& each : part.tensors) {
    const at::Tensor dense = each.detach().to(device).contiguous();
    bytes.push_back(dense.as_strided({dense.numel()}, {1}).view(at::kByte));  // of one element: whatever its strides
  }
  return at::cat(bytes);
}

int64_t size_of(const Json& form) {
  int64_t bytes = 0;
  for (const Json& each : form.at("tensors")) {
    int64_t size = static_cast<int64_t>(c10::elementSize(static_cast<at::ScalarType>(each.at(0).get<int>())));
    for (const int64_t one : each.at(1).get<std::vector<int64_t>>())
      size *= one;
    bytes += size;
  }
  return bytes;
}

// The tensors of a part, in memory of their own, of its bytes.
Message part_of(const Json& form, const at::Tensor& bytes) {
  Message part{.tensors = {}, .note = form.at("note").get<std::string>()};
  int64_t at = 0;
  for (const Json& each : form.at("tensors")) {
    const auto sizes = each.at(1).get<std::vector<int64_t>>();
    const auto dtype = static_cast<at::ScalarType>(each.at(0).get<int>());
    const int64_t size = size_of({{"tensors", Json::array({each})}});
    part.tensors.push_back(bytes.narrow(0, at, size).clone().view(dtype).view(sizes));
    at += size;
  }
  return part;
}

}  // namespace

std::optional<std::vector<Message>> deal(comm::Group& group, const Hand& own, const std::string& origin,
                                         const std::string& what, at::Device device) {
  std::vector<Json> all;
  for (const std::string& text : texts_of(group, text_of(own), "parts of batches", device))
    all.push_back(Json::parse(text));
  if (!own.problem.empty()) return std::nullopt;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto problem = all[rank].at("problem").get<std::string>();
    if (problem.empty()) continue;
    if (all[rank].at("of_values").get<bool>()) TESSERA_FAIL(c10::ValueError, problem);
    TESSERA_FAIL(StageFailed, "[", origin, "] ", what, " ", rank, " of the sequence could not be had: ", problem);
  }
  for (const Json& one : all)
    if (one.at("parts").empty()) return std::nullopt;
  std::vector<at::Tensor> sent;
  std::vector<int64_t> going, coming;
  for (const Message& part : own.parts)
    going.push_back(sent.emplace_back(bytes_of(part, device)).numel());
  const auto form = [&](size_t rank) -> const Json& {
    return all[rank].at("parts").at(static_cast<size_t>(group.rank()));
  };
  int64_t total = 0;
  for (size_t rank = 0; rank < all.size(); ++rank)
    total += coming.emplace_back(size_of(form(rank)));
  at::Tensor in = at::cat(sent), out = group.size() == 1 ? in : at::empty({total}, in.options());
  if (group.size() > 1) group.all_to_all(out, in, coming, going, "parts of batches").wait();
  std::vector<Message> parts;
  int64_t at = 0;
  for (size_t rank = 0; rank < all.size(); at += coming[rank++])
    parts.push_back(part_of(form(rank), out.narrow(0, at, coming[rank])));
  return parts;
}

}  // namespace tessera::pipeline
