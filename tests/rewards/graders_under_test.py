"""Reward functions of a user, good and bad, for the tests: named by import path like any other."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

from orbit_cli.types import Prompt

NOT_CALLABLE = 3


def length(response: str, prompt: Prompt) -> int:
    return len(response) + len(prompt.metadata.get("extra", ""))


def misbehave(response: str, prompt: Prompt) -> float | None | str:
    """Does what the response says, so that one grader can be tried in all its moods."""
    if response == "hang":
        time.sleep(3600)
    if response == "raise":
        raise KeyError("no such entry")
    if response == "exit":
        sys.exit(3)
    if response == "crash":
        os._exit(139)
    if response == "print":
        print("a grader that prints")
    if response.startswith("hang with child "):
        child = subprocess.Popen(["sleep", "3600"])
        Path(response.removeprefix("hang with child ")).write_text(str(child.pid))
        time.sleep(3600)
    return {"nan": math.nan, "inf": math.inf, "nothing": None, "text": "no number"}.get(response, 1.0)
