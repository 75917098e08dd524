"""Threads that wait sleep, unless the user chose otherwise; decided before torch is there to read it."""

import os
import subprocess
import sys

import pytest

from prototree.threads import CHOSEN_BY_USERS

SAY = "; import os; print(os.environ.get('OMP_WAIT_POLICY'))"


def after(code: str, **chosen: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in CHOSEN_BY_USERS}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment | chosen, capture_output=True, text=True, timeout=3600, check=True)


def test_waiting_threads_sleep_and_torch_hears_of_it() -> None:
    done = after("import prototree.network.backbone" + SAY, OMP_DISPLAY_ENV="true")
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
