#include "tessera/commands/commands.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"

namespace tessera::commands {

namespace {

struct Case {
  std::string name;
  std::vector<std::string> line;
  int code;
  std::vector<std::string> output, errors;  // parts of them, in order
};

void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
  size_t from = 0;
  for (const std::string& part : parts) {
    const size_t at = text.find(part, from);
    ASSERT_NE(at, std::string::npos) << "'" << part << "' is not in:\n" << text;
    from = at + part.size();
  }
}

const std::string kAdam =
    R"({"optimizer": {"type": "Adam"}, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}})";
const std::string kOffload =
    R"({"bf16": {"enabled": true}, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 3, "mics_shard_size": 2,
        "offload_optimizer": {"device": "cpu"}}})";

// {"a": 1} in base64, as people of the `deepspeed` launcher write it.
const std::string kEncoded = "eyJhIjogMX0";

const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      {"none", {}, 2, {}, {"no command ''"}},
      {"unknown", {"inspekt"}, 2, {}, {"no command 'inspekt'"}},
      {"help", {"check", "--help"}, 0, {"usage: tessera check config", "--ranks N", "--all"}, {}},
      {"check",
       {"check", kAdam, "--ranks", "3"},
       0,
       {"zero_optimization.stage = 2 (given)", "3 ranks: 12 samples a step = micro batch 4 x 1"},
       {}},
      {"check, an option with =", {"check", "--ranks=2", kAdam}, 0, {"2 ranks: 8 samples"}, {}},
      {"check warns and fails",
       {"check", R"({"unknown_thing": 1, "zero_optimization": {"zero_quantized_weights": true}})"},
       1,
       {},
       {"warning: unknown_thing", "zero_quantized_weights"}},
      {"check of what is wrong",
       {"check", R"({"unknown_thing": 1, "zero_optimization": {"stage": 9, "stagee": 1}})"},
       1,
       {},
       {"warning: unknown_thing", "2 problems", "stage"}},
      {"check of base64", {"check", kEncoded}, 0, {}, {"warning: a"}},
      {"check of nothing",
       {"check", "no such file"},
       1,
       {},
       {"[initialize] config is neither a file", "base64", "'no such file'"}},
      {"check of a folder", {"check", "/"}, 1, {}, {"/ is a folder; give the JSON file itself"}},
      {"no argument", {"check"}, 2, {}, {"tessera check: it needs config", "usage: "}},
      {"too many", {"check", kAdam, "x"}, 2, {}, {"too many arguments: x"}},
      {"no such option", {"check", kAdam, "--rank", "2"}, 2, {}, {"unknown option --rank"}},
      {"no value", {"check", kAdam, "--ranks"}, 2, {}, {"--ranks needs a value"}},
      {"a flag with a value", {"check", kAdam, "--all=1"}, 2, {}, {"--all takes no value"}},
      {"no number", {"check", kAdam, "--ranks", "x"}, 2, {}, {"--ranks must be a whole number from 1, got 'x'"}},
      {"zero ranks", {"check", kAdam, "--ranks", "0"}, 2, {}, {"from 1, got '0'"}},
      {"estimate",
       {"estimate", "7B", "--ranks", "1", "8"},
       0,
       {" ranks  stage     params      grads     states   gathered      total  (GB)\n     1      0      14.00      "
        "14.00      70.00",
        "     8      3       1.75       1.75       8.75"},
       {}},
      {"estimate of a fraction",
       {"estimate", "1.5m", "--ranks", "1"},
       0,
       {"     1      0       0.00       0.00       0.01"},
       {}},
      {"estimate where a stage is refused",
       {"estimate", "7B", "--config", kOffload, "--ranks", "2", "3"},
       0,
       {"host       disk  (GB)", "     2      0 refused: ", "     2      1  ",
        "     3      3 refused: ", "mics_shard_size"},
       {}},
      {"estimate of a typo",
       {"estimate", "7Q"},
       1,
       {},
       {"[estimate] '7Q' is no number of parameters, like 7B or 350M\n"}},
      {"estimate of a typo, wrongly configured",
       {"estimate", "7Q", "--config", R"({"bf16": {"enabledd": true}})"},
       1,
       {},
       {"'7Q' is no number of parameters", "bf16.enabledd: unknown key"}},
      {"estimate of nothing", {"estimate", "0"}, 1, {}, {"'0' is no number"}},
      {"estimate of a model", {"estimate", "/"}, 1, {}, {"a model from '/' is built by Python"}},
      {"estimate with a wrong configuration",
       {"estimate", "7B", "--config", R"({"fp16": {"enabled": true, "nonsense": 1}})"},
       1,
       {},
       {"nonsense"}},
      {"report", {"report"}, 0, {"tessera            ", "built for torch    2.", "cores ", "disk "}, {}},
      {"page of nothing", {"page"}, 2, {}, {"it needs run", "usage: tessera page run... [--out FILE]"}},
      {"page of what is not there", {"page", "/nowhere"}, 1, {}, {"[page] there is no '/nowhere'"}},
      {"page of no numbers", {"page", "/proc/self"}, 1, {}, {"no file *.csv and none *.jsonl in '/proc/self'"}},
      {"page of other lines", {"page", "/proc/cpuinfo"}, 1, {}, {"'/proc/cpuinfo', line 1, is no number"}},
      {"inspect of nothing", {"inspect", "/nowhere"}, 1, {}, {"[checkpoint] there is no folder '/nowhere'"}},
      {"inspect of a folder without one",
       {"inspect", "/proc"},
       1,
       {},
       {"there is no file 'latest' in '/proc'; name a tag"}},
      {"a command misspelt", {"inspet", "/proc"}, 2, {}, {"there is no command 'inspet'; did you mean 'inspect'?"}},
      {"inspect of a tag that is none", {"inspect", "/nowhere", "--tag", "a/b"}, 1, {}, {"a/b"}},
      {"inspect of no checkpoint", {"inspect", "/", "--tag", "tmp"}, 1, {}, {"manifest.json"}},
      {"deepspeed of no stage", {"deepspeed", "a", "b", "--stage", "4"}, 2, {}, {"--stage must be one of 0, 1, 2, 3"}},
      {"universal of nothing", {"universal", "/nowhere", "b"}, 1, {}, {"there is no folder '/nowhere'"}},
      {"export of a dtype that is none",
       {"export", "a", "b", "--dtype", "fp8"},
       2,
       {},
       {"--dtype must be one of fp32, bf16, fp16, saved, got 'fp8'"}},
      {"export in files of no size",
       {"export", "a", "b", "--max_shard_size", "5XB"},
       1,
       {},
       {"max_shard_size must be like 500MB"}},
  };
  return all;
}

TEST(Commands, Lines) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    const auto [code, output, errors] = run(c.line);
    EXPECT_EQ(code, c.code) << errors;
    expect_parts(output, c.output);
    expect_parts(errors, c.errors);
  }
}

TEST(Commands, AFrontEndAddsWhatItKnows) {
  const auto sizes = [](const std::string& model, const config::Config&) {
    EXPECT_EQ(model, "/");
    return config::ModelSizes{
        .trained = 1'000'000'000, .frozen = 1'000'000'000, .units = {100, 1'000'000'000, 500'000'000}};
  };
  const FrontEnd front{
      .sizes_of = sizes,
      .facts = {{"python", "\"3\""}, {"devices", "[\"a\", \"b\"]"}, {"missing for more", "[\"no thing\"]"}},
  };
  expect_parts(run({"estimate", "/", "--ranks", "2"}, front).output,
               {"     2      3       2.00       1.00       5.00       3.00"});
  const std::string help = run({"estimate", "--help"}).output, more = run({"estimate", "--help"}, front).output;
  expect_parts(help, {"a number of parameters (7B)\n"});
  expect_parts(more, {"a number of parameters (7B), or a folder or file of a Hugging Face configuration\n"});
  expect_parts(run({"estimate", "7Q"}, front).errors, {"like 7B or 350M, and no file or folder that exists"});
  const auto found = nlohmann::ordered_json::parse(run({"report", "--json"}, front).output);
  std::vector<std::string> names;
  for (const auto& [name, value] : found.items())
    names.push_back(name);
  EXPECT_EQ(names, (std::vector<std::string>{"tessera", "built for torch", "python", "machine", "cores", "memory_gb",
                                             "instruction sets", "devices", "transports", "disk", "missing for more"}));
  EXPECT_EQ(found["missing for more"].back(), "no thing");
  expect_parts(run({"report"}, front).output,
               {"python             3\n", "devices            a; b\n", "missing for more\n", "  no thing\n"});
}

nlohmann::json data_of(const std::string& page) {
  std::ifstream file(page);
  const std::string text{std::istreambuf_iterator<char>(file), {}}, begin = "const DATA = ";
  const size_t from = text.find(begin) + begin.size();
  return nlohmann::json::parse(text.substr(from, text.find(";\n", from) - from));
}

// Of lines as a run leaves them that was killed, and went on from the step before; of CSV files; and of many points.
TEST(Commands, PagesHaveTheNumbersOfRuns) {
  const io::TempFolder folder;
  const auto write = [&](const std::string& name, auto put) {
    std::filesystem::create_directories(std::filesystem::path(folder / name).parent_path());
    std::ofstream file(folder / name);
    put(file);
  };
  const auto number = [](const char* name, const std::string& value, int step) {
    return R"({"name": "Train/Samples/)" + std::string(name) + R"(", "value": )" + value + R"(, "step": )" +
           std::to_string(step) + "}\n";
  };
  write("a.jsonl", [&](auto& file) {
    for (int step = 1; step <= 3; ++step)
      file << number("global_steps", std::to_string(step), 8 * step) << number("train_loss", "5", 8 * step);
    file << R"({"warning": "</script>", "step": 8})" << "\n" << R"({"warning": "lost", "step": 24})" << "\n";
    file << R"({"name": "Own/bias", "value": 1, "step": 24})" << "\n" << R"({"name": "Tra)" << "\n";
    file << number("skipped_steps", "0", 8);
    file << number("global_steps", "2", 16) << number("train_loss", "null", 16) << number("skipped_steps", "1", 16);
    file << R"({"name": "Trai)";
  });
  write("b/lines/a.jsonl", [&](auto& file) {
    for (int step = 1; step <= 2500; ++step)
      file << number("train_loss", std::to_string(step), step);
  });
  write("b/tables/Train_Samples_lr.csv",
        [](auto& file) { file << "step,lr\r\n8,0.5\r\n16,0\r\n24,0\r\n16,inf\r\n24,0"; });
  write("b/tables/Own_bias.csv", [](auto& file) { file << "step,bias\r\n8,1\r\n12\r\n16,2\r\n24,3\r\n"; });
  write("b/tables/warnings.csv", [](auto& file) { file << "step,warning\r\n8,\"a, \"\"b\"\"\nc\"\r\n24,lost\r\n"; });
  const std::string out = folder / "page.html";
  const auto written = run({"page", folder / "a.jsonl", "--out", out});
  EXPECT_EQ(written.code, 0) << written.errors;
  EXPECT_EQ(written.output, "written: " + out + "\nleft out of '" + (folder / "a.jsonl") +
                                "': line 10, no number or warning of a run\n");
  auto data = data_of(out);
  EXPECT_EQ(data["x"], "step");
  const auto series = data["runs"][0]["series"];
  EXPECT_EQ(series["Train/Samples/train_loss"], nlohmann::json::parse("[[1, 5], [2, null]]"));
  EXPECT_FALSE(series.contains("Own/bias"));
  EXPECT_EQ(data["runs"][0]["warnings"],
            nlohmann::json::parse(R"([[1, "</script>"], [2, "the update was skipped: inf or NaN in a gradient"]])"));
  EXPECT_EQ(run({"page", folder / "a.jsonl", folder / "b/lines", folder / "b/tables/", "--out", out}).code, 0);
  data = data_of(out);
  EXPECT_EQ(data["x"], "samples");
  EXPECT_EQ(data["runs"][0]["name"], folder / "a.jsonl");
  EXPECT_EQ(data["runs"][1]["name"], folder / "b/lines/a.jsonl");
  EXPECT_EQ(data["runs"][2]["name"], "tables");
  const auto many = data["runs"][1]["series"]["Train/Samples/train_loss"];
  EXPECT_EQ(many.size(), 834U);
  EXPECT_EQ(many[0], nlohmann::json::parse("[3, 2]"));
  EXPECT_EQ(data["runs"][2]["series"]["Train/Samples/lr"], nlohmann::json::parse("[[8, 0.5], [16, null]]"));
  EXPECT_EQ(data["runs"][2]["series"]["Own_bias"], nlohmann::json::parse("[[8, 1], [16, 2]]"));
  EXPECT_EQ(data["runs"][2]["warnings"], nlohmann::json::parse(R"([[8, "a, \"b\"\nc"]])"));
}

TEST(Commands, SizesOfFiles) {
  const std::map<std::string, int64_t> good{{"5GB", 5'000'000'000}, {"4 KiB", 4096}, {" 9 ", 9}, {"2mib", 2 << 20}};
  for (const auto& [text, bytes] : good)
    EXPECT_EQ(shard_bytes(text), bytes) << text;
  for (const char* text : {"", "5XB", "-1GB", "0", "1.5GB", "9999999999999999999", "9999999999GB", "GB"})
    EXPECT_HAS(testing::message_of<c10::ValueError>([&] { shard_bytes(text); }), "max_shard_size");
}

}  // namespace
}  // namespace tessera::commands
