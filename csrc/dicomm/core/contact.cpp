#include "core/contact.h"

#include <sstream>

#include "core/text.h"

namespace dicomm {

namespace {

constexpr const char* kFormat = "dicomm-contact-1";

}  // namespace

std::string Contact::encode() const {
  return text(kFormat, ' ', static_cast<int>(transport), ' ', host_id, ' ', local_name, ' ',
              tcp_address, ' ', tcp_port);
}

Contact Contact::decode(const std::string& value, int rank) {
  Contact contact;
  std::string format;
  int transport = -1;
  std::istringstream stream(value);
  stream >> format >> transport >> contact.host_id >> contact.local_name >> contact.tcp_address >>
      contact.tcp_port;
  if (!stream || format != kFormat || transport < 0 || transport > 2 || contact.tcp_port < 1 ||
      contact.tcp_port > 65535)
    throw Error(text("the store's entry for rank ", rank, " is not a ", kFormat,
                     ": another version, or another program wrote it"));
  contact.transport = static_cast<Transport>(transport);
  return contact;
}

std::string contact_key(const std::string& communicator_name, int rank) {
  return text("dicomm/", communicator_name, "/", rank);
}

Transport choose_transport(const Contact& mine, const Contact& theirs, int their_rank) {
  const bool same_host = mine.host_id == theirs.host_id;
  if (mine.transport == Transport::tcp || theirs.transport == Transport::tcp) return Transport::tcp;
  if (same_host) return Transport::shm;
  if (mine.transport == Transport::shm || theirs.transport == Transport::shm)
    throw Error(text("transport shm was asked for, but rank ", their_rank,
                     " is on another host (or in another container)"));
  return Transport::tcp;
}

}  // namespace dicomm
