// Warnings of TORCH_WARN on this thread while an object lives, for a caller that writes them down as well.
#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <vector>

namespace tessera {

class CaughtWarnings : private c10::WarningHandler {
 public:
  // `shows`: warnings go where they went before, too; else the owner shows them. An outer object gets those of an inner one only where
  // the inner one shows.
  explicit CaughtWarnings(bool shows = true) : shows_(shows) {}
  const std::vector<std::string>& texts() const { return texts_; }

 private:
  void process(const c10::Warning& warning) override {
    texts_.push_back(warning.msg());
    if (shows_ && before_ != nullptr) before_->process(warning);
  }

  const bool shows_;
  c10::WarningHandler* const before_ = c10::WarningUtils::get_warning_handler();
  const c10::WarningUtils::WarningHandlerGuard guard_{this};
  std::vector<std::string> texts_;
};

}  // namespace tessera
