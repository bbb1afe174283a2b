#include "tessera/pipeline/ranks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/pipeline/wire.h"

namespace tessera::pipeline {

std::vector<std::vector<double>> rows_of(comm::Group& everyone, const std::vector<double>& own, comm::Label label,
                                         at::Device device) {
  const auto count = static_cast<int64_t>(own.size());
  const at::Tensor mine = at::tensor(own, at::kDouble).to(device);
  at::Tensor all = at::empty({everyone.size() * count}, mine.options());
  everyone.all_gather(all, mine, label).wait();
  all = all.cpu();
  const auto* data = all.const_data_ptr<double>();
  std::vector<std::vector<double>> rows;
  for (int rank = 0; rank < everyone.size(); ++rank, data += count)
    rows.emplace_back(data, data + count);
  return rows;
}

std::vector<std::string> texts_of(comm::Group& everyone, const std::string& own, comm::Label label, at::Device device) {
  const auto lengths = rows_of(everyone, {static_cast<double>(own.size())}, label, device);
  const double longest = (*std::ranges::max_element(lengths))[0];
  std::vector<std::string> texts(lengths.size());
  if (longest == 0) return texts;
  const auto length = static_cast<int64_t>(longest);
  const at::Tensor mine = at::zeros({length}, at::kByte);
  std::memcpy(mine.mutable_data_ptr(), own.data(), own.size());
  at::Tensor all = at::empty({everyone.size() * length}, at::TensorOptions(at::kByte).device(device));
  everyone.all_gather(all, mine.to(device), label).wait();
  all = all.cpu();
  const auto* data = static_cast<const char*>(all.const_data_ptr());
  for (size_t rank = 0; rank < texts.size(); ++rank, data += length)
    texts[rank].assign(data, static_cast<size_t>(lengths[rank][0]));
  return texts;
}

comm::PointToPointPtr own_messages(comm::Group& everyone, const comm::PointToPointPtr& way) {
  if (way == nullptr) return nullptr;
  double number = 0;
  for (const auto& row : rows_of(everyone, {static_cast<double>(way->siblings())}, "pipelines over the same ranks"))
    number = std::max(number, row[0]);
  return comm::sibling(way, static_cast<int64_t>(number));
}

void agree(comm::Group& everyone, const std::string& problem, at::Device device) {
  const auto texts = texts_of(everyone, problem, "whether all ranks go on", device);
  const auto other = std::ranges::find_if(texts, [](const std::string& text) { return !text.empty(); });
  if (problem.empty() && other != texts.end()) TESSERA_FAIL(StageFailed, *other);
}

std::string Ranks::name(int of) const {
  return c10::str("stage ", of / size, " (rank ", of, ")");
}

std::vector<std::vector<double>> Ranks::rows(const std::vector<double>& own, comm::Label label) const {
  return rows_of(*everyone, own, label, device);
}

std::vector<std::string> Ranks::texts(const std::string& own, comm::Label label) const {
  return texts_of(*everyone, own, label, device);
}

void Ranks::flush() const {
  if (forwards) forwards->flush();
  if (backwards && backwards != forwards) backwards->flush();
}

}  // namespace tessera::pipeline
