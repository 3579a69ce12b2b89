"""Where conf/ and recipes/ lie: inside the installed package, or at the root of the checkout. Reads nothing else."""

from __future__ import annotations

from pathlib import Path

from orbit_cli.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]  # .../orbit_cli
CHECKOUT = PACKAGE.parents[1]  # the folder above src/
GROUPS = (
    "model",
    "quantization",
    "adapter",
    "algorithm",
    "environment",
    "engine",
    "hardware",
    "logging",
    "experiment",
)


def data_root() -> Path:
    """Folder that holds `conf/` and `recipes/`: `orbit_cli/` in a wheel, the checkout's root otherwise.

    Raises ConfigError when neither has them (a broken installation).
    """
    for root in (PACKAGE, CHECKOUT):
        if (root / "conf" / "config.yaml").is_file():
            return root
    raise ConfigError(
        f"no conf/config.yaml in {PACKAGE} or {CHECKOUT}: the installation is incomplete; run pip install again"
    )


def conf_dir() -> Path:
    return data_root() / "conf"


def recipes_dir() -> Path:
    return data_root() / "recipes"


def group_options(group: str) -> list[str]:
    """Names of the files of a group, for example group_options("adapter") == ["lora", "oft"]."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def recipe_names() -> list[str]:
    return sorted(path.stem for path in recipes_dir().glob("*.yaml"))
