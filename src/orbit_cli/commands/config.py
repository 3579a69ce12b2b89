"""`orbit config`: the composed config with where each value came from, or the manual of one key."""

from __future__ import annotations

from orbit_cli.commands.options import Cfg, Overrides, load_config
from orbit_cli.errors import ConfigError


def config(overrides: Overrides = None, cfg: Cfg = None) -> None:
    """Show the composed config and where each value came from; or explain keys.

    \b
    orbit config
    orbit config recipe=smoke_moe_lora trainer.steps=5
    orbit config explain adapter.block_size
    orbit config explain adapter.block_size model=tiny_moe adapter.block_size=16
    orbit config --cfg job > mine.yaml
    """
    words = overrides or []
    if words and words[0] in ("show", "explain"):
        verb, words = words[0], words[1:]
    else:
        verb = "show"
    if verb == "explain":
        from orbit_cli.config.explain import explain

        given = [word for word in words if "=" in word or word.startswith("~")]
        keys = [word for word in words if word not in given]
        if not keys:
            raise ConfigError("orbit config explain needs a key, for example orbit config explain adapter.block_size")
        print("\n\n".join(explain(key, given) for key in keys))
        return
    load_config(words, cfg)  # what is shown must be valid
    from orbit_cli.config.provenance import provenance_table

    print(provenance_table(words))
