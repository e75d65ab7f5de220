"""What the README and the pages show is run as a reader would, and what they name is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from docs_pages.blocks import blocks
from docs_pages.commands import commands, options

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINKED = ("csrc", "examples", "tools")  # what a reader in the repository has beside the page
LANGUAGES = {"shell", "python", "text", "toml", "json", "jsonl"}
READ_AND_RUN = [
    ROOT / "README.md",
    DOCS / "start.md",
    *sorted((DOCS / "tutorials").glob("*.md")),
    *sorted((DOCS / "guides").glob("*.md")),
]
# whose commands other long tests run, too
SLOW_PAGES = [
    *(DOCS / "guides" / f"{n}.md" for n in ("board", "data", "elastic", "fault-tolerance")),
    *(DOCS / "guides" / f"{n}.md" for n in ("machines", "models", "planning", "precision")),
    DOCS / "guides" / "training.md",
    *(DOCS / "tutorials" / f"{n}.md" for n in ("cluster", "failing-nodes", "fine-tune")),
    *(DOCS / "tutorials" / f"{n}.md" for n in ("own-model", "real-chips", "vendor")),
]
PROGRAM = re.compile(r"\b((?:dicomm|ditorch|heteropp)-[a-z]+|tools/[a-z0-9-]+)(?![\w/.-])")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]*")
FOREIGN = {  # options of other programs that the pages name beside ours
    *("--nnodes", "--nproc-per-node", "--max-restarts", "--rdzv-backend", "--rdzv-endpoint"),
    *("--rdzv-id", "--multi_gpu", "--cuda-compat", "--module", "--inplace"),
    *("--node-rank", "--master-addr", "--hostfile", "--map-by"),  # torchrun's and mpirun's
    *("--partition", "--nodes", "--exclusive", "--signal", "--ntasks-per-node"),  # Slurm's
}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, marks=pytest.mark.exhaustive if p in SLOW_PAGES else pytest.mark.long)
        for p in READ_AND_RUN
    ],
    ids=name,
)
@pytest.mark.timeout(600)
def test_every_block_of_the_page_does_what_the_page_says(page: Path, tmp_path: Path) -> None:
    for folder in LINKED:
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / ".venv").symlink_to(sys.prefix)  # where tools look for Python
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    ran = 0
    for block in blocks(page):
        if block.not_run is not None:
            continue
        if block.title is not None:
            file = tmp_path / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
            continue
        if block.language == "shell":
            command = ["bash", "-euo", "pipefail", "-c", block.text]
        elif block.language == "python":
            command = [sys.executable, "-c", block.text]
        else:
            continue
        ended = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
        )
        said = f"{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
        assert ended.returncode == 0, f"{name(page)}, line {block.line}:\n{block.text}\n{said}"
        ran += 1
    assert ran, f"{name(page)} shows nothing that is run"


def test_every_page_trains_in_a_folder_of_its_own() -> None:
    """A reader goes through several pages in one folder, and a run refuses another's folder."""
    first = {"runs/quickstart": "tools/quickstart"}
    for page in READ_AND_RUN:
        for block in blocks(page):
            for command in block.text.replace("\\\n", " ").splitlines():
                words = command.split()
                if not words or words[0] != "heteropp-train" or "--resume" in words:
                    continue
                output = words[words.index("--output") + 1] if "--output" in words else "runs/train"
                assert first.setdefault(output, name(page)) == name(page), output


@pytest.mark.parametrize("page", READ_AND_RUN, ids=name)
def test_a_block_is_run_or_says_why_not(page: Path) -> None:
    for block in blocks(page):
        where = f"{name(page)}, line {block.line}"
        assert block.language in LANGUAGES, f"{where}: a language is expected after ```"
        assert block.not_run is None or len(block.not_run.split()) > 2, f"{where}: why not?"
        if block.language == "text":
            assert not block.text.startswith(tuple(commands())), f"{where}: a shell block?"


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=name)
def test_every_option_of_our_commands_exists(page: Path) -> None:
    unknown = [
        f"{program or 'none of our commands'} has no {option}"
        for command in typed(page.read_text(encoding="utf-8"))
        for program in [(PROGRAM.findall(command) or [None])[-1]]
        for option in OPTION.findall(command)
        if option not in FOREIGN | options_of(program)
    ]
    assert not unknown, f"{name(page)}: {'; '.join(unknown)}"


def typed(text: str) -> list[str]:
    """What the page has in code: each command, without a script's own words."""
    fences = re.findall(r"^ *```.*?\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S))
    lines = "\n".join(fences).replace("\\\n", " ").splitlines()
    lines += [span.replace("\n", " ") for span in inline]
    parts = [part for line in lines for part in re.split(r"[|;#]|&&", line)]
    return [
        part.split(" -- ")[0] for part in parts if not part.lstrip().startswith(("pip ", "git "))
    ]


@cache
def options_of(program: str | None) -> set[str]:
    if program is None:
        return set().union(*(options(command) for command in commands() if " " not in command))
    if program in commands():
        return options(program)
    help_text = subprocess.run([ROOT / program, "--help"], capture_output=True, text=True).stdout
    return set(OPTION.findall(help_text))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 1000


def test_every_command_has_a_row_of_the_readme() -> None:
    rows = set(re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert rows == {command for command in commands() if " " not in command}


def test_the_page_of_the_architecture_has_every_folder() -> None:
    drawn = re.search(r"```text\n(.*?)```", (DOCS / "architecture.md").read_text(), re.DOTALL)
    assert drawn is not None
    parts = re.split(r"^(\w+)/", drawn[1], flags=re.MULTILINE)
    listed = {
        top: set(re.findall(r"[\w-]+(?=/)", says))
        for top, says in zip(parts[1::2], parts[2::2], strict=True)
    }
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    folders = {tuple(path.split("/")[:2]) for path in tracked.split() if path.count("/") > 1}
    folders = {(top, name) for top, name in folders if top not in ("docs", ".ci")}
    assert ("heteropp", "cli") in folders
    missing = sorted(f"{top}/{name}" for top, name in folders if name not in listed.get(top, ()))
    assert not missing


@pytest.mark.long
def test_the_site_builds_without_a_warning() -> None:
    built = subprocess.run([ROOT / "tools" / "docs"], capture_output=True, text=True, timeout=250)
    assert built.returncode == 0, built.stderr
    assert not built.stderr


def test_without_mkdocs_one_sentence_says_what_is_needed() -> None:
    lacking = "import sys; sys.modules.update(dict.fromkeys(['mkdocs', 'markdown', 'pymdownx']))"
    program = f"{lacking}; sys.path.insert(0, 'tools'); import docs; sys.exit(docs.main())"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert ended.stderr == "docs: mkdocs is needed: pip install 'hyperhetero[docs]'\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[x](nowhere.md)", "no such file"),
        ("[x](glossary.md#nowhere)", "no heading #nowhere"),
        ("![x](pictures/nowhere.png)", "no such file"),
        ("[x](https:/nowhere)", "https://host.domain/path was expected"),
    ],
)
def test_a_broken_link_is_named(line: str, said: str, tmp_path: Path) -> None:
    from docs_pages.links import broken_links

    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / "glossary.md").write_text("# Words\n\n[here](#words) <mailto:a@b.c>\n")
    assert broken_links(tmp_path) == []
    (tmp_path / "page.md").write_text(f"# A page\n\n{line}\n")
    assert len(found := broken_links(tmp_path)) == 1
    assert said in found[0]
