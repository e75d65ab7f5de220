#include "transport/verbs/settings.h"

#include <charconv>
#include <cstdlib>

#include "core/text.h"

namespace dicomm::verbs {

namespace {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

int number(const std::string& value, const std::string& what) {
  int result = 0;
  const auto end = value.data() + value.size();
  const auto [stopped, error] = std::from_chars(value.data(), end, result);
  if (error != std::errc() || stopped != end || value.empty())
    throw Error(text(what, " '", value, "': expected a whole number"));
  return result;
}

struct Number {
  int value;
  std::string what;  // the option or the variable that says so
};

// The option's value, else the environment's.
std::optional<Number> chosen(std::optional<int> option, const char* name, const char* variable) {
  if (option) return Number{*option, name};
  const std::string value = environment(variable);
  if (value.empty()) return std::nullopt;
  return Number{number(value, variable), variable};
}

// The same, checked.
std::optional<int> within(std::optional<int> option, const char* name, const char* variable,
                          int lowest, int highest) {
  const auto given = chosen(option, name, variable);
  if (!given) return std::nullopt;
  if (given->value < lowest || given->value > highest)
    throw Error(text(given->what, " ", given->value, ": expected ", lowest, " to ", highest));
  return given->value;
}

std::optional<int> mtu(std::optional<int> option) {
  const auto given = chosen(option, "mtu_bytes", "DICOMM_MTU_BYTES");
  if (!given) return std::nullopt;
  for (const int bytes : {256, 512, 1024, 2048, 4096})
    if (given->value == bytes) return bytes;
  throw Error(text(given->what, " ", given->value, ": expected 256, 512, 1024, 2048 or 4096"));
}

Connect connect_named(const std::string& option) {
  const std::string name = option.empty() ? environment("DICOMM_CONNECT") : option;
  if (name.empty() || name == "auto") return Connect::automatic;
  if (name == "cm") return Connect::cm;
  if (name == "bootstrap") return Connect::bootstrap;
  throw Error(text(option.empty() ? "DICOMM_CONNECT" : "connect", " '", name,
                   "': expected auto, cm or bootstrap"));
}

}  // namespace

Settings settings(const Options& options) {
  const VerbsOptions& given = options.verbs;
  Settings result;
  result.nics = options.nics.empty() ? environment("DICOMM_NICS") : options.nics;
  result.gid_index = within(given.gid_index, "gid_index", "DICOMM_GID_INDEX", 0, 255);
  result.mtu_bytes = mtu(given.mtu_bytes);
  const auto set = [](int& value, std::optional<int> wanted) { value = wanted.value_or(value); };
  result.traffic_class =
      within(given.traffic_class, "traffic_class", "DICOMM_TRAFFIC_CLASS", 0, 255);
  result.hop_limit = within(given.hop_limit, "hop_limit", "DICOMM_HOP_LIMIT", 1, 255);
  set(result.timeout, within(given.timeout, "qp_timeout", "DICOMM_QP_TIMEOUT", 0, 31));
  set(result.retry_count, within(given.retry_count, "retry_count", "DICOMM_RETRY_COUNT", 0, 7));
  set(result.rnr_retry, within(given.rnr_retry, "rnr_retry", "DICOMM_RNR_RETRY", 0, 7));
  result.connect = connect_named(given.connect);
  if (const auto file = environment("DICOMM_IBVERBS_LIBRARY"); !file.empty())
    result.ibverbs_library = file;
  if (const auto file = environment("DICOMM_RDMACM_LIBRARY"); !file.empty())
    result.rdmacm_library = file;
  return result;
}

}  // namespace dicomm::verbs
