// Contact::decode() on what any program may have put into the Store.
#include "core/contact.h"

#include <cstdint>
#include <cstdlib>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  const std::string value(reinterpret_cast<const char*>(data), bytes);
  try {
    const auto contact = dicomm::Contact::decode(value, 1);
    // What is accepted says the same once more.
    if (dicomm::Contact::decode(contact.encode(), 1).encode() != contact.encode()) std::abort();
  } catch (const dicomm::Error&) {
  }
  return 0;
}
