"""reasoning-gym as it is installed: which scorers run an answer as code, and what its data sets need to be repeatable.

The scan reads the source of every scorer, with the functions of the package that it calls. A data set of a newer
version whose scorer evaluates text fails here until it is on one of the two lists.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import inspect
import random
import sys
import textwrap
from collections.abc import Iterator
from types import FunctionType, ModuleType

import pytest

from rollmesh_protocol.environments.interface import Environment, Item
from rollmesh_protocol.environments.reasoning_gym import (
    CHUNK,
    EVALUATES_ITS_OWN_TEXT,
    KEPT_CHUNKS,
    MAX_ANSWER_CHARS,
    TEXT_EVALUATING,
    extract_answer,
    make,
)
from rollmesh_protocol.errors import HostError, UsageError

reasoning_gym = pytest.importorskip("reasoning_gym")
DATASETS: dict[str, tuple[type, type]] = reasoning_gym.factory.DATASETS

CODE = frozenset({"eval", "exec", "compile", "__import__", "import_module", "literal_eval"})
EXPRESSIONS = frozenset({"parse_expr", "sympify", "lambdify", "nsimplify", "parse_latex", "S"})
OBJECTS = frozenset({"load", "safe_load", "full_load", "unsafe_load", "read_pickle"})
PROCESSES = frozenset({"system", "popen", "run", "Popen", "check_output", "check_call"})
EVALUATORS = CODE | EXPRESSIONS | OBJECTS | PROCESSES
"""Calls that turn text into code, objects or processes; ``loads`` is looked at with its module."""
SAFE_MODULES = frozenset({"re", "json"})
SYMPY = frozenset({"sympy", "sp"})
PASSED_ON = frozenset({"composite"})
"""Scorers that call other data sets' scorers: on the list for that."""
NAMESAKES = frozenset({"propositional_logic"})
"""Scorers that call a function named like an evaluator, but their own: on the list in case that changes."""


def calls_of(function: FunctionType) -> Iterator[tuple[str, str]]:
    """(module or object, name) of every call in a function's source."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield "", node.func.id
            elif isinstance(node.func, ast.Attribute):
                owner = node.func.value
                yield (owner.id if isinstance(owner, ast.Name) else "?"), node.func.attr


def is_ours(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] == "reasoning_gym"


def methods(kind: type) -> dict[str, FunctionType]:
    found: dict[str, FunctionType] = {}
    for base in reversed(kind.__mro__):
        if is_ours(base.__module__):
            for name, member in vars(base).items():
                function = getattr(member, "__func__", member)
                if isinstance(function, FunctionType):
                    found[name] = function
    return found


def reached(kind: type) -> Iterator[tuple[FunctionType, str, str]]:
    """Every call in a data set's scorer, and in the package's functions and classes that it uses by name."""
    own = methods(kind)
    todo, seen = [own["score_answer"]], set()
    while todo:
        function = todo.pop()
        if function in seen:
            continue
        seen.add(function)
        module: ModuleType = sys.modules[function.__module__]
        for owner, name in calls_of(function):
            yield function, owner, name
            target = vars(module).get(name)
            target = own.get(name, target) if owner in {"self", "cls", "?"} else target
            if isinstance(target, FunctionType) and is_ours(target.__module__):
                todo.append(target)
            elif isinstance(target, type) and is_ours(target.__module__):
                todo += methods(target).values()


def evaluates(kind: type) -> bool:
    for function, owner, name in reached(kind):
        own = vars(sys.modules[function.__module__]).get(name)
        if isinstance(own, FunctionType) and is_ours(own.__module__):
            continue  # a namesake, whose own calls are looked at in turn
        if name in EVALUATORS and owner not in SAFE_MODULES:
            return True
        if name == "loads" and owner != "json":
            return True
        if owner in SYMPY and name not in {"Symbol", "symbols"}:
            return True
    return False


def test_every_scorer_that_evaluates_text_is_listed() -> None:
    found = {name for name, (kind, _) in DATASETS.items() if evaluates(kind)}
    listed = set(TEXT_EVALUATING) | set(EVALUATES_ITS_OWN_TEXT)
    assert found - listed == set(), "read these scorers: do they run the answer as code?"
    assert listed - found == PASSED_ON | NAMESAKES, "these scorers evaluate nothing any more"
    assert not set(TEXT_EVALUATING) & set(EVALUATES_ITS_OWN_TEXT)


def test_the_scan_sees_what_it_should() -> None:
    calls = {(function.__qualname__, name) for function, _, name in reached(DATASETS["cryptarithm"][0])}
    assert any("verify_cryptarithm_solution" in function for function, _ in calls)
    assert evaluates(DATASETS["countdown"][0])
    assert not evaluates(DATASETS["chain_sum"][0])


@pytest.mark.parametrize("dataset", sorted(TEXT_EVALUATING))
def test_text_evaluating_data_sets_are_refused_with_the_reason(dataset: str) -> None:
    with pytest.raises(UsageError, match=r"runs the answer's text as code \(.+\).*allow_text_evaluation = true"):
        make({"dataset": dataset}, seed=1)


def payloads() -> list[str]:
    code = "__import__('builtins').__dict__.__setitem__('ROLLMESH_RAN', 1)"
    return [code, f"[{code}]", f"[[{code}]]", f"({code}) + 1", f"'a'; {code}", f"['a', {code}, 'b']", f"{{{code}}}"]


def ran(environment: Environment, item: Item) -> bool:
    vars(builtins).pop("ROLLMESH_RAN", None)
    for payload in payloads():
        with contextlib.suppress(Exception):
            environment.reward(item, f"<answer>{payload}</answer>")
    return vars(builtins).pop("ROLLMESH_RAN", None) is not None


def test_the_payload_runs_where_it_is_allowed_to() -> None:
    """The control for the next test."""
    for dataset in ("string_insertion", "n_queens", "spiral_matrix"):
        environment = make({"dataset": dataset, "allow_text_evaluation": True}, seed=1)
        assert ran(environment, environment.item(0))


ALLOWED = sorted(set(DATASETS) - set(TEXT_EVALUATING))


@pytest.mark.parametrize("dataset", ALLOWED)
def test_allowed_data_sets_make_items_and_run_no_answer(dataset: str) -> None:
    environment = make({"dataset": dataset}, seed=1)
    item = environment.item(3)
    assert Item.from_plain(item.to_plain()) == item
    roles = [message["role"] for message in environment.messages(item)]
    assert roles == ["system", "user"]
    assert not ran(environment, item)
    again = make({"dataset": dataset}, seed=1)
    assert again.item(3) == item
    with contextlib.suppress(ValueError, IndexError, KeyError, TypeError):  # some scorers raise: that counts as 0
        assert 0.0 <= again.reward(item, "<answer>no</answer>") <= 1.0
    assert make({"dataset": dataset}, seed=2).item(3) != item or dataset in {"coin_flip", "rectangle_count"}


@pytest.mark.parametrize("dataset", ["acre", "gsm_symbolic", "list_functions", "word_ladder", "chain_sum"])
def test_indices_do_not_end(dataset: str) -> None:
    """The first four raise beyond their size when they are asked as they are."""
    environment = make({"dataset": dataset}, seed=1)
    indices = [0, CHUNK - 1, CHUNK, 123 * CHUNK + 7, *(number * CHUNK for number in range(KEPT_CHUNKS + 2))]
    items = {index: environment.item(index) for index in indices}
    assert len({item.question for item in items.values()}) == len(items)
    assert all(environment.item(index) == item for index, item in items.items())
    fresh = make({"dataset": dataset}, seed=1)
    assert all(fresh.item(index) == items[index] for index in reversed(indices))


def test_items_do_not_depend_on_the_process_and_leave_no_trace_in_it() -> None:
    """``list_functions`` draws from the global random numbers."""
    items = []
    for state in range(30):
        random.seed(state)
        before = random.getstate()
        items.append([make({"dataset": "list_functions"}, seed=1).item(index) for index in range(490, 510)])
        assert random.getstate() == before
    assert all(item == items[0] for item in items)


def test_neighbouring_seeds_do_not_share_items() -> None:
    """reasoning-gym seeds item i with seed + i: used as it is, run 1's item 1 would be run 2's item 0."""
    questions = [
        make({"dataset": "chain_sum"}, seed=seed).item(index).question for seed in (1, 2) for index in range(50)
    ]
    assert len(set(questions)) > 95


def test_right_answers_are_rewarded() -> None:
    environment = make({"dataset": "spell_backward", "parameters": {"min_word_len": 4, "max_word_len": 4}}, seed=1)
    item = environment.item(0)
    word = item.question.split()[-1]
    assert environment.reward(item, f"Let me see. <answer>{word[::-1]}</answer>") == 1.0
    assert environment.reward(item, word[::-1]) == 1.0
    assert environment.reward(item, f"<answer>{word}</answer>") < 1.0


def test_an_item_that_cannot_be_made_again_is_an_error_not_a_zero() -> None:
    environment = make({"dataset": "chain_sum"}, seed=1)
    for item in (Item("another question", {"index": 0}), Item("x", {}), Item("x", {"index": "0"})):
        with pytest.raises(HostError, match="PYTHONHASHSEED"):
            environment.reward(item, "1")


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no data set 'chain_sums'; did you mean .*chain_sum"):
        make({"dataset": "chain_sums"}, seed=1)
    with pytest.raises(UsageError, match=r"chain_sum has no parameter 'min_term'; did you mean .*min_terms"):
        make({"dataset": "chain_sum", "parameters": {"min_term": 1}}, seed=1)
    with pytest.raises(UsageError, match="no parameter 'size'"):
        make({"dataset": "chain_sum", "parameters": {"size": 5}}, seed=1)
    with pytest.raises(UsageError, match="does not take these parameters"):
        make({"dataset": "chain_sum", "parameters": {"min_terms": 9, "max_terms": 2}}, seed=1)
    with pytest.raises(UsageError, match="no parameter 'data_set'; did you mean dataset"):
        make({"dataset": "chain_sum", "data_set": "x"}, seed=1)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("7", "7"),
        (" 7 \n", "7"),
        ("<answer> 7 </answer>", "7"),
        ("<answer>1</answer> no, <answer>2</answer>.", "2"),
        ("<answer>never closed", "<answer>never closed"),
        ("closed</answer>", "closed</answer>"),
        ("<answer>1</answer> and <answer>open", "1"),
        ("<answer></answer>", ""),
        ("", ""),
    ],
)
def test_extract_answer(completion: str, answer: str) -> None:
    assert extract_answer(completion) == answer


def test_long_answers_are_cut() -> None:
    assert len(extract_answer("x" * 10**7)) == MAX_ANSWER_CHARS
    assert extract_answer("<answer>" * 10**6) == ("<answer>" * 10**6)[-MAX_ANSWER_CHARS:]
