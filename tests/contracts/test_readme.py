"""The README is true: its tree is the repository's, its targets and files exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGES = (
    "protocol/rollmesh_protocol", "protocol/rollmesh_peer", "node/rollmesh_node", "learner/rollmesh_learner",
)  # fmt: skip


def tree() -> list[str]:
    """The paths of the tree at the end; an indented line lies below the last one that is not."""
    (block,) = re.findall(r"## The tree\n\n```\n(.*?)```", README, re.DOTALL)
    paths, above = [], ""
    for indent, path in re.findall(r"^( *)(\S+) {2,}\S", block, re.MULTILINE):
        above = above if indent else path
        paths.append(above + path if indent else path)
    assert len(paths) == len(block.splitlines())
    return paths


def test_every_path_of_the_tree_exists() -> None:
    paths = tree()
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_part_of_a_package_is_in_the_tree() -> None:
    parts = {
        f"{package}/{folder.name}/"
        for package in PACKAGES
        for folder in (ROOT / package).iterdir()
        if (folder / "__init__.py").exists()
    }
    missing = parts - set(tree()) - {"protocol/rollmesh_peer/mesh/libp2p_host/"}
    assert missing == set()


def test_every_make_target_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", makefile, re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z0-9-]+)(?=`| {2,}|$)", README, re.MULTILINE))
    assert {"demo", "test", "check", "bench-e2e"} <= named <= targets


def test_every_link_leads_to_a_file() -> None:
    for readme in (ROOT / "README.md", ROOT / "protocol" / "README.md"):
        links = re.findall(r"\]\(([^)#:]+)\)", readme.read_text(encoding="utf-8"))
        assert links and [link for link in links if not (readme.parent / link).exists()] == []


def test_anchors_inside_the_specification_exist() -> None:
    text = (ROOT / "protocol" / "README.md").read_text(encoding="utf-8")
    headings = {title.lower().replace(" ", "-") for title in re.findall(r"^## (.+)$", text, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([a-z-]+)\)", text)) <= headings
