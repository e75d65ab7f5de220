"""What is wrong with what a person gave, in one sentence that names every problem at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

Location = tuple[int | str, ...]
OUR_WORDS = {
    "Value error, ": "",
    "Input should be": "expected",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "more than",
}
MOST_PROBLEMS = 20  # that a sentence names
LONGEST_WAIT_S = 10_000_000  # that can be asked for, about four months: clocks overflow at more
MOST_CHARACTERS = 100  # of a wrong value


def decoded(content: bytes) -> str:
    """Returns the text of a file, whether or not it begins with a UTF-8 byte-order mark.

    Raises UnicodeDecodeError.
    """
    return content.decode("utf-8-sig")


def problems(error: ValidationError, given: Any = None, table: str = "") -> str:
    """Returns what is wrong: "name: missing; nodes[0].chip: unknown key".

    given: what was validated, where it is at hand: of a field that may be of several kinds,
    pydantic names the kind as if it were a place, which only what was given can tell apart.
    table: which table of a file that is.
    """
    errors = error.errors()
    around = {one["loc"][:depth] for one in errors for depth in range(len(one["loc"]))}
    found: dict[str, str] = {}
    for one in errors:
        if one["loc"] in around:  # it follows from what is wrong inside
            continue
        location = one["loc"] if given is None else _inside(given, one["loc"], one["type"])
        place = _place((table, *location) if table else location)
        found.setdefault(place, f"{place}: {_problem(one)}" if place else _problem(one))
    return listed(list(found.values()))


def listed(found: Sequence[str]) -> str:
    """Returns the first of several problems in one sentence, and how many more there are.

    A long expectation that several share, such as the names of all chips, is said only once.
    """
    named, said = [], set()
    for problem in found[:MOST_PROBLEMS]:
        place, _, expected = problem.partition(": expected ")
        repeats = len(expected) > MOST_CHARACTERS and expected in said
        named.append(f"{place}: expected the same" if repeats else problem)
        said.add(expected)
    more = [f"and {len(found) - MOST_PROBLEMS} more"] if len(found) > MOST_PROBLEMS else []
    return "; ".join([*named, *more])


def _inside(given: Any, location: Location, problem: str) -> Location:
    """Returns the parts of a location that lead through what was given."""
    kept: Location = ()
    for depth, part in enumerate(location, 1):
        try:
            given = given[part]
        except (KeyError, IndexError, TypeError):
            if problem != "missing" or depth < len(location):
                continue
        kept += (part,)
    return kept


def _place(location: Location) -> str:
    place = ""
    for part in location:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
    return place


def _problem(error: Any) -> str:
    if error["type"] == "missing":
        return "missing"
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return "unknown key"
    return f"{in_our_words(error['msg'])}, got {repr(error['input'])[:MOST_CHARACTERS]}"


def in_our_words(message: str) -> str:
    """Returns a message of pydantic's about a value as the other sentences say it."""
    for theirs, ours in OUR_WORDS.items():
        message = message.replace(theirs, ours)
    return message
