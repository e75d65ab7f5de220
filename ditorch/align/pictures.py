"""The page's pictures, as SVG that takes its text colour from the page."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

from markupsafe import Markup

DECADES = 19
"""Bins of `Errors.histogram`: 0, then below 1e-16, 1e-15 ... 1, then 1 and more."""

COLOURS = ("#4477aa", "#d1603d", "#2e9e6b", "#b8860b", "#9a5bb5", "#2aa1b3", "#c2497e", "#7a7a7a")

_LABELS = {0: "0", 3: "1e-14", 7: "1e-10", 11: "1e-6", 14: "1e-3", 18: "≥1"}


def spark(counts: Sequence[int]) -> Markup:
    """A histogram the size of a word."""
    bars = "".join(
        f"M{5 * i} 20v-{height * 19:.1f}h4V20z" for i, height in enumerate(_heights(counts))
        if height
    )  # fmt: skip
    return Markup(
        f'<svg class="spark" viewBox="0 0 {5 * DECADES} 20" preserveAspectRatio="none" '
        f'aria-hidden="true"><path class="bars" d="{bars}"/></svg>'
    )


def histogram(counts: Sequence[int]) -> Markup:
    """A histogram with an axis; hovering tells the counts."""
    total = sum(counts)
    wide, high, each = 418, 100, 22
    parts = []
    for i, height in enumerate(_heights(counts)):
        if height:
            bar = height * high
            said = f"{counts[i]:,} elements ({counts[i] / total:.3%}), {_bin_name(i)}"
            parts.append(
                f'<rect class="bars" x="{each * i + 1}" y="{high - bar + 4:.1f}" '
                f'width="{each - 2}" height="{bar:.1f}"><title>{said}</title></rect>'
            )
    ticks = "".join(
        f'<text x="{_tick_x(i, each)}" y="118" text-anchor="middle">{label}</text>'
        for i, label in _LABELS.items()
    )
    return Markup(
        f'<svg class="histogram" viewBox="-8 0 {wide + 16} 124" width="{wide}" role="img" '
        f'aria-label="Elements by relative error">{"".join(parts)}'
        f'<path class="axis" d="M0 104.5h{wide}"/><g class="ticks">{ticks}</g></svg>'
    )


def _tick_x(i: int, each: int) -> float:
    """Bins 0 and 18 are named in their middle; the others at their upper edge."""
    return each * (i + 0.5) if i in (0, DECADES - 1) else each * (i + 1)


def _bin_name(i: int) -> str:
    if i == 0:
        return "exact"
    return "relative error 1 or more" if i == DECADES - 1 else f"relative error below 1e{i - 17}"


def _heights(counts: Sequence[int]) -> list[float]:
    """Returns the heights of a histogram's bars, from 0 to 1, by the counts that they stand for.

    The scale is logarithmic, so that one wrong element in a million is visible.
    """
    most = math.log2(1 + max(counts, default=0))
    return [math.log2(1 + count) / most if count else 0.0 for count in counts[:DECADES]]


def loss_picture(
    curves: Sequence[Sequence[float]], errors: Sequence[Sequence[float] | None], bar: float
) -> Markup:
    """Losses by step, above the relative errors of those that have a reference.

    Args:
        curves: coloured in order by `COLOURS`.
        errors: of each curve, or None.
        bar: drawn as a line among the errors.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 9}):
        figure, (above, below) = pyplot.subplots(
            2, 1, figsize=(9, 5), sharex=True, height_ratios=(3, 2), layout="constrained"
        )
        for i, curve in enumerate(curves):
            above.plot(_drawable(curve), color=colour(i), linewidth=1.3)
        for i, error in enumerate(errors):
            if error is not None:
                below.plot(_drawable(error), color=colour(i), linewidth=1)
        below.axhline(bar, color="#d9482b", linestyle="--", linewidth=1)
        below.annotate(
            f"mean must stay below {bar:.1%}", (0, bar), xytext=(4, 3), textcoords="offset points",
            color="#d9482b",
        )  # fmt: skip
        below.set_yscale("symlog", linthresh=1e-5)
        below.set_ylim(bottom=0)
        above.set_ylabel("loss")
        below.set_ylabel("relative error")
        below.set_xlabel("step")
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :].replace("#000000", "currentColor")
    label = '<svg role="img" aria-label="Losses and their relative errors by step" '
    return Markup(label + 'fill="currentColor" ' + svg.removeprefix("<svg "))


def colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def _drawable(values: Sequence[float]) -> list[float]:
    """Gaps where a loss is not finite."""
    return [value if math.isfinite(value) else math.nan for value in values]
