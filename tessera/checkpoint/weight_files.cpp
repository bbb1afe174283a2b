#include "tessera/checkpoint/weight_files.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/checkpoint/torch_file.h"
#include "tessera/checkpoint/writer.h"
#include "tessera/io/file.h"
#include "tessera/io/lock.h"
#include "tessera/io/safetensors.h"

namespace tessera::checkpoint {

namespace {

namespace fs = std::filesystem;

constexpr const char* kPart = ".part";
constexpr const char* kLock = ".lock";
constexpr const char* kSafeTensors = ".safetensors";
constexpr const char* kTorch = ".bin";
constexpr const char* kIndex = ".index.json";

void write_torch(const io::File& file, const c10::Dict<std::string, at::Tensor>& state) {
  int64_t at = 0;
  write_torch_file(state, [&](const void* bytes, size_t size) {
    file.write(bytes, static_cast<int64_t>(size), at);
    at += static_cast<int64_t>(size);
  });
}

}  // namespace

struct WeightFiles::Open {
  io::File file;
  std::vector<io::TensorEntry> entries{};      // safetensors: where each tensor goes
  c10::Dict<std::string, at::Tensor> state{};  // torch: all of the file
  explicit Open(io::File f) : file(std::move(f)) {}
};

int64_t WeightTensor::bytes() const {
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  return std::accumulate(shape.begin(), shape.end(), size, std::multiplies<>());
}

std::vector<size_t> plan_files(const std::vector<WeightTensor>& tensors, int64_t max_bytes) {
  std::vector<size_t> counts{0};
  int64_t bytes = 0;
  for (const WeightTensor& tensor : tensors) {
    if (counts.back() > 0 && bytes + tensor.bytes() > max_bytes) {
      counts.push_back(0);
      bytes = 0;
    }
    ++counts.back();
    bytes += tensor.bytes();
  }
  return counts;
}

WeightFiles::WeightFiles(std::string folder, const std::string& name, std::vector<WeightTensor> tensors,
                         int64_t max_bytes)
    : folder_(std::move(folder)),
      id_(new_id()),
      tensors_(std::move(tensors)),
      counts_(plan_files(tensors_, max_bytes)) {
  extension_ = name.ends_with(kSafeTensors) ? kSafeTensors : kTorch;
  TESSERA_CHECK_VALUE(name.ends_with(extension_) && name.size() > extension_.size() && name[0] != '.' &&
                          name.find('/') == std::string::npos,
                      "export", "a file of weights is named like 'model.safetensors' or 'pytorch_model.bin', not '",
                      name, "'");
  stem_ = name.substr(0, name.size() - extension_.size());
  mark_ = std::make_unique<SaveMark>(folder_, id_);
  remove_left();
  begin();
}

WeightFiles::~WeightFiles() {
  for (size_t i = 0; i < counts_.size(); ++i)
    ::unlink(part_of(name_of(i)).c_str());
}

std::string WeightFiles::part_of(const std::string& name) const {
  return path(name) + "." + id_ + kPart;
}

// Unfinished files of exports that nobody holds any more.
void WeightFiles::remove_left() const {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder_, ignored)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(stem_) || !name.ends_with(kPart)) continue;
    const std::string rest = name.substr(0, name.size() - std::strlen(kPart));
    const std::string id = rest.substr(rest.rfind('.') + 1);
    if (is_id(id) && !is_held(folder_, id)) ::unlink(entry.path().c_str());
  }
}

std::string WeightFiles::path(const std::string& name) const {
  return (fs::path(folder_) / name).string();
}

std::string WeightFiles::name_of(size_t file) const {
  if (counts_.size() == 1) return stem_ + extension_;
  char number[64];
  std::snprintf(number, sizeof(number), "-%05zu-of-%05zu", file + 1, counts_.size());
  return stem_ + number + extension_;
}

// Files in the folder that an export of this name made.
std::vector<std::string> WeightFiles::earlier() const {
  std::vector<std::string> found;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder_, ignored)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(stem_) || !name.ends_with(extension_) || name.size() < stem_.size() + extension_.size())
      continue;
    std::string number = name.substr(stem_.size(), name.size() - stem_.size() - extension_.size());
    std::replace_if(number.begin(), number.end(), [](char c) { return c >= '0' && c <= '9'; }, '0');
    if (number.empty() || number == "-00000-of-00000") found.push_back(name);
  }
  return found;
}

void WeightFiles::begin() {
  left_ = counts_[file_];
  open_ = std::make_unique<Open>(io::File::create(part_of(name_of(file_))));
  if (extension_ == kSafeTensors) {
    // The larger elements first: without gaps between tensors each is aligned to its own then.
    io::SafeTensors header{{}, {{"format", "pt"}}};
    std::vector<size_t> order(left_);
    std::iota(order.begin(), order.end(), next_);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return c10::elementSize(tensors_[a].dtype) > c10::elementSize(tensors_[b].dtype);
    });
    for (const size_t i : order) {
      const WeightTensor& tensor = tensors_[i];
      header.tensors.push_back({tensor.names[0], tensor.dtype, tensor.shape});
      for (size_t k = 1; k < tensor.names.size(); ++k)
        header.metadata[tensor.names[k]] = tensor.names[0];
    }
    const std::string text = io::layout_safetensors(header);
    open_->entries.resize(left_);
    for (size_t i = 0; i < order.size(); ++i)
      open_->entries[order[i] - next_] = header.tensors[i];
    open_->file.write(text.data(), static_cast<int64_t>(text.size()), 0);
  }
  if (left_ == 0) end();
}

void WeightFiles::write(const at::Tensor& value) {
  TESSERA_ASSERT(next_ < tensors_.size());
  const WeightTensor& tensor = tensors_[next_];
  TESSERA_CHECK_VALUE(value.layout() == at::kStrided && value.sizes() == tensor.shape, "export", "'", tensor.names[0],
                      "' is not a dense tensor of shape ", at::IntArrayRef(tensor.shape));
  const at::Tensor mine = value.detach().to(at::kCPU, tensor.dtype).contiguous();
  if (extension_ == kSafeTensors) {
    open_->file.write(mine.const_data_ptr(), static_cast<int64_t>(mine.nbytes()),
                      open_->entries[open_->entries.size() - left_].begin);
  } else {
    // A tensor of its own: what shares memory with others would bring all of it along.
    const at::Tensor own = mine.storage().nbytes() == mine.nbytes() ? mine : mine.clone();
    for (const std::string& name : tensor.names)
      open_->state.insert(name, own);
  }
  ++next_;
  if (--left_ == 0) end();
}

void WeightFiles::end() {
  if (extension_ == kTorch) write_torch(open_->file, open_->state);
  open_->file.sync();
  open_->file.close();
  open_.reset();
  if (++file_ < counts_.size()) begin();
}

// One file replaces another in one moment. Of several, no index is there while some are new and some old.
std::vector<std::string> WeightFiles::finish() {
  TESSERA_ASSERT(next_ == tensors_.size() && file_ == counts_.size());
  const std::string index_name = stem_ + extension_ + kIndex;
  io::Lock alone = io::Lock::wait(path(stem_ + extension_ + kLock));  // two would mix their files
  const bool several = counts_.size() > 1;
  if (several) ::unlink(path(index_name).c_str());
  std::vector<std::string> names;
  nlohmann::ordered_json index{{"metadata", {{"total_size", 0}}}, {"weight_map", nlohmann::ordered_json::object()}};
  int64_t total = 0;
  size_t at = 0;
  for (size_t i = 0; i < counts_.size(); ++i) {
    const std::string to = path(name_of(i)), from = part_of(name_of(i));
    TESSERA_CHECK_IO(::rename(from.c_str(), to.c_str()) == 0, "export", "cannot rename '", from, "' to '", to,
                     "': ", std::strerror(errno));
    names.push_back(name_of(i));
    for (const size_t last = at + counts_[i]; at < last; ++at) {
      total += tensors_[at].bytes();
      const size_t shown = extension_ == kTorch ? tensors_[at].names.size() : 1;
      for (size_t k = 0; k < shown; ++k)
        index["weight_map"][tensors_[at].names[k]] = names.back();
    }
  }
  io::sync_folder(folder_);
  index["metadata"]["total_size"] = total;
  if (several) io::replace_text(path(index_name), index.dump(2) + "\n");
  if (!several) ::unlink(path(index_name).c_str());
  for (const std::string& old : earlier())
    if (std::find(names.begin(), names.end(), old) == names.end()) ::unlink(path(old).c_str());
  if (several) names.push_back(index_name);
  alone.remove();
  mark_.reset();
  return names;
}

}  // namespace tessera::checkpoint
