"""Runs tests one after the other and writes a line of JSON for each as it ends.

python -m c10d_tests.worker OUTPUT NAME...   (no NAME: writes the names of all tests)
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
import unittest
from pathlib import Path


def main(output: Path, names: list[str]) -> None:
    from c10d_tests.gated import TestDicomm

    if not names:
        output.write_text(json.dumps(unittest.TestLoader().getTestCaseNames(TestDicomm)))
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload(["c10d_tests.gated"])
    for name in names:
        begun = time.monotonic()
        result = unittest.TestResult()
        TestDicomm(name).run(result)
        failures = [text for _, text in result.failures + result.errors]
        skips = [reason for _, reason in result.skipped]
        outcome = "failed" if failures else "skipped" if skips else "passed"
        line = {
            "name": name,
            "outcome": outcome,
            "reason": "\n".join(failures or skips),
            "seconds": round(time.monotonic() - begun, 2),
        }
        with output.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
