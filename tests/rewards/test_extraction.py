"""Finding the graded part of a response."""

from __future__ import annotations

import re

import pytest

from orbit_cli.rewards.extraction import last_boxed, last_group


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{4}, no: \boxed{5}", "5"),
        (r"\boxed{\frac{1}{3}}", r"\frac{1}{3}"),
        (r"\boxed {x_{1}^{2}} done", "x_{1}^{2}"),
        (r"\boxed{ \{1, 2\} }", r"\{1, 2\}"),
        (r"\boxed{a \\} and more", r"a \\"),
        (r"\boxed{5} and then \boxed{6 which never ends", "5"),
        (r"\boxed{outer \boxed{inner}}", "inner"),
        (r"\boxed{}", ""),
        ("no box", None),
        (r"\boxed{never closed", None),
    ],
)
def test_last_boxed(text, expected):
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        (r"answer: (\d+)", "answer: 1, answer: 22", "22"),
        (r"\d+", "1 then 2", "2"),
        (r"a|(b)", "b a", None),  # the last match has no such group
        (r"<answer>(.*?)</answer>", "<answer> 7 </answer>", "7"),
        (r"x", "nothing", None),
    ],
)
def test_last_group(pattern, text, expected):
    assert last_group(re.compile(pattern), text) == expected
