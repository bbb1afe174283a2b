#include "tessera/checkpoint/reader.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/checkpoint/deepspeed/read.h"
#include "tessera/checkpoint/numbering.h"
#include "tessera/checkpoint/writer.h"
#include "tessera/io/crc32c.h"
#include "tessera/io/safetensors.h"

namespace tessera::checkpoint {

using shard::Range;

// Elements of a piece, and where in the result they belong.
struct Reader::Copy {
  const Piece* piece;
  int64_t from;  // element of the piece
  int64_t to;    // of the result
  int64_t size;
};

struct Reader::Files {
  std::mutex mutex;
  std::vector<std::shared_ptr<const io::File>> open;
  int count = 0;
};

namespace {

constexpr int64_t kManifestLimit = int64_t{1} << 31;
constexpr const char* kRemedy = ": copy the checkpoint again, or load another tag";
constexpr int kOpenFiles = 256;  // at once; the limit of a process is often 1024

const Slice* first(const std::vector<Slice>& slice) {
  return slice.empty() ? nullptr : slice.data();
}

int64_t itemsize(const TensorRecord& record) {
  return static_cast<int64_t>(c10::elementSize(record.dtype));
}

std::vector<int64_t> permuted(const std::vector<int64_t>& shape, const std::vector<int64_t>& order) {
  if (order.empty()) return shape;
  std::vector<int64_t> result;
  for (const int64_t dim : order)
    result.push_back(shape[dim]);
  return result;
}

std::vector<int64_t> inverse(const std::vector<int64_t>& order) {
  std::vector<int64_t> result(order.size());
  for (size_t i = 0; i < order.size(); ++i)
    result[order[i]] = static_cast<int64_t>(i);
  return result;
}

}  // namespace

Reader::Reader(std::string folder, const std::string& manifest_text)
    : folder_(std::move(folder)),
      manifest_(parse_manifest(manifest_text, (std::filesystem::path(folder_) / kManifestName).string())),
      files_(std::make_unique<Files>()) {
  for (size_t i = 0; i < manifest_.tensors.size(); ++i)
    index_[{manifest_.tensors[i].name, manifest_.tensors[i].kind}] = i;
  files_->open.resize(manifest_.files.size());
}

Reader::Reader(Reader&&) noexcept = default;
Reader::~Reader() = default;

void Reader::check_live() const {
  TESSERA_CHECK(files_ != nullptr, "checkpoint", "this reader was moved from; use the one that it was moved to");
}

const TensorRecord* Reader::find(const std::string& name, const std::string& kind) const {
  check_live();
  const auto found = index_.find({name, kind});
  return found == index_.end() ? nullptr : &manifest_.tensors[found->second];
}

// Opens a file once, and compares it with what the manifest says.
std::shared_ptr<const io::File> Reader::file(int number) const {
  check_live();
  const std::lock_guard lock(files_->mutex);
  std::shared_ptr<const io::File>& place = files_->open[number];
  if (place) return place;
  const FileRecord& expected = manifest_.files[number];
  const std::string path = (std::filesystem::path(folder_) / expected.name).string();
  std::error_code ignored;
  const bool missing = std::filesystem::status(path, ignored).type() == std::filesystem::file_type::not_found;
  TESSERA_CHECK_IO(!missing, "checkpoint", "there is no file '", path, "', which the manifest requires", kRemedy);
  auto file = std::make_shared<const io::File>(io::File::open(path));
  TESSERA_CHECK_IO(file->size() == expected.bytes, "checkpoint", "'", file->path(), "' has ", file->size(),
                   " bytes, the manifest says ", expected.bytes, kRemedy);
  if (!expected.raw) {
    const io::SafeTensors header = io::read_safetensors(*file);
    const auto id = header.metadata.find("id");
    TESSERA_CHECK_IO(id != header.metadata.end() && id->second == manifest_.id, "checkpoint", "'", file->path(),
                     "' belongs to another checkpoint than the manifest beside it", kRemedy);
  }
  if (++files_->count > kOpenFiles) {
    for (auto& other : files_->open)
      other.reset();
    files_->count = 1;
  }
  return place = std::move(file);
}

bool Reader::reorders(const TensorRecord& record, const Want& want) const {
  return record.order != want.order;
}

std::vector<Reader::Copy> Reader::copies(const TensorRecord& record, const std::vector<Slice>& slice,
                                         Range range) const {
  struct Source {
    Run run;
    const Piece* piece;
  };
  std::vector<Source> sources;
  for (const Piece& piece : record.pieces)
    for (const Run& run : runs_of(record.shape, piece.slice < 0 ? nullptr : &record.slices[piece.slice], piece.range))
      sources.push_back({run, &piece});
  const auto by_begin = [](const Source& a, const Source& b) { return a.run.begin < b.run.begin; };
  std::sort(sources.begin(), sources.end(), by_begin);
  std::vector<Copy> result;
  for (const Run& run : runs_of(record.shape, first(slice), range)) {
    auto source = std::upper_bound(sources.begin(), sources.end(), Source{run, nullptr}, by_begin);
    if (source != sources.begin()) --source;
    for (; source != sources.end() && source->run.begin < run.begin + run.size; ++source) {
      const Range both = shard::intersect({run.begin, run.begin + run.size},
                                          {source->run.begin, source->run.begin + source->run.size});
      if (both.empty()) continue;
      const int64_t from = source->run.local + both.begin - source->run.begin - source->piece->range.begin;
      const int64_t to = run.local + both.begin - run.begin - range.begin;
      Copy* last = result.empty() ? nullptr : &result.back();
      if (last && last->piece == source->piece && last->from + last->size == from && last->to + last->size == to)
        last->size += both.size();
      else
        result.push_back({source->piece, from, to, both.size()});
    }
  }
  return result;
}

void Reader::verify_piece(const TensorRecord& record, const Piece& piece, Range elements) const {
  const auto opened = file(piece.file);
  const io::File& in = *opened;
  if (manifest_.files[piece.file].raw) return;
  const int64_t bytes = piece.range.size() * itemsize(record);
  std::string block(static_cast<size_t>(std::min(bytes, kChecksumBlock)), '\0');
  const int64_t end = elements.end * itemsize(record);
  for (int64_t at = elements.begin * itemsize(record) / kChecksumBlock * kChecksumBlock; at < end;
       at += kChecksumBlock) {
    const int64_t length = std::min(kChecksumBlock, bytes - at);
    in.read(block.data(), length, piece.offset + at);
    TESSERA_CHECK_IO(io::crc32c(block.data(), length) == piece.checksums[at / kChecksumBlock], "checkpoint", "'",
                     in.path(), "', tensor '", record.name, "' (", record.kind, "): bytes ", piece.offset + at, " to ",
                     piece.offset + at + length, " are damaged: their checksum differs");
  }
}

void Reader::verify(const TensorRecord& record, const Want& want) const {
  std::map<const Piece*, Range> needed;
  const bool whole = reorders(record, want);
  for (const Copy& copy :
       copies(record, whole ? std::vector<Slice>{} : want.slice, whole ? Range{0, record.numel()} : want.range)) {
    const auto [place, is_new] = needed.try_emplace(copy.piece, Range{copy.from, copy.from + copy.size});
    place->second = {std::min(place->second.begin, copy.from), std::max(place->second.end, copy.from + copy.size)};
  }
  for (const auto& [piece, elements] : needed)
    verify_piece(record, *piece, elements);
}

void Reader::verify_blocks(const std::function<bool(const TensorRecord&)>& needed, int part, int parts) const {
  check_live();
  std::map<std::pair<int, int64_t>, std::pair<const Block*, const TensorRecord*>> blocks;
  for (const TensorRecord& record : manifest_.tensors)
    for (const Piece& piece : record.pieces) {
      const FileRecord& of = manifest_.files[piece.file];
      if (!of.raw || !needed(record)) continue;
      const auto next = std::upper_bound(of.blocks.begin(), of.blocks.end(), piece.offset,
                                         [](int64_t at, const Block& block) { return at < block.bytes.begin; });
      blocks.insert({{piece.file, std::prev(next)->bytes.begin}, {&*std::prev(next), &record}});
    }
  std::string chunk(static_cast<size_t>(kChecksumBlock), '\0');
  int number = 0;
  for (const auto& [where, what] : blocks) {
    if (number++ % parts != part) continue;
    const auto& [block, record] = what;
    if (block->checksum == 0) continue;
    const auto in = file(where.first);
    uint32_t sum = 0;
    for (int64_t at = block->bytes.begin; at < block->bytes.end; at += kChecksumBlock) {
      const int64_t length = std::min(kChecksumBlock, block->bytes.end - at);
      in->read(chunk.data(), length, at);
      sum = io::crc32(chunk.data(), length, sum);
    }
    TESSERA_CHECK_IO(sum == block->checksum, "checkpoint", "'", in->path(), "', tensor '", record->name, "' (",
                     record->kind, "): bytes ", block->bytes.begin, " to ", block->bytes.end,
                     " are damaged: their checksum differs");
  }
}

void Reader::verify_all() const {
  verify_blocks([](const TensorRecord&) { return true; }, 0, 1);
  for (const TensorRecord& record : manifest_.tensors)
    for (const Piece& piece : record.pieces)
      verify_piece(record, piece, {0, piece.range.size()});
  for (const auto& [name, file] : manifest_.blobs)
    blob(name);
}

at::Tensor Reader::read(const TensorRecord& record, const Want& want) const {
  at::Tensor result = at::empty({want.range.size()}, at::TensorOptions(record.dtype));
  read_to(result, record, want);
  return result;
}

at::Tensor Reader::read_in_order(const TensorRecord& record, const Want& want) const {
  at::Tensor whole = read_whole(record);
  if (!want.slice.empty()) {
    std::vector<at::Tensor> parts;
    for (const Range& range : want.slice[0].ranges)
      parts.push_back(whole.narrow(want.slice[0].dim, range.begin, range.size()));
    whole = at::cat(parts, want.slice[0].dim);
  }
  if (!want.order.empty()) whole = whole.permute(want.order);
  return whole.contiguous().view(-1).narrow(0, want.range.begin, want.range.size());
}

void Reader::read_to(const at::Tensor& result, const TensorRecord& record, const Want& want) const {
  if (reorders(record, want)) {
    result.copy_(read_in_order(record, want));
    return;
  }
  auto* to = static_cast<char*>(result.mutable_data_ptr());
  const int64_t size = itemsize(record);
  // Scattered elements of a piece are read with what lies between them.
  const std::vector<Copy> all = copies(record, want.slice, want.range);
  for (size_t i = 0; i < all.size();) {
    size_t end = i + 1;
    while (end < all.size() && all[end].piece == all[i].piece && all[end].from >= all[end - 1].from)
      ++end;
    const auto opened = file(all[i].piece->file);
    const io::File& in = *opened;
    const int64_t begin = all[i].from * size;
    const int64_t bytes = (all[end - 1].from + all[end - 1].size) * size - begin;
    if (end == i + 1) {
      in.read(to + all[i].to * size, bytes, all[i].piece->offset + begin);
    } else {
      std::string window(static_cast<size_t>(bytes), '\0');
      in.read(window.data(), bytes, all[i].piece->offset + begin);
      for (size_t k = i; k < end; ++k)
        std::memcpy(to + all[k].to * size, window.data() + all[k].from * size - begin,
                    static_cast<size_t>(all[k].size * size));
    }
    i = end;
  }
}

at::Tensor Reader::read_whole(const TensorRecord& record) const {
  const at::Tensor flat = read(record, {{}, record.order, {0, record.numel()}});
  const at::Tensor whole = flat.view(permuted(record.shape, record.order));
  return record.order.empty() ? whole : whole.permute(inverse(record.order));
}

at::Tensor Reader::read_whole(const std::string& name, const std::string& kind) const {
  const TensorRecord& record = named(name, kind);
  verify(record, {{}, record.order, {0, record.numel()}});
  return read_whole(record);
}

at::Tensor Reader::read_range(const std::string& name, const std::string& kind, Range range) const {
  const TensorRecord& record = named(name, kind);
  TESSERA_CHECK_VALUE(0 <= range.begin && range.begin <= range.end && range.end <= record.numel(), "checkpoint",
                      "there are no elements ", range.begin, " to ", range.end, " of '", name, "' (", kind, ")");
  const Want want{{}, {}, range};
  verify(record, want);
  return read(record, want);
}

const TensorRecord& Reader::named(const std::string& name, const std::string& kind) const {
  const TensorRecord* found = find(name, kind);
  if (found != nullptr) return *found;
  std::string kinds;
  for (const TensorRecord& record : manifest_.tensors)
    if (record.name == name) kinds += (kinds.empty() ? "'" : ", '") + record.kind + "'";
  TESSERA_FAIL(c10::ValueError, "[checkpoint] '", folder_, "' has no '", kind, "' of '", name, "'",
               kinds.empty() ? ", nor anything else of that name" : "; there are " + kinds);
}

std::string Reader::blob(const std::string& name) const {
  check_live();
  const auto found = manifest_.blobs.find(name);
  TESSERA_CHECK_IO(found != manifest_.blobs.end(), "checkpoint", "'", folder_, "' has no '", name, "'");
  if (found->second.name.empty()) return found->second.text;
  const std::string path = (std::filesystem::path(folder_) / found->second.name).string();
  std::string bytes = io::read_text(path, found->second.bytes);
  TESSERA_CHECK_IO(static_cast<int64_t>(bytes.size()) == found->second.bytes &&
                       io::crc32c(bytes.data(), found->second.bytes) == found->second.checksum,
                   "checkpoint", "'", path, "' is damaged: its length or checksum differs");
  return bytes;
}

std::string manifest_text(const std::string& dir, const std::string& tag, const DeepSpeedHints& hints) {
  check_tag(tag);
  const std::string folder = folder_of(dir, tag), path = (std::filesystem::path(folder) / kManifestName).string();
  if (std::filesystem::exists(path)) return io::read_text(path, kManifestLimit);
  std::string text = deepspeed::manifest_of(folder, hints);
  TESSERA_CHECK_IO(!text.empty(), "checkpoint", "there is no complete checkpoint '", tag, "' in '", dir, "': '", path,
                   "' is missing, and so are ", deepspeed::kLookedFor);
  return text;
}

bool is_other_than_folder(const std::string& dir) {
  namespace fs = std::filesystem;
  return fs::exists(dir) && (!fs::is_directory(dir) || fs::exists(fs::path(dir) / kManifestName));
}

std::string why_no_latest(const std::string& dir, const std::string& latest) {
  namespace fs = std::filesystem;
  const fs::path path = fs::path(dir).lexically_normal(), folder = path.has_filename() ? path : path.parent_path();
  if (!fs::exists(folder)) return c10::str("there is no folder '", dir, "'");
  if (!fs::is_directory(folder))
    return c10::str("'", dir, "' is a file; give the folder that save_checkpoint() was called with");
  if (fs::exists(folder / kManifestName)) {
    const std::string around = folder.parent_path().string();
    return c10::str("'", dir, "' is one checkpoint; give the folder around it, '", around.empty() ? "." : around,
                    "', with the tag '", folder.filename().string(), "'");
  }
  const std::vector<std::string> there = tags(dir);
  return c10::str("there is no file '", latest, "' in '", dir, "'; name a tag",
                  there.empty() ? "" : ", as '" + there[0] + "'");
}

Reader open(const std::string& dir, const std::string& given, const DeepSpeedHints& hints) {
  const std::string tag = given.empty() ? latest_tag(dir) : given;
  TESSERA_CHECK_IO(!tag.empty(), "checkpoint", why_no_latest(dir));
  const std::string text = manifest_text(dir, tag, hints);
  return {folder_of(dir, tag), text};
}

bool is_tag(const std::string& text) {
  return !text.empty() && text.size() < 200 && text[0] != '.' && text.find('/') == std::string::npos &&
         text.find('\0') == std::string::npos && text != "latest";
}

std::string latest_tag(const std::string& dir, const std::string& file) {
  const std::string path = (std::filesystem::path(dir) / file).string();
  if (!std::filesystem::exists(path)) return {};
  std::string tag = io::read_text(path, 4096);
  while (!tag.empty() && std::isspace(static_cast<unsigned char>(tag.back())) != 0)
    tag.pop_back();
  TESSERA_CHECK_IO(!tag.empty(), "checkpoint", "'", path,
                   "' is empty: it must hold a tag; name one, or write it there");
  using Json = nlohmann::json;
  const std::string shown = Json(tag).dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
  const bool is_utf8 = Json::parse(shown) == tag;
  TESSERA_CHECK_IO(is_utf8 && is_tag(tag), "checkpoint", "'", path, "' holds ", shown,
                   ", which is no tag: the name of one folder, as UTF-8");
  return tag;
}

}  // namespace tessera::checkpoint
