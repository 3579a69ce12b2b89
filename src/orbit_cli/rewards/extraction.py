"""Finding the part of a response that is graded: the last match of an expression, the last \\boxed{...}.

Text in, text out. Whether the part is right is the scorers' question.
"""

from __future__ import annotations

import collections
import re

BOXED = re.compile(r"\\boxed\s*\{")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped character, a brace among them, is consumed as a pair


def last_group(pattern: re.Pattern[str], text: str) -> str | None:
    """First group of the last match (the whole match where the expression has no group), stripped; None if none."""
    last = next(iter(collections.deque(pattern.finditer(text), maxlen=1)), None)
    if last is None:
        return None
    found = last.group(1) if pattern.groups else last.group(0)
    return None if found is None else found.strip()


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete \boxed{...}, braces balanced; None if there is none.

    >>> last_boxed(r"first \boxed{4}, so \boxed{\frac{1}{3}}")
    '\\frac{1}{3}'
    """
    contents = (_balanced(text, match.end()) for match in reversed(list(BOXED.finditer(text))))
    return next((content.strip() for content in contents if content is not None), None)


def _balanced(text: str, start: int) -> str | None:
    """Text from `start` to the brace that closes the one just before it; None if it is never closed."""
    depth = 1
    for token in BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0:
            return text[start : token.start()]
    return None
