#include "core/contact.h"

#include <algorithm>
#include <optional>
#include <sstream>

#include "core/text.h"
#include "transport/registry.h"

namespace dicomm {

namespace {

constexpr const char* kFormat = "dicomm-contact-3";

// Those that a transport has of a contact, a space between each two; nothing where they end early.
std::optional<std::string> read_words(std::istream& stream, int count) {
  std::string words, word;
  for (int i = 0; i < count; ++i) {
    if (!(stream >> word)) return std::nullopt;
    words += (i > 0 ? " " : "") + word;
  }
  return words;
}

}  // namespace

std::string Contact::where() const {
  const auto transports = registered_transports();
  for (std::size_t i = 0; i < words.size(); ++i)
    if (std::string address = transports[i]->address(words[i]); !address.empty()) return address;
  return {};
}

std::string Contact::encode() const {
  std::string value = text(kFormat, ' ', asked, ' ', host_id);
  for (const std::string& transports_words : words) value += ' ' + transports_words;
  return value;
}

Contact Contact::decode(const std::string& value, int rank) {
  const auto transports = registered_transports();
  Contact contact;
  std::string format;
  std::istringstream stream(value);
  stream >> format >> contact.asked >> contact.host_id;
  bool understood = stream && format == kFormat && contact.asked <= transports.size();
  for (std::size_t i = 0; understood && i < transports.size(); ++i) {
    auto words = read_words(stream, transports[i]->words());
    understood = words && transports[i]->understands(*words);
    if (understood) contact.words.push_back(std::move(*words));
  }
  if (!understood)
    throw Error(text("the store's entry for rank ", rank, " is not a ", kFormat,
                     ": another version, or another program wrote it"));
  return contact;
}

std::string contact_key(const std::string& communicator_name, int rank) {
  return text("dicomm/", communicator_name, "/", rank);
}

std::size_t choose_transport(const std::vector<std::unique_ptr<Transport>>& mine, std::size_t asked,
                             const Contact& theirs, int their_rank) {
  const auto known = registered_transports();
  const auto obstacle = [&](std::size_t i) {
    return mine[i]->obstacle(theirs.host_id, theirs.words[i]);
  };
  std::vector<std::size_t> wanted;
  for (std::size_t i = 0; i < known.size(); ++i)
    if (asked == i + 1 || theirs.asked == i + 1) wanted.push_back(i);
  for (const std::size_t i : wanted)
    if (known[i]->connects_everyone()) return i;
  if (!wanted.empty()) {
    const std::size_t first = wanted.front();
    if (const std::string why = obstacle(first); !why.empty())
      throw Error(
          text("transport ", known[first]->name(), " was asked for, but rank ", their_rank, why));
    if (wanted.size() > 1)
      throw Error(text("of this rank and rank ", their_rank, " one asks for transport ",
                       known[first]->name(), ", the other for ", known[wanted[1]]->name()));
    return first;
  }
  std::vector<std::size_t> order(known.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::sort(order, {}, [&](std::size_t i) { return known[i]->preference(); });
  const auto found =
      std::ranges::find_if(order, [&](std::size_t i) { return obstacle(i).empty(); });
  if (found == order.end())
    throw Error(text("no transport connects this rank and rank ", their_rank));
  return *found;
}

}  // namespace dicomm
