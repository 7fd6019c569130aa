"""The tables of protocol/README.md, made from the code that they describe.

``python -m tests.contracts.wire_tables`` writes them between their markers; a test holds that they are up to date. The
prose around them is written by hand.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import types
import typing
from pathlib import Path
from typing import Annotated, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from rollmesh_protocol import envelope, layout, lease, manifest, messages, rollout, status
from rollmesh_protocol.errors import CODES
from rollmesh_protocol.record import Record

README = Path(__file__).parents[2] / "protocol" / "README.md"

RECORDS: dict[str, tuple[type[Record], ...]] = {
    "Signed messages": (envelope.Envelope,),
    "Joining": (
        messages.Hello, messages.EngineInfo, messages.Invite, messages.Welcome, messages.Head, messages.Pass,
        messages.RunCard, messages.ModelReference, layout.Layout, layout.TensorSpec, messages.RunLimits,
        messages.Checks, messages.MarginChecks, messages.DriftCheck, messages.LogprobChecks,
    ),
    "Work": (
        messages.LeaseRequest, messages.LeaseAnswer, messages.Wait, messages.Standing, lease.Lease, lease.LeasedSample,
        rollout.Result, rollout.SampleResult, rollout.Segment, messages.Receipt, messages.ReturnRequest,
        messages.ReturnAnswer,
    ),
    "Weights": (
        messages.ManifestRequest, manifest.Manifest, messages.EdgesRequest, messages.EdgesAnswer, manifest.Edge,
        messages.PeersRequest, messages.PeersAnswer, messages.Neighbour, messages.HaveRequest, messages.HaveUpdate,
        messages.ChunkRequest,
    ),
    "Gossip": (messages.PolicyHeader, messages.Notice),
    "Status": (
        status.StatusRequest, status.StatusAnswer, status.RunStatus, status.SpreadStatus, status.TrustStatus,
        status.LengthStatus, status.PeerStatus, status.NodeStatus,
    ),
}  # fmt: skip
"""Every record that crosses the wire, in the order of the README."""

PLAIN = {int: "int", float: "float", str: "text", bytes: "bytes", bool: "bool", type(None): "nil"}


def records_section() -> str:
    """A table of fields for each record."""
    parts = []
    for title, records in RECORDS.items():
        parts.append(f"### {title}\n")
        for record in records:
            summary = " ".join((inspect.getdoc(record) or "").split("\n\n")[0].split())
            parts.append(f"**{record.__name__}**: {_plain(summary)}\n")
            parts.append("| field | type | |\n|---|---|---|")
            notes = _notes(record)
            parts += [
                f"| `{name}` | {_described(field)} | {notes.get(name, '')} |"
                for name, field in record.model_fields.items()
            ]
            parts.append("")
    return "\n".join(parts).rstrip()


def codes_section() -> str:
    """A table of every refusal code."""
    rows = [f"| `{code}` | {entry.meaning} | {entry.advice} |" for code, entry in CODES.items()]
    return "\n".join(["| code | meaning | what to do |", "|---|---|---|", *rows])


SECTIONS = {"records": records_section, "codes": codes_section}


def written(text: str) -> str:
    """``text`` with every section brought up to date."""
    for name, make in SECTIONS.items():
        begin, end = f"<!-- {name}: made by tests/contracts/wire_tables.py -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"{README} lacks the markers of {name}")
        before, after = pattern.split(text)
        text = f"{before}{begin}\n\n{make()}\n\n{end}{after}"
    return text


def _described(field: FieldInfo) -> str:
    return _kind(field.annotation, tuple(field.metadata))


def _kind(annotation: object, metadata: tuple[object, ...] = ()) -> str:
    """The notation of the README: ``int 0..16``, ``bytes[32]``, ``text[..64]``, ``array[1..4] of map Lease``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner, *more = arguments
        return _kind(inner, (*_constraints(more), *metadata))
    if origin in (Union, types.UnionType):
        kinds = [_kind(argument, metadata if argument is not type(None) else ()) for argument in arguments]
        return " or ".join(kinds)
    if origin is Literal:
        return "text: " + ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return f"array{_size(metadata)} of {_kind(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return f"map {annotation.__name__}"
    assert isinstance(annotation, type), annotation
    suffix = _size(metadata) if annotation in (bytes, str) else _range(metadata, whole=annotation is int)
    return PLAIN[annotation] + suffix


def _constraints(metadata: typing.Iterable[object]) -> list[object]:
    """The constraints inside ``Field(...)`` of an ``Annotated``."""
    found: list[object] = []
    for item in metadata:
        found += item.metadata if isinstance(item, FieldInfo) else [item]
    return found


def _size(metadata: tuple[object, ...]) -> str:
    least = next((item.min_length for item in metadata if isinstance(item, annotated_types.MinLen)), None)
    most = next((item.max_length for item in metadata if isinstance(item, annotated_types.MaxLen)), None)
    if least is None and most is None:
        return ""
    return f"[{least:,}]" if least == most and least is not None else f"[{_span(least, most)}]"


def _range(metadata: tuple[object, ...], *, whole: bool) -> str:
    least = most = None
    above = ""
    for item in metadata:
        match item:
            case annotated_types.Ge(ge=bound):
                least = bound
            case annotated_types.Gt(gt=bound) if not whole:
                above = f" above {bound:g}"
            case annotated_types.Le(le=bound):
                most = bound
            case annotated_types.Lt(lt=bound) if whole:
                most = bound - 1  # type: ignore[operator]
            case annotated_types.Gt() | annotated_types.Lt():
                raise TypeError(f"no notation for {item}")
    if above:
        return f"{above}, at most {_number(most)}"
    return f" {_span(least, most)}" if least is not None or most is not None else ""


def _span(least: object, most: object) -> str:
    return f"{'' if least is None else _number(least)}..{'' if most is None else _number(most)}"


def _number(value: object) -> str:
    if value in (2**64 - 1, 2**63 - 1):
        return f"2^{int(value).bit_length()} - 1"  # type: ignore[call-overload]
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _notes(record: type[Record]) -> dict[str, str]:
    """The texts under the fields of a record, in one line each."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(record))).body
    assert isinstance(body, ast.ClassDef)
    notes = {}
    for before, after in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(before, ast.AnnAssign)
            and isinstance(before.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            notes[before.target.id] = _plain(" ".join(after.value.value.split()))
    return notes


def _plain(text: str) -> str:
    """Sphinx's roles and double backticks as Markdown."""
    return re.sub(r":\w+:`[~!]?([^`]+)`", r"`\1`", text).replace("``", "`")


if __name__ == "__main__":
    README.write_text(written(README.read_text(encoding="utf-8")), encoding="utf-8")
