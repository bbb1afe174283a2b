#include "tessera/nn/sequence_cut.h"

#include <c10/core/GradMode.h>

#include "tessera/base/error.h"
#include "tessera/parallel/functions.h"
#include "tessera/parallel/sequence_regions.h"

namespace tessera::nn {

using parallel::kSequenceDim;

bool SequenceCut::is_on() const {
  return c10::GradMode::is_enabled() || !keeps_whole_;
}

at::Tensor SequenceCut::split(const at::Tensor& x, const std::string& path) {
  keeps_whole_ = parallel::stays_whole(x, group_->size(), path);
  return keeps_whole_ ? x : parallel::split_to_ranks(x, group_, kSequenceDim, {}, "sequence before '" + path + "'");
}

at::Tensor SequenceCut::join(const at::Tensor& x, const std::string& path) const {
  return is_on() ? parallel::gather_from_ranks(x, group_, kSequenceDim, {}, "sequence after '" + path + "'") : x;
}

}  // namespace tessera::nn
