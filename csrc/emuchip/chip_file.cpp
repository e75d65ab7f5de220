#include "chip_file.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <optional>
#include <sstream>
#include <type_traits>
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

// Takes the values out of a table one by one, so that what is left over is unknown. What is wrong
// is collected, and told all at once by `finish`; until then, a value means nothing.
class Reader {
 public:
  Reader(std::string path, TomlTable values) : path_(std::move(path)), values_(std::move(values)) {}

  std::string text(const std::string& key, size_t longest) {
    return take<std::string>(
        key, "a string of 1 to " + std::to_string(longest) + " characters",
        [&](const std::string& text) { return !text.empty() && text.size() <= longest; });
  }

  bool flag(const std::string& key) {
    return take<bool>(key, "true or false", [](bool) { return true; });
  }

  int64_t count(const std::string& key) {
    return take<int64_t>(key, "an integer of at least 1", [](int64_t n) { return n >= 1; });
  }

  int64_t parts(const std::string& key) {
    return take<int64_t>(key, "an integer from 1 to 4096",
                         [](int64_t n) { return n >= 1 && n <= 4096; });
  }

  double positive(const std::string& key) {
    return take<double>(key, "a number above 0", [](double x) { return x > 0 && !std::isinf(x); });
  }

  double seconds(const std::string& key) {
    return take<double>(key, "seconds from 0 to 1", [](double x) { return x >= 0 && x <= 1; });
  }

  double share(const std::string& key) {
    return take<double>(key, "a number above 0, at most 1",
                        [](double x) { return x > 0 && x <= 1; });
  }

  // The place of the value in `choices`.
  size_t choice(const std::string& key, const std::vector<std::string>& choices) {
    std::string expected = "one of";
    for (const std::string& name : choices) expected += " \"" + name + "\"";
    const auto place = [&](const std::string& text) {
      return std::find(choices.begin(), choices.end(), text);
    };
    const auto found = place(take<std::string>(
        key, expected, [&](const std::string& text) { return place(text) != choices.end(); }));
    return found == choices.end() ? 0 : found - choices.begin();
  }

  bool has(const std::string& key) const { return values_.contains(key); }

  bool has_table(const std::string& name) const {
    const auto first = values_.lower_bound(name + ".");
    return first != values_.end() && first->first.starts_with(name + ".");
  }

  // Throws ChipFileError where anything was wrong, or is left over.
  void finish() {
    for (const auto& [key, value] : values_) problem(key, "unknown key");
    if (!problems_.empty()) throw ChipFileError(path_ + ": " + problems_);
  }

 private:
  template <typename T, typename Fits>
  T take(const std::string& key, const std::string& expected, Fits fits) {
    const auto found = values_.find(key);
    if (found == values_.end()) {
      problem(key, "missing, expected " + expected);
      return T();
    }
    const TomlValue value = found->second;
    values_.erase(found);
    const std::optional<T> typed = as<T>(value);
    if (typed && fits(*typed)) return *typed;
    problem(key, "expected " + expected + ", got " + shown(value));
    return T();
  }

  template <typename T>
  static std::optional<T> as(const TomlValue& value) {
    if (const auto* same = std::get_if<T>(&value)) return *same;
    if constexpr (std::is_same_v<T, double>) {
      if (const auto* integer = std::get_if<int64_t>(&value)) return static_cast<double>(*integer);
    }
    return std::nullopt;
  }

  void problem(const std::string& key, const std::string& what) {
    problems_ += (problems_.empty() ? "" : "; ") + key + ": " + what;
  }

  std::string path_;
  TomlTable values_;
  std::string problems_;
};

TomlTable read_values(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (!file || !(text << file.rdbuf()))
    throw ChipFileError(path + ": cannot be read as a chip file");
  std::string content = text.str();
  if (content.starts_with("\xef\xbb\xbf")) content.erase(0, 3);  // a UTF-8 byte-order mark
  try {
    return parse_toml(content);
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
    for (const char* name : {"half_side", "causal_attention_efficiency",
                             "causal_attention_backward_efficiency", "bandwidth_share"}) {
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
  numerics.split_k = reader.parts("numerics.split_k");
  numerics.flush_to_zero = reader.flag("numerics.flush_to_zero");
  numerics.fast_exp = reader.flag("numerics.fast_exp");
  check_cluster_keys(reader);
  check_measured_keys(reader);
  reader.finish();
  return chip;
}

}  // namespace emuchip
