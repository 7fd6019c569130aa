"""Golden bytes: a silent change of any message's encoding fails here. Regenerate on purpose, with a new major."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollmesh_protocol.errors import CODES
from rollmesh_protocol.lease import seed_of
from tests.unit.protocol.examples import EXAMPLES, LAYOUT, RUN

VECTORS = Path(__file__).parents[2] / "vectors" / "messages.json"
RECORDED = json.loads(VECTORS.read_text())


def test_every_example_is_recorded() -> None:
    assert sorted(RECORDED["messages"]) == sorted(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_encoding_is_frozen(name: str) -> None:
    assert EXAMPLES[name].encode().hex() == RECORDED["messages"][name]


@pytest.mark.parametrize("name", EXAMPLES)
def test_decoding_gives_the_same_record(name: str) -> None:
    record = EXAMPLES[name]
    assert type(record).decode(bytes.fromhex(RECORDED["messages"][name]), limit=1 << 20) == record


def test_derived_values_are_frozen() -> None:
    assert LAYOUT.digest.hex() == RECORDED["layout_digest"]
    assert LAYOUT.root((bytes(32), bytes([1]) * 32, bytes([2]) * 32)).hex() == RECORDED["root"]
    assert seed_of(bytes(range(32)), run=RUN, group=41, sample=3) == RECORDED["seed"]


def test_codes_are_only_added() -> None:
    assert set(RECORDED["codes"]) <= set(CODES), "a code that peers know was removed or renamed"


if __name__ == "__main__":  # python -m tests.unit.protocol.test_vectors: record anew
    VECTORS.write_text(
        json.dumps(
            {
                "messages": {name: record.encode().hex() for name, record in EXAMPLES.items()},
                "layout_digest": LAYOUT.digest.hex(),
                "root": LAYOUT.root((bytes(32), bytes([1]) * 32, bytes([2]) * 32)).hex(),
                "seed": seed_of(bytes(range(32)), run=RUN, group=41, sample=3),
                "codes": sorted(CODES),
            },
            indent=1,
        )
        + "\n"
    )
