"""Builds the documentation as a site in build/site; a warning or a broken link is an error."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Returns the exit code: 0 when the site is built and every link leads somewhere."""
    parser = argparse.ArgumentParser(prog="docs", description=__doc__)
    parser.add_argument(
        "--serve", action="store_true", help="Serve the site, and build it anew on every change."
    )
    arguments = parser.parse_args()
    try:
        import mkdocs  # noqa: F401
    except ModuleNotFoundError:
        print("docs: mkdocs is needed: pip install 'hyperhetero[docs]'", file=sys.stderr)
        return 2
    from docs_pages.links import broken_links  # which needs what mkdocs brings

    if arguments.serve:
        return mkdocs_command("serve").returncode
    built = mkdocs_command("build", "--strict", stderr=subprocess.PIPE)
    broken = broken_links(ROOT)
    if built.returncode:
        print(built.stderr, end="", file=sys.stderr)
    for line in broken:
        print(f"docs: {line}", file=sys.stderr)
    if built.returncode or broken:
        return 1
    print("docs: built in build/site; open build/site/index.html")
    return 0


def mkdocs_command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs mkdocs on the repository's mkdocs.yml, without its maker's notice at every start."""
    command = [sys.executable, "-m", "mkdocs", *arguments]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, **options)


if __name__ == "__main__":
    sys.exit(main())
