// How connections come to be.
//
// Both sides of a pair may dial. Where they do at once, the lower rank turns the other's call
// down ("crossed") and its own counts.
#include <algorithm>

#include "core/clock.h"
#include "core/connection_manager.h"
#include "core/host.h"
#include "core/sealed_store.h"
#include "core/text.h"
#include "transport/registry.h"

namespace dicomm {

namespace {

constexpr std::chrono::seconds kDialTimeout{30};
// How long the store is asked for a contact without looking at what else happened, and how long it
// is left alone then: a peer that starts late costs few requests, of however many ranks.
constexpr std::chrono::milliseconds kStoreTurn{200};
// A crowd at the peer's door may cost a call; it is made again, each time after a longer pause.
constexpr std::chrono::milliseconds kFirstPause{5};
constexpr std::chrono::milliseconds kLongestPause{640};

}  // namespace

void ConnectionManager::open() {
  poller_.watch(lobby_.fd(), Poller::Source::lobby);
  open_transports();
  store_->set(contact_key(options_.name, me_.rank), contact_.encode());
}

// Each listens, too, where it has a listener of its own.
void ConnectionManager::open_transports() {
  contact_.host_id = host_id();
  if (options_.transport != kAnyTransport) contact_.asked = transport_index(options_.transport) + 1;
  for (const TransportFactory* factory : registered_transports()) {
    transports_.push_back(factory->open(options_));
    doors_.push_back(transport_index(factory->door()));
    Transport& transport = *transports_.back();
    const Fd& listener = listeners_.emplace_back(transport.listen());
    if (listener) lobby_.open(listener.get(), transports_.size() - 1);
    contact_.words.push_back(transport.contact_words());
  }
}

void ConnectionManager::need(int rank) {
  Peer& peer = peers_[rank];
  if (peer.connection || peer.dialling) return;
  start_dialler([this, rank] { dial(rank); });
  peer.dialling = true;
}

// Throws Error where there is no thread left: nothing has begun then, and the next request tries.
void ConnectionManager::start_dialler(std::function<void()> body) {
  std::list<std::thread> starting(1);
  const auto self = starting.begin();
  try {
    *self = std::thread([this, self, body = std::move(body)] {
      body();
      dialler_ended(self);
    });
  } catch (const std::system_error& error) {
    throw Error(text("no thread left to connect with: ", error.what()));
  }
  diallers_.splice(diallers_.end(), starting);  // under the mutex, as the thread's own end is
}

// A thread keeps its stack until it is joined: each joins the one that ended before it.
void ConnectionManager::dialler_ended(std::list<std::thread>::iterator self) {
  std::list<std::thread> before;
  {
    Lock lock(guard_.mutex);
    before.swap(ended_dialler_);
    ended_dialler_.splice(ended_dialler_.end(), diallers_, self);
    no_dialler_left_.notify_all();
  }
  for (std::thread& dialler : before) dialler.join();
}

// On a thread of its own, so that one slow peer delays no other.
void ConnectionManager::dial(int rank) {
  try {
    auto contact = find_contact(rank);
    if (!contact) return;
    try {
      dial(rank, *contact);
    } catch (const NotThisHost&) {
      contact->host_id.clear();  // which it claims only
      dial(rank, *contact);
    }
  } catch (const std::exception& error) {
    unreachable(rank, error.what());
  }
}

void ConnectionManager::dial(int rank, const Contact& contact) {
  const Deadline deadline{Clock::now() + kDialTimeout, closing_};
  const std::size_t transport = choose_transport(transports_, contact_.asked, contact, rank);
  const auto dialler = transports_[transport]->dial(contact.words[transport]);
  Fd socket;
  Dialled dialled = call(contact, transport, rank, deadline, dialler->card(), socket);
  if (dialled.verdict == Verdict::crossed) return await_crossed_call(rank, socket);
  const PeerIdentity peer = dialled.peer;
  auto stream = dialler->connect(std::move(socket), std::move(dialled), deadline);
  Lock lock(guard_.mutex);
  if (closing_ || peers_[rank].connection) return;
  connected(rank, peer, std::move(stream));
}

Dialled ConnectionManager::call(const Contact& contact, std::size_t transport, int rank,
                                const Deadline& deadline, const TransportCard& card, Fd& socket) {
  for (auto pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    try {
      const std::size_t door = doors_[transport];
      socket = transports_[door]->call(contact.words[door], deadline);
      return dial_handshake(socket, me_, rank, deadline, card);
    } catch (const TurnedAway& why) {
      {
        Lock lock(guard_.mutex);
        peers_[rank].turned_away = why.what();
      }
      // Ranks that were turned away together do not come back together.
      const auto own_pause = pause + pause * (me_.rank % 16) / 16;
      if (!deadline.rest(own_pause))
        throw Error(text("turned away for ", seconds(kDialTimeout), ", the last time because ",
                         why.what()));
    }
  }
}

// The peer's own call is on its way. It keeps ours open until then, so that its death shows.
void ConnectionManager::await_crossed_call(int rank, const Fd& socket) {
  const Deadline deadline{Time::max(), closing_};
  if (deadline.wait(socket.get(), POLLIN)) unreachable(rank, "it hung up before it was connected");
}

void ConnectionManager::unreachable(int rank, const std::string& reason) {
  Lock lock(guard_.mutex);
  Peer& peer = peers_[rank];
  if (closing_ || peer.connection) return;
  peer.gone =
      text("rank ", rank, " died or left before it was connected: ", reason, addresses(rank));
  events_.peer_failed(rank);
}

// To be told where a connection failed: a wrong one is the usual reason.
std::string ConnectionManager::addresses(int rank) const {
  const std::string& theirs = peers_[rank].address;
  const char* unknown =
      peers_[rank].unsealed
          ? "has published no address with this job's secret: the secrets differ, "
            "or a stranger wrote one"
          : "has published no address";
  return text(" (it ", theirs.empty() ? unknown : "listens at " + theirs, ", this rank at ",
              contact_.where(), ")");
}

// Nothing: closing, or connected from the other side meanwhile, or never published in time.
std::optional<Contact> ConnectionManager::find_contact(int rank) {
  const Deadline deadline{deadline_after(options_.timeout), closing_};
  std::chrono::milliseconds turn = kStoreTurn;
  do {
    try {
      auto contact = Contact::decode(store_->get(contact_key(options_.name, rank), turn), rank);
      Lock lock(guard_.mutex);
      peers_[rank].address = contact.where();
      return contact;
    } catch (const Unsealed&) {
      Lock lock(guard_.mutex);
      peers_[rank].unsealed = true;
    } catch (const TimeoutError&) {
    }
    turn = {};  // one look at a time from here on
    Lock lock(guard_.mutex);
    if (closing_ || peers_[rank].connection) return std::nullopt;
  } while (deadline.rest(kStoreTurn));
  Lock lock(guard_.mutex);
  peers_[rank].dialling = false;  // the next request tries again
  return std::nullopt;
}

void ConnectionManager::validate(PendingConnection& pending) {
  Verdict verdict = pending.verdict();
  const int rank = pending.peer().rank;
  if (closing_) return;
  if (verdict == Verdict::welcome) {
    if (peers_[rank].connection)
      verdict = Verdict::duplicate;
    else if (peers_[rank].dialling && me_.rank < rank)
      verdict = Verdict::crossed;
  }
  try {
    auto acceptor =
        verdict == Verdict::welcome ? transport_of(pending).accept(pending.caller()) : nullptr;
    const Fd none;
    if (!pending.answer(me_, verdict, acceptor ? acceptor->descriptor() : none,
                        acceptor ? acceptor->card() : TransportCard{}))
      return;
    if (verdict == Verdict::crossed) peers_[rank].crossed = pending.release();
    if (!acceptor) return;
    const PeerIdentity peer = pending.peer();
    Fd socket = pending.release();
    if (!acceptor->finished())
      return finish_accepting(peer, std::move(acceptor), std::move(socket));
    connected(rank, peer, acceptor->stream(std::move(socket)));
  } catch (const std::exception& error) {
    lobby_.last_refusal = error.what();
    pending.tell_failure(me_, error.what());
  }
}

// That of the door, or one whose callers come there and that knows the card for its own.
Transport& ConnectionManager::transport_of(const PendingConnection& pending) {
  for (std::size_t i = 0; i < transports_.size(); ++i)
    if (i != pending.door() && doors_[i] == pending.door() && transports_[i]->wants(pending.card()))
      return *transports_[i];
  return *transports_[pending.door()];
}

// On a thread of its own, as dialling: the caller is a rank, but it may be slow.
void ConnectionManager::finish_accepting(const PeerIdentity& peer, std::unique_ptr<Acceptor> begun,
                                         Fd caller) {
  const bool nobody_dialled = !peers_[peer.rank].dialling;
  const std::shared_ptr<Acceptor> acceptor = std::move(begun);
  auto socket = std::make_shared<Fd>(std::move(caller));
  start_dialler([this, peer, acceptor, socket, nobody_dialled] {
    std::string failure;
    try {
      acceptor->finish(*socket, Deadline{Clock::now() + kHandshakeTimeout, closing_});
      // Once the caller goes on, it hangs up on a crossing call of ours.
      Lock lock(guard_.mutex);
      if (closing_ || peers_[peer.rank].connection) return;
      return connected(peer.rank, peer, acceptor->stream(std::move(*socket)));
    } catch (const std::exception& error) {
      failure = error.what();
    }
    Lock lock(guard_.mutex);
    lobby_.last_refusal = failure;
    if (nobody_dialled) peers_[peer.rank].dialling = false;  // the next request tries
  });
  peers_[peer.rank].dialling = true;
}

}  // namespace dicomm
