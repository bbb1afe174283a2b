#include "tessera/nn/sequence_loader.h"

#include <exception>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/pipeline/deal.h"

namespace tessera::nn::detail {
namespace {

// Tensors in the order of their names, which are the note.
pipeline::Message message_of(const SequenceTensors& part) {
  pipeline::Message message;
  for (const auto& [name, value] : part) {
    message.note += name + '\n';
    message.tensors.push_back(value);
  }
  return message;
}

SequenceTensors named_of(const pipeline::Message& message) {
  SequenceTensors part;
  size_t begin = 0;
  for (const at::Tensor& value : message.tensors) {
    const size_t end = message.note.find('\n', begin);
    part[message.note.substr(begin, end - begin)] = value;
    begin = end + 1;
  }
  return part;
}

}  // namespace

std::optional<std::deque<SequenceTensors>> deal_parts(const std::function<std::optional<SequenceTensors>()>& read,
                                                      comm::Group& sp, c10::Device device, Positions positions) {
  pipeline::Hand own;
  std::exception_ptr failed;
  const auto fail = [&](const char* text, bool of_values) {
    failed = std::current_exception();
    own = {.parts = {}, .problem = text, .of_values = of_values};
  };
  try {
    if (auto batch = read())
      for (const SequenceTensors& part : parallel::cut_batch(std::move(*batch), sp.size(), positions))
        own.parts.push_back(message_of(part));
  } catch (const c10::ValueError& error) {
    fail(error.what_without_backtrace(), true);
  } catch (const std::exception& error) {
    fail(error.what(), false);
  }
  const auto dealt = pipeline::deal(sp, own, "SequenceLoader", "the batch of rank", device);
  if (failed) std::rethrow_exception(failed);
  if (!dealt) return std::nullopt;
  std::deque<SequenceTensors> parts;
  for (const pipeline::Message& each : *dealt)
    parts.push_back(named_of(each));
  return parts;
}

}  // namespace tessera::nn::detail
