import os
import subprocess
import sys
from pathlib import Path

import pytest
from cgroup_tree import machine, v2_group

from headstart.core.errors import ConfigError
from headstart.model.setup.threads import available_cores, configure_num_threads


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))


@pytest.mark.skipif(sys.platform != "linux", reason="cgroups")
@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 6), ("200000 100000", 2), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 6)],
)
@pytest.mark.usefixtures("eight_cores")
def test_cores_are_the_least_of_machine_affinity_and_quota(tmp_path: Path, quota: str, cores: int) -> None:
    v2_group(machine(tmp_path), cpu_max=quota)
    assert available_cores(tmp_path) == cores


def test_real_machine_never_grants_more_cores_than_it_has() -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)


def test_sets_openmp_variables_where_the_user_has_not() -> None:
    environ: dict[str, str] = {}
    assert configure_num_threads(3, environ=environ) == 3
    assert environ["OMP_NUM_THREADS"] == environ["MKL_NUM_THREADS"] == "3"
    assert environ["GOMP_SPINCOUNT"] == "1000"


def test_users_settings_stand() -> None:
    environ = {"GOMP_SPINCOUNT": "5", "OMP_NUM_THREADS": "2"}
    assert configure_num_threads(environ=environ) == 2
    assert configure_num_threads(7, environ=environ) == 7  # said to us, which is later and nearer
    assert environ["GOMP_SPINCOUNT"] == "5"
    assert environ["OMP_NUM_THREADS"] == "2"


def test_default_is_every_core_granted() -> None:
    assert configure_num_threads(environ={}) == available_cores()


@pytest.mark.parametrize(
    ("threads", "variable", "words"), [(-1, "2", "threads is -1"), (0, "many", "'many'"), (0, "0", "OMP_NUM_THREADS")]
)
def test_bad_numbers_are_refused(threads: int, variable: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configure_num_threads(threads, environ={"OMP_NUM_THREADS": variable})


def test_module_does_not_import_torch() -> None:
    code = "import sys, headstart.model.setup.threads; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0
