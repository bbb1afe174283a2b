// An error of one rank, made one of all ranks of all stages.
#pragma once

#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/pipeline/ranks.h"

namespace tessera::pipeline {

// An error, as this rank announces it to others.
struct Failure {
  std::string text;
  bool announced = false;  // by another rank, whose error it is
  bool lost = false;       // a connection broke, or the program is to end: this rank has no exchange any more
};

// In what ranks announce of a batch, behind the rank in words.
inline constexpr std::string_view kFailed = " failed in this batch: ";
std::string first_line(const std::string& text);

// What a C++ exception says.
Failure failure_of(const std::exception_ptr& error);
using Explain = std::function<Failure(const std::exception_ptr& error)>;

// A rank's part of what all ranks make: its numbers, or its error.
struct Attempt {
  std::vector<double> numbers = {};
  std::exception_ptr problem = {};
  Failure failure = {};
};
Attempt attempt(const Explain& explain, const std::function<std::vector<double>()>& own);
// The numbers of all ranks, `count` each, a row for each rank. Where any rank has an error `end` is called on all, and throws.
// Collective.
std::vector<std::vector<double>> rows_of_all(const Ranks& ranks, const Attempt& mine, size_t count, comm::Label label,
                                             const std::function<void()>& end);

// What each rank makes by itself, as many numbers on all of them, a row for each rank. An error of one rank is one of all, which it
// leaves at one place: there it is thrown as it is, elsewhere as StageFailed, "[pipeline] stage 1 (rank 2) could not DO: " and its
// text. A lost connection is thrown at once. Collective.
std::vector<std::vector<double>> agreed_rows(const Ranks& ranks, const std::string& could_not, const Explain& explain,
                                             size_t count, const std::function<std::vector<double>()>& own,
                                             comm::Label label);

// What is built by all ranks: up to an exchange a rank's errors are its own, so that agree() comes before each, and behind the last.
class Building {
 public:
  // `where`: this rank in words.
  Building(comm::GroupPtr everyone, std::string where, at::Device device = at::kCPU)
      : everyone_(std::move(everyone)), device_(device), where_(std::move(where)) {}
  void set_where(std::string where) { where_ = std::move(where); }

  // This rank goes on. StageFailed where another one has failed. Collective.
  void agree() const;
  // In place of the next agree(), for an error that this rank then throws; nothing where another rank has announced it. Collective,
  // but where a connection broke.
  void fail(const Failure& failure) const;
  // What others read of it.
  std::string text_of(const Failure& failure) const;

 private:
  const comm::GroupPtr everyone_;
  const at::Device device_;
  std::string where_;
};

}  // namespace tessera::pipeline
