"""How a process of ours logs, on the stdlib's logging: text for a person, or JSON lines for a program.

Only a process's own wiring calls :func:`set_up_logging`; a part has ``logging.getLogger("rollmesh.<part>")`` and
reports each change of state with :func:`event`. As a library we stay silent. Text shortens peer ids, JSON does not.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from typing import Final, Literal, TextIO

Plain = str | int | float | bool | None
Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]

OURS: Final = ("rollmesh", "rollmesh_protocol", "rollmesh_peer", "rollmesh_node", "rollmesh_learner")
"""Loggers are named ``rollmesh.<part>``, or after their module."""
NOISY: Final = ("libp2p", "multiaddr", "aioquic", "zeroconf")
"""Libraries that log a stranger's garbage as an error of ours; heard at level debug only."""

SHORT_CHARS: Final = 8
"""As in :func:`rollmesh_protocol.identity.short`, which is not imported here because it loads the cryptography."""

_PEER: Final = re.compile(r"\b(?:12D3KooW|16Uiu2HA|Qm)[1-9A-HJ-NP-Za-km-z]{36,50}\b")


def shorten_peers(text: str) -> str:
    """``text`` with every peer id cut to its last characters: the first ones are the same for all Ed25519 keys."""
    return _PEER.sub(lambda match: f"..{match.group()[-SHORT_CHARS:]}", text)


def event(logger: logging.Logger, sentence: str, *, level: int = logging.INFO, **fields: Plain) -> None:
    """Report one change of state: a sentence that stays the same, and what varies as fields."""
    logger.log(level, "%s", sentence, extra={"fields": fields}, stacklevel=2)


def set_up_logging(*, form: Format = "text", level: Level = "info", stream: TextIO | None = None) -> None:
    """Send this process's log to ``stream`` (stderr by default). Calling it again replaces what it set before."""
    handler = _Ours(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else Text())
    root = logging.getLogger()
    for old in root.handlers[:]:
        if isinstance(old, _Ours):
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for name in OURS:
        logging.getLogger(name).setLevel(level.upper())
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING if level == "debug" else logging.CRITICAL)
    logging.captureWarnings(capture=True)


class _Ours(logging.StreamHandler[TextIO]):
    """The handler that :func:`set_up_logging` put there, as told from handlers of others."""


class Text(logging.Formatter):
    """``12:04:31 INFO  node.worker: leases taken groups=2 peer=..9aXkPqZt``, times in the machine's own zone."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback below it where there is one."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        pairs = "".join(f" {name}={_word(value)}" for name, value in _fields(record).items())
        line = _plain(f"{clock} {record.levelname:<7} {_part(record.name)}: {record.getMessage()}{pairs}")
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return shorten_peers(line)


class JsonLines(logging.Formatter):
    """One JSON object a line: ``time`` (seconds since 1970), ``level``, ``part``, ``event`` and the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the message holds."""
        line: dict[str, Plain] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "part": _part(record.name),
            "event": record.getMessage(),
        }
        for name, value in _fields(record).items():
            line[f"{name}_" if name in line else name] = value
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _plain(text: str) -> str:
    """``text`` on one line and without terminal controls: names, codes and sentences in it may be a stranger's."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)


def _fields(record: logging.LogRecord) -> Mapping[str, Plain]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}


def _part(name: str) -> str:
    """``rollmesh.mesh.host`` as ``mesh.host``."""
    return name.removeprefix("rollmesh_").removeprefix("rollmesh.")


def _word(value: Plain) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(c.isspace() or c in '"=' for c in text) else text
