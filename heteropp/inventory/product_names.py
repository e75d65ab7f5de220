"""Which shipped chip file describes a product, by the name that its vendor's tools print."""

from __future__ import annotations

import re

from heteropp.description.chips import chip_names

MAKERS = ("ascend", "metax", "mtt", "kunlun")  # words of our names that tools may leave out
MODEL_NUMBERS = {"hl-225": "gaudi2", "hl-325": "gaudi3"}  # what hl-smi prints
PAPER = re.compile(r"[a-d](-mini)?")  # the H2 paper's chips, which nobody sells


def chip_of(product: str) -> str | None:
    """Returns the name of the chip file of a product, "NVIDIA H100 80GB HBM3" say, or None.

    All words of the file's name stand in the product's; of several such, the longest is meant.
    """
    product = product.lower()
    if product in chip_names() and len(product) > 1:  # a letter may stand for anything
        return product
    for number, chip in MODEL_NUMBERS.items():
        if number in product:
            return chip
    fitting = [
        name
        for name in chip_names()
        if not PAPER.fullmatch(name) and all(_stands_in(word, product) for word in _words(name))
    ]
    return max(fitting, key=len, default=None)


def _words(name: str) -> list[str]:
    return [word for word in name.split("-") if word not in MAKERS]


def _stands_in(word: str, product: str) -> bool:
    """Whether a word stands there by itself: "t4" does not in "T400", nor "h200" in "GH200"."""
    before = r"(?<!\d)" if word[0].isdigit() else r"(?<![a-z])"
    after = r"(?!\d)" if word[-1].isdigit() else r"(?![a-z])"
    return re.search(before + re.escape(word) + after, product) is not None
