#include "tessera/checkpoint/torch_file.h"

#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <exception>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/checkpoint/deepspeed/ivalues.h"
#include "tessera/checkpoint/deepspeed/pt_file.h"
#include "tessera/checkpoint/reader.h"

namespace tessera::checkpoint {

// The writer of the zip file takes no error, and would throw from its destructor.
void write_torch_file(const c10::IValue& value, const std::function<void(const void*, size_t)>& write) {
  std::string text;
  const auto keep = [&](const char* bytes, size_t size) { text.append(bytes, size); };
  torch::jit::Pickler pickler(keep, nullptr, nullptr, nullptr, nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(value);
  pickler.stop();
  for (const at::Tensor& tensor : pickler.tensorData())
    TESSERA_CHECK_VALUE(!tensor.is_meta(), "checkpoint", "a tensor on the meta device, which has no values");
  std::exception_ptr error;
  const auto write_part = [&](const void* bytes, size_t size) {
    try {
      if (!error) write(bytes, size);
    } catch (...) {
      error = std::current_exception();
    }
    return size;
  };
  caffe2::serialize::PyTorchStreamWriter zip(write_part);
  const std::string order = "little";
  zip.writeRecord("data.pkl", text.data(), text.size());
  zip.writeRecord("byteorder", order.data(), order.size());
  const std::vector<at::Tensor>& tensors = pickler.tensorData();
  for (size_t i = 0; i < tensors.size(); ++i)
    zip.writeRecord("data/" + std::to_string(i), tensors[i].storage().data(), tensors[i].storage().nbytes());
  zip.writeEndOfFile();
  if (error) std::rethrow_exception(error);
}

namespace {

std::string bytes_of(const c10::IValue& value) {
  std::string bytes;
  const c10::IValue on_host = value.deepcopy(at::Device(at::kCPU));
  write_torch_file(on_host, [&](const void* part, size_t size) { bytes.append(static_cast<const char*>(part), size); });
  return bytes;
}

// Adds what of a value cannot be written, each by its place, as "'a'[2]: an undefined tensor".
void add_wrong(const c10::IValue& value, const std::string& place, std::vector<std::string>& wrong) {
  const size_t before = wrong.size();
  if (value.isGenericDict()) {
    for (const auto& item : value.toGenericDict()) {
      const std::string key = item.key().isString() ? "'" + item.key().toStringRef() + "'" : c10::str(item.key());
      add_wrong(item.value(), place.empty() ? key : c10::str(place, "[", key, "]"), wrong);
    }
  } else if (value.isList() || value.isTuple()) {
    const auto parts = value.isTuple() ? value.toTupleRef().elements().vec() : value.toListRef().vec();
    for (size_t i = 0; i < parts.size(); ++i)
      add_wrong(parts[i], c10::str(place, "[", i, "]"), wrong);
  } else if (value.isTensor() && !value.toTensor().defined()) {
    wrong.push_back(place + ": an undefined tensor");
  }
  if (wrong.size() > before || (value.isTensor() && !value.toTensor().defined())) return;
  try {
    bytes_of(value);
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    wrong.push_back(c10::str(place, place.empty() ? "" : ": ", text.substr(0, text.find('\n'))));
  }
}

}  // namespace

std::string to_torch_file(const c10::IValue& value, const std::string& what) {
  std::vector<std::string> wrong;
  try {
    return bytes_of(value);
  } catch (const c10::Error&) {
    add_wrong(value, "", wrong);
  }
  TESSERA_FAIL(c10::ValueError, "[checkpoint] ", what,
               " holds what a file of torch.save() cannot: ", c10::Join("; ", wrong));
}

c10::IValue from_torch_file(const std::string& bytes, const std::string& what) try {
  return torch::jit::pickle_load(std::vector<char>(bytes.begin(), bytes.end()));
} catch (const std::exception& error) {
  const std::string text = error.what();
  TESSERA_FAIL(IoError, "[checkpoint] ", what, " cannot be read: ", text.substr(0, text.find('\n')));
}

c10::IValue dict_of_blob(const Reader& reader, const std::string& name) {
  if (!reader.manifest().blobs.contains(name)) return {};
  const c10::IValue value = from_torch_file(reader.blob(name), "'" + name + "'");
  TESSERA_CHECK_IO(value.isGenericDict(), "checkpoint", "'", name, "' is damaged: it is no table");
  return value;
}

ClientValues client_values(const Reader& reader, bool warns) {
  if (!reader.manifest().blobs.contains("client_state")) return {};
  c10::IValue found;
  try {
    found = dict_of_blob(reader, "client_state");
  } catch (const IoError&) {  // torch's machine of C++ has fewer values than Python, and refuses all for one
    std::vector<std::string> left_out;
    const deepspeed::PtFile file(reader.blob("client_state"), "client_state", Objects::Inert);
    ClientValues values = deepspeed::ivalues_of(file, left_out);
    if (warns && !left_out.empty())
      TORCH_WARN("[checkpoint] of 'client_state' what C++ has no value for is left out: ", c10::Join("; ", left_out));
    return values;
  }
  ClientValues values;
  for (const auto& item : found.toGenericDict())
    if (item.key().isString()) values.emplace(item.key().toStringRef(), item.value());
  return values;
}

}  // namespace tessera::checkpoint
