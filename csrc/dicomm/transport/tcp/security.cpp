#include "transport/tcp/security.h"

#include <cstdlib>
#include <cstring>
#include <utility>

#include "core/communicator.h"
#include "core/host.h"
#include "core/text.h"
#include "transport/tcp/kernel_tls.h"

namespace dicomm {

namespace {

constexpr std::pair<const char*, Security> kWords[] = {
    {"none", Security::none},
    {"integrity", Security::integrity},
    {"encryption", Security::encryption},
};

const char* word(Security security) {
  for (const auto& [word, meant] : kWords)
    if (meant == security) return word;
  return "?";
}

}  // namespace

Security wanted_security() {
  const char* value = std::getenv("DICOMM_SECURITY");
  if (!value || !*value) return Security::by_place;
  for (const auto& [word, meant] : kWords)
    if (std::strcmp(value, word) == 0) return meant;
  throw Error(text("DICOMM_SECURITY is '", value, "', expected none, integrity or encryption"));
}

SecurityCard SecurityCard::of(Security wanted) {
  SecurityCard card{0, wanted, sha256(host_id())};
  const bool kernel_may = kernel_tls_allowed();
  if (wanted != Security::none) card.fast_aes = aes_is_fast();
  if (wanted == Security::encryption) card.kernel_tls = kernel_may && kernel_tls_works();
  return card;
}

SecurityCard SecurityCard::read(const TransportCard& card) {
  SecurityCard found;
  std::memcpy(&found, card.data(), sizeof found);
  return found;
}

TransportCard SecurityCard::write() const {
  static_assert(sizeof(SecurityCard) <= sizeof(TransportCard));
  TransportCard card{};
  std::memcpy(card.data(), this, sizeof *this);
  return card;
}

Protection agreed_protection(const SecurityCard& own, const SecurityCard& peers) {
  const Security by_place = own.host == peers.host ? Security::none : Security::integrity;
  const auto meant = [&](Security wanted) {
    return wanted == Security::by_place ? by_place : wanted;
  };
  const Security ours = meant(own.wanted), theirs = meant(peers.wanted);
  if (ours != theirs)
    throw Error(text("DICOMM_SECURITY asks for ", word(theirs), " there and for ", word(ours),
                     " here; expected the same on every rank"));
  const bool aes = own.fast_aes && peers.fast_aes;
  const bool kernels = own.kernel_tls && peers.kernel_tls;
  return {ours, aes ? Cipher::aes_128_gcm : Cipher::chacha20_poly1305,
          ours == Security::encryption && aes && kernels};
}

StreamEnd tampered() {
  return {"what arrived is not what it sent: somebody on the way changed it", false};
}

}  // namespace dicomm
