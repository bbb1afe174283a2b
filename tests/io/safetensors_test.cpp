#include "tessera/io/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>

#include "tessera/base/error.h"
#include "tests/io/temp_folder.h"
#include "tests/support/numbers.h"

namespace tessera::io {
namespace {

SafeTensors read_bytes(const std::string& bytes) {
  const TempFolder folder;
  File::create(folder / "f").write(bytes.data(), static_cast<int64_t>(bytes.size()), 0);
  return read_safetensors(File::open(folder / "f"));
}

std::string with_header(const std::string& json, int64_t data) {
  uint64_t length = json.size();
  std::string head(8, '\0');
  std::memcpy(head.data(), &length, 8);
  return head + json + std::string(data, 'x');
}

SafeTensors some() {
  return {{{"a", at::kFloat, {2, 3}}, {"b/\"x\"", at::kBFloat16, {}}, {"none", at::kLong, {0, 4}}}, {{"format", "pt"}}};
}

TEST(SafeTensors, ComeBack) {
  SafeTensors file = some();
  const std::string header = layout_safetensors(file);
  EXPECT_EQ(header.size() % 64, 0u);
  EXPECT_EQ(file.tensors[0].begin, static_cast<int64_t>(header.size()));
  const SafeTensors back = read_bytes(header + std::string(26, 'x'));
  EXPECT_EQ(back.tensors, file.tensors);
  EXPECT_EQ(back.metadata, file.metadata);
  for (SafeTensors strange :
       {SafeTensors{{{"q", at::kQInt8, {1}}}, {}}, SafeTensors{{{"a", at::kByte, {1}}, {"a", at::kByte, {1}}}, {}},
        SafeTensors{{{"__metadata__", at::kByte, {1}}}, {}}, SafeTensors{{{"\xff", at::kByte, {1}}}, {}}})
    EXPECT_THROW(layout_safetensors(strange), c10::ValueError);
}

// Two values of F4 are a byte, and one element of torch. A dtype that torch does not have spoils its own tensor only.
TEST(SafeTensors, DtypesOfLessThanAByte) {
  SafeTensors file{
      {{"a", at::ScalarType::Float4_e2m1fn_x2, {2, 3}}, {"none", at::ScalarType::Float4_e2m1fn_x2, {0, 3}}}, {}};
  const std::string header = layout_safetensors(file);
  EXPECT_NE(header.find(R"("a":{"dtype":"F4","shape":[2,6],"data_offsets":[0,6]})"), std::string::npos) << header;
  EXPECT_EQ(read_bytes(header + std::string(6, 'x')).tensors, file.tensors);
  SafeTensors scalar{{{"a", at::ScalarType::Float4_e2m1fn_x2, {}}}, {}};
  EXPECT_THROW(layout_safetensors(scalar), c10::ValueError);
  const std::string json =
      R"({"a":{"dtype":"F6_E3M2","shape":[4],"data_offsets":[0,3]},"b":{"dtype":"F32","shape":[1],"data_offsets":[3,7]}})";
  const std::vector<TensorEntry> found = read_bytes(with_header(json, 7)).tensors;
  const auto start = static_cast<int64_t>(json.size()) + 8;
  EXPECT_EQ(found[0], (TensorEntry{"a", at::ScalarType::Undefined, {4}, start, start + 3, "F6_E3M2"}));
  EXPECT_EQ(found[1], (TensorEntry{"b", at::kFloat, {1}, start + 3, start + 7}));
}

TEST(SafeTensors, HostileHeadersAreRefused) {
  const std::string a = R"("a":{"dtype":"F32","shape":[2],"data_offsets":)";
  const std::string headers[] = {
      "",
      "[]",
      "{",
      "{\"a\":1}",
      "{" + a + "[0,4]}}",
      "{" + a + "[4,12]}}",
      "{" + a + "[8,0]}}",
      "{" + a + "[-8,0]}}",
      "{" + a + "[0,8]},\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
      R"({"a":{"dtype":"F33","shape":[2],"data_offsets":[8,0]}})",
      R"({"a":{"dtype":"F33","shape":[2],"data_offsets":[0,9]}})",
      R"({"a":{"dtype":"F4","shape":[16,1],"data_offsets":[0,8]}})",
      R"({"a":{"dtype":"F4","shape":[],"data_offsets":[0,8]}})",
      R"({"a":{"dtype":"F4","shape":[8],"data_offsets":[0,8]}})",
      R"({"a":{"dtype":"F32","shape":[1152921504606846976,16],"data_offsets":[0,8]}})",
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":1}})",
      R"({"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})",
      R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})",
      R"({"__metadata__":{"a":1}})",
      "{\"__metadata__\":\"a\"," + a + "[0,8]}}",
      "{\"__metadata__\":[\"a\"]," + a + "[0,8]}}",
  };
  for (const std::string& header : headers)
    EXPECT_THROW(read_bytes(with_header(header, 8)), IoError) << header;
  EXPECT_NO_THROW(read_bytes(with_header("{" + a + "[0,8]}}", 8)));
  EXPECT_THROW(read_bytes(with_header("{" + a + "[0,8]}}", 9)), IoError);
  EXPECT_THROW(read_bytes(with_header("{" + a + "[0,8]}}", 7)), IoError);
  EXPECT_THROW(read_bytes("\xff\xff\xff\xff\xff\xff\xff\xff{}"), IoError);
  EXPECT_THROW(read_bytes("abc"), IoError);
}

// Numbers that wrap, values of every other kind, nesting without end: the same tensors inside the file, or an IoError.
TEST(SafeTensors, NoValueOfAHeaderWraps) {
  using Json = nlohmann::ordered_json;
  SafeTensors file = some();
  const Json good = Json::parse(layout_safetensors(file).substr(8));
  int refused = 0;
  const auto check = [&](const std::string& json) {
    const std::string bytes = with_header(json, 26);
    try {
      for (const TensorEntry& entry : read_bytes(bytes).tensors)
        EXPECT_TRUE(entry.begin >= 8 && entry.begin <= entry.end && entry.end <= static_cast<int64_t>(bytes.size()));
    } catch (const IoError& error) {
      ++refused;
      EXPECT_NE(std::string(error.what()).find("/f'"), std::string::npos) << json;
    }
  };
  testing::each_wrong_number(good, [&](const std::string&, const Json& json) { check(json.dump()); });
  testing::each_wrong_kind(good, [&](const std::string&, const Json& json) { check(json.dump()); });
  for (const char* key : {"more", "__metadata__"})
    check(testing::with_nested(good.dump(), key));
  EXPECT_GT(refused, 200);
}

// A thousand headers with one byte changed: the same tensors inside the file, or an IoError; never another outcome.
TEST(SafeTensors, MutatedHeaders) {
  SafeTensors file = some();
  const std::string good = layout_safetensors(file) + std::string(26, 'x');
  std::srand(1);
  for (int i = 0; i < 1000; ++i) {
    std::string bad = good;
    bad[static_cast<size_t>(std::rand()) % (good.size() - 26)] = static_cast<char>(std::rand());
    try {
      for (const TensorEntry& entry : read_bytes(bad).tensors)
        EXPECT_TRUE(entry.begin >= 8 && entry.end <= static_cast<int64_t>(bad.size()));
    } catch (const IoError&) {
    }
  }
}

}  // namespace
}  // namespace tessera::io
