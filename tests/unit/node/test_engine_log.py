"""The engine's log file: bounded, and never a reason to fail."""

from __future__ import annotations

from pathlib import Path

from rollmesh_node.engine_log import EngineLog


def test_the_file_turns_over_and_both_stay_bounded(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    log = EngineLog(path, most_bytes=1000)
    for number in range(200):
        log.write(f"line {number}")
    older = path.with_name("engine.log.1")
    assert path.stat().st_size <= 1000 and older.stat().st_size <= 1000
    lines = (older.read_text() + path.read_text()).splitlines()
    assert [line.split(" ", 2)[2] for line in lines][-3:] == ["line 197", "line 198", "line 199"]
    log.write("x" * 5000)
    assert path.stat().st_size <= 1000
    again = EngineLog(path, most_bytes=1000)  # a restarted node goes on with what is there
    again.write("after the restart")
    assert path.stat().st_size <= 1000 and "after the restart" in path.read_text()


def test_a_folder_that_cannot_be_written_costs_lines_only(tmp_path: Path) -> None:
    log = EngineLog(tmp_path / "gone" / "engine.log")
    log.write("lost")
    assert not log.path.exists()
