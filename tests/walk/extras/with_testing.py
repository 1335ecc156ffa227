# walk: './fenced[testing]' ./fenced/testkit
"""An author of a backend plays worlds, without the repository."""

import subprocess
import sys

worlds = [sys.executable, "-m", "fenced_testkit.simulation", "0-4", "--authority", "memory"]
done = subprocess.run(worlds, capture_output=True, text=True)
assert done.returncode == 0, done.stdout + done.stderr
