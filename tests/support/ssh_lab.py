"""The machines of tools/machines, which reach each other by ssh, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from installed import need
from lab import lab
from machines import Machine

ROOT = Path(__file__).parents[2]
DAEMON = """\
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
PidFile none
SetEnv PATH={path} PYTHONPATH={root} XDG_CACHE_HOME={folder}/cache
"""
CLIENT = """\
IdentityFile {folder}/key
UserKnownHostsFile {folder}/known
StrictHostKeyChecking no
LogLevel ERROR
"""
# first on the PATH, as whoever has the settings in ~/.ssh needs no option
SSH = '#!/bin/sh\nexec /usr/bin/ssh -F {folder}/client "$@"\n'


@contextmanager
def ssh_lab(count: int, folder: Path) -> Iterator[tuple[list[Machine], dict[str, str]]]:
    """Yields machines, and the environment in which commands on them have ssh.

    folder: what all of them have; ssh's own files are in the folder ssh of it.
    """
    need("openssh-server", "/usr/sbin/sshd")
    need("openssh-client", "/usr/bin/ssh")
    own = folder / "ssh"
    (own / "bin").mkdir(parents=True)
    path = f"{own}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    (own / "daemon").write_text(DAEMON.format(folder=own, path=path, root=ROOT))
    (own / "client").write_text(CLIENT.format(folder=own))
    (own / "bin" / "ssh").write_text(SSH.format(folder=own))
    (own / "bin" / "ssh").chmod(0o755)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", own / "key"], check=True)
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    environment.pop("DICOMM_SECRET", None)  # one that was drawn in this process
    with lab(count, folder) as there, (own / "daemons.txt").open("w") as output:
        for machine in there:
            machine.do("mkdir -p /run/sshd")
            machine.start(
                ["/usr/sbin/sshd", "-D", "-e", "-f", str(own / "daemon")], environment, output
            )
        yield there, environment
