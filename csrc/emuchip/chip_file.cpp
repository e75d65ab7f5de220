#include "chip_file.h"

#include <cmath>
#include <fstream>
#include <sstream>
#include <vector>

#include "toml.h"

namespace emuchip {
namespace {

std::string shown(const TomlValue& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return '"' + *text + '"';
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  std::ostringstream out;
  if (const auto* integer = std::get_if<int64_t>(&value)) out << *integer;
  if (const auto* real = std::get_if<double>(&value)) out << *real;
  return out.str();
}

// Takes the values out of a table one by one, so that what is left over is unknown.
class Reader {
 public:
  Reader(std::string path, TomlTable values) : path_(std::move(path)), values_(std::move(values)) {}

  std::string text(const std::string& key, size_t longest) {
    const TomlValue value = take(key, "a string");
    const auto* text = std::get_if<std::string>(&value);
    if (!text || text->empty() || text->size() > longest) {
      wrong(key, "a string of 1 to " + std::to_string(longest) + " characters", value);
    }
    return *text;
  }

  bool flag(const std::string& key) {
    const TomlValue value = take(key, "true or false");
    const auto* flag = std::get_if<bool>(&value);
    if (!flag) wrong(key, "true or false", value);
    return *flag;
  }

  int64_t count(const std::string& key) {
    const TomlValue value = take(key, "an integer of at least 1");
    const auto* integer = std::get_if<int64_t>(&value);
    if (!integer || *integer < 1) wrong(key, "an integer of at least 1", value);
    return *integer;
  }

  double positive(const std::string& key) {
    const TomlValue value = take(key, "a number above 0");
    const double number = as_double(value);
    if (!(number > 0) || std::isinf(number)) wrong(key, "a number above 0", value);
    return number;
  }

  double seconds(const std::string& key) {
    const TomlValue value = take(key, "seconds from 0 to 1");
    const double number = as_double(value);
    if (!(number >= 0 && number <= 1)) wrong(key, "seconds from 0 to 1", value);
    return number;
  }

  double share(const std::string& key) {
    const TomlValue value = take(key, "a number above 0, at most 1");
    const double number = as_double(value);
    if (!(number > 0 && number <= 1)) wrong(key, "a number above 0, at most 1", value);
    return number;
  }

  // The place of the value in `choices`.
  size_t choice(const std::string& key, const std::vector<std::string>& choices) {
    std::string expected = "one of";
    for (const std::string& name : choices) expected += " \"" + name + "\"";
    const TomlValue value = take(key, expected);
    for (size_t i = 0; i < choices.size(); ++i) {
      const auto* text = std::get_if<std::string>(&value);
      if (text && *text == choices[i]) return i;
    }
    wrong(key, expected, value);
  }

  bool has(const std::string& key) const { return values_.contains(key); }

  bool has_table(const std::string& name) const {
    const auto first = values_.lower_bound(name + ".");
    return first != values_.end() && first->first.starts_with(name + ".");
  }

  void expect_nothing_left() const {
    if (!values_.empty()) {
      throw ChipFileError(path_ + ": " + values_.begin()->first + ": unknown key");
    }
  }

 private:
  TomlValue take(const std::string& key, const std::string& expected) {
    const auto found = values_.find(key);
    if (found == values_.end()) {
      throw ChipFileError(path_ + ": " + key + ": missing, expected " + expected);
    }
    TomlValue value = found->second;
    values_.erase(found);
    return value;
  }

  static double as_double(const TomlValue& value) {
    if (const auto* integer = std::get_if<int64_t>(&value)) return static_cast<double>(*integer);
    if (const auto* real = std::get_if<double>(&value)) return *real;
    return std::nan("");
  }

  [[noreturn]] void wrong(const std::string& key, const std::string& expected,
                          const TomlValue& value) const {
    throw ChipFileError(path_ + ": " + key + ": expected " + expected + ", got " + shown(value));
  }

  std::string path_;
  TomlTable values_;
};

TomlTable read_values(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (!file || !(text << file.rdbuf()))
    throw ChipFileError(path + ": cannot be read as a chip file");
  try {
    return parse_toml(text.str());
  } catch (const TomlError& error) {
    throw ChipFileError(path + ": " + error.what());
  }
}

// Keys that plans and transports use and this library does not; checked all the same, so that
// the file means the same to every reader.
void check_cluster_keys(Reader& reader) {
  reader.count("chips_per_node");
  reader.count("tp_limit");
  reader.positive("links.intra_node_bytes_per_s");
  reader.seconds("links.intra_node_latency_s");
  reader.count("links.nics_per_node");
  reader.positive("links.nic_bytes_per_s");
  reader.seconds("links.nic_latency_s");
}

// What a real chip's kernels and collectives were measured to reach: plans use it, where it is
// said; an emulated chip is paced by its roofline.
void check_measured_keys(Reader& reader) {
  if (reader.has_table("kernels")) {
    for (const char* name : {"half_side", "attention_efficiency", "attention_backward_efficiency",
                             "bandwidth_share"}) {
      reader.positive(std::string("kernels.") + name);
    }
    reader.seconds("kernels.host_s");
    reader.seconds("kernels.micro_batch_s");
    for (const char* dtype : {"float32", "float16", "bfloat16"}) {
      const std::string own = std::string("kernels.") + dtype;
      if (reader.has(own + "_efficiency")) reader.share(own + "_efficiency");
      if (reader.has(own + "_half_side")) reader.positive(own + "_half_side");
    }
  }
  if (reader.has_table("collectives")) {
    reader.seconds("collectives.latency_s");
    reader.positive("collectives.bytes_per_s");
    for (const char* name : {"collectives.pair_bytes_per_s", "collectives.four_bytes_per_s"}) {
      if (reader.has(name)) reader.positive(name);
    }
  }
}

}  // namespace

double ChipFile::peak_flops(ditorch_dtype dtype) const {
  switch (dtype) {
    case DITORCH_FLOAT32:
      return float32_flops;
    case DITORCH_FLOAT64:
      return float64_flops;
    case DITORCH_FLOAT16:
      return float16_flops;
    case DITORCH_BFLOAT16:
      return bfloat16_flops;
    default:
      return other_flops;
  }
}

ChipFile read_chip_file(const std::string& path) {
  Reader reader(path, read_values(path));
  const size_t longest = sizeof(ditorch_device_properties::vendor) - 1;
  ChipFile chip;
  chip.vendor = reader.text("vendor", longest);
  chip.chip_type = reader.text("chip_type", longest);
  chip.launch_s = reader.seconds("compute.launch_s");
  chip.efficiency = reader.share("compute.efficiency");
  chip.float32_flops = reader.positive("compute.float32_flops");
  chip.float64_flops = reader.positive("compute.float64_flops");
  chip.float16_flops = reader.positive("compute.float16_flops");
  chip.bfloat16_flops = reader.positive("compute.bfloat16_flops");
  chip.other_flops = reader.positive("compute.other_flops");
  chip.capacity_bytes = reader.count("memory.capacity_bytes");
  chip.bandwidth_bytes_per_s = reader.positive("memory.bandwidth_bytes_per_s");
  chip.host_bytes_per_s = reader.positive("links.host_bytes_per_s");
  Numerics& numerics = chip.numerics;
  numerics.neutral = reader.flag("numerics.neutral");
  numerics.accumulate = static_cast<Accumulate>(
      reader.choice("numerics.accumulate", {"float32", "float64", "bfloat16"}));
  numerics.order =
      static_cast<Order>(reader.choice("numerics.order", {"sequential", "blocked", "pairwise"}));
  numerics.split_k = reader.count("numerics.split_k");
  numerics.flush_to_zero = reader.flag("numerics.flush_to_zero");
  numerics.fast_exp = reader.flag("numerics.fast_exp");
  check_cluster_keys(reader);
  check_measured_keys(reader);
  reader.expect_nothing_left();
  return chip;
}

}  // namespace emuchip
