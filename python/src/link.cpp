#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>

#include "bindings.h"
#include "tessera/base/error.h"
#include "tessera/engine/engine.h"
#include "tessera/pipeline/link.h"

namespace tessera::python {

namespace {

// Messages through an object of Python's with send(tensor, to, tag) and receive(tensor, from, tag), of bytes on the CPU.
class PythonPointToPoint final : public comm::PointToPoint {
 public:
  PythonPointToPoint(int rank, int size, py::object channel) : rank_(rank), size_(size), channel_(std::move(channel)) {}
  ~PythonPointToPoint() override {
    const py::gil_scoped_acquire locked;
    channel_ = {};
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  at::Device device() const override { return at::kCPU; }
  at::Tensor share(const at::Tensor& tensor) override { return tensor.detach().cpu().contiguous(); }  // send() copies
  int64_t send(const at::Tensor& tensor, int to, int tag, comm::Label) override {
    call("send", tensor, to, tag);
    return 0;
  }
  void receive(const at::Tensor& tensor, int from, int tag, comm::Label) override {
    call("receive", tensor, from, tag);
  }
  void settle(int64_t) override {}  // send() copies
  void flush() override {}

 private:
  void call(const char* name, const at::Tensor& tensor, int peer, int tag) {
    const py::gil_scoped_acquire locked;
    std::string lost;
    try {
      channel_.attr(name)(tensor.detach().reshape(-1).view(at::kByte), peer, tag);
      return;
    } catch (const py::error_already_set& error) {
      if (!error.matches(py::module_::import("torch.distributed").attr("DistBackendError"))) throw;
      lost = py::str(error.value());
    }
    TESSERA_FAIL(c10::DistBackendError, lost);
  }

  const int rank_, size_;
  py::object channel_;
};

// Makes a layout from the dataclasses of python/tessera/hybrid/_layout.py, which actors pickle.
pipeline::Layout layout_from(const py::object& layout) {
  return {layout.attr("batch").cast<int>(), layout.attr("sequence").cast<int>(), layout.attr("replicas").cast<int>()};
}

pipeline::Dims dims_from(const py::object& dims) {
  return {dims.attr("batch").cast<int>(), dims.attr("sequence").cast<std::optional<int>>()};
}

// Ranks of the source, then those of the target.
template <class End>
std::shared_ptr<End> make_end(const py::object& source, const py::object& target, const py::object& dims,
                              std::array<std::string, 2> sides, int place, comm::PointToPointPtr p2p,
                              const std::shared_ptr<engine::Engine>& engine) {
  pipeline::LinkRanks ranks{.source = layout_from(source), .target = layout_from(target)};
  ranks.target_rank = ranks.source.ranks();
  ranks.place = place;
  ranks.rank = p2p->rank();
  ranks.p2p = std::move(p2p);
  ranks.dims = dims_from(dims);
  ranks.sides = std::move(sides);
  return {new End(std::move(ranks), pipeline::link_engine(engine)), Unlocked<End>()};
}

template <class End>
auto bind_end(py::module_& m, const char* name) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  return py::class_<End, std::shared_ptr<End>>(m, name)
      .def(py::init(&make_end<End>), py::arg("source"), py::arg("target"), py::arg("dims"), py::arg("sides"),
           py::arg("place"), py::arg("p2p"), py::arg("engine"))
      .def("abort", &End::abort, py::arg("reason"), NoGil())
      .def("close", &End::close, NoGil())
      .def("step", &End::step, NoGil());
}

}  // namespace

void bind_link(py::module_& m) {
  using namespace pipeline;
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<PythonPointToPoint, comm::PointToPoint, std::shared_ptr<PythonPointToPoint>>(m, "PythonPointToPoint")
      .def(py::init<int, int, py::object>(), py::arg("rank"), py::arg("size"), py::arg("channel"));

  bind_end<LinkSender>(m, "LinkSender")
      .def(
          "send",
          [](LinkSender& end, const Tensors& outputs, const std::string& sample, const std::optional<Sizes>& samples,
             const std::string& note) { end.send(outputs, sample, samples, note); },
          py::arg("outputs"), py::arg("sample"), py::arg("samples"), py::arg("note"), NoGil())
      .def(
          "gradients", [](LinkSender& end, const std::string& sample) { return end.gradients(sample); },
          py::arg("sample"), NoGil())
      .def(
          "check_not_freed",
          [](const LinkSender& end, const std::string& sample, const std::string& error) {
            end.check_not_freed(sample, error);
          },
          py::arg("sample"), py::arg("error"));
  bind_end<LinkReceiver>(m, "LinkReceiver")
      .def(
          "receive",
          [](LinkReceiver& end, const std::string& sample) {
            Message message = end.receive_message(sample);
            return std::pair(std::move(message.tensors), std::move(message.note));
          },
          py::arg("sample"), NoGil())
      .def(
          "give_back",
          [](LinkReceiver& end, const std::string& sample,
             const std::optional<std::vector<std::optional<at::Tensor>>>& gradients) {
            if (!gradients) return end.give_back(sample);
            Tensors given;
            for (const auto& gradient : *gradients)
              given.push_back(gradient.value_or(at::Tensor()));
            end.give_back(sample, given);
          },
          py::arg("sample"), py::arg("gradients"), NoGil());
  m.def(
      "check_link_dims",
      [](const py::object& dims, const py::object& layout, const std::string& where) {
        check(dims_from(dims), layout_from(layout), where);
      },
      py::arg("dims"), py::arg("layout"), py::arg("where"));
  m.def(
      "hand_over",
      [](LinkSender& sender, LinkReceiver& receiver, const Tensors& outputs, const std::string& sample,
         const std::optional<Sizes>& samples,
         std::string note) { return hand_over(sender, receiver, outputs, sample, samples, std::move(note)); },
      py::arg("sender"), py::arg("receiver"), py::arg("outputs"), py::arg("sample"), py::arg("samples"),
      py::arg("note"), NoGil());
  m.def(
      "take_over",
      [](LinkReceiver& receiver, const std::string& sample) {
        Message message = hand_over(receiver, sample);
        return std::pair(std::move(message.tensors), std::move(message.note));
      },
      py::arg("receiver"), py::arg("sample"), NoGil());
}

}  // namespace tessera::python
