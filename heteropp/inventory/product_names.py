"""Which shipped chip file describes a product, by the name that its vendor's tools print."""

from __future__ import annotations

import re

from heteropp.description.chips import chip_names

MAKERS = ("ascend", "metax", "mtt", "kunlun")  # words of our names that tools may leave out
MODEL_NUMBERS = {"hl-225": "gaudi2", "hl-325": "gaudi3"}  # what hl-smi prints
PAPER = re.compile(r"[a-d](-mini)?")  # the H2 paper's chips, which nobody sells
# Words of products that share a chip's name but not its figures: "RTX 3090 Ti", "H200 NVL",
# "H20-3e"; a letter at a number or by itself, as in "V100S", "A100X" and "RTX 4090 D"; Cambricon's
# cards other than the X8; and shares of an NVIDIA GPU, as in "a100_3g.20gb".
VARIANTS = re.compile(r"pcie|nvl|laptop|mobile|max|ti|super|[a-z]|3e|m8|s4|x4l?|\d+g")


def chip_of(product: str) -> str | None:
    """Returns the name of the chip file of a product, "NVIDIA H100 80GB HBM3" say, or None.

    All words of the file's name stand in the product's; of several such, the longest is meant. It
    is None where the product's name says that it is a variant with other figures.
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
    longest = max(fitting, key=len, default=None)
    return None if longest is None or _is_variant(product, longest) else longest


def _is_variant(product: str, name: str) -> bool:
    """Whether what the product's name has beside the words of the chip file's is of a variant."""
    for word in _words(name):
        product = re.sub(_by_itself(word), " ", product)
    return any(VARIANTS.fullmatch(word) for word in re.split("[^a-z0-9]+", product))


def _words(name: str) -> list[str]:
    return [word for word in name.split("-") if word not in MAKERS]


def _stands_in(word: str, product: str) -> bool:
    return re.search(_by_itself(word), product) is not None


def _by_itself(word: str) -> str:
    """Returns a pattern of the word by itself: no "t4" in "T400", nor "h200" in "GH200"."""
    before = r"(?<!\d)" if word[0].isdigit() else r"(?<![a-z])"
    after = r"(?!\d)" if word[-1].isdigit() else r"(?![a-z])"
    return before + re.escape(word) + after
