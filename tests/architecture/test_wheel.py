"""A wheel carries conf/ and recipes/ inside orbit_cli, and works from any folder without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked wheel, as site-packages would hold it."""
    work = tmp_path_factory.mktemp("wheel")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(work),
        str(ROOT),
    ]
    subprocess.run(build, check=True, timeout=120)
    (wheel,) = work.glob("*.whl")
    site = work / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


@pytest.mark.timeout(180)
def test_the_wheel_is_whole(installed: Path) -> None:
    for folder in ("conf", "recipes"):
        inside = {path.relative_to(installed / "orbit_cli") for path in (installed / "orbit_cli" / folder).rglob("*.*")}
        outside = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.*")}
        assert inside == outside
    assert (installed / "orbit_kernels" / "__init__.py").is_file()
    assert (installed / "orbit_cli" / "telemetry" / "report.css").is_file()
    points = next(installed.glob("*.dist-info/entry_points.txt")).read_text()
    assert "orbit = orbit_cli.__main__:main" in points
    assert "[sglang.srt.plugins]" in points


@pytest.mark.timeout(180)
def test_the_wheel_finds_its_configs(installed: Path, tmp_path: Path) -> None:
    """In isolated mode (-I), so that neither the checkout nor its editable installation can help."""
    code = (
        f"import sys; sys.path.insert(0, {str(installed)!r})\n"
        "import orbit_cli.config.locate as locate\n"
        f"assert str(locate.data_root()).startswith({str(installed)!r}), locate.data_root()\n"
        "from orbit_cli.config.compose import compose\n"
        "print(compose(['recipe=smoke_moe_lora', 'trainer.steps=7']).trainer.steps)\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "7"
