// Work on the disk that all ranks do together: an error of one is an error on all.
#pragma once

#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/zero/rank_guard.h"
#include "tessera/zero/ranks.h"

namespace tessera::engine {

enum Outcome : char { kFine = 'f', kValue = 'v', kDisk = 'd', kMemory = 'm', kUsage = 'u', kBuilt = 'b', kOther = 'o' };

// Runs f, which returns a text, on every rank. Then either all have the texts, by rank, or all throw what one rank threw.
template <class F>
std::vector<std::string> together(const zero::Ranks& ranks, comm::Label label, const F& f) {
  std::string mine;
  try {
    mine = std::string(1, kFine) + f();
  } catch (const c10::ValueError& e) {
    mine = std::string(1, kValue) + e.what_without_backtrace();
  } catch (const IoError& e) {
    mine = std::string(1, kDisk) + e.what_without_backtrace();
  } catch (const UsageError& e) {
    mine = std::string(1, kUsage) + e.what_without_backtrace();
  } catch (const c10::NotImplementedError& e) {
    mine = std::string(1, kBuilt) + e.what_without_backtrace();
  } catch (const c10::OutOfMemoryError& e) {
    mine = std::string(1, kMemory) + e.what_without_backtrace();
  } catch (const c10::Error& e) {
    mine = std::string(1, kOther) + e.what_without_backtrace();
  } catch (const std::exception& e) {
    mine = std::string(1, kOther) + e.what();
  }
  std::vector<std::string> texts;
  try {
    texts = ranks.gather_text(mine, label);
  } catch (const c10::OutOfMemoryError& error) {  // for the texts themselves: this rank alone has the error
    zero::end_groups(error, ranks);
    throw;
  }
  for (size_t r = 0; r < texts.size(); ++r) {
    const char outcome = texts[r][0];
    texts[r].erase(0, 1);
    if (outcome == kFine) continue;
    const std::string where = texts.size() > 1 ? " (rank " + std::to_string(r) + ")" : "";
    if (outcome == kValue) TESSERA_FAIL(::c10::ValueError, texts[r], where);
    if (outcome == kDisk) TESSERA_FAIL(IoError, texts[r], where);
    if (outcome == kUsage) TESSERA_FAIL(UsageError, texts[r], where);
    if (outcome == kBuilt) TESSERA_FAIL(::c10::NotImplementedError, texts[r], where);
    if (outcome == kMemory) throw zero::AgreedOutOfMemory({__func__, __FILE__, __LINE__}, texts[r] + where);
    TESSERA_FAIL(::c10::Error, texts[r], where);
  }
  return texts;
}

}  // namespace tessera::engine
