"""The first cause of a job's end: one rank tells it in the job's store, and every rank names it.

Whoever reaches the store's port can write to it. So a cause has a seal that only a process with the
job's secret can make, and one without it is not believed.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import sys
from typing import Any

import torch.distributed as dist

from dicomm.secret import VARIABLE

KEY = "cause"
Cause = dict[str, Any]


class FirstCause:
    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.is_warned = False  # of somebody without the secret

    def heard(self) -> Cause | None:
        """Returns the cause that a rank has told; None where none has. Raises RuntimeError."""
        return self._opened(self.store.get(KEY)) if self.store.check([KEY]) else None

    def tell(self, cause: Cause) -> Cause:
        """Returns the job's first cause, which may be this one. Raises RuntimeError."""
        if first := self._opened(self.store.compare_set(KEY, "", _sealed(cause))):
            return first
        self.store.set(KEY, _sealed(cause))  # in place of what no rank has written
        return cause

    def _opened(self, text: bytes) -> Cause | None:
        with contextlib.suppress(ValueError, TypeError):  # of what no rank can have written
            match json.loads(text):
                case [str(words), str(seal)] if hmac.compare_digest(_seal(words), seal):
                    return json.loads(words)
        if not self.is_warned:
            print(
                "somebody without the job's secret wrote a cause of its end to the job's store, "
                "which is not believed",
                file=sys.stderr,
                flush=True,
            )
        self.is_warned = True
        return None


def _sealed(cause: Cause) -> str:
    words = json.dumps(cause)
    return json.dumps([words, _seal(words)])


def _seal(words: str) -> str:
    secret = os.environ.get(VARIABLE, "")
    return hmac.new(secret.encode(), b"first cause" + words.encode(), hashlib.sha256).hexdigest()
