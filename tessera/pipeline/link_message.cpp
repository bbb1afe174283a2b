#include "tessera/pipeline/link_message.h"

#include <ATen/ops/zeros.h>

#include "tessera/base/error.h"

namespace tessera::pipeline {
namespace {

constexpr size_t kHead = 3;  // kind, number, length of the sample

}  // namespace

std::vector<int64_t> numbers_of(const at::Tensor& header) {
  const at::Tensor words = header.cpu();
  const auto* data = words.const_data_ptr<int64_t>();
  return {data, data + words.numel()};
}

std::vector<int64_t> header_of(int64_t number, const Sample& sample) {
  std::vector<int64_t> header{kOfTensors, number, static_cast<int64_t>(sample.text.size())};
  for (const char letter : sample.text)
    header.push_back(static_cast<unsigned char>(letter));
  return header;
}

size_t body_of(const std::vector<int64_t>& header) {
  return kHead + static_cast<size_t>(header.at(2));
}

Sample sample_of(const std::vector<int64_t>& header) {
  std::string text;
  for (size_t i = kHead; i < body_of(header); ++i)
    text.push_back(static_cast<char>(header.at(i)));
  return text;
}

void add_outputs(std::vector<int64_t>& header, const Tensors& outputs, const std::optional<Sizes>& samples) {
  header.push_back(samples ? static_cast<int64_t>(samples->size()) : -1);
  if (samples) header.insert(header.end(), samples->begin(), samples->end());
  for (const at::Tensor& t : outputs) {
    header.insert(header.end(), {static_cast<int64_t>(t.scalar_type()), t.requires_grad() ? 1 : 0, t.dim()});
    header.insert(header.end(), t.sizes().begin(), t.sizes().end());
  }
}

Outputs outputs_of(const std::vector<int64_t>& header) {
  Outputs outputs;
  auto next = header.begin() + static_cast<std::ptrdiff_t>(body_of(header));
  const auto list = [&](int64_t count) {
    Sizes values(next, next + count);
    next += count;
    return values;
  };
  if (const int64_t count = *next++; count >= 0) outputs.samples = list(count);
  while (next != header.end()) {
    outputs.dtypes.push_back(static_cast<at::ScalarType>(*next++));
    outputs.trained.push_back(*next++ != 0);
    outputs.shapes.push_back(list(*next++));
  }
  return outputs;
}

LinkTable table_of(const std::vector<Outputs>& parts, const LinkRanks& ranks, const std::string& where) {
  std::optional<Sizes> samples = Sizes();
  for (size_t part = 0; part < parts.size(); ++part) {
    TESSERA_CHECK_VALUE(parts[part].dtypes == parts[0].dtypes && parts[part].trained == parts[0].trained, "hybrid",
                        where, ": ranks 0 and ", part * ranks.source.replicas, " of ", ranks.sides[0],
                        " sent other tensors");
    if (part % ranks.source.sequence != 0) continue;
    if (!parts[part].samples) samples.reset();
    if (samples) samples->insert(samples->end(), parts[part].samples->begin(), parts[part].samples->end());
  }
  LinkTable table;
  for (size_t i = 0; i < parts[0].shapes.size(); ++i) {
    std::vector<Sizes> shapes;
    for (const Outputs& part : parts)
      shapes.push_back(part.shapes[i]);
    auto whole = whole_of(ranks.source, ranks.dims, shapes, where);
    table.wanted.push_back(wanted_of(ranks.target, ranks.dims, whole.sizes, samples, where));
    table.held.push_back(std::move(whole.held));
  }
  return table;
}

Sizes sizes_of(const Box& box) {
  Sizes sizes;
  for (const auto& [begin, end] : box)
    sizes.push_back(end - begin);
  return sizes;
}

at::Tensor inside(at::Tensor tensor, const Box& box, const Box& outer) {
  for (size_t d = 0; d < box.size(); ++d)
    tensor = tensor.narrow(static_cast<int64_t>(d), box[d].first - outer[d].first, box[d].second - box[d].first);
  return tensor;
}

void join(at::Tensor& whole, const at::Tensor& piece, const Box& box, const Box& outer) {
  if (box == outer) {
    whole = piece;
    return;
  }
  if (!whole.defined()) whole = at::zeros(sizes_of(outer), piece.options());
  inside(whole, box, outer).copy_(piece);
}

at::Tensor Pieces::of(const at::Tensor& tensor, const Box& box, const Box& outer) {
  const at::Tensor piece = inside(tensor.detach(), box, outer);
  if (!p2p_) return piece;
  const std::pair<const void*, Box> key{tensor.unsafeGetTensorImpl(), box};
  for (const auto& [made, copy] : made_)
    if (made == key) return copy;
  return made_.emplace_back(key, p2p_->share(piece)).second;
}

}  // namespace tessera::pipeline
