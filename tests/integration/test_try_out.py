"""``envfarm env test`` on environments that do not even start."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

_BROKEN = """
import os
os._exit(3)
"""


def test_a_log_that_a_failure_names_can_be_read_afterwards(tmp_path):
    (tmp_path / "broken.py").write_text(_BROKEN)
    argv = [sys.executable, "-m", "envfarm.cli.main", "env", "test", f"{tmp_path}/broken.py:Broken"]
    run = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode != 0
    said = (run.stdout + run.stderr).replace("\n", "")
    folder = Path(re.search(r"/tmp/envfarm-test-\w+", said).group())
    assert any((folder / "logs").iterdir())
    shutil.rmtree(folder)
