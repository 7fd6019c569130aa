"""A small run, its learner and its model, for the tests of a node."""

from __future__ import annotations

import json
from typing import Any

from rollmesh_protocol.envelope import seal
from rollmesh_protocol.identity import Identity
from rollmesh_protocol.layout import Layout, TensorSpec
from rollmesh_protocol.lease import Lease
from rollmesh_protocol.messages import ModelReference, RunCard, RunLimits

LEARNER = Identity(b"L" * 32)
NODE = Identity(b"N" * 32)
STRANGER = Identity(b"S" * 32)
RUN = "run-0001"
LAYOUT = Layout(tensors=(TensorSpec(name="w", dtype="bf16", shape=(8, 32)),))


def make_card(
    *,
    config: bytes | None = None,
    prompt_tokens: int = 64,
    new_tokens: int = 32,
    samples_per_group: int = 8,
    layout: Layout = LAYOUT,
    base_root: bytes = b"\0" * 32,
    **fields: Any,
) -> RunCard:
    """A run card; ``fields`` replace whole fields of it."""
    values: dict[str, Any] = {
        "run": RUN,
        "name": "test",
        "learner": LEARNER.peer,
        "model": ModelReference(
            source="test:model",
            parameters=256,
            base_root=base_root,
            config=json.dumps({"model_type": "llama", "vocab_size": 100}).encode() if config is None else config,
        ),
        "layout": layout,
        "vocabulary": 100,
        "stop_tokens": (2,),
        "tokenizer_digest": b"\1" * 32,
        "environments": ("addition",),
        "limits": RunLimits(prompt_tokens=prompt_tokens, new_tokens=new_tokens, samples_per_group=samples_per_group),
        "swap_modes": ("drain",),
    }
    return RunCard(**(values | fields))


def seal_lease(lease: Lease, *, by: Identity = LEARNER, run: str = RUN, kind: str = "lease") -> bytes:
    """The encoded envelope of a lease."""
    return seal(lease.encode(), run=run, kind=kind, identity=by).encode()  # type: ignore[arg-type]
