"""Names and parameters that nobody knows are answered with the nearest ones."""

from __future__ import annotations

import pytest

from rollmesh_protocol.environments.parameters import Parameters, nearest
from rollmesh_protocol.environments.registry import make_environment
from rollmesh_protocol.errors import UsageError


def test_built_in_and_handed_in() -> None:
    assert make_environment("addition", {}, seed=1).name == "addition"

    def other(parameters: object, /, *, seed: int) -> object:
        raise UsageError("this one was asked")

    others = {"mine": other, "addition": other}
    with pytest.raises(UsageError, match="this one was asked"):
        make_environment("mine", {}, seed=1, others=others)  # type: ignore[arg-type]
    assert make_environment("addition", {}, seed=1, others=others).name == "addition"  # type: ignore[arg-type]


def test_unknown_environment() -> None:
    with pytest.raises(UsageError, match="no environment 'adddition'; did you mean addition"):
        make_environment("adddition", {}, seed=1)
    with pytest.raises(UsageError, match="no environment 'chess'; known: addition, reasoning_gym"):
        make_environment("chess", {}, seed=1)


def test_nearest_is_a_sentence() -> None:
    assert nearest("x", []) == "; there are none"
    assert nearest("zzz", ["a", "b"]) == "; known: a, b"
    assert nearest("zzz", [str(number) for number in range(100)]) == "; there are 100, such as 0"


def test_types_of_parameters() -> None:
    read = Parameters("e", {"n": 3, "t": "x", "f": True, "m": {"a": 1}})
    assert read.integer("n", default=1, least=0, most=5) == 3
    assert read.text("t") == "x"
    assert read.flag("f", default=False) is True
    assert read.table("m") == {"a": 1}
    read.finish()


@pytest.mark.parametrize("value", [3, None, ["x"]])
def test_wrong_types_are_told(value: object) -> None:
    with pytest.raises(UsageError, match="must be a text"):
        Parameters("e", {"t": value}).text("t")
    with pytest.raises(UsageError, match="true or false"):
        Parameters("e", {"t": value}).flag("t", default=False)
    with pytest.raises(UsageError, match="must be a table"):
        Parameters("e", {"t": value}).table("t")


def test_a_missing_text_is_told() -> None:
    with pytest.raises(UsageError, match="'dataset' of the environment e must be a text, it is missing"):
        Parameters("e", {}).text("dataset")
