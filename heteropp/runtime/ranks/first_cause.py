"""The first cause of a job's end: one rank tells it in the job's store, and every rank names it."""

from __future__ import annotations

import json
from typing import Any

from heteropp.process_groups.seals import Seals

KEY = "cause"
Cause = dict[str, Any]


class FirstCause:
    def __init__(self, seals: Seals) -> None:
        self.seals = seals

    def heard(self) -> Cause | None:
        """Returns the cause that a rank has told; None where none has. Raises RuntimeError."""
        told = self.seals.get(KEY)
        return None if told is None else json.loads(told)

    def tell(self, cause: Cause) -> Cause:
        """Returns the job's first cause, which may be this one. Raises RuntimeError."""
        return json.loads(self.seals.set_first(KEY, json.dumps(cause)))
