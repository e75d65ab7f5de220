"""What a timeline looks like."""

from __future__ import annotations

import pytest

from heteropp.description.timeline import Span, shades


def test_shades_are_as_dark_as_the_time_is_filled() -> None:
    spans = [Span(0, "step", None, 0.0, 1.0), Span(0, "step", None, 2.0, 2.5)]
    image = shades([spans, []], end_s=4.0, columns=4)
    full = 1 - image[0][0]
    assert (1 - image[0][2]).tolist() == pytest.approx((full / 2).tolist())
    assert image[0][1].tolist() == image[0][3].tolist() == [1, 1, 1]
    assert (image[1] == 1).all()
