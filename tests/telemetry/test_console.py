"""The console of a run whose reader goes away."""

import subprocess
import sys

LINES = """
from orbit_cli.config.schema.system import ConsoleMode
from orbit_cli.telemetry.console import RunConsole
with RunConsole(ConsoleMode.plain, 1) as console:
    for number in range(5000):
        console.note(f"line {number} of a run that goes on" + "." * 60)
import sys
print("finished", file=sys.stderr)
"""


def test_a_run_goes_on_when_its_output_is_closed():
    process = subprocess.Popen([sys.executable, "-c", LINES], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("line 0")
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait() == 0 and "the output was closed; the run goes on" in said and said.endswith("finished\n")
