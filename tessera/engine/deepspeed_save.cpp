// An engine's checkpoint in DeepSpeed's files: saved as ours into a folder beside first, then every rank writes its part of
// DeepSpeed's files from there, and the new folder takes its place in one step.
#include <filesystem>
#include <optional>
#include <set>

#include "tessera/base/error.h"
#include "tessera/checkpoint/deepspeed/save.h"
#include "tessera/engine/checkpoint.h"
#include "tessera/io/file.h"
#include "tessera/io/lock.h"

namespace tessera::engine {

namespace {

namespace fs = std::filesystem;

// Names in the folder of checkpoints: a folder for every save that is on its way, and a file beside it whose lock its first rank
// holds. Both are removed at the end, and by the next save where nobody holds the lock.
const std::string kBeside = ".tessera-saving", kMark = ".saving";

// Removes what saves that were cut off have left in `folder`, and the folder when it is empty then.
void remove_left(const fs::path& folder) {
  std::error_code none;
  std::set<std::string> paths;
  for (const auto& entry : fs::directory_iterator(folder, none)) {
    const std::string path = entry.path().string();
    paths.insert(path.ends_with(kMark) ? path.substr(0, path.size() - kMark.size()) : path);
  }
  for (const std::string& path : paths) {
    std::optional<io::Lock> lock = io::Lock::take_left(path + kMark);
    if (!lock && fs::exists(path + kMark, none)) continue;
    fs::remove_all(path, none);
    if (lock) lock->remove();
  }
  fs::remove(folder, none);
}

io::Lock take(const std::string& path) {
  constexpr int kAttempts = 10;
  for (int attempt = 1;; ++attempt) {
    io::make_folder(fs::path(path).parent_path().string());
    try {
      return io::Lock::wait(path);
    } catch (const IoError&) {
      if (attempt == kAttempts) throw;  // before that: another save has just found the folder empty and removed it
    }
  }
}

}  // namespace

std::string Checkpointer::save_as_deepspeed(const std::string& dir, const SaveOptions& given, ClientPart client) {
  const checkpoint::DeepSpeedLayout layout = *given.deepspeed;
  const fs::path folder = fs::path(dir) / kBeside;
  const std::string beside = (folder / exchange(checkpoint::new_id(), "")[0]).string();
  const std::string made = (fs::path(beside) / "deepspeed").string();
  std::optional<io::Lock> mark;
  on_all([&] {
    if (place() != 0) return;
    remove_left(folder);
    mark.emplace(take(beside + kMark));
  });
  const auto end = [&] {
    if (!mark) return;
    std::error_code none;
    fs::remove_all(beside, none);
    mark->remove();
    mark.reset();
    remove_left(folder);
  };
  SaveOptions ours = given;
  ours.deepspeed.reset();
  ours.latest = false;
  ours.keep_last = 0;
  std::string tag;
  try {
    tag = save(beside, ours, std::move(client));
    on_all([&] { checkpoint::deepspeed::write_ranks(beside, tag, made, layout, place(), ranks_.all()); });
    on_all([&] {
      if (place() == 0)
        checkpoint::deepspeed::finish_folder(made, dir, tag, layout.stage, given.latest, given.keep_last.value_or(0));
    });
  } catch (...) {
    end();
    throw;
  }
  end();
  return tag;
}

}  // namespace tessera::engine
