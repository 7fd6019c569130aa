"""The printed configuration: it loads back to itself and says what each setting is."""

from __future__ import annotations

import tomllib
from typing import Annotated

from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, JsonValue

from rollmesh_peer.config import Section, Unit, load, render_toml
from rollmesh_peer.config.rendering import surface


class Part(Section):
    """An entry of a list."""

    name: str
    """What it is called."""
    params: dict[str, JsonValue] = Field(default_factory=dict)
    """Whatever else."""


class Inner(Section):
    """A section."""

    text: str = ""
    """Any text."""
    ratio: Annotated[float, Unit("ratio"), Field(gt=0, le=1e300)] = 0.5
    """A number, with a description that is long enough that it does not fit on one line of a comment and is wrapped."""
    count: Annotated[int | None, Unit("things")] = None
    """How many."""
    words: tuple[str, ...] = ()
    """A list."""


class Whole(Section):
    """A whole configuration."""

    inner: Inner = Inner()
    """The inner part."""
    parts: tuple[Part, ...] = ()
    """The parts."""


VALUES = st.recursive(
    st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
WHOLES = st.builds(
    Whole,
    inner=st.builds(
        Inner,
        text=st.text(),
        ratio=st.floats(min_value=5e-324, max_value=1e300),
        count=st.none() | st.integers(-(2**62), 2**62),
        words=st.lists(st.text(), max_size=3).map(tuple),
    ),
    parts=st.lists(
        st.builds(Part, name=st.text(), params=st.dictionaries(st.text(), VALUES, max_size=3)), max_size=3
    ).map(tuple),
)


@given(WHOLES, st.booleans())
def test_what_is_printed_loads_back_to_itself(tmp_path_factory, config, describe):
    path = tmp_path_factory.getbasetemp() / "round.toml"
    path.write_text(render_toml(config, describe=describe), encoding="utf-8", newline="")
    assert load(Whole, path=path, environ={}, prefix="X") == config


def test_each_setting_stands_under_its_description_unit_and_range():
    text = render_toml(Whole(parts=(Part(name="a", params={"x y": 1}), Part(name="b"))))
    assert text == (
        "# The inner part.\n"
        "[inner]\n"
        "# Any text.\n"
        'text = ""\n'
        "# A number, with a description that is long enough that it does not fit on one line of a comment and\n"
        "# is wrapped. [ratio, > 0, <= 1e+300]\n"
        "ratio = 0.5\n"
        "# How many. [things]\n"
        "# count is not set\n"
        "# A list.\n"
        "words = []\n"
        "\n"
        "# The parts.\n"
        "[[parts]]\n"
        "# What it is called.\n"
        'name = "a"\n'
        "# Whatever else.\n"
        'params = { "x y" = 1 }\n'
        "\n"
        "[[parts]]\n"
        "# What it is called.\n"
        'name = "b"\n'
        "# Whatever else.\n"
        "params = {}\n"
    )


def test_without_descriptions_only_values_are_left():
    text = render_toml(Whole(), describe=False)
    assert tomllib.loads(text) == {"inner": {"text": "", "ratio": 0.5, "words": []}}
    assert "Any text" not in text


def test_the_surface_names_kind_measure_and_default():
    assert surface(Whole) == {
        "inner.text": 'text, default ""',
        "inner.ratio": "number [ratio, > 0, <= 1e+300], default 0.5",
        "inner.count": "integer [things], default none",
        "inner.words": "list, default []",
        "parts.[].name": "text, required",
        "parts.[].params": "table, default {}",
    }
