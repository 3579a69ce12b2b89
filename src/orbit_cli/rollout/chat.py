"""Chat text to token ids, and back. The only place that knows chat templates.

Everything the policy sees is built here once; what it sampled is never decoded and encoded again (token-in token-out).
"""

from __future__ import annotations

from pathlib import Path

from orbit_cli.errors import CheckpointError, ConfigError

_MARK = "\u241eresponse\u241e"  # stands for a sampled response when the template's glue is measured


class Chat:
    """A tokenizer with its chat template and stop tokens."""

    def __init__(self, folder: Path, stop_token_ids: list[int] | None = None) -> None:
        """`folder`: tokenizer of a Hugging Face checkpoint. Raises CheckpointError where there is none."""
        from transformers import AutoTokenizer

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(str(folder))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder} holds no tokenizer that transformers can read: {error}") from error
        if not self.tokenizer.chat_template:
            raise CheckpointError(
                f"the tokenizer in {folder} has no chat template; set model.tokenizer to a folder that has one"
            )
        self.stop_token_ids = tuple(stop_token_ids or self._stop_tokens(folder))
        if not self.stop_token_ids:
            raise ConfigError(f"no end-of-turn token is known for {folder}; set model.stop_token_ids")

    def _stop_tokens(self, folder: Path) -> list[int]:
        from transformers import GenerationConfig

        ids: list[int] = []
        if (folder / "generation_config.json").exists():
            eos = GenerationConfig.from_pretrained(str(folder)).eos_token_id
            ids = list(eos) if isinstance(eos, list | tuple) else [eos] if eos is not None else []
        if self.tokenizer.eos_token_id is not None and self.tokenizer.eos_token_id not in ids:
            ids.append(self.tokenizer.eos_token_id)
        return ids

    def prompt_tokens(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of the messages and of the header of the answer that is to be sampled."""
        text = self._render(messages, header=True)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def continuation_tokens(self, messages: list[dict[str, str]], reply: list[dict[str, str]]) -> list[int]:
        """Token ids that follow a sampled end-of-turn token: template glue, the environment's reply, the next header.

        `messages` is the conversation up to the sampled response. Raises ConfigError if the template rewrites
        history so that no continuation exists.
        """
        turn = [*messages, {"role": "assistant", "content": _MARK}]
        whole = self._render([*turn, *reply], header=True)
        before, mark, after = whole.partition(_MARK)
        if not mark or self._render(turn, header=False).partition(_MARK)[0] != before:
            raise ConfigError(
                "this chat template rewrites earlier turns, so a sampled response cannot be continued token by token; "
                "set environment.max_turns=1"
            )
        end = next((t for t in map(self.tokenizer.decode, self.stop_token_ids) if after.startswith(t)), None)
        if end is None:
            raise ConfigError(
                "the chat template does not end an answer with one of model.stop_token_ids; set model.stop_token_ids"
            )
        return self.tokenizer(after[len(end) :], add_special_tokens=False)["input_ids"]

    def text(self, token_ids: list[int]) -> str:
        """Text of a response, without stop tokens, for graders and people."""
        kept = [t for t in token_ids if t not in self.stop_token_ids]
        return self.tokenizer.decode(kept, skip_special_tokens=True)

    def _render(self, messages: list[dict[str, str]], header: bool) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=header)
