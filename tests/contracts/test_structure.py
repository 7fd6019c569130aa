"""Who reaches what, over any number of imports: beside the contracts in pyproject.toml, which name direct imports."""

from __future__ import annotations

import graphlib

import grimp
import pytest

PACKAGES = ("rollmesh_protocol", "rollmesh_peer", "rollmesh_node", "rollmesh_learner")

# Modules that only child processes import, as prefixes: below these a package may be reached, over any number of steps
# and from inside functions too. Everything else is, or may become, part of a daemon.
TORCH = (
    "rollmesh_peer.models",
    "rollmesh_node.engine",
    "rollmesh_learner.training",
    "rollmesh_learner.audit",
)
TASKS = (
    "rollmesh_protocol.environments",
    "rollmesh_peer.children.plugins",
    "rollmesh_peer.children.sandbox",
    "rollmesh_peer.children.scorer",
    "rollmesh_peer.children.zygote",
    "rollmesh_learner.work.prompter",
)
ALLOWED = {
    "torch": TORCH,
    "transformers": TORCH,
    "safetensors": TORCH,
    "tokenizers": ("rollmesh_learner.work.model_text", "rollmesh_learner.work.prompter"),
    "reasoning_gym": TASKS,
    "matplotlib": ("rollmesh_learner.training.plot",),
}


@pytest.fixture(scope="module")
def graph():
    return grimp.build_graph(
        *PACKAGES, include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None
    )


def is_below(module, prefixes):
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


@pytest.mark.parametrize("heavy", ALLOWED)
def test_only_modules_of_child_processes_reach_it(graph, heavy):
    chains = {
        " <- ".join(reversed(graph.find_shortest_chain(module, heavy)))
        for module in graph.find_downstream_modules(heavy)
        if not is_below(module, ALLOWED[heavy])
    }
    assert chains == set()


def test_no_module_imports_in_a_circle(graph):
    ours = {module for module in graph.modules if is_below(module, PACKAGES)}
    assert circle({module: graph.find_modules_directly_imported_by(module) & ours for module in ours}) == []


def circle(imports):
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_a_circle_would_be_seen():
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("wiring", "importers"),
    [
        ("rollmesh_node.daemon", {"rollmesh_node.cli"}),
        ("rollmesh_learner.coordinator", {"rollmesh_learner.cli"}),
    ],
)
def test_only_the_command_imports_the_wiring(graph, wiring, importers):
    assert graph.find_modules_that_directly_import(wiring) == importers
