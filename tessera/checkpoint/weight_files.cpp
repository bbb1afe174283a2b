#include "tessera/checkpoint/weight_files.h"

#include <ATen/Functions.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <tuple>

#include "tessera/base/error.h"
#include "tessera/checkpoint/node.h"
#include "tessera/checkpoint/torch_file.h"
#include "tessera/checkpoint/writer.h"
#include "tessera/io/file.h"
#include "tessera/io/lock.h"
#include "tessera/io/safetensors.h"

namespace tessera::checkpoint {

namespace {

using Json = Node::Json;

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
  TESSERA_CHECK_VALUE(dtype != at::ScalarType::Undefined, "safetensors", "tensor '", names.empty() ? "" : names[0],
                      "' has the dtype '", unknown, "', which torch does not have");
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  return std::accumulate(shape.begin(), shape.end(), size, std::multiplies<>());
}

std::vector<size_t> plan_files(const std::vector<WeightTensor>& tensors, int64_t max_bytes) {
  TESSERA_CHECK_VALUE(max_bytes > 0, "export", "max_shard_bytes must be > 0, got ", max_bytes);
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
                         int64_t max_bytes, std::map<std::string, std::string> metadata)
    : folder_(std::move(folder)),
      id_(new_id()),
      tensors_(std::move(tensors)),
      metadata_(std::move(metadata)),
      counts_(plan_files(tensors_, max_bytes)) {
  extension_ = name.ends_with(kSafeTensors) ? kSafeTensors : kTorch;
  TESSERA_CHECK_VALUE(name.ends_with(extension_) && name.size() > extension_.size() && name[0] != '.' &&
                          name.find('/') == std::string::npos,
                      "export", "a file of weights is named like 'model.safetensors' or 'pytorch_model.bin', not '",
                      name, "'");
  TESSERA_CHECK_VALUE(metadata_.empty() || extension_ == kSafeTensors, "export", "'", name,
                      "' has no place for metadata; a '.safetensors' has");
  metadata_.emplace("format", "pt");  // which tools look for
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

// Removes unfinished files of exports that nobody holds any more.
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
    // Larger elements come first: without gaps between tensors each is aligned to its own element then.
    io::SafeTensors header{{}, metadata_};
    std::vector<size_t> order(left_);
    std::iota(order.begin(), order.end(), next_);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return c10::elementSize(tensors_[a].dtype) > c10::elementSize(tensors_[b].dtype);
    });
    for (const size_t i : order) {
      const WeightTensor& tensor = tensors_[i];
      header.tensors.push_back({tensor.names[0], tensor.dtype, tensor.shape});
      for (size_t k = 1; k < tensor.names.size(); ++k)
        TESSERA_CHECK_VALUE(header.metadata.emplace(tensor.names[k], tensor.names[0]).second, "export", "'",
                            tensor.names[k], "' is the name of a tied tensor, and a key of the metadata");
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
  const at::Tensor mine = value.detach().resolve_conj().resolve_neg().to(at::kCPU, tensor.dtype).contiguous();
  if (extension_ == kSafeTensors) {
    open_->file.write(mine.const_data_ptr(), static_cast<int64_t>(mine.nbytes()),
                      open_->entries[open_->entries.size() - left_].begin);
  } else {
    // A tensor alone is saved: one that shares memory with others would bring all of it along.
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

// One file replaces another in one moment. With several, no index is there while some are new and some old.
std::vector<std::string> WeightFiles::finish() {
  TESSERA_ASSERT(next_ == tensors_.size() && file_ == counts_.size());
  const std::string index_name = stem_ + extension_ + kIndex;
  io::Lock alone = io::Lock::wait(path(stem_ + extension_ + kLock));  // two exports would mix their files
  const bool several = counts_.size() > 1;
  if (several) ::unlink(path(index_name).c_str());
  std::vector<std::string> names;
  Json::object_t files;  // names are of one tensor each
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
        files.emplace_back(tensors_[at].names[k], names.back());
    }
  }
  io::sync_folder(folder_);
  const Json index{{"metadata", {{"total_size", total}}}, {"weight_map", std::move(files)}};
  if (several) io::replace_text(path(index_name), index.dump(2) + "\n");
  if (!several) ::unlink(path(index_name).c_str());
  for (const std::string& old : earlier())
    if (std::find(names.begin(), names.end(), old) == names.end()) ::unlink(path(old).c_str());
  if (several) names.push_back(index_name);
  alone.remove();
  mark_.reset();
  return names;
}

std::vector<std::string> write_weights(const std::string& folder, const std::string& name, const NamedTensors& tensors,
                                       const WriteOptions& options) {
  std::vector<WeightTensor> all;
  std::vector<at::Tensor> values;
  using View = std::tuple<const void*, at::ScalarType, std::vector<int64_t>, std::vector<int64_t>, bool, bool>;
  std::map<View, size_t> seen;
  for (const auto& item : tensors) {
    const at::Tensor& value = item.value();
    TESSERA_CHECK_VALUE(value.defined() && value.layout() == at::kStrided && !value.is_meta(), "export", "'",
                        item.key(), "' is not a dense tensor with values");
    if (value.numel() > 0) {
      const View view{value.const_data_ptr(), value.scalar_type(), value.sizes().vec(),
                      value.strides().vec(),  value.is_conj(),     value.is_neg()};
      const auto [at, is_new] = seen.try_emplace(view, all.size());
      if (!is_new) {
        all[at->second].names.push_back(item.key());
        continue;
      }
    }
    all.push_back({{item.key()}, value.scalar_type(), value.sizes().vec()});
    values.push_back(value);
  }
  WeightFiles files(folder, name, all, options.max_shard_bytes, options.metadata);
  for (const at::Tensor& value : values)
    files.write(value);
  return files.finish();
}

// ---------------------------------------------------------------- reading

namespace {

using Index = std::map<std::string, std::string>;  // the file of each tensor

constexpr const char* kIndexOfSafeTensors = ".safetensors.index.json";
constexpr int64_t kLargestIndex = 100'000'000;
constexpr int64_t kSmallGap = 1 << 14;  // bytes between needed ones that cost less than another read
constexpr int64_t kBlock = 4 << 20;

Index index_of(const std::string& path) {
  const auto json =
      parsed<nlohmann::json>(io::read_text(path, kLargestIndex));  // many names: an ordered one looks through all
  TESSERA_CHECK_IO(json.is_object() && json.contains("weight_map") && json["weight_map"].is_object(), "safetensors",
                   "'", path, "' is no index: it must be a JSON object with a 'weight_map'");
  Index index;
  for (const auto& [name, file] : json["weight_map"].items()) {
    const bool good = file.is_string() && file.get_ref<const std::string&>().ends_with(kSafeTensors) &&
                      file.get_ref<const std::string&>().find('/') == std::string::npos;
    TESSERA_CHECK_IO(good, "safetensors", "'", path, "', tensor '", name,
                     "': its file must be the name of a '.safetensors' beside the index");
    index[name] = file.get<std::string>();
  }
  return index;
}

std::vector<std::string> files_in(const std::string& folder, const char* ending) {
  std::vector<std::string> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error))
    if (entry.path().filename().string().ends_with(ending)) found.push_back(entry.path().string());
  TESSERA_CHECK_IO(!error, "safetensors", "cannot read the folder '", folder, "': ", error.message());
  std::sort(found.begin(), found.end());
  return found;
}

// `width` bytes from `begin` on of each of `rows` rows of `row` bytes.
struct Columns {
  int64_t begin, rows, row, width;
};

// Reads columns into rows of `to_row` bytes.
void read_columns(const io::File& file, const Columns& of, char* to, int64_t to_row) {
  if (of.width == 0 || of.rows == 0) return;
  if (of.rows == 1 || (of.width == of.row && of.row == to_row)) {
    file.read(to, of.rows * of.width, of.begin);
    return;
  }
  const bool apart = of.row - of.width >= kSmallGap;
  const int64_t most = apart ? 1 : std::max<int64_t>(1, kBlock / of.row);
  std::vector<char> block(apart ? 0 : static_cast<size_t>(std::min(most, of.rows) * of.row));
  for (int64_t first = 0; first < of.rows; first += most) {
    const int64_t count = std::min(most, of.rows - first), at = of.begin + first * of.row;
    if (apart) {
      file.read(to + first * to_row, of.width, at);
      continue;
    }
    file.read(block.data(), (count - 1) * of.row + of.width, at);
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(to + (first + i) * to_row, block.data() + i * of.row, static_cast<size_t>(of.width));
  }
}

}  // namespace

WeightReader::WeightReader(const std::string& path) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) {
    path.ends_with(kIndexOfSafeTensors) ? add_index(path) : add_file(path, nullptr);
    return;
  }
  const std::vector<std::string> indices = files_in(path, kIndexOfSafeTensors);
  TESSERA_CHECK_IO(indices.size() < 2, "safetensors", "'", path, "' has several indices, '",
                   fs::path(indices[0]).filename().string(), "' and '", fs::path(indices[1]).filename().string(),
                   "': name one of them");
  if (!indices.empty()) {
    add_index(indices[0]);
    return;
  }
  const std::vector<std::string> files = files_in(path, kSafeTensors);
  TESSERA_CHECK_IO(!files.empty(), "safetensors", "'", path, "' has no file '*.safetensors'");
  for (const std::string& file : files)
    add_file(file, nullptr);
}

WeightReader::WeightReader(const std::vector<std::string>& files) {
  for (const std::string& file : files)
    add_file(file, nullptr);
}

void WeightReader::add_index(const std::string& path) {
  const Index index = index_of(path);
  std::map<std::string, Index> by_file;
  for (const auto& [name, file] : index)
    by_file[file].emplace(name, file);
  for (const auto& [file, wanted] : by_file)
    add_file((fs::path(path).parent_path() / file).string(), &wanted);
  for (const auto& [name, file] : index)
    TESSERA_CHECK_IO(numbers_.contains(name), "safetensors", "'", path, "' says that tensor '", name, "' is in '", file,
                     "', which has none of that name");
}

// `wanted`: what this one of several files has to have; null: all.
void WeightReader::add_file(const std::string& path, const Index* wanted) {
  const auto file = std::make_shared<const io::File>(io::File::open(path));
  const io::SafeTensors header = io::read_safetensors(*file);
  const auto add_name = [&](const std::string& name, size_t number) {
    TESSERA_CHECK_IO(numbers_.emplace(name, number).second, "safetensors", "'", path, "': tensor '", name,
                     "' is in another file, too: name the files that belong together");
  };
  std::unordered_map<std::string, size_t> mine;
  for (const io::TensorEntry& entry : header.tensors) {
    if (wanted != nullptr && !wanted->contains(entry.name)) continue;
    add_name(entry.name, tensors_.size());
    mine.emplace(entry.name, tensors_.size());
    tensors_.push_back({{entry.name}, entry.dtype, entry.shape, entry.unknown});
    bytes_.push_back({file, entry.begin, entry.end});
  }
  for (const auto& [key, word] : header.metadata) {
    const auto tied = mine.find(word);
    if (tied == mine.end() || mine.contains(key) || key == "format") continue;
    add_name(key, tied->second);
    tensors_[tied->second].names.push_back(key);
  }
  metadata_.insert(header.metadata.begin(), header.metadata.end());
}

const WeightTensor* WeightReader::find(const std::string& name) const {
  const auto found = numbers_.find(name);
  return found == numbers_.end() ? nullptr : &tensors_[found->second];
}

size_t WeightReader::number_of(const std::string& name) const {
  const auto found = numbers_.find(name);
  TESSERA_CHECK_VALUE(found != numbers_.end(), "safetensors", "no file has a tensor '", name, "'");
  const WeightTensor& tensor = tensors_[found->second];
  TESSERA_CHECK_IO(tensor.dtype != at::ScalarType::Undefined, "safetensors", "'", bytes_[found->second].file->path(),
                   "', tensor '", name, "' has the dtype '", tensor.unknown,
                   "', which torch does not have: it cannot be read, the others can");
  return found->second;
}

at::Tensor WeightReader::read(const std::string& name) const {
  const size_t number = number_of(name);
  const WeightTensor& tensor = tensors_[number];
  const Bytes& bytes = bytes_[number];
  at::Tensor result = at::empty(tensor.shape, at::TensorOptions(tensor.dtype));
  if (bytes.end > bytes.begin) bytes.file->read(result.mutable_data_ptr(), bytes.end - bytes.begin, bytes.begin);
  return result;
}

at::Tensor WeightReader::read(const std::string& name, const Slice& slice) const {
  const size_t number = number_of(name);
  const WeightTensor& tensor = tensors_[number];
  const auto dim = static_cast<size_t>(slice.dim);
  TESSERA_CHECK_VALUE(slice.dim >= 0 && dim < tensor.shape.size(), "safetensors", "tensor '", name, "' of shape ",
                      at::IntArrayRef(tensor.shape), " has no dim ", slice.dim);
  std::vector<int64_t> shape = tensor.shape;
  shape[dim] = 0;
  for (const shard::Range& range : slice.ranges) {
    TESSERA_CHECK_VALUE(0 <= range.begin && range.begin <= range.end && range.end <= tensor.shape[dim], "safetensors",
                        "dim ", slice.dim, " of tensor '", name, "' has ", tensor.shape[dim], " elements, not [",
                        range.begin, ", ", range.end, ")");
    shape[dim] += range.size();
  }
  at::Tensor result = at::empty(shape, at::TensorOptions(tensor.dtype));
  if (result.numel() == 0) return result;
  const Bytes& bytes = bytes_[number];
  const int64_t rows = c10::multiply_integers(shape.begin(), shape.begin() + slice.dim);
  const int64_t row = (bytes.end - bytes.begin) / rows, inner = row / tensor.shape[dim];
  auto* to = static_cast<char*>(result.mutable_data_ptr());
  for (const shard::Range& range : slice.ranges) {
    const int64_t width = range.size() * inner;
    read_columns(*bytes.file, {bytes.begin + range.begin * inner, rows, row, width}, to, shape[dim] * inner);
    to += width;
  }
  return result;
}

}  // namespace tessera::checkpoint
