"""README's blocks work as pasted, in order, on a machine where another server runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.reading import ROOT
from tests.docs.readme_session import in_own_network


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_every_block_of_the_readme_works_as_pasted_beside_another_server(tmp_path: Path):
    """In a network of their own, since they name their ports."""
    probe = in_own_network("true")
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("this machine makes no networks for users")
    done = subprocess.run(
        in_own_network(sys.executable, "-m", "tests.docs.readme_session", str(tmp_path)),
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    workers = re.findall(r"^ 127\.0\.0\.1:800\d +well ", done.stdout, re.MULTILINE)
    assert len(workers) == 4, done.stdout
    assert "Give each replica" in done.stdout and "timestamp costs" in done.stdout
