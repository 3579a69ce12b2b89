"""`sglang.Engine` without what a token-in, token-out engine never uses, so that it starts in half the time.

With `skip_tokenizer_init` the scheduler answers the tokenizer's process directly: the detokenizer's process would
import all of SGLang and then wait for ever. And SGLang imports every model it knows; here only the checkpoint's own is
looked at. Imported in the engine's own process alone.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path


def narrow_model_registry(architectures: list[str]) -> None:
    """Make SGLang's registry skip the model files that do not define one of `architectures`; call before its import."""
    spec = importlib.util.find_spec("sglang")
    folder = Path(spec.submodule_search_locations[0]) / "srt" / "models"
    wanted = re.compile(rf"^class ({'|'.join(map(re.escape, architectures))})\b", re.MULTILINE)
    files = sorted(folder.glob("*.py"))
    defining = {path.stem for path in files if wanted.search(path.read_text(errors="ignore"))}
    if defining and "SGLANG_DISABLED_MODEL_ARCHS" not in os.environ:
        others = [path.stem for path in files if path.stem not in defining]
        os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(others)


def start_engine(arguments: dict):
    """A running engine; `arguments` are ServerArgs' fields."""
    from sglang.srt.entrypoints.engine import Engine

    class TokenEngine(Engine):
        @classmethod
        def _launch_detokenizer_subprocesses(cls, server_args, port_args, run_detokenizer_process_func):
            return [], []

    return TokenEngine(**arguments)
