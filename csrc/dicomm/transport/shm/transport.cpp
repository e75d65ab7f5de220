#include "core/transport.h"

#include "core/host.h"
#include "transport/shm/shm.h"

namespace dicomm {

namespace {

class ShmDialler final : public Dialler {
 public:
  std::unique_ptr<Stream> connect(Fd socket, Dialled dialled, const Deadline&) override {
    return shm_stream(std::move(socket), std::move(dialled.descriptor), false);
  }
};

// The acceptor makes the segment: it travels to the dialler with the verdict.
class ShmAcceptor final : public Acceptor {
 public:
  const Fd& descriptor() const override { return segment_; }
  std::unique_ptr<Stream> stream(Fd socket) override {
    return shm_stream(std::move(socket), std::move(segment_), true);
  }

 private:
  Fd segment_ = make_segment();
};

class ShmTransport final : public Transport {
 public:
  explicit ShmTransport(int rank) : rank_(rank) {}

  Fd listen() override {
    LocalListener listener = local_listen(rank_);
    name_ = std::move(listener.name);
    return std::move(listener.fd);
  }
  std::string contact_words() const override { return name_; }
  std::string obstacle(const std::string& host, const std::string&) const override {
    return host == host_ ? "" : " is on another host (or in another container)";
  }
  Fd call(const std::string& name, const Deadline& deadline) const override {
    return local_connect(name, deadline);
  }
  std::unique_ptr<Dialler> dial(const std::string&) override {
    return std::make_unique<ShmDialler>();
  }
  std::unique_ptr<Acceptor> accept(const Caller&) override {
    return std::make_unique<ShmAcceptor>();
  }

 private:
  const int rank_;
  const std::string host_ = host_id();
  std::string name_;  // of the listening socket
};

class ShmFactory final : public TransportFactory {
 public:
  const char* name() const override { return "shm"; }
  int preference() const override { return 0; }
  bool understands(const std::string&) const override { return true; }
  std::unique_ptr<Transport> open(const Options& options) const override {
    return std::make_unique<ShmTransport>(options.rank);
  }
};

}  // namespace

const TransportFactory& shm_transport() {
  static const ShmFactory factory;
  return factory;
}

}  // namespace dicomm
