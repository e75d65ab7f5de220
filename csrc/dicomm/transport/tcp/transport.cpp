#include "core/transport.h"

#include <charconv>

#include "core/text.h"
#include "transport/tcp/kernel_tls.h"
#include "transport/tcp/sealed_stream.h"
#include "transport/tcp/security.h"
#include "transport/tcp/tcp.h"

namespace dicomm {

namespace {

std::unique_ptr<Stream> stream_over(Fd socket, const Protection& protection, const Digest& session,
                                    bool dialled) {
  if (protection.security == Security::none) return tcp_stream(std::move(socket));
  if (protection.in_kernel) {
    encrypt_in_kernel(socket.get(), session, dialled);
    return tcp_stream(std::move(socket), "encryption by AES-128-GCM in the kernel");
  }
  return sealed_stream(
      tcp_stream(std::move(socket)),
      {session, dialled, protection.security == Security::encryption, protection.cipher});
}

// Clones of a virtual machine have one id: that the way does not leave the host must show as well.
SecurityCard peers_card(const TransportCard& card, const Fd& socket) {
  SecurityCard theirs = SecurityCard::read(card);
  if (!leads_to_this_host(socket.get())) theirs.host = {};
  return theirs;
}

class TcpDialler final : public Dialler {
 public:
  explicit TcpDialler(const SecurityCard& own) : own_(own) {}

  TransportCard card() const override { return own_.write(); }
  std::unique_ptr<Stream> connect(Fd socket, Dialled dialled, const Deadline&) override {
    const Protection agreed = agreed_protection(own_, peers_card(dialled.card, socket));
    return stream_over(std::move(socket), agreed, dialled.session, true);
  }

 private:
  const SecurityCard own_;
};

class TcpAcceptor final : public Acceptor {
 public:
  TcpAcceptor(const SecurityCard& own, const Caller& caller) : own_(own), caller_(caller) {}

  TransportCard card() const override { return own_.write(); }
  std::unique_ptr<Stream> stream(Fd socket) override {
    const Protection agreed = agreed_protection(own_, peers_card(caller_.card, socket));
    return stream_over(std::move(socket), agreed, caller_.session, false);
  }

 private:
  const SecurityCard own_;
  const Caller caller_;
};

// "10.0.0.3 4242"
struct TcpAddress {
  std::string host;
  int port = 0;  // 0: there is none in these words

  explicit TcpAddress(const std::string& words) : host(words.substr(0, words.find(' '))) {
    if (host.size() == words.size()) return;
    const char* const end = words.data() + words.size();
    int number = 0;
    const auto [stopped, error] = std::from_chars(words.data() + host.size() + 1, end, number);
    if (error == std::errc() && stopped == end && number > 0 && number < 1 << 16) port = number;
  }
};

class TcpTransport final : public Transport {
 public:
  explicit TcpTransport(std::string address) : wanted_(std::move(address)) {}

  Fd listen() override {
    TcpListener listener = tcp_listen(wanted_);
    words_ = text(listener.address, ' ', listener.port);
    return std::move(listener.fd);
  }
  std::string contact_words() const override { return words_; }
  std::string obstacle(const std::string&, const std::string&) const override { return {}; }
  Fd call(const std::string& words, const Deadline& deadline) const override {
    const TcpAddress address(words);
    return tcp_connect(address.host, address.port, deadline);
  }
  std::unique_ptr<Dialler> dial(const std::string&) override {
    return std::make_unique<TcpDialler>(own_);
  }
  std::unique_ptr<Acceptor> accept(const Caller& caller) override {
    return std::make_unique<TcpAcceptor>(own_, caller);
  }

 private:
  const std::string wanted_;  // to listen at
  const SecurityCard own_ = SecurityCard::of(wanted_security());
  std::string words_;
};

class TcpFactory final : public TransportFactory {
 public:
  const char* name() const override { return "tcp"; }
  int preference() const override { return 2; }
  bool connects_everyone() const override { return true; }
  int words() const override { return 2; }
  bool understands(const std::string& words) const override { return TcpAddress(words).port > 0; }
  std::string address(const std::string& words) const override {
    const TcpAddress address(words);
    return endpoint(address.host, std::to_string(address.port));
  }
  std::unique_ptr<Transport> open(const Options& options) const override {
    return std::make_unique<TcpTransport>(options.listen_address);
  }
};

}  // namespace

const TransportFactory& tcp_transport() {
  static const TcpFactory factory;
  return factory;
}

}  // namespace dicomm
