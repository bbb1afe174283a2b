// Weight files: named tensors as other tools load them, in one file or in several with an index.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera::checkpoint {

class SaveMark;

struct WeightTensor {
  std::vector<std::string> names;  // its own first, then those of parameters that are tied to it
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;

  int64_t bytes() const;
};

// How many tensors each file has, one file after the other: at most `max_bytes` in a file, unless one tensor has more.
std::vector<size_t> plan_files(const std::vector<WeightTensor>& tensors, int64_t max_bytes);

// Writes `folder`/`name`, or files "stem-00001-of-00002.ext" and "name.index.json", the names of Transformers. The
// extension says the format: ".bin" is what torch.load() reads, with all names on one tensor; ".safetensors" has the first
// name, and the others in the metadata. Memory: one tensor of safetensors, one file of ".bin". Several may write the same name
// at once: what is finished last holds. What one that was cut off has left goes.
class WeightFiles {
 public:
  // Value error for a name of another form, or of a folder.
  WeightFiles(std::string folder, const std::string& name, std::vector<WeightTensor> tensors, int64_t max_bytes);
  ~WeightFiles();  // without finish() nothing stays
  WeightFiles(const WeightFiles&) = delete;
  WeightFiles& operator=(const WeightFiles&) = delete;

  // The next tensor, in its shape; brought to its dtype.
  void write(const at::Tensor& value);
  // All files appear, and those of an earlier export of this name go. Returns their names, the index last.
  std::vector<std::string> finish();

 private:
  struct Open;
  std::string path(const std::string& name) const;
  std::string name_of(size_t file) const;
  std::string part_of(const std::string& name) const;
  std::vector<std::string> earlier() const;
  void remove_left() const;
  void begin();
  void end();

  std::string folder_, stem_, extension_;
  const std::string id_;  // of this export's unfinished files, beside which others may write their own
  std::unique_ptr<SaveMark> mark_;
  std::vector<WeightTensor> tensors_;
  std::vector<size_t> counts_;
  size_t file_ = 0, next_ = 0, left_ = 0;  // the file that is written, the next tensor, how many the file still gets
  std::unique_ptr<Open> open_;
};

}  // namespace tessera::checkpoint
