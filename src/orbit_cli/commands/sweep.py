"""`orbit train -m`: a run per combination of values, chosen by Hydra's sweeper and started by its launcher.

Each job is a child process, `orbit train <its overrides>`, with its own run folder and its own log below one sweep
folder, so that a crash (of the engine too) ends one job and its traceback is in that job's log.

    runs/sweep-.../jobs.json   overrides, exit codes and run folders       000/log.txt   all that job 0 printed
    runs/sweep-.../000/NAME/   the run folder of job 0
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from omegaconf import DictConfig

from orbit_cli.config.compose import PRIMARY, register_schema, search_path_override
from orbit_cli.config.locate import conf_dir
from orbit_cli.config.overrides import read_overrides
from orbit_cli.errors import ConfigError, UserError
from orbit_cli.telemetry.files import write_json
from orbit_cli.telemetry.run_folder import unique_name

ORBIT_TRAIN = (sys.executable, "-m", "orbit_cli", "train")
LOG = "log.txt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run of a sweep. Plain data: a launcher may carry it from another process."""

    number: int
    overrides: list[str]
    folder: str  # of the job: its log, and its run folder below
    exit_code: int

    @property
    def run(self) -> Path | None:
        """The run folder, unless the job died before it had one."""
        return next((path.parent for path in Path(self.folder).glob("*/config.yaml")), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRunner:
    """Hydra's task function: starts one job and waits for it. A value, so that launchers can pickle it."""

    command: tuple[str, ...]
    sweep: str  # folder
    fixed: tuple[str, ...]  # arguments of every job that are no Hydra overrides: recipe=NAME

    def __call__(self, config: DictConfig) -> dict[str, Any]:
        hydra = HydraConfig.get()
        own = [text for text in hydra.overrides.task if not text.lstrip("+~").startswith("run.root=")]
        folder = Path(self.sweep) / f"{int(hydra.job.num):03d}"
        folder.mkdir(parents=True)
        arguments = [*self.fixed, *own, f"run.root='{folder}'"]
        print(f"job {hydra.job.num}  {' '.join(own)}  (log: {folder / LOG})", flush=True)
        with open(folder / LOG, "w", encoding="utf-8") as log:
            log.write(f"$ orbit train {' '.join(arguments)}\n")
            log.flush()
            done = subprocess.run([*self.command, *arguments], stdout=log, stderr=subprocess.STDOUT, check=False)
        job = Job(number=int(hydra.job.num), overrides=own, folder=str(folder), exit_code=done.returncode)
        return asdict(job)


def run_sweep(overrides: list[str], *, show_config: bool = False, command: tuple[str, ...] = ORBIT_TRAIN) -> int:
    """Run a sweep and print its table. Returns 1 if a job failed, else 0. Raises ConfigError before any starts."""
    from orbit_cli.commands.sweep_table import print_table

    if show_config:
        raise UserError("--cfg job shows one config: leave out -m and give one value per key")
    read_overrides(overrides, sweep=True)  # every mistake is told before anything starts
    recipes = [text for text in overrides if text.lstrip("+").startswith(("recipe=", "recipes="))]
    # One recipe for all jobs is passed on as it was written; several recipes are swept like a group.
    fixed = [text for text in recipes if "," not in text]
    request = read_overrides([text for text in overrides if text not in fixed], sweep=True)
    root = Path(str(request.values.get("run.root", "runs"))).expanduser().resolve()
    sweep = root / unique_name("sweep")
    print(f"sweep in {sweep}", flush=True)
    jobs = _launch(  # makes the sweep's folder with its first job
        [
            search_path_override(request.search_path),
            f"hydra.sweep.dir='{sweep}/hydra'",
            "hydra.sweep.subdir=${hydra.job.num}",
            "hydra.output_subdir=null",
            "hydra.job.chdir=false",
            "hydra/job_logging=none",
            "hydra/hydra_logging=none",
            *request.overrides,
        ],
        JobRunner(command=command, sweep=str(sweep), fixed=tuple(fixed)),
    )
    shutil.rmtree(sweep / "hydra", ignore_errors=True)  # empty folders: Hydra makes one per job
    write_json(sweep / "jobs.json", [asdict(job) | {"run": str(job.run) if job.run else None} for job in jobs])
    print_table(jobs)
    return 1 if any(job.exit_code for job in jobs) else 0


def _launch(overrides: list[str], task: JobRunner) -> list[Job]:
    """Hand the sweep to Hydra; the jobs in the order in which they were launched."""
    register_schema()
    GlobalHydra.instance().clear()
    hydra = Hydra.create_main_hydra2(
        task_name="orbit", config_search_path=create_config_search_path(f"file://{conf_dir()}")
    )
    try:
        returned = hydra.multirun(
            config_name=PRIMARY, task_function=task, overrides=overrides, with_log_configuration=False
        )
    except HydraException as error:
        raise ConfigError(f"the sweep cannot be composed: {str(error).strip().splitlines()[0]}") from error
    finally:
        GlobalHydra.instance().clear()
    return sorted((Job(**job.return_value) for job in _flat(returned)), key=lambda job: job.number)


def _flat(returned: Any) -> list[JobReturn]:
    """BasicSweeper returns a list of batches of jobs; other sweepers may return jobs or nothing."""
    if isinstance(returned, JobReturn):
        return [returned]
    return [job for part in returned or [] for job in _flat(part)]
