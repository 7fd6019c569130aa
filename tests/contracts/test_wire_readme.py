"""The specification of the wire says what the code does: its tables are made from the code, its names are all there."""

from __future__ import annotations

import inspect
import re

from rollmesh_protocol import envelope, layout, lease, limits, manifest, messages, rollout, sampling, status, streams
from rollmesh_protocol.errors import CODES
from rollmesh_protocol.record import Record
from tests.contracts.wire_tables import README, RECORDS, codes_section, written

TEXT = README.read_text(encoding="utf-8")


def test_the_tables_are_up_to_date() -> None:
    assert written(TEXT) == TEXT, "run: python -m tests.contracts.wire_tables"


def test_every_code_is_in_the_table() -> None:
    rows = re.findall(r"^\| `([a-z_.]+)` \| (.+) \| (.+) \|$", codes_section(), re.MULTILINE)
    assert [row[0] for row in rows] == list(CODES)
    assert codes_section() in TEXT


def test_every_record_of_the_protocol_has_a_table() -> None:
    modules = (envelope, layout, lease, manifest, messages, rollout, status)
    defined = {
        value
        for module in modules
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Record) and value.__module__ == module.__name__
    }
    shown = [record for records in RECORDS.values() for record in records]
    assert set(shown) == defined and len(shown) == len(defined)


def test_every_stream_topic_and_kind_is_named() -> None:
    ids = [value for name, value in vars(streams).items() if name.isupper()]
    assert len(ids) == 10
    for name in (*ids, streams.policy_topic("<run>"), streams.notice_topic("<run>")):
        assert f"`{name}`" in TEXT
    for kind in envelope.Kind.__args__:
        assert f"`{kind}`" in TEXT


def test_the_numbers_in_the_prose_are_those_of_the_code() -> None:
    for number in (
        f"{limits.HELLO_BYTES // limits.KIB} KiB", f"{limits.RESULT_BYTES // limits.MIB} MiB",
        f"{limits.MAX_NESTING} levels", f"{limits.MAX_ITEMS:,} values", f"{limits.MAX_CARD_ITEMS:,}",
        f"{limits.MAX_CHUNKS_PER_REQUEST} indices", f"{limits.SERVED_FILE_RATIO:g} times",
        f"{limits.PASS_VERSIONS:,} versions", f"{limits.CHUNK_IDLE_S:g} s", f"{limits.HAVE_ALIVE_S:g} s",
        f"{limits.HAVE_SILENCE_S:g} s", f"{limits.GOSSIP_BYTES // limits.KIB} KiB", f"{limits.LOGPROB_SLACK:g}",
        f"{sampling.G_MAX:.4f}", f"{sampling.G_MIN:.4f}", *(f"0x{word:08X}" for word in sampling.MULTIPLIERS),
        *(f"0x{word:08X}" for word in sampling.WEYL), f"{layout.ALIGNMENT} bytes",
    ):  # fmt: skip
        assert number in TEXT, number
