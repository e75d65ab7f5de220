#include "transport/tcp/aead.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "core/clock.h"
#include "core/communicator.h"
#include "core/stream.h"
#include "core/text.h"

namespace dicomm {

namespace {

// As in openssl/evp.h, of every version since 1.1.
constexpr int kGetTag = 0x10, kSetTag = 0x11;

struct LibCrypto {
  void* (*aes_128_gcm)();
  void* (*chacha20_poly1305)();
  void* (*new_context)();
  void (*free_context)(void*);
  int (*init)(void* context, const void* cipher, void* engine, const std::uint8_t* key,
              const std::uint8_t* nonce, int encrypt);
  int (*update)(void* context, std::uint8_t* to, int* written, const std::uint8_t* from, int bytes);
  int (*final)(void* context, std::uint8_t* to, int* written);
  int (*control)(void* context, int what, int bytes, void* argument);
};

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (!function) throw Error(text("OpenSSL's libcrypto has no ", name));
}

LibCrypto load() {
  void* library = nullptr;
  for (const char* name : {"libcrypto.so.3", "libcrypto.so.1.1"})
    if (!library) library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!library)
    throw Error(
        "messages between hosts cannot be protected: OpenSSL's libcrypto.so.3 is not here; install "
        "it, or set DICOMM_SECURITY=none on every rank");
  LibCrypto found{};
  find(library, "EVP_aes_128_gcm", found.aes_128_gcm);
  find(library, "EVP_chacha20_poly1305", found.chacha20_poly1305);
  find(library, "EVP_CIPHER_CTX_new", found.new_context);
  find(library, "EVP_CIPHER_CTX_free", found.free_context);
  find(library, "EVP_CipherInit_ex", found.init);
  find(library, "EVP_CipherUpdate", found.update);
  find(library, "EVP_CipherFinal_ex", found.final);
  find(library, "EVP_CIPHER_CTX_ctrl", found.control);
  return found;
}

const LibCrypto& crypto() {
  static const LibCrypto loaded = load();
  return loaded;
}

void expect(int result, const char* what) {
  if (result != 1) throw StreamEnd{text("OpenSSL's libcrypto failed to ", what), false};
}

// How long the cipher takes for a record, at best.
Clock::duration measured(Cipher cipher) {
  constexpr int kRecords = 4;
  std::vector<std::byte> record(16 << 10);
  Aead aead(cipher, Digest{}, Aead::Use::seal);
  auto best = Clock::duration::max();
  for (int i = 0; i < kRecords; ++i) {
    const auto begun = Clock::now();
    aead.begin();
    aead.convert(record.data(), record.size(), record.data());
    aead.tag();
    best = std::min(best, Clock::now() - begun);
  }
  return best;
}

}  // namespace

const char* name_of(Cipher cipher) {
  return cipher == Cipher::aes_128_gcm ? "AES-128-GCM" : "ChaCha20-Poly1305";
}

bool aes_is_fast() {
  static const bool fast = [] {
    constexpr auto kMuch = 2;  // what is nearly equal would be decided by noise
    try {
      return measured(Cipher::aes_128_gcm) < kMuch * measured(Cipher::chacha20_poly1305);
    } catch (...) {  // who needs a cipher that is missing will be told
      return true;
    }
  }();
  return fast;
}

void Aead::Free::operator()(void* context) const { crypto().free_context(context); }

Aead::Aead(Cipher cipher, const Digest& key, Use use)
    : context_(crypto().new_context()), use_(use) {
  void* const chosen =
      cipher == Cipher::aes_128_gcm ? crypto().aes_128_gcm() : crypto().chacha20_poly1305();
  if (!context_ ||
      crypto().init(context_.get(), chosen, nullptr, key.data(), nullptr, use == Use::seal) != 1)
    throw Error(text("OpenSSL's libcrypto failed to take a key of ", name_of(cipher)));
}

void Aead::begin() {
  std::uint8_t nonce[12] = {};
  std::memcpy(nonce, &records_, sizeof records_);
  ++records_;
  expect(crypto().init(context_.get(), nullptr, nullptr, nullptr, nonce, use_ == Use::seal),
         "begin a record");
}

void Aead::cover(const void* data, std::size_t bytes) {
  if (bytes > 0) convert(data, bytes, nullptr);
}

void Aead::convert(const void* from, std::size_t bytes, void* to) {
  int written = 0;
  expect(crypto().update(context_.get(), static_cast<std::uint8_t*>(to), &written,
                         static_cast<const std::uint8_t*>(from), static_cast<int>(bytes)),
         "convert a record");
}

Tag Aead::tag() {
  Tag tag{};
  int written = 0;
  std::uint8_t nothing[16];
  expect(crypto().final(context_.get(), nothing, &written), "end a record");
  expect(crypto().control(context_.get(), kGetTag, tag.size(), tag.data()), "give a tag");
  return tag;
}

bool Aead::genuine(const Tag& tag) {
  Tag expected = tag;
  int written = 0;
  std::uint8_t nothing[16];
  expect(crypto().control(context_.get(), kSetTag, expected.size(), expected.data()), "take a tag");
  return crypto().final(context_.get(), nothing, &written) == 1;
}

}  // namespace dicomm
