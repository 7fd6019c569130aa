"""Tells what happens: a picture that is drawn over in a terminal, lines where there is none. It decides nothing."""

from __future__ import annotations

from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.live import Live

from rollmesh_learner.demo.view import render, step_line, wait_line
from rollmesh_learner.demo.watching import Scene

QUIET_S: Final = 30.0
"""Without a terminal, a long wait is told this often."""


class Narrator:
    """Use as a context manager, which gives the terminal back at its end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="ellipsis")
        self._steps_told = 0
        self._notice = ""
        self._told_s = -QUIET_S

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def tell(self, scene: Scene, notice: str) -> None:
        """Show a scene, and what the demo itself is doing."""
        if self._console.is_terminal:
            self._live.update(render(scene, notice=notice), refresh=True)
            return
        if notice != self._notice:
            self._notice = notice
            self._line(scene, notice)
        for step in scene.steps[self._steps_told :]:
            self._line(scene, step_line(scene, step))
        self._steps_told = len(scene.steps)
        if scene.elapsed_s - self._told_s >= QUIET_S:
            self._line(scene, wait_line(scene))

    def _line(self, scene: Scene, sentence: str) -> None:
        self._told_s = scene.elapsed_s
        self._console.print(f"{scene.elapsed_s:5.0f} s  {sentence}", markup=False)
