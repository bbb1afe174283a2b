// A backward that came too late: another one has freed the graph.
#pragma once

#include <string_view>

namespace tessera::pipeline {

// Whether autograd says so by the text of an error.
inline bool is_of_freed_graph(std::string_view error) {
  return error.find("through the graph a second time") != std::string_view::npos;
}

}  // namespace tessera::pipeline
