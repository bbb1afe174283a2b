#include "tessera/comm/c10d/messages.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/full.h>

#include <utility>

namespace tessera::comm {
namespace {

constexpr int kFirstTag = 0x40000000;        // clear of the small tags that people use
constexpr int kMarkTag = 0x20000000;         // added for the mark after a message
constexpr int kSecondRound = 0x10000000;     // added for the second round of a call
constexpr int64_t kInstances = 64;           // groups over one process group before tags repeat
constexpr int64_t kCallTags = 64;            // calls of one group before tags repeat
constexpr int64_t kHashes = 1 << 16;         // hashes that tags tell apart
constexpr int64_t kMarkedBytes = 64 * 1024;  // messages from here on are followed by a mark

}  // namespace

Messages::Messages(C10dCore& core, const C10dCall& call, bool second_round)
    : core_(core),
      info_(call.info),
      tag_(kFirstTag + (second_round ? kSecondRound : 0) +
           static_cast<int>((call.instance % kInstances * kCallTags + call.number % kCallTags) * kHashes)),
      hash_(agreement_hash(call.info)) {}

std::vector<Transfer> Messages::take() {
  marks_.insert(marks_.end(), transfers_.begin(), transfers_.end());
  return std::move(marks_);
}

void Messages::add(const at::Tensor& flat, Span span, int peer, bool out) {
  if (span.count == 0) return;
  try {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const int64_t bytes = span.count * static_cast<int64_t>(flat.element_size());
    const int tag = tag_of(bytes);
    transfers_.push_back(start(flat.narrow(0, span.begin, span.count), peer, out, tag));
    if (bytes < kMarkedBytes) return;
    const at::Tensor mark = at::full({1}, out ? 1 : 0, at::TensorOptions(at::kByte));
    Transfer transfer = start(mark, peer, out, tag + kMarkTag);
    if (out) {
      transfers_.push_back(std::move(transfer));
    } else {
      transfer.mark = mark;
      marks_.push_back(std::move(transfer));
    }
  } catch (const std::exception& error) {
    core_.fail(info_, std::chrono::steady_clock::now(), peer, error.what());
  }
}

int Messages::tag_of(int64_t bytes) const {
  const uint64_t mixed = (hash_ ^ static_cast<uint64_t>(bytes)) * 0x9e3779b97f4a7c15u;  // the top bits depend on all
  return tag_ + static_cast<int>(mixed / (UINT64_MAX / uint64_t{kHashes} + 1));
}

Transfer Messages::start(const at::Tensor& tensor, int peer, bool out, int tag) {
  std::vector<at::Tensor> one = {tensor};
  return {out ? core_.group().send(one, peer, tag) : core_.group().recv(one, peer, tag), peer};
}

}  // namespace tessera::comm
