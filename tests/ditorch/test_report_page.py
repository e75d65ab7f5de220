"""The report's page in a real browser (CI installs one; README.md says how to get it)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Page, browser
from sample_findings import FAULTY, FIRST_BAD, GOOD, write_sample

from ditorch.align.gather import gather
from ditorch.align.page import write_report

OPERATORS = "document.querySelectorAll('#operator-table tbody tr[data-row]')"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("findings")
    write_sample(directory)
    write_report(gather(directory), directory / "report.html")
    return directory / "report.html"


@pytest.fixture
def page(chromium: Page, sample: Path) -> Page:
    chromium.problems.clear()
    chromium.requests.clear()
    chromium.open(sample)
    return chromium


def texts(page: Page, selector: str) -> list[str]:
    """What a reader sees of the elements, hidden ones left out."""
    return page.run(
        f"Array.from(document.querySelectorAll({selector!r}))"
        ".filter(e => e.checkVisibility()).map(e => e.innerText)"
    )


def column(page: Page, heading: str) -> list[str]:
    """The cells of the operator table's column, from top to bottom, of the rows shown."""
    return page.run(
        f"""(() => {{
          const heads = Array.from(document.querySelectorAll('#operator-table thead th'));
          const i = heads.findIndex(h => h.textContent.trim() === {heading!r});
          return Array.from({OPERATORS}).filter(r => !r.hidden)
            .map(r => r.cells[i].textContent.trim());
        }})()"""
    )


def click_heading(page: Page, heading: str) -> None:
    page.run(
        "Array.from(document.querySelectorAll('#operator-table thead button'))"
        f".find(b => b.textContent === {heading!r}).click()"
    )


def type_words(page: Page, words: str) -> None:
    page.run(
        f"(() => {{ const w = document.getElementById('words'); w.value = {words!r};"
        " w.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def test_a_reader_sees_verdicts_and_the_first_bad_operator(page: Page) -> None:
    assert page.problems == []
    cards = texts(page, "#chips .card")
    assert texts(page, "#chips .card > .verdict") == ["✓ passed", "✗ failed"]
    assert GOOD in cards[0] and FAULTY in cards[1]
    (first,) = texts(page, ".first-bad")
    for said in (FIRST_BAD.operator, FIRST_BAD.module, FIRST_BAD.source, "NaN in 512 elements"):
        assert said in first
    assert "step 3, rank 1" in first
    (verdict,) = texts(page, "#verdict")
    assert "failed" in verdict and FAULTY in verdict


def test_the_page_is_one_file(page: Page, sample: Path) -> None:
    assert page.requests == [sample.as_uri()]


def test_nothing_hostile_runs(page: Page) -> None:
    assert page.run("document.title").startswith("Precision report")
    assert page.run("document.querySelectorAll('img').length") == 0
    assert any("<script>document.title" in name for name in column(page, "operator"))


def test_headings_sort(page: Page) -> None:
    def shares() -> list[float]:
        return [float(share.replace("∞", "inf")) for share in column(page, "share")]

    assert len(shares()) == 83
    click_heading(page, "share")
    assert shares() == sorted(shares(), reverse=True) and shares()[0] == float("inf")
    click_heading(page, "share")
    assert shares() == sorted(shares())
    click_heading(page, "operator")
    assert column(page, "operator") == sorted(column(page, "operator"), key=str.lower)
    assert page.problems == []


def test_nan_is_the_largest_error(page: Page) -> None:
    click_heading(page, "max rel")
    assert column(page, "max rel")[0] == "NaN"


def test_the_filter_leaves_what_matches(page: Page) -> None:
    type_words(page, "LAYER_norm bfloat16")
    kept = column(page, "operator")
    assert kept and all("layer_norm" in name for name in kept)
    assert set(column(page, "dtype")) == {"bfloat16"}
    assert texts(page, "#shown") == [f"{len(kept)} of 83"]
    type_words(page, "no such operator")
    assert column(page, "operator") == []
    type_words(page, "")
    assert len(column(page, "operator")) == 83


def test_pictures_have_a_size(page: Page) -> None:
    sizes = page.run(
        "Array.from(document.querySelectorAll('.picture svg, svg.spark'))"
        ".map(s => s.getBoundingClientRect()).map(r => Math.min(r.width, r.height))"
    )
    assert len(sizes) > 80 and min(sizes) >= 15
    bars = page.run(
        "Array.from(document.querySelectorAll('svg.histogram'))"
        ".map(s => s.querySelectorAll('rect.bars').length)"
    )
    assert bars and min(bars) > 1
    curves = page.run(
        "Array.from(document.querySelectorAll('#losses svg path'))"
        ".filter(p => p.getTotalLength() > 300).length"
    )
    assert curves >= 5  # three losses, two errors


def test_conformance_has_its_table(page: Page) -> None:
    (said,) = texts(page, "#conformance")
    for part in (
        "99.5%",
        "gradient departs",
        "complex128, complex64",
        "one chip only",
        "200 samples computed by the chip",
    ):
        assert part in said
    assert texts(page, "#conformance .good") == ["✓ passed"]


def test_a_row_opens_to_its_worst_elements(page: Page) -> None:
    page.run("document.querySelector('#operator-table button.more').click()")
    (detail,) = texts(page, "tr.detail")
    for said in ("NaN in 512 elements", "[0, 2, 7, 1]", "0.25", FIRST_BAD.source):
        assert said in detail
    page.run("document.querySelector('#operator-table button.more').click()")
    assert texts(page, "tr.detail") == []
    assert page.problems == []


def test_text_can_be_read_in_light_and_dark(page: Page) -> None:
    for scheme in ("dark", "light"):
        page.emulate(scheme=scheme)
        assert page.run(CONTRAST) >= 4.5, scheme


def test_it_fits_a_sheet_of_paper_and_a_phone(page: Page) -> None:
    for media, width in (("print", 1047), ("screen", 420)):  # A4 landscape within 1 cm margins
        page.emulate(media=media, width=width)
        assert page.run("document.documentElement.scrollWidth") <= width, media
    page.emulate()


CONTRAST = """(() => {
  const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number).map(channel);
                       return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const back = e => { for (; e; e = e.parentElement) {
                        const c = getComputedStyle(e).backgroundColor;
                        if (c !== 'rgba(0, 0, 0, 0)') return c; } };
  const ratio = e => { const [a, b] = [getComputedStyle(e).color, back(e)].map(light).sort();
                       return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); };
  return Math.min(...Array.from(document.querySelectorAll('.good, .bad, .quiet, p, dt, a, th, td'))
    .filter(e => e.checkVisibility()).map(ratio));
})()"""


@pytest.mark.exhaustive
def test_thousands_of_operators(chromium: Page, tmp_path: Path) -> None:
    write_sample(tmp_path, operators=2500)
    write_report(gather(tmp_path), tmp_path / "report.html")
    chromium.problems.clear()
    chromium.open(tmp_path / "report.html")
    assert texts(chromium, "#shown") == ["5003 of 5003"]
    assert len(column(chromium, "operator")) == 200
    click_heading(chromium, "RMSE")
    assert len(column(chromium, "operator")) == 200
    type_words(chromium, "aten.silu_2061")
    assert column(chromium, "operator") == ["aten.silu_2061"] * 2
    type_words(chromium, "silu")
    assert len(column(chromium, "operator")) == 200
    chromium.run("document.querySelector('#operators button.all').click()")
    assert len(column(chromium, "operator")) == 384
    assert chromium.problems == []
