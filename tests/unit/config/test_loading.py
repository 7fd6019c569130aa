"""Loading a configuration: precedence, places, and sentences for everything that can be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, JsonValue, ValidationError

from rollmesh_peer.config import Located, Section, Unit, load
from rollmesh_protocol.errors import UsageError


class Engine(Section):
    """A section."""

    speed: Annotated[float, Unit("m/s"), Field(gt=0, le=300)] = 1.0
    """How fast."""
    gears: Annotated[int, Unit("gears"), Field(ge=1)] = 5
    """How many."""
    fuel: Literal["petrol", "diesel"] = "petrol"
    """What it burns."""
    turbo: bool = False
    """Whether it has one."""
    label: str = ""
    """What it says on it."""
    parts: tuple[str, ...] = ()
    """What it is made of."""
    manual: Annotated[Path | None, Located()] = None
    """Where it is described."""
    source: Annotated[str, Located(unless=("web:",))] = ""
    """Where it comes from."""


class Wheel(Section):
    """An entry of a list."""

    size: Annotated[float, Unit("m")]
    """How large."""
    photo: Annotated[Path | None, Located()] = None
    """How it looks."""
    extras: dict[str, JsonValue] = Field(default_factory=dict)
    """Whatever else."""


class Car(Section):
    """A whole configuration."""

    engine: Engine = Engine()
    """The engine."""
    wheels: tuple[Wheel, ...] = ()
    """The wheels."""


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "car.toml"
        path.write_text(text)
        return path

    return write


def car(path: Path | None, *overrides: str, **environ: str) -> Car:
    return load(Car, path=path, overrides=overrides, environ=environ, prefix="CAR")


def problems(path: Path | None, *overrides: str, **environ: str) -> Sequence[str]:
    with pytest.raises(UsageError) as caught:
        car(path, *overrides, **environ)
    return str(caught.value).splitlines()


def test_without_a_file_the_defaults_hold():
    assert car(None) == Car()


def test_later_sources_win(write):
    path = write("[engine]\nspeed = 2\ngears = 2\nlabel = 'two'\n")
    loaded = car(path, "engine.speed=4", CAR__ENGINE__SPEED="3", CAR__ENGINE__GEARS="3")
    assert (loaded.engine.speed, loaded.engine.gears, loaded.engine.label) == (4.0, 3, "two")


def test_the_last_of_two_flags_wins():
    assert car(None, "engine.gears=1", "engine.gears=2").engine.gears == 2


def test_variables_of_other_programs_are_left_alone():
    assert car(None, CARPET__X="1", CAR_ENGINE="1", CAR="1", car__engine__gears="7") == Car()


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("engine.label=123", "label", "123"),
        ("engine.label=a = b", "label", "a = b"),
        ('engine.label="quoted # text"', "label", "quoted # text"),
        ("engine.label=", "label", ""),
        ("engine.label=1979-05-27", "label", "1979-05-27"),
        ("engine.turbo=true", "turbo", True),
        ("engine.speed=1e-5", "speed", 1e-5),
        ("engine.fuel=diesel", "fuel", "diesel"),
        ("engine.parts=a, b", "parts", ("a", "b")),
        ('engine.parts=["a", "b,c"]', "parts", ("a", "b,c")),
        ("engine.parts=", "parts", ()),
    ],
)
def test_overrides_are_read_by_the_type_of_their_field(override, name, value):
    assert getattr(car(None, override).engine, name) == value


def test_overrides_reach_into_lists_of_tables_and_free_tables(write):
    path = write("[[wheels]]\nsize = 1\n[[wheels]]\nsize = 2\n")
    loaded = car(path, "wheels.1.size=3", "wheels.0.extras.spokes=32", CAR__WHEELS__0__EXTRAS__NAME="left")
    assert [wheel.size for wheel in loaded.wheels] == [1, 3]
    assert loaded.wheels[0].extras == {"spokes": 32, "name": "left"}


def test_places_in_a_file_start_at_its_folder_and_others_at_the_current_one(write, tmp_path, monkeypatch):
    path = write("[engine]\nmanual = 'docs/m.pdf'\nsource = '../shop'\n[[wheels]]\nsize = 1\nphoto = 'p.png'\n")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    loaded = car(path)
    assert loaded.engine.manual == tmp_path / "docs/m.pdf"
    assert loaded.engine.source == str(tmp_path / "../shop")
    assert loaded.wheels[0].photo == tmp_path / "p.png"
    assert car(path, "engine.manual=m.pdf").engine.manual == here / "m.pdf"
    assert car(path, CAR__ENGINE__SOURCE="x").engine.source == str(here / "x")


def test_places_may_be_absolute_at_home_or_no_places(write, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    loaded = car(write("[engine]\nmanual = '~/m.pdf'\nsource = 'web:shop'\n"))
    assert loaded.engine.manual == Path("/home/ada/m.pdf")
    assert loaded.engine.source == "web:shop"
    assert car(write("[engine]\nmanual = '/m.pdf'\n")).engine.manual == Path("/m.pdf")


def test_a_configuration_is_frozen():
    with pytest.raises(ValidationError):
        car(None).engine.gears = 3


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[engine]\nsped = 1", "there is no setting engine.sped; did you mean engine.speed?"),
        ("[engin]\nspeed = 1", "there is no setting engin; did you mean engine?"),
        ("speed = 1", "there is no setting speed; did you mean engine.speed?"),
        ("[engine.fuel]\nx = 1", "engine.fuel must be one of 'petrol' or 'diesel', not {\"x\": 1}"),
        ("[zebra]\nx = 1", "there is no setting zebra; known here: engine, wheels"),
        ("[engine]\nspeed = '1'", 'engine.speed must be a number, not "1"'),
        ("[engine]\nspeed = true", "engine.speed must be a number, not true"),
        ("[engine]\nspeed = nan", "engine.speed must be a finite number, not NaN"),
        ("[engine]\nspeed = 0", "engine.speed must be greater than 0, not 0"),
        ("[engine]\nspeed = 301", "engine.speed must be at most 300, not 301"),
        ("[engine]\ngears = 1.0", "engine.gears must be a whole number, not 1.0"),
        ("[engine]\ngears = 0", "engine.gears must be at least 1, not 0"),
        ("[engine]\nturbo = 1", "engine.turbo must be true or false, not 1"),
        ("[engine]\nturbo = 'yes'", 'engine.turbo must be true or false, not "yes"'),
        ("[engine]\nlabel = 1", "engine.label must be text in quotes, not 1"),
        ("[engine]\nfuel = 'coal'", "engine.fuel must be one of 'petrol' or 'diesel', not \"coal\""),
        ("[engine]\nparts = 'a'", 'engine.parts must be a list, not "a"'),
        ("[engine]\nparts = [1]", "engine.parts.0 must be text in quotes, not 1"),
        ("engine = 1", "engine must be a table, not 1"),
        ("[[wheels]]\n", "wheels.0.size is missing: How large."),
        ("[[wheels]]\nsize = 1\nsise = 1", "there is no setting wheels.0.sise; did you mean wheels.0.size?"),
        ("[wheels]\nsize = 1", 'wheels must be a list, not {"size": 1}'),
    ],
)
def test_one_sentence_for_what_is_wrong_in_a_file(write, text, sentence):
    path = write(text)
    assert problems(path) == [f"{path}: {sentence}"]


def test_every_problem_is_told_with_its_source(write):
    path = write("[engine]\ngears = 0\nsped = 2\n")
    assert set(problems(path, "engine.turbo=maybe", "engine.colour=red", CAR__ENGINE__FUEL="coal")) == {
        f"{path}: engine.gears must be at least 1, not 0",
        f"{path}: there is no setting engine.sped; did you mean engine.speed?",
        '--set engine.turbo: engine.turbo must be true or false, not "maybe"',
        "--set engine.colour: there is no setting engine.colour; known here: " + ", ".join(Engine.model_fields),
        "CAR__ENGINE__FUEL: engine.fuel must be one of 'petrol' or 'diesel', not \"coal\"",
    }


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("engine.gears", "--set engine.gears: is not of the form section.key=value"),
        ("=1", "--set =1: is not of the form section.key=value"),
        ("engine.gears.x=1", "--set engine.gears.x: engine.gears is a single value, not a table"),
        ("wheels.0.size=1", "--set wheels.0.size: wheels has 0 entries, counted from 0; there is no entry 0"),
        ("wheels.0=1", "--set wheels.0: wheels has 0 entries, counted from 0; there is no entry 0"),
        ("engine=1", "--set engine: engine must be a table, not 1"),
    ],
)
def test_one_sentence_for_a_wrong_flag(override, sentence):
    assert problems(None, override) == [sentence]


def test_an_override_ends_at_a_value(write):
    path = write("[[wheels]]\nsize = 1\n")
    assert problems(path, "wheels.0=1") == ["--set wheels.0: wheels.0 is a table: name one of its keys"]


def test_an_override_cannot_smuggle_in_other_keys():
    assert problems(None, "engine.gears=1\nspeed = 2") == [
        '--set engine.gears: engine.gears must be a whole number, not "1\\nspeed = 2"'
    ]


def test_files_that_are_none(tmp_path):
    missing = tmp_path / "no.toml"
    assert problems(missing) == [f"{missing}: cannot be read: No such file or directory"]
    assert problems(tmp_path) == [f"{tmp_path}: cannot be read: Is a directory"]
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xff\xfe")
    assert problems(path) == [f"{path}: is not UTF-8 text"]
    path.write_text("[engine\n")
    assert problems(path)[0].startswith(f"{path}: is not TOML: ")
    assert "line 1" in problems(path)[0]
    path.write_bytes(b"#" * (1024 * 1024 + 1))
    assert "is no config file" in problems(path)[0]
    path.write_text("[[wheels]]\nsize = 1\nextras = { born = 1979-05-27 }\n")
    assert problems(path) == [f"{path}: no setting takes a date or a time: put 1979-05-27 in quotes"]
