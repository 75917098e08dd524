"""Threads that wait sleep, and freed memory is kept, unless the user chose otherwise."""

import os
import subprocess
import sys

import pytest

from prototree.threads import CHOSEN_BY_USERS, KEEPING_CHOSEN_BY_USERS

SAY = "; import os; print(os.environ.get('OMP_WAIT_POLICY'))"


def after(code: str, **chosen: str) -> subprocess.CompletedProcess[str]:
    environment = {
        key: value for key, value in os.environ.items() if key not in (*CHOSEN_BY_USERS, *KEEPING_CHOSEN_BY_USERS)
    }
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment | chosen, capture_output=True, text=True, timeout=3600, check=True)


def test_waiting_threads_sleep_and_torch_hears_of_it() -> None:
    done = after("import prototree.backbones.backbone" + SAY, OMP_DISPLAY_ENV="true")
    assert done.stdout.strip() == "passive"
    if "OMP_WAIT_POLICY" not in done.stderr:
        pytest.skip("this torch's OpenMP does not say what it has read")
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr


@pytest.mark.parametrize("name", CHOSEN_BY_USERS)
def test_what_the_user_chose_stays(name: str) -> None:
    value = "active" if name == "OMP_WAIT_POLICY" else "7"
    expected = value if name == "OMP_WAIT_POLICY" else "None"
    assert after("import prototree" + SAY, **{name: value}).stdout.strip() == expected


def test_once_torch_is_there_nothing_is_pretended() -> None:
    assert after("import torch, prototree" + SAY).stdout.strip() == "None"


FAULTS = """
import resource, prototree, prototree.threads, numpy
def step():
    some = [numpy.ones(2**20, numpy.float32) for _ in range(8)]
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 50)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep freed memory in their own way")
def test_freed_memory_is_used_again_instead_of_asked_for_anew() -> None:
    pages = 8 * 4 * 2**20 // 4096
    assert int(after(FAULTS).stdout) < pages / 100
    assert int(after(FAULTS, MALLOC_TRIM_THRESHOLD_="131072").stdout) > pages / 10, "unless the user chose"
