"""What the sanitizer script lets pass: Triton's own hand-over of roles, and nothing else."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "sanitize_kernels.py"
SPEC = importlib.util.spec_from_file_location("sanitize_kernels", SCRIPT)
sanitize = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(sanitize)

KERNEL = ["def forward_kernel(", "    acc = dot(a, b)", "    gl.warp_specialize("]
ROLES = """========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at forward_kernel+0x150 in hopper_forward.py:1
=========     and Write access at forward_kernel+0x18e0 in hopper_forward.py:1 [170 hazards]
=========     and Write access at forward_kernel+0x5b80 in hopper_forward.py:3 [138 hazards]
========= 
"""
BUFFER = """========= Error: Race reported between Write access at forward_kernel+0x150 in hopper_forward.py:2
=========     and Read access at forward_kernel+0x18e0 in hopper_forward.py:3 [1 hazards]
========= 
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""


def line_of(file: str, number: int) -> str:
    return KERNEL[number - 1]


def test_the_hand_over_of_roles_passes():
    assert sanitize.races(ROLES, line_of) == ([], 1)


def test_a_race_in_a_buffer_is_real():
    real, roles = sanitize.races(ROLES + BUFFER, line_of)
    assert roles == 1 and len(real) == 1 and "hopper_forward.py:2" in real[0]


def test_a_report_without_lines_is_real():
    real, roles = sanitize.races("========= Error: Race reported somewhere\n", line_of)
    assert len(real) == 1 and roles == 0


def test_lines_of_kernels_are_found():
    files = [path for path in (SCRIPT.parents[1] / "kernels" / "orbit_kernels").glob("hopper_*.py")]
    specialised = [path for path in files if "gl.warp_specialize(" in path.read_text()]
    assert len(specialised) >= 3
    number = specialised[0].read_text().splitlines().index("    gl.warp_specialize(") + 1
    assert "gl.warp_specialize(" in sanitize.source_line(specialised[0].name, number)
    assert sanitize.source_line("nowhere.py", 3) == ""
