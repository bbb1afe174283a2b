// Weight files: named tensors as other tools load them, in one file or in several with an index.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/checkpoint/manifest.h"
#include "tessera/io/file.h"

namespace tessera::checkpoint {

class SaveMark;

struct WeightTensor {
  std::vector<std::string> names;  // the tensor's own name first, then those of parameters that are tied to it
  at::ScalarType dtype =
      at::kFloat;  // Undefined: of a file, one that torch does not have; reading the tensor is an IoError
  std::vector<int64_t> shape;
  std::string unknown = {};  // the format's word for that dtype

  int64_t bytes() const;
};

// How many tensors each file has, one file after the other: at most `max_bytes` in a file, unless one tensor has more.
std::vector<size_t> plan_files(const std::vector<WeightTensor>& tensors, int64_t max_bytes);

// Writes `folder`/`name`, or files "stem-00001-of-00002.ext" and "name.index.json", the names of Transformers. The
// extension says the format: ".bin" is what torch.load() reads, with all names on one tensor; ".safetensors" has the first
// name, and the others in the metadata, beside the `metadata` that is given (of a ".safetensors" only). Memory: one tensor of safetensors, one file of ".bin". Several may write the same name
// at once: the export that is finished last holds. What an export that was cut off has left goes.
class WeightFiles {
 public:
  // Value error for a name of another form, or with a folder.
  WeightFiles(std::string folder, const std::string& name, std::vector<WeightTensor> tensors, int64_t max_bytes,
              std::map<std::string, std::string> metadata = {});
  ~WeightFiles();  // without finish() nothing stays
  WeightFiles(const WeightFiles&) = delete;
  WeightFiles& operator=(const WeightFiles&) = delete;

  // Writes the next tensor, in its shape; it is brought to its dtype.
  void write(const at::Tensor& value);
  // Makes all files appear, and removes those of an earlier export of this name. Returns their names, the index last.
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
  const std::string id_;  // names this export's unfinished files, beside which others may write their own
  std::unique_ptr<SaveMark> mark_;
  std::vector<WeightTensor> tensors_;
  std::map<std::string, std::string> metadata_;
  std::vector<size_t> counts_;
  size_t file_ = 0, next_ = 0, left_ = 0;  // the file that is written, the next tensor, how many the file still gets
  std::unique_ptr<Open> open_;
};

using NamedTensors = torch::OrderedDict<std::string, at::Tensor>;  // as a torch::nn::Module has them

struct WriteOptions {
  int64_t max_shard_bytes = std::numeric_limits<int64_t>::max();  // bytes of a file, unless one tensor has more
  std::map<std::string, std::string> metadata = {};
};
// Writes all tensors, as WeightFiles does: `folder`/`name` whole or not at all. Names of one tensor, or of one view of one
// memory (tied weights), have its values once. Returns the names of the files. Value error for what the format cannot hold.
std::vector<std::string> write_weights(const std::string& folder, const std::string& name, const NamedTensors& tensors,
                                       const WriteOptions& options = {});

// Reads safetensors in one file or in several, whole or the slices that a rank needs. Local. Holds the files open: files that
// take their names later are not read. Any number of threads may read.
class WeightReader {
 public:
  // `path`: a file; an index ("model.safetensors.index.json") of files beside it; or a folder, of its index where it has one,
  // else of all that is "*.safetensors". Headers are read and checked here. IoError that names the file, and the tensor: what
  // is missing or damaged, a folder with two indices or without files, a tensor that two files have.
  explicit WeightReader(const std::string& path);
  explicit WeightReader(const std::vector<std::string>& files);  // reads the files together

  // The tensors as they come in the files, each with the other names that metadata gives it (a tied weight's).
  const std::vector<WeightTensor>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }  // of the first file that has a key
  // Finds a tensor by any of its names; null where there is none.
  const WeightTensor* find(const std::string& name) const;
  // Reads a tensor or a slice on the CPU, in its dtype. Value error for a name or a slice that is not there; IoError for a disk, and
  // for a dtype that torch does not have.
  // A slice is read without the rest of its tensor, but for gaps of less than 16 KiB.
  at::Tensor read(const std::string& name) const;
  at::Tensor read(const std::string& name, const Slice& slice) const;

 private:
  struct Bytes {
    std::shared_ptr<const io::File> file;
    int64_t begin = 0, end = 0;
  };
  void add_file(const std::string& path, const std::map<std::string, std::string>* wanted);
  void add_index(const std::string& path);
  size_t number_of(const std::string& name) const;

  std::vector<WeightTensor> tensors_;
  std::vector<Bytes> bytes_;  // of each tensor
  std::unordered_map<std::string, size_t> numbers_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace tessera::checkpoint
