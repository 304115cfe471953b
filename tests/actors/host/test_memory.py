"""Host memory that a container leaves to a process."""

import psutil
import pytest

from raymm.actors.host.memory import available_memory


@pytest.fixture
def cgroup(tmp_path):
    def made(limit, used=3_000_000, cached=1_000_000):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
        (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")
        return tmp_path

    return made


def test_a_limit_counts_without_files_that_can_be_dropped(cgroup):
    assert available_memory(cgroup(5_000_000)) == 5_000_000 - 3_000_000 + 1_000_000


@pytest.mark.parametrize("limit", ["max", 2**62])
def test_without_a_smaller_limit_the_node_counts(cgroup, limit, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 7}))
    assert available_memory(cgroup(limit)) == 7


def test_a_node_without_containers_counts_alone(tmp_path):
    assert 0 < available_memory(tmp_path) <= psutil.virtual_memory().total
