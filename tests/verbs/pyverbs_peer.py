"""A peer that shares no code with dicomm: pyverbs, a socket and hashlib, by what is written in
csrc/dicomm: core/handshake.h, core/frame.h and transport/verbs/wire.h.

Runs under the system's Python, which has Debian's python3-pyverbs:

    pyverbs_peer.py SCENARIO FOLDER SECRET

It is rank 0 of 2 on device rxe0, calls rank 1 (of two crossing calls the lower rank's counts), and
prints what it saw as one line of JSON.
"""

import contextlib
import ctypes
import hashlib
import hmac
import json
import os
import signal
import socket
import struct
import sys
import time
import urllib.parse
from pathlib import Path

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.enums import (
    IBV_ACCESS_LOCAL_WRITE,
    IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_WRITE,
    IBV_MTU_1024,
    IBV_QPT_RC,
    IBV_SEND_SIGNALED,
    IBV_WC_RECV,
    IBV_WC_SUCCESS,
    IBV_WR_RDMA_READ,
    IBV_WR_SEND,
)
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

DEVICE, PORT, GID_INDEX = "rxe0", 1, 1
DEADLINE_S = 60.0
FOR_EVER = 7  # of rnr_retry
REFUSALS = Path(f"/sys/class/infiniband/{DEVICE}/ports/{PORT}/hw_counters/rcvd_rnr_err")

HANDSHAKE_VERSION = 6
HELLO = struct.Struct("<8sIiiiii32s32s64s64s")
RAIL = struct.Struct("<16sIIHBBBBBBH16s14x")
CARD = struct.Struct("<IIII512s")
SLOT = struct.Struct("<IIIBBH")
FRAME, FRAME_MORE = struct.Struct("<HBBIQQII"), struct.Struct("<Qq")
KEYS = struct.Struct("<8I")
SLOT_MAGIC, FRAME_MAGIC = 0x6476, 0x4344
SLOTS, SLOT_BYTES, SPARE_SLOTS = 64, 8320, 16
WELCOME = 1
EAGER, OFFER, ACCEPT, DATA, DONE, CANCEL, CREDIT, ABORT, GOODBYE = range(1, 10)
JOIN = 11
CONTEXT = 0  # of the communicator that made the connection
OVERHEAD_BYTES = 64  # that an eager message takes of the credit besides its payload


def pattern(length, seed):
    """Bytes that the test's other side makes by itself, too."""
    return hashlib.shake_256(str(seed).encode()).digest(length)


class Unexpected(Exception):
    pass


def expect(condition, what):
    if not condition:
        raise Unexpected(what)


class Memory:
    """Registered bytes at a fixed address."""

    def __init__(self, pd, length):
        self._buffer = ctypes.create_string_buffer(length)
        self.address = ctypes.addressof(self._buffer)
        access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE
        self.mr = MR(pd, length, access, address=self.address)

    def write(self, data, offset=0):
        ctypes.memmove(self.address + offset, data, len(data))

    def read(self, length, offset=0):
        return ctypes.string_at(self.address + offset, length)


class Peer:
    """The connection: slots, the bytes in them, the frames in those."""

    def __init__(self, folder, secret, receives=SLOTS + SPARE_SLOTS, use_cm=None, rnr_retry=6):
        """use_cm: called with the address, port and nonce that rank 1 tells. rnr_retry: how often
        a slot is sent again where rank 1 has no receive buffer."""
        self._by_cm = use_cm is not None
        self._rnr_retry = rnr_retry
        self._context = Context(name=DEVICE)
        self._pd = PD(self._context)
        self._cq = CQ(self._context, 1024)
        capabilities = QPCap(max_send_wr=512, max_recv_wr=512, max_send_sge=1, max_recv_sge=1)
        self._qp = QP(
            self._pd,
            QPInitAttr(qp_type=IBV_QPT_RC, scq=self._cq, rcq=self._cq, cap=capabilities),
        )
        self._inbox = Memory(self._pd, (SLOTS + SPARE_SLOTS) * SLOT_BYTES)
        self._outbox = Memory(self._pd, (SLOTS + SPARE_SLOTS) * SLOT_BYTES)
        self._bytes_in = bytearray()
        self._expected = self._next = 1
        self._consumed = self._consumed_told = self._consumed_by_peer = 0
        self._eager_consumed = 0
        self._sent = self._completed = 0
        self._to_init()
        for buffer in range(receives):
            self._post_receive(buffer)
        theirs = self._shake_hands(folder, secret.encode())
        if use_cm:
            use_cm(*self._cm_words(theirs))
            self._socket.sendall(b"\0")  # no rail is connected by it
            self._receive(1)
        self._connect(theirs)
        self._post_slot(0, b"")  # the acceptor may use the rail

    # --- meeting ---

    def _shake_hands(self, folder, secret):
        """Returns rank 1's card."""
        key = Path(folder) / urllib.parse.quote("dicomm/default/1", safe="")
        deadline = time.monotonic() + DEADLINE_S
        while not key.exists():
            expect(time.monotonic() < deadline, "rank 1 never appeared in the store")
            time.sleep(0.01)
        words = key.read_text().split()
        expect(words[0].startswith("dicomm-contact-"), words[0])
        self._socket = socket.create_connection((words[4], int(words[5])), timeout=DEADLINE_S)
        name = hashlib.sha256(b"default").digest()
        nonce, label, host = os.urandom(32), b"rank 0 (pyverbs)", b"elsewhere"
        version, pid = HANDSHAKE_VERSION, os.getpid()
        hello = HELLO.pack(b"dicommhs", version, 0, 1, 2, pid, 0, name, nonce, label, host)
        self._socket.sendall(hello)
        theirs = self._receive(HELLO.size)
        expect(theirs[:8] == b"dicommhs" and HELLO.unpack(theirs)[1:4] == (version, 1, 0), theirs)
        self._pid = HELLO.unpack(theirs)[5]
        card = self._card()
        sign = hmac.new(secret, b"dialler" + hello + theirs + card, hashlib.sha256)
        self._socket.sendall(card + sign.digest())
        verdict = self._receive(4 + CARD.size)
        sign = hmac.new(secret, b"acceptor" + hello + theirs + verdict, hashlib.sha256)
        expect(self._receive(32) == sign.digest(), "rank 1 does not prove that it knows the secret")
        expect(verdict[:4] == struct.pack("<I", WELCOME), verdict[:4])
        return verdict[4:]

    def _receive(self, length):
        data = b""
        while len(data) < length:
            more = self._socket.recv(length - len(data))
            expect(more, "rank 1 hung up")
            data += more
        return data

    def _card(self):
        sysfs = Path(f"/sys/class/infiniband/{DEVICE}/ports/{PORT}/gids/{GID_INDEX}")
        gid = bytes.fromhex(sysfs.read_text().strip().replace(":", ""))
        ethernet, roce_v2, mtu, reads = 2, 1, IBV_MTU_1024, 4
        bootstrap, automatic = 0, 1
        self._psn = 0x123456
        rail = RAIL.pack(
            gid, self._qp.qp_num, self._psn, 0, ethernet, roce_v2, mtu, reads, PORT,
            automatic if self._by_cm else bootstrap, 0, b"",
        )  # fmt: skip
        return CARD.pack(2, 1, SLOTS, SLOT_BYTES, rail)

    # --- the queue pair ---

    def _to_init(self):
        attributes = QPAttr(port_num=PORT)
        attributes.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE
        self._qp.to_init(attributes)

    def _cm_words(self, card):
        gid, *_, port, nonce = RAIL.unpack(CARD.unpack(card)[-1][: RAIL.size])
        return socket.inet_ntoa(gid[12:]), port, nonce

    def _connect(self, card):
        version, rails, self._window, self._slot_bytes, rail = CARD.unpack(card)
        expect(version == 2 and rails >= 1, card)
        gid, number, psn, *_ = RAIL.unpack(rail[: RAIL.size])
        route = GlobalRoute(
            dgid=GID(":".join(gid.hex()[i : i + 4] for i in range(0, 32, 4))),
            sgid_index=GID_INDEX,
        )
        route.hop_limit = 64
        attributes = QPAttr(port_num=PORT)
        attributes.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE
        attributes.path_mtu = IBV_MTU_1024
        attributes.dest_qp_num, attributes.rq_psn, attributes.sq_psn = number, psn, self._psn
        attributes.max_dest_rd_atomic = attributes.max_rd_atomic = 4
        attributes.min_rnr_timer, attributes.timeout = 12, 14
        attributes.retry_cnt, attributes.rnr_retry = 6, self._rnr_retry
        attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=PORT)
        self._qp.to_rts(attributes)

    def _post_receive(self, buffer):
        address = self._inbox.address + buffer * SLOT_BYTES
        self._qp.post_recv(
            RecvWR(wr_id=buffer, num_sge=1, sg=[SGE(address, SLOT_BYTES, self._inbox.mr.lkey)])
        )

    def _post_slot(self, sequence, data):
        while self._sent - self._completed == SLOTS + SPARE_SLOTS:
            self._poll()
        self._consumed_told = self._consumed
        head = SLOT.pack(sequence, self._consumed, self._consumed, 0, 1, SLOT_MAGIC)
        offset = self._sent % (SLOTS + SPARE_SLOTS) * SLOT_BYTES
        self._outbox.write(head + data, offset)
        sge = SGE(self._outbox.address + offset, len(head + data), self._outbox.mr.lkey)
        self._sent += 1
        self._qp.post_send(
            SendWR(opcode=IBV_WR_SEND, num_sge=1, sg=[sge], send_flags=IBV_SEND_SIGNALED)
        )

    def _poll(self):
        count, completions = self._cq.poll(16)
        if count == 0:
            os.sched_yield()
        for each in completions:
            expect(each.status == IBV_WC_SUCCESS, f"completion with status {each.status}")
            if each.opcode & IBV_WC_RECV:
                self._arrived(each.wr_id, each.byte_len)
            else:
                self._completed += 1

    def _arrived(self, buffer, length):
        data = self._inbox.read(length, buffer * SLOT_BYTES)
        sequence, consumed, _, _, rails_up, magic = SLOT.unpack(data[: SLOT.size])
        expect(magic == SLOT_MAGIC and rails_up & 1, data[: SLOT.size])
        self._consumed_by_peer = max(self._consumed_by_peer, consumed)
        if length > SLOT.size:
            expect(sequence == self._expected, f"slot {sequence} instead of {self._expected}")
            self._expected += 1
            self._consumed += 1
            self._bytes_in += data[SLOT.size :]
        self._post_receive(buffer)
        if self._consumed - self._consumed_told >= SLOTS // 2:
            self._post_slot(0, b"")

    def _until(self, ready, what):
        deadline = time.monotonic() + DEADLINE_S
        while not ready():
            expect(time.monotonic() < deadline, f"{what} never came")
            self._poll()

    # --- frames ---

    def send(self, kind, tag=0, length=0, id=0, address=0, payload=b"", heed_window=True):
        credit, self._eager_consumed = self._eager_consumed, 0
        frame = FRAME.pack(FRAME_MAGIC, kind, address != 0, credit, tag, length, id, CONTEXT)
        frame += FRAME_MORE.pack(address, 0) + payload if address else payload
        room = min(self._slot_bytes, SLOT_BYTES) - SLOT.size
        for start in range(0, len(frame), room):
            if heed_window:
                self._until(
                    lambda: self._next - self._consumed_by_peer <= self._window, "room at rank 1"
                )
            self._post_slot(self._next, frame[start : start + room])
            self._next += 1

    def receive(self, kind):
        """The next frame's (tag, bytes, id, address, payload); other kinds than wanted may only
        be credit, and word that the communicator is there."""
        while True:
            head = self._take(FRAME.size)
            magic, got, is_long, _, tag, length, id, context = FRAME.unpack(head)
            expect(magic == FRAME_MAGIC and context == CONTEXT, head)
            address = FRAME_MORE.unpack(self._take(FRAME_MORE.size))[0] if is_long else 0
            more = {EAGER: length, DATA: length, ABORT: length, OFFER: KEYS.size}.get(got, 0)
            payload = self._take(more)
            if got == EAGER:
                self._eager_consumed += length + OVERHEAD_BYTES
            if got not in (CREDIT, JOIN):
                expect(got == kind, f"frame {got} instead of {kind}: {payload!r}")
                return tag, length, id, address, payload

    def _take(self, length):
        self._until(lambda: len(self._bytes_in) >= length, "more of a frame")
        data = bytes(self._bytes_in[:length])
        del self._bytes_in[:length]
        return data

    def memory(self, length):
        return Memory(self._pd, length)

    def read_from_peer(self, memory, offset, length, address, rkey):
        """One RDMA READ, to its end."""
        sge = SGE(memory.address + offset, length, memory.mr.lkey)
        request = SendWR(opcode=IBV_WR_RDMA_READ, num_sge=1, sg=[sge], send_flags=IBV_SEND_SIGNALED)
        request.set_wr_rdma(rkey, address)
        before = self._completed + (self._sent - self._completed)
        self._sent += 1
        self._qp.post_send(request)
        self._until(lambda: self._completed > before, "the end of an RDMA READ")

    @contextlib.contextmanager
    def rank_1_stopped(self):
        """Rank 1 has no processor meanwhile, and reads nothing."""
        os.kill(self._pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._pid, signal.SIGCONT)

    def until_all_arrived(self):
        self._until(lambda: self._completed == self._sent, "the last completion")

    def until_refused(self, before):
        """Returns once rank 1's device had no receive buffer for a slot."""
        self._until(lambda: int(REFUSALS.read_text()) > before, "a refusal")

    def linger(self):
        """Answers until rank 1 has left."""
        self.receive(GOODBYE)
        self.send(GOODBYE)
        with contextlib.suppress(Unexpected):  # it may be gone before it acknowledges
            self.until_all_arrived()
        self._socket.shutdown(socket.SHUT_WR)


# --- rdma_cm ---


class Parameters(ctypes.Structure):
    _fields_ = (
        ("private_data", ctypes.c_char_p),
        *((name, ctypes.c_uint8) for name in ("private_bytes", "reads_in", "reads_out", "flow")),
        *((name, ctypes.c_uint8) for name in ("retry_count", "rnr_retry", "srq")),
        ("qp_number", ctypes.c_uint32),
    )


def call_by_cm(address, port, private_data):
    """Whether the listener there accepts a call with these bytes."""
    cm = ctypes.CDLL("librdmacm.so.1", use_errno=True)
    sockaddr_in, tcp, patience_ms, refused = "=HH4s8x", 0x0106, 100, 111
    here = struct.pack(sockaddr_in, socket.AF_INET, 0, socket.inet_aton("10.1.0.1"))
    there = struct.pack(sockaddr_in, socket.AF_INET, socket.htons(port), socket.inet_aton(address))
    id = ctypes.c_void_p()
    expect(cm.rdma_create_id(None, ctypes.byref(id), None, tcp) == 0, "rdma_create_id")
    # A neighbour that answers at once may do so unnoticed by the kernel: ask again.
    found = any(cm.rdma_resolve_addr(id, here, there, patience_ms) == 0 for _ in range(50))
    expect(found, "rdma_resolve_addr")
    expect(cm.rdma_resolve_route(id, patience_ms) == 0, "rdma_resolve_route")
    told = Parameters(private_data, len(private_data), 1, 1, 0, 7, 7, 0, 77)
    accepted = cm.rdma_connect(id, ctypes.byref(told)) == 0
    expect(accepted or ctypes.get_errno() == refused, f"rdma_connect: {ctypes.get_errno()}")
    cm.rdma_destroy_id(id)
    return accepted


# --- scenarios ---------------------------------------------------------------------------------


def exchange(folder, secret):
    """Short and long messages, both ways."""
    peer = Peer(folder, secret)
    tag, _, _, _, payload = peer.receive(EAGER)
    seen = {"short": [tag, hashlib.sha256(payload).hexdigest()]}

    tag, length, id, address, payload = peer.receive(OFFER)
    memory, half = peer.memory(length), length // 2
    rkey = KEYS.unpack(payload)[0]
    peer.read_from_peer(memory, 0, half, address, rkey)
    peer.read_from_peer(memory, half, length - half, address + half, rkey)
    peer.send(DONE, id=id)
    seen["long"] = [tag, hashlib.sha256(memory.read(length)).hexdigest()]

    peer.send(EAGER, tag=7, length=5000, id=1, payload=pattern(5000, 7))
    mine = pattern(2_000_003, 8)
    memory = peer.memory(len(mine) + 1)
    memory.write(mine, 1)  # not aligned
    keys = KEYS.pack(memory.mr.rkey, *[0] * 7)
    peer.send(OFFER, tag=8, length=len(mine), id=2, address=memory.address + 1, payload=keys)
    _, _, id, _, _ = peer.receive(DONE)
    expect(id == 2, f"done with {id} instead of 2")
    for number in range(1000):  # many slots, so that both windows turn over
        peer.send(EAGER, tag=9, length=8, id=3 + number, payload=struct.pack("<Q", number))
    peer.linger()
    return seen


def no_buffers(folder, secret):
    """Has receive buffers for the first few slots only, and gives none back."""
    peer = Peer(folder, secret, receives=2)
    peer._post_receive = lambda buffer: None
    time.sleep(DEADLINE_S)  # ended by the test
    return {}


def strangers(folder, secret):
    """While it is connected with rank 1, others call by rdma_cm who do not know the nonce."""
    accepted = []

    def call(address, port, nonce):
        for byte, bit in ((0, 0), (7, 4), (15, 7)):
            wrong = bytearray(nonce)
            wrong[byte] ^= 1 << bit
            for words in (bytes(wrong), b"", os.urandom(56)):
                accepted.append(call_by_cm(address, port, words))
        accepted.append(call_by_cm(address, port, nonce))

    peer = Peer(folder, secret, use_cm=call)
    peer.send(EAGER, tag=7, length=5000, id=1, payload=pattern(5000, 7))
    peer.linger()
    return accepted


def send_patterns(peer, numbers, heed_window=True):
    for number in numbers:
        payload = pattern(4000, number)  # a slot each
        peer.send(EAGER, 1, len(payload), number, payload=payload, heed_window=heed_window)


def flood(folder, secret):
    """Sends all that the window allows and far more empty slots than there are buffers for."""
    peer = Peer(folder, secret, rnr_retry=FOR_EVER)
    refusals = int(REFUSALS.read_text())
    with peer.rank_1_stopped():
        send_patterns(peer, range(SLOTS))
        for _ in range(4 * SPARE_SLOTS):
            peer._post_slot(0, b"")
        peer.until_refused(refusals)
    send_patterns(peer, range(SLOTS, 1000))
    peer.send(EAGER, tag=2, length=1, id=1000, payload=b"x")
    peer.linger()
    return {}


def over_window(folder, secret):
    """Sends a slot more than the window allows."""
    peer = Peer(folder, secret)
    with peer.rank_1_stopped():
        send_patterns(peer, range(SLOTS + 1), heed_window=False)
        peer.until_all_arrived()
    time.sleep(DEADLINE_S)  # ended by the test
    return {}


def wrong_key(folder, secret):
    """Offers memory under a key that is not its own."""
    peer = Peer(folder, secret)
    memory = peer.memory(1 << 20)
    keys = KEYS.pack(memory.mr.rkey ^ 0x5A5A, *[0] * 7)
    peer.send(OFFER, tag=1, length=1 << 20, id=1, address=memory.address, payload=keys)
    time.sleep(DEADLINE_S)
    return {}


SCENARIOS = (exchange, strangers, no_buffers, flood, over_window, wrong_key)

if __name__ == "__main__":
    scenario, store_folder, job_secret = sys.argv[1:]
    scenarios = {each.__name__: each for each in SCENARIOS}
    try:
        print(json.dumps(scenarios[scenario](store_folder, job_secret)), flush=True)
    except Unexpected as problem:
        sys.exit(f"pyverbs_peer: {problem}")
