"""What one of three machines sees of itself and of the others: one line of JSON."""

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

NUMBER = int(os.environ["HYPERHETERO_MACHINE"])
ADDRESSES = os.environ["HYPERHETERO_MACHINES"].split(",")
SHARE = Path(os.environ["RDMA_MACHINE_SHARE"])
OTHERS = [number for number in range(len(ADDRESSES)) if number != NUMBER]
PORT = 4000
DEADLINE_S = 60


def wait_for(paths):
    deadline_s = time.monotonic() + DEADLINE_S
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline_s, paths
        time.sleep(0.02)


def wait_for_all(name):
    """Returns what each machine wrote of that name, once all have it."""
    paths = [SHARE / f"{name}-{number}" for number in range(len(ADDRESSES))]
    wait_for(paths)
    return [path.read_text() for path in paths]


def write(name, text):
    part = SHARE / f".{name}-{NUMBER}"
    part.write_text(text)
    part.rename(SHARE / f"{name}-{NUMBER}")


def answer(listener):
    while True:
        listener.accept()[0].sendall(socket.gethostname().encode())


def called(host):
    """Returns a host's answer, and the seconds that connecting to it took."""
    begin_s = time.monotonic()
    with socket.create_connection((host, PORT), timeout=DEADLINE_S) as connection:
        took_s = time.monotonic() - begin_s
        return connection.recv(99).decode(), took_s


def main():
    marks = [Path(folder, f"mark-{NUMBER}") for folder in ("/tmp", "/dev/shm")]
    for mark in marks:
        mark.touch()
    listener = socket.create_server(("", PORT))
    threading.Thread(target=answer, args=(listener,), daemon=True).start()
    write("here", socket.gethostname())
    said = {
        "seen": wait_for_all("here"),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text(),
        "host": socket.gethostname(),
        "addresses": ADDRESSES,
        "marks": [p.name for mark in marks for p in mark.parent.glob("mark-*")],
        "devices": {
            path.name: (path / "ports/1/state").read_text().strip()
            for path in Path("/sys/class/infiniband").iterdir()
        },
        "by_name": {f"machine-{i}": called(f"machine-{i}") for i in OTHERS},
        "by_second_rail": {f"machine-{i}": called(f"10.2.0.{i + 1}") for i in OTHERS},
    }
    write("done", "")
    wait_for_all("done")  # nobody's listener goes before
    print(json.dumps(said))
    return NUMBER


if __name__ == "__main__":
    sys.exit(main())
