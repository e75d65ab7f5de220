#include "core/contact.h"

#include <sstream>

#include "core/text.h"
#include "transport/verbs/endpoint.h"

namespace dicomm {

namespace {

constexpr const char* kFormat = "dicomm-contact-3";

}  // namespace

std::string Contact::where() const { return endpoint(tcp_address, std::to_string(tcp_port)); }

std::string Contact::encode() const {
  return text(kFormat, ' ', static_cast<int>(transport), ' ', host_id, ' ', local_name, ' ',
              tcp_address, ' ', tcp_port, ' ', verbs::encode(rails));
}

Contact Contact::decode(const std::string& value, int rank) {
  Contact contact;
  std::string format;
  std::string rails;
  int transport = -1;
  std::istringstream stream(value);
  stream >> format >> transport >> contact.host_id >> contact.local_name >> contact.tcp_address >>
      contact.tcp_port >> rails;
  if (!stream || format != kFormat || transport < 0 ||
      transport > static_cast<int>(Transport::verbs) || contact.tcp_port < 1 ||
      contact.tcp_port > 65535)
    throw Error(text("the store's entry for rank ", rank, " is not a ", kFormat,
                     ": another version, or another program wrote it"));
  contact.transport = static_cast<Transport>(transport);
  contact.rails = verbs::decode_rails(rails);
  return contact;
}

std::string contact_key(const std::string& communicator_name, int rank) {
  return text("dicomm/", communicator_name, "/", rank);
}

Transport choose_transport(const Contact& mine, const Contact& theirs, int their_rank) {
  const auto asked = [&](Transport transport) {
    return mine.transport == transport || theirs.transport == transport;
  };
  const bool same_host = mine.host_id == theirs.host_id;
  const bool rails_meet = verbs::reachable(mine.rails, theirs.rails);
  if (asked(Transport::tcp)) return Transport::tcp;
  if (asked(Transport::shm) && !same_host)
    throw Error(text("transport shm was asked for, but rank ", their_rank,
                     " is on another host (or in another container)"));
  if (asked(Transport::verbs) && asked(Transport::shm))
    throw Error(text("of this rank and rank ", their_rank,
                     " one asks for transport shm, the other for verbs"));
  if (asked(Transport::verbs) && !rails_meet)
    throw Error(text("transport verbs was asked for, but rank ", their_rank,
                     theirs.rails.empty() ? " has no RDMA device"
                                          : "'s RDMA devices and this rank's do not reach each "
                                            "other (InfiniBand and Ethernet, RoCE v1 and v2, IPv4 "
                                            "and IPv6)"));
  if (asked(Transport::verbs)) return Transport::verbs;
  if (same_host) return Transport::shm;
  return rails_meet ? Transport::verbs : Transport::tcp;
}

}  // namespace dicomm
