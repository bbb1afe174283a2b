// A backward that came too late: another one has freed the graph.
#pragma once

#include <exception>
#include <string_view>

namespace tessera::pipeline {

// Whether autograd says so by this error.
inline bool is_of_freed_graph(const std::exception& error) {
  return std::string_view(error.what()).find("through the graph a second time") != std::string_view::npos;
}

}  // namespace tessera::pipeline
