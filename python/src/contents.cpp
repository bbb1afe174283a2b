#include "tessera/engine/contents.h"

#include <pybind11/stl.h>

#include "bindings.h"

namespace tessera::python {

void bind_contents(py::module_& m) {
  using Named = std::vector<std::tuple<std::string, int64_t, bool>>;
  m.def(
      "compare_contents",
      [](const Named& built, const Named& now, const std::unordered_set<int64_t>& known) {
        const auto of = [](const Named& params) {
          std::vector<engine::NamedParam> named;
          for (const auto& [name, id, trained] : params)
            named.push_back({name, id, trained});
          return named;
        };
        const engine::ContentsReport report = engine::compare_contents(of(built), of(now), known);
        return std::pair(report.fault, report.warning);
      },
      py::arg("built"), py::arg("now"), py::arg("known"));
}

}  // namespace tessera::python
