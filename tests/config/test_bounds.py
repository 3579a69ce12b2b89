"""Numbers outside what they can be are refused when the config is composed, with the key and the bound."""

import pytest

from orbit_cli.config.compose import compose
from orbit_cli.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("hardware.threads=-1", r"hardware\.threads=-1 must be at least 1"),
        ("hardware.memory_mib=0", r"hardware\.memory_mib=0 must be at least 1"),
        ("engine.tensor_parallel=-2", r"engine\.tensor_parallel=-2 must be at least 1; set 1"),
        ("engine.tensor_parallel=0", r"engine\.tensor_parallel=0 must be at least 1; set 1"),
        (f"rollout.prompts_per_step={10**17}", r"prompts_per_step=1(0){17} is more than any run .* at most 10000000"),
        ("rollout.group_size=9000000", r"prompts_per_step=8 with group_size=9000000 makes 72000000 samples a step"),
        ("rollout.collect_prompts=99999999999", r"collect_prompts=99999999999 is more than any run ends with"),
        ("evaluation.samples=100000000000", r"evaluation\.samples=1(0){11} is more than any run ends with"),
        ("evaluation.samples=1000000", r"evaluation\.prompts=64 with samples=1000000 makes 64000000 samples"),
        ("evaluation.bootstrap=1000000000000", r"evaluation\.bootstrap=1(0){12} is more than any run ends with"),
        ("environment.max_turns=1000000", r"environment\.max_turns=1000000 is more than any run ends with"),
        (
            "hardware.gpus=2",
            r"hardware\.gpus=2 with hardware\.device=cpu: none .*; set hardware\.gpus=0",
        ),
        ("engine.start_timeout_s=-1", r"start_timeout_s=-1\.0 must be positive"),
        ("engine.mem_fraction_static=1.5", r"mem_fraction_static=1\.5 must lie between"),
        ("sync.probe_prompts=0", r"sync\.probe_prompts=0 must be at least 1"),
        ("sync.max_mean_gap=0", r"would stop every run"),
        ("logging.samples_per_step=-2", r"samples_per_step=-2 must be at least 0"),
        ("trainer.checkpoint_every=-1", r"checkpoint_every=-1 must be at least 0"),
        ("seed=-1", r"seed=-1 is outside"),
        ("memory.context_gib=-500", r"memory\.context_gib=-500\.0 must be at least 0"),
        ("memory.host_slack=-1", r"memory\.host_slack=-1\.0 must be at least 0"),
        ("environment.max_turns=0", r"environment\.max_turns=0 must be at least 1"),
        ("environment.reward.timeout_s=0", r"environment\.reward\.timeout_s=0\.0 must be positive"),
        ("evaluation.max_new_tokens=0", r"evaluation\.max_new_tokens=0 must be at least 1"),
        ("evaluation.bootstrap=0", r"evaluation\.bootstrap=0 must be at least 1"),
        ("evaluation.pass_k=[0]", r"evaluation\.pass_k has 0"),
        ("evaluation.top_p=0", r"evaluation\.top_p=0\.0 must be above 0"),
        ("rollout.top_k=0", r"rollout\.top_k=0 must be at least 1, or -1"),
        ("trainer.beta1=1", r"trainer\.beta1=1\.0 must lie between 0 and 1, below 1"),
        ("trainer.weight_decay=-1", r"trainer\.weight_decay=-1\.0 must be at least 0"),
        ("trainer.warmup_steps=-5", r"trainer\.warmup_steps=-5 must be at least 0"),
        ("trainer.learning_rate=0", r"trainer\.learning_rate=0\.0 must be positive, for example 0\.0001"),
        ("sync.movement_share=-1", r"sync\.movement_share=-1\.0 must lie between 0 and 1"),
        ("algorithm.clip_low=-0.1", r"algorithm\.clip_low=-0\.1 must be at least 0"),
        ("adapter.layers=[-1]", r"adapter\.layers has -1; layers count from 0"),
        ("adapter.targets=[q_proj,q_proj]", r"adapter\.targets names q_proj twice"),
        ("quantization.targets=[]", r"quantization\.targets is empty"),
        ("quantization.ignore=['re:(']", r"quantization\.ignore has 're:\(', no regular expression"),
        (f"trainer.steps={10**400}", r"must be a whole number of at most 18 digits"),
        (f"memory.context_gib={10**400}", r"must be a number below 1e18"),
        ("memory.graphs_gib=1e308", r"must be a number below 1e18"),
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
        compose(["model=kimi_k26", "hardware=h200x8", "hardware.gpus=-3"])  # engine.tensor_parallel follows them
    with pytest.raises(ConfigError, match=r"hardware\.gpus=1000000 is more than one machine has; set at most"):
        compose(["model=kimi_k26", "hardware=h200x8", "hardware.gpus=1000000"])


def test_an_engine_of_a_machine_without_gpus_is_one_process() -> None:
    assert compose(["model=kimi_k26", "hardware=cpu"]).engine.tensor_parallel == 1


@pytest.mark.parametrize(("longest", "zone"), [(8, 2), (16, 4), (2, 1), (20480, 5120)])
def test_the_zone_of_the_penalty_on_length_fits_the_responses(longest: int, zone: int) -> None:
    config = compose(["algorithm=dapo", f"rollout.max_new_tokens={longest}"])
    assert config.overlong_buffer == zone
    assert compose(["algorithm=dapo", "rollout.max_new_tokens=8", "algorithm.overlong_buffer=3"]).overlong_buffer == 3


def test_a_zone_of_the_whole_response_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.overlong_buffer=8 is not shorter .*=8: every response"):
        compose(["algorithm=dapo", "rollout.max_new_tokens=8", "algorithm.overlong_buffer=8"])
    with pytest.raises(ConfigError, match=r"overlong_buffer of at least 1 token; null takes a quarter"):
        compose(["algorithm=dapo", "algorithm.overlong_buffer=0"])
