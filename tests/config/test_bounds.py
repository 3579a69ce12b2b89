"""Numbers outside what they can be are refused when the config is composed, with the key and the bound."""

import pytest

from orbit_cli.config.compose import compose
from orbit_cli.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("hardware.threads=-1", r"hardware\.threads=-1 must be at least 1"),
        ("hardware.memory_mib=0", r"hardware\.memory_mib=0 must be at least 1"),
        ("engine.tensor_parallel=-2", r"engine\.tensor_parallel=-2 must be at least 0"),
        ("engine.start_timeout_s=-1", r"start_timeout_s=-1\.0 must be positive"),
        ("engine.mem_fraction_static=1.5", r"mem_fraction_static=1\.5 must lie between"),
        ("sync.probe_prompts=0", r"sync\.probe_prompts=0 must be at least 1"),
        ("sync.max_mean_gap=0", r"would stop every run"),
        ("logging.samples_per_step=-2", r"samples_per_step=-2 must be at least 0"),
        ("trainer.checkpoint_every=-1", r"checkpoint_every=-1 must be at least 0"),
        ("seed=-1", r"seed=-1 is outside"),
        ("hardware.gpus=-3", r"hardware\.gpus=-3 must be at least 0"),
        (f"run.name={'x' * 201}", r"run\.name=x{20}\.\.\. has 201 bytes, .* at most 200"),
    ],
)
def test_a_number_out_of_bounds(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        compose([override])


def test_gpus_are_needed_where_the_device_is_one() -> None:
    with pytest.raises(ConfigError, match=r"hardware\.gpus=0 must be at least 1"):
        compose(["hardware=h200", "hardware.gpus=0"])


def test_gpus_are_answered_before_what_follows_from_them() -> None:
    with pytest.raises(ConfigError, match=r"hardware\.gpus=-3 must be at least 1"):
        compose(["model=kimi_k26", "hardware=h200x8", "hardware.gpus=-3"])  # engine.tensor_parallel=${hardware.gpus}
