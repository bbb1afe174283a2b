#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>

#include "tessera/checkpoint/deepspeed/ivalues.h"
#include "tessera/checkpoint/deepspeed/pt_file.h"
#include "tessera/checkpoint/deepspeed/pt_writer.h"
#include "tessera/checkpoint/torch_file.h"
#include "tests/io/temp_folder.h"
#include "tests/support/errors.h"

namespace tessera::checkpoint::deepspeed {
namespace {

using namespace std::string_literals;

Streamed streamed(const at::Tensor& tensor, int64_t chunk = 3) {
  return {tensor.scalar_type(), tensor.sizes().vec(), [tensor, chunk](const Streamed::Sink& sink) {
            for (const at::Tensor& part : tensor.reshape({-1}).split(chunk))
              sink(part.contiguous());
          }};
}

const at::Tensor kOnes = at::arange(12, at::kFloat).view({3, 4}), kHalves = at::full({5}, 0.5, at::kBFloat16);

Value sample(Values& values) {
  const Value dict = values.items(Kind::Dict), module = values.items(Kind::Ordered);
  const Value ones = values.streamed(streamed(kOnes));
  values.put(module, "ones", ones);
  values.put(module, "tied", ones);
  values.put(module, "halves", values.streamed(streamed(kHalves)));
  values.put(module, "empty", values.streamed(streamed(at::empty({0, 4}))));
  values.put(dict, "module", module);
  values.put(dict, "again", module);
  values.put(dict, "numbers", values.list(Shape{0, -5, 255, 256, 1 << 20, int64_t{1} << 40, -(int64_t{1} << 50)}));
  values.put(dict, "real", Value::of(1.5));
  values.put(dict, "flag", Value::of(true));
  values.put(dict, "none", {});
  values.put(dict, "dtype", Value::of(at::kHalf));
  values.put(dict, "bytes", values.text("\x00\xff\x80z"s, Kind::Bytes));
  values.put(dict, "large", values.text("\0\0\0\0\0\0\0\0\1"s, Kind::Large));
  values.put(dict, "tuple", values.items(Kind::Tuple, {Value::of(int64_t{1}), values.text("\u00e4")}));
  values.put(dict, "set", values.items(Kind::Set, {Value::of(int64_t{1}), Value::of(int64_t{2})}));
  return dict;
}

void expect_sample(const PtFile& file) {
  const Value& dict = file.value();
  const Value& module = at(dict, "module");
  EXPECT_TRUE(module.is(Kind::Ordered));
  EXPECT_EQ(at(dict, "again").items, module.items);
  EXPECT_TRUE(file.read(tensor_of(at(module, "ones"))).equal(kOnes));
  EXPECT_EQ(tensor_of(at(module, "ones")).begin(), tensor_of(at(module, "tied")).begin());
  EXPECT_TRUE(file.read(tensor_of(at(module, "halves"))).equal(kHalves));
  EXPECT_EQ(file.read(tensor_of(at(module, "empty"))).sizes(), (std::vector<int64_t>{0, 4}));
  EXPECT_EQ(at(at(dict, "numbers"), size_t{6}).number, -(int64_t{1} << 50));
  EXPECT_EQ(at(dict, "real").real, 1.5);
  EXPECT_EQ(at(dict, "flag").number, 1);
  EXPECT_TRUE(at(dict, "none").is(Kind::None));
  EXPECT_EQ(at(dict, "dtype").dtype, at::kHalf);
  EXPECT_EQ(*at(dict, "bytes").text, "\x00\xff\x80z"s);
  EXPECT_EQ(at(dict, "large").text->size(), 9U);
  EXPECT_EQ(text_of(at(at(dict, "tuple"), size_t{1})), "\u00e4");
  EXPECT_EQ(at(dict, "set").items->size(), 2U);
}

TEST(PtFile, ReadsWhatIsWritten) {
  const io::TempFolder folder;
  Values values;
  write_pt(folder / "a.pt", sample(values), {});
  const PtFile file(folder / "a.pt", Objects::Refused);
  expect_sample(file);
  for (const Block& block : file.blocks())
    EXPECT_EQ(block.bytes.begin % 64, 0);
  expect_sample(PtFile(pt_bytes(sample(values), {}), "'memory'", Objects::Refused));
}

TEST(PtFile, HasWhatIsPlainForCpp) {
  Values values;
  const Value dict = sample(values), self = values.items(Kind::List);
  self.items->push_back(self);
  values.put(dict, "self", self);
  values.put(dict, "keys", values.items(Kind::Dict, {values.items(Kind::Tuple), Value::of(1.0)}));
  values.put(dict, "half", values.items(Kind::Dict, {Value::of(0.5), Value::of(1.0)}));
  Object object;
  object.callable = values.name({"argparse", "Namespace"});
  object.args = values.items(Kind::Tuple);
  values.put(dict, "object", values.object(object));
  std::vector<std::string> left_out;
  const auto found = ivalues_of(PtFile(pt_bytes(dict, {.objects = Objects::Kept}), "it", Objects::Inert), left_out);
  EXPECT_EQ(found.at("module").toGenericDict().at("tied").toTensor().sum().item<float>(), 66);
  EXPECT_EQ(found.at("again").toGenericDict().at("halves").toTensor().scalar_type(), at::kBFloat16);
  EXPECT_EQ(found.at("numbers").toListRef()[6].toInt(), -(int64_t{1} << 50));
  EXPECT_EQ(found.at("bytes").toStringRef(), "\x00\xff\x80z"s);
  EXPECT_EQ(found.at("tuple").toTupleRef().elements()[1].toStringRef(), "\u00e4");
  EXPECT_EQ(found.at("set").toListRef().size(), 2U);
  EXPECT_EQ(found.at("half").toGenericDict().at(0.5).toDouble(), 1);
  EXPECT_TRUE(found.at("none").isNone());
  const std::vector<std::string> names{"'large' is an integer of more", "'self' is nested too deep, or holds itself",
                                       "'keys' has a key that is neither", "'object' is "};
  ASSERT_EQ(left_out.size(), names.size()) << c10::Join("; ", left_out);
  for (size_t i = 0; i < names.size(); ++i)
    EXPECT_HAS(left_out[i], names[i]);
}

// What a front end in C++ reads and writes is read and written by torch's own machine.
TEST(PtFile, IsWhatTorchReads) {
  Values values;
  const Value dict = values.items(Kind::Dict);
  values.put(dict, "epoch", Value::of(int64_t{1} << 40));
  values.put(dict, "tensor", values.streamed(streamed(kOnes)));
  values.put(dict, "list", values.list(std::vector<std::string>{"a", "b"}));
  const c10::IValue read = from_torch_file(pt_bytes(dict, {}), "it");
  EXPECT_EQ(read.toGenericDict().at("epoch").toInt(), int64_t{1} << 40);
  EXPECT_TRUE(read.toGenericDict().at("tensor").toTensor().equal(kOnes));
  const PtFile back(to_torch_file(read, "it"), "it", Objects::Refused);
  EXPECT_EQ(at(back.value(), "epoch").number, int64_t{1} << 40);
  EXPECT_TRUE(back.read(tensor_of(at(back.value(), "tensor"))).equal(kOnes));
  EXPECT_TRUE(at(at(back.value(), "list"), size_t{1}).is_text("b"));
}

// ---- hostile files

void put16(std::string& to, uint16_t value) {
  to.append(reinterpret_cast<const char*>(&value), 2);
}
void put32(std::string& to, uint32_t value) {
  to.append(reinterpret_cast<const char*>(&value), 4);
}

struct Record {
  std::string name, data;
  uint16_t method = 0;
};
// An archive in the plainest form, without checksums.
std::string archive_of(const std::vector<Record>& records) {
  std::string text, directory;
  for (const auto& [name, data, method] : records) {
    const auto at = static_cast<uint32_t>(text.size());
    std::string common;
    for (const uint16_t word : {uint16_t{20}, uint16_t{0}, method, uint16_t{0}, uint16_t{33}})
      put16(common, word);
    for (const size_t word : {size_t{0}, data.size(), data.size()})
      put32(common, static_cast<uint32_t>(word));
    put16(common, static_cast<uint16_t>(name.size()));
    put16(common, 0);
    put32(text, 0x04034b50);
    text += common + name + data;
    put32(directory, 0x02014b50);
    put16(directory, 20);
    directory += common;
    for (int i = 0; i < 3; ++i)
      put16(directory, 0);
    put32(directory, 0);
    put32(directory, at);
    directory += name;
  }
  const auto begin = static_cast<uint32_t>(text.size());
  text += directory;
  put32(text, 0x06054b50);
  put32(text, 0);
  put16(text, static_cast<uint16_t>(records.size()));
  put16(text, static_cast<uint16_t>(records.size()));
  put32(text, static_cast<uint32_t>(directory.size()));
  put32(text, begin);
  put16(text, 0);
  return text;
}
std::string with_pickle(const std::string& pickle) {
  return archive_of({{"a/data.pkl", pickle}, {"a/data/0", std::string(64, '\0')}});
}

std::string refused(const std::string& bytes, Objects objects = Objects::Refused) {
  return testing::error_of<IoError>([&] { PtFile(bytes, "x.pt", objects); });
}

std::string repeated(const std::string& text, int64_t times) {
  std::string all;
  for (int64_t i = 0; i < times; ++i)
    all += text;
  return all;
}

// A storage of `numel` floats in record `key`.
std::string storage(char key = '0', char numel = 16) {
  std::string text = "(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0"s;
  text += key;
  text += "X\x03\0\0\0cpuK"s;
  text += numel;
  return text + "tQ";
}
const std::string kTensor = "\x80\x02"s + "ctorch._utils\n_rebuild_tensor_v2\n(";

TEST(PtFile, HostilePicklesAreRefused) {
  const std::string level = "q\0"s + repeated("h\0"s, 99) + "t", start = "\x80\x02"s, four = "\x80\x04"s;
  const std::vector<std::string> hostile{
      start + "})" + repeated("\x85", 1'000'000) + "K\x01s.",                     // a key that is nested deep
      start + "}" + repeated("(", 7) + "K\x01" + repeated(level, 7) + "K\x01s.",  // a key of 100 ** 7 parts
      start + "}]K\x01s.",                                                        // keys that are no data
      start + "}(}K\x01u.",
      four + "\x8f(]\x90.",
      four + "(}\x91.",
      start + "}r\xff\xff\xff\x7fK\x01K\x02.",                // two values; its memo has a place beyond any memory
      four + "\x8d\xff\xff\xff\xff\xff\xff\xff\x3f" + "ab.",  // texts beyond the end
      four + "\x8e\xff\xff\xff\xff\xff\xff\xff\x3f" + "ab.",
      start + "\x8b\xff\xff\xff\x7f" + "ab.",
      start + "X\xff\xff\xff\x7f" + "ab.",
      start + "(ios\nsystem\n.",  // operations that torch.save does not write
      start + "(cos\nsystem\no.",
      start + "\x82\x01.",
      start + "I1\n.",
      four + "\x8c\x05torch\x8c\x19serialization.os.system\x93.",
      start + "]K\0K\x01s."s,  // items of what has none
      start + "}K\0a."s,
      start + "ccollections\nOrderedDict\nK\x01" + "b.",
      start + "ccollections\nOrderedDict\n)R(K\x01u.",
      start + repeated("]q\0h\0a"s, 3),  // no end
      start + "r\xff\xff\xff\x7f.",
      kTensor + storage() + "K\x0fK\x02\x85K\x01\x85\x89}tR.",  // beyond its storage
      kTensor + storage() + "J\xff\xff\xff\xffK\x02\x85K\x01\x85\x89}tR.",
      kTensor + storage() + "K\0"s + "J\xff\xff\xff\x7f\x85J\xff\xff\xff\x7f\x85\x89}tR.",
      kTensor + "K\x01K\0K\x02\x85K\x01\x85\x89}tR."s,
      start + storage('9') + ".",      // no such record
      start + storage('0', 17) + ".",  // larger than its record
      start + "ctorch\nfloat32\n)R.",
      start + "K\x01)R.",
      start + "cbuiltins\nint\nK\x05\x85R.",
      start + "c_codecs\nencode\nX\x02\0\0\0abX\x04\0\0\0utf8\x86R."s,
      start + "}}s.",
      "(.",
      ".",
      "",
  };
  for (size_t i = 0; i < hostile.size(); ++i) {
    EXPECT_HAS(refused(with_pickle(hostile[i])), "x.pt") << i;
    // A name alone is kept.
    if (hostile[i].find("os.system") != std::string::npos) continue;
    EXPECT_HAS(refused(with_pickle(hostile[i]), Objects::Kept), "x.pt") << i;
  }
  EXPECT_EQ(refused(with_pickle(start + "ccollections\nOrderedDict\n)R}b.\x80")),
            "");  // what is behind the end is not read
}

TEST(PtFile, MemoryIsBounded) {
  const std::string start = "\x80\x02"s, many = repeated("K\x01", 1'000'000);
  // A list of a million, copied over and over; so many values that they are no checkpoint.
  const std::string copies = repeated("cbuiltins\nlist\nh\0\x85R0"s, 1000);
  EXPECT_HAS(refused(with_pickle(start + "](" + many + "eq\0"s + copies + ".")), "more than 33554432 values");
  EXPECT_HAS(refused(with_pickle(start + std::string(40'000'000, '(') + ".")), "more than 33554432 values");
}

TEST(PtFile, NestsAreReadAndNotWritten) {
  const std::string deep = "\x80\x02" + std::string(1'000'000, ']') + std::string(999'999, 'a') + ".";
  const PtFile file(with_pickle(deep), "x.pt", Objects::Refused);  // and its end does not call itself a million times
  EXPECT_HAS(testing::error_of<Unfit>([&] { pt_bytes(file.value(), {}); }), "nested too deep");
  // What holds itself comes back so; lists that are shared stay small.
  const PtFile circle(with_pickle("\x80\x02]q\0h\0a."s), "x.pt", Objects::Refused);
  const PtFile same(pt_bytes(circle.value(), {}), "y.pt", Objects::Refused);
  EXPECT_EQ(same.value().items, same.value().items->front().items);
  const PtFile laughs(with_pickle("\x80\x02]"s + repeated("q\0"s + "0]h\0ah\0a"s, 100) + "."), "x.pt",
                      Objects::Refused);
  EXPECT_LT(pt_bytes(laughs.value(), {}).size(), 10'000U);
}

TEST(PtFile, ObjectsAreInertRefusedOrKept) {
  const std::string start = "\x80\x02"s, path = "cpathlib\nPosixPath\n(X\x01\0\0\0atR."s;
  EXPECT_HAS(refused(with_pickle(start + path)), "holds an object of 'pathlib.PosixPath', which is none of those");
  const PtFile kept(with_pickle(start + path), "x.pt", Objects::Kept);
  EXPECT_HAS(pt_bytes(kept.value(), {Objects::Kept}), "cpathlib\nPosixPath\n");
  const PtFile inert(pt_bytes(kept.value(), {Objects::Inert}), "y.pt", Objects::Refused);
  EXPECT_TRUE(at(inert.value(), "__class__").is_text("pathlib.PosixPath"));
  const PtFile scaler(
      with_pickle(start + "cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n)\x81}X\x01\0\0\0sK\x07sb."s), "x.pt",
      Objects::Refused);
  EXPECT_EQ(scaler.value().object->attribute("s")->number, 7);
  EXPECT_HAS(refused(with_pickle(start + "cos\nsystem\nX\x01\0\0\0a\x85R."s)), "os.system");
}

TEST(PtFile, OtherFilesAreRefused) {
  const std::string pickle = "\x80\x02}.";
  EXPECT_HAS(refused(archive_of({{"a/data.pkl", pickle, 8}})), "is not stored as it is");
  EXPECT_HAS(refused(archive_of({{"a/data.pkl", pickle}, {"b/data.pkl", pickle}})), "has no data.pkl");
  EXPECT_HAS(refused(archive_of({{"a/other", pickle}})), "has no data.pkl");
  EXPECT_HAS(refused(archive_of({{"a/data.pkl", pickle}, {"a/byteorder", "big"}})), "big-endian");
  EXPECT_HAS(refused(archive_of({{"a/data.pkl", pickle}, {"a/data/0", "x"}, {"a/data/0", "y"}})), "one name");
  EXPECT_HAS(refused("\x80\x02}q\x01."), "was not written by torch.save as a zip archive");
  EXPECT_HAS(refused(""), "x.pt");
  EXPECT_HAS(testing::error_of<IoError>([] { PtFile("no/such.pt", Objects::Refused, 0); }), "cannot be read");
  // One element is a whole tensor.
  const std::string repeats = kTensor + storage('0', 1) + "K\0"s + "J\xff\xff\xff\x7f\x85K\0\x85\x89}tR."s;
  const PtFile file(with_pickle(repeats), "x.pt", Objects::Refused);
  EXPECT_HAS(testing::error_of<IoError>([&] { pt_bytes(file.value(), {}); }), "repeats");
}

// A named error, or a value whose tensors are inside the file.
TEST(PtFile, MutatedFiles) {
  Values values;
  const std::string good = pt_bytes(sample(values), {});
  std::mt19937 random(7);
  int read = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string bad = good;
    for (unsigned k = random() % 4 + 1; k > 0; --k)
      bad[random() % bad.size()] = static_cast<char>(random());
    if (random() % 8 == 0) bad.resize(random() % bad.size());
    const std::string error = testing::error_of<std::exception>([&] {
      const PtFile file(bad, "x.pt", i % 2 == 0 ? Objects::Refused : Objects::Kept);
      testing::error_of<Unfit>([&] { pt_bytes(file.value(), {Objects::Kept}); });
      ++read;
    });
    if (error.empty()) continue;
    EXPECT_HAS(error, "x.pt");
  }
  EXPECT_GT(read, 30);
  EXPECT_LT(read, 2970);
}

}  // namespace
}  // namespace tessera::checkpoint::deepspeed
