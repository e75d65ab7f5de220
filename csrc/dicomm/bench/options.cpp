#include "bench/options.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>

#include "core/text.h"

namespace dicomm::bench {

namespace {

const std::map<std::string, Mode> kModes{{"latency", Mode::latency},
                                         {"bandwidth", Mode::bandwidth},
                                         {"bidirectional", Mode::bidirectional}};

// "8", "4K", "64M".
std::size_t size(const std::string& option, const std::string& word) {
  char* end = nullptr;
  const unsigned long long number = std::strtoull(word.c_str(), &end, 10);
  const std::string unit(end);
  const int shift = unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : 0;
  if (end == word.c_str() || word[0] == '-' || (shift == 0 && !unit.empty()) || number > 1ull << 40)
    throw Error(text(option, ": '", word, "' is not a size in bytes, like 8, 4K or 64M"));
  return number << shift;
}

double positive(const std::string& option, const std::string& word) {
  char* end = nullptr;
  const double number = std::strtod(word.c_str(), &end);
  if (*end != 0 || end == word.c_str() || !(number > 0))
    throw Error(text(option, ": '", word, "' is not a positive number"));
  return number;
}

std::string joined(const std::vector<std::string>& words, const std::string& between) {
  std::string all;
  for (const std::string& word : words) all += (all.empty() ? "" : between) + word;
  return all;
}

const std::string& choice(const std::string& option, const std::vector<std::string>& names,
                          const std::string& word) {
  if (std::find(names.begin(), names.end(), word) != names.end()) return word;
  throw Error(text(option, ": '", word, "' is not one of ", joined(names, ", ")));
}

Mode mode_named(const std::string& word) {
  std::vector<std::string> names;
  for (const auto& [name, mode] : kModes) names.push_back(name);
  return kModes.at(choice("MODE", names, word));
}

std::vector<std::size_t> sizes(const std::string& option, const std::string& words) {
  std::vector<std::size_t> result;
  std::istringstream stream(words);
  for (std::string word; std::getline(stream, word, ',');) result.push_back(size(option, word));
  return result;
}

}  // namespace

std::string usage() {
  return "usage: DICOMM_SECRET=... dicomm-perf MODE --store FOLDER --rank R [--world N]\n"
         "         [--transport " +
         joined(transport_names(), "|") +
         "] [--sizes 8,4K,64M] [--seconds S]\n"
         "         [--iterations N] [--window N] [--offset BYTES] [--listen ADDRESS]\n"
         "         [--timeout SECONDS]\n"
         "MODE: latency, bandwidth or bidirectional. Ranks 2k and 2k+1 are a pair; the even ones\n"
         "print one JSON line a size. Start one process a rank.\n";
}

Arguments parse(int count, char** words) {
  Arguments arguments;
  Options& options = arguments.communicator;
  if (count < 2) throw Error("the mode is missing");
  arguments.mode = mode_named(words[1]);
  arguments.sizes = {8, 1 << 10, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20};
  options.world_size = 2;
  options.rank = -1;
  options.timeout = std::chrono::seconds(60);
  options.name = "perf";
  for (int at = 2; at < count; at += 2) {
    const std::string option = words[at];
    if (at + 1 == count) throw Error(text(option, ": its value is missing"));
    const std::string value = words[at + 1];
    if (option == "--store") {
      arguments.store = value;
    } else if (option == "--rank") {
      options.rank = static_cast<int>(size(option, value));
    } else if (option == "--world") {
      options.world_size = static_cast<int>(size(option, value));
    } else if (option == "--transport") {
      options.transport = choice(option, transport_names(), value);
    } else if (option == "--sizes") {
      arguments.sizes = sizes(option, value);
    } else if (option == "--seconds") {
      arguments.seconds = positive(option, value);
    } else if (option == "--iterations") {
      arguments.iterations = size(option, value);
    } else if (option == "--window") {
      arguments.window = std::max<std::size_t>(1, size(option, value));
    } else if (option == "--offset") {
      arguments.offset_bytes = size(option, value) % 4096;
    } else if (option == "--listen") {
      options.listen_address = value;
    } else if (option == "--timeout") {
      options.timeout = std::chrono::milliseconds(std::llround(positive(option, value) * 1000));
    } else {
      throw Error(text("'", option, "' is not an option"));
    }
  }
  if (arguments.store.empty()) throw Error("--store: the folder where ranks meet is missing");
  if (options.world_size < 2 || options.world_size % 2 != 0)
    throw Error(text("--world: ", options.world_size, " ranks are not pairs"));
  if (options.rank < 0 || options.rank >= options.world_size)
    throw Error(text("--rank: expected 0 to ", options.world_size - 1));
  if (const char* secret = std::getenv("DICOMM_SECRET")) options.secret = secret;
  if (options.secret.empty()) throw Error("DICOMM_SECRET is not set: every rank needs the same");
  return arguments;
}

const char* name(Mode mode) {
  for (const auto& [word, value] : kModes)
    if (value == mode) return word.c_str();
  return "?";
}

}  // namespace dicomm::bench
