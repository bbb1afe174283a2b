// What a rank prints, line by line.
#pragma once

#include <cstdio>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/launch_options.h"

namespace tessera::run {

// Writes all of `text`. The errno of what could not be written, or 0.
int write_all(int fd, std::string_view text);

// The read end of a pipe in which a rank prints to stdout or stderr.
class Output {
 public:
  // `to`: 1 or 2, of this process. Of errors (2) tracebacks of Python that end in KeyboardInterrupt are left out, which say that
  // the job was interrupted; tail() has them. `copy`: a file that gets the output without the prefix; or empty. std::runtime_error where
  // that cannot be written.
  Output(int from, int to, std::string prefix, const std::string& copy);
  Output(Output&&) = delete;
  ~Output();

  int fd() const { return from_; }  // -1 at the pipe's end
  void read();                      // reads some of what is there, without waiting; passes whole lines on
  void finish();                    // passes on what is left of a line, and closes
  const std::deque<std::string>& tail() const { return tail_; }

 private:
  void pass(std::string_view line, std::string& out);
  void add(const std::vector<std::string>& lines, std::string& out) const;
  void put(const std::string& out);

  int from_;
  bool lost_ = false;  // nothing can be written any more
  const int to_;
  const std::string prefix_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> copy_;
  std::string open_;  // the line that has not ended
  std::deque<std::string> tail_;
  Tracebacks tracebacks_;
};

}  // namespace tessera::run
