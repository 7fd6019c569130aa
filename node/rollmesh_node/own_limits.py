"""What a node refuses of a learner: the volunteer's own limits against the run card and against every lease. Pure.

Anyone can print a join line, so a card and a lease are a stranger's wishes. Nothing beyond these limits is downloaded,
kept or generated, and a model that brings code of its own is never loaded. Every refusal names both numbers and the
setting that the volunteer may raise.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from rollmesh_protocol import limits
from rollmesh_protocol.envelope import Envelope
from rollmesh_protocol.errors import HostError, Refused
from rollmesh_protocol.lease import Lease
from rollmesh_protocol.messages import RunCard

CODE_KEYS: Final = frozenset({"auto_map", "custom_pipelines", "trust_remote_code"})
"""Keys of a config.json that make the model library fetch or run the model's own code."""


@dataclass(frozen=True, kw_only=True)
class OwnLimits:
    """The most that this node gives. Bytes and tokens."""

    prompt_tokens: int
    new_tokens: int
    disk_bytes: int
    download_bytes: int


def check_card(card: RunCard, own: OwnLimits) -> None:
    """Refuse a run that asks for more than ``own`` or for a model that this node would not load.

    Raises:
        Refused: ``card.limits`` or ``card.model``, with the numbers.
    """
    asked = card.limits
    _demand(asked.prompt_tokens, own.prompt_tokens, "tokens in a prompt", "limits.prompt_tokens")
    _demand(asked.new_tokens, own.new_tokens, "tokens in a completion", "limits.completion_tokens")
    _demand_gb(card.layout.image_bytes, own.download_bytes, "of weights to download", "limits.download_gb")
    _demand_gb(card.layout.image_bytes, own.disk_bytes, "of weights on disk", "limits.disk_gb")
    if any(token >= card.vocabulary for token in card.stop_tokens):
        raise Refused("card.model", "a stop token lies outside the vocabulary")
    check_model_config(card.model.config)


def check_model_config(raw: bytes) -> None:
    """Refuse a config.json that is none, or that asks for the model's own code.

    Raises:
        Refused: ``card.model``.
    """
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refused("card.model", "the model's configuration is not JSON") from error
    if not isinstance(config, dict):
        raise Refused("card.model", "the model's configuration is not a table")
    _refuse_code(config, depth=0)
    if config.get("quantization_config") is not None:
        raise Refused("card.model", "the model's weights are quantised, which this protocol does not carry")


def check_memory(card: RunCard, *, free_bytes: int, needed_bytes: int) -> None:
    """Refuse a model that does not fit into this machine's memory, before it is downloaded.

    Raises:
        HostError: with the numbers.
    """
    if needed_bytes > free_bytes:
        raise HostError(
            f"{card.model.source} needs {_gb(needed_bytes)} of memory (weights, working copy and the engine itself), "
            f"and {_gb(free_bytes)} are free: close other programs, or take a run with a smaller model"
        )


def open_lease(sealed: bytes, *, card: RunCard, node: str, own: OwnLimits) -> Lease:
    """The lease in an encoded envelope, once it is known to be the learner's word, ours, and within every limit.

    Raises:
        Refused: an ``envelope.*`` code, ``request.invalid``, ``lease.other_node`` or ``lease.limits``.
    """
    envelope = Envelope.decode(sealed, limit=limits.LEASES_BYTES)
    lease = Lease.decode(envelope.open(run=card.run, kind="lease", signer=card.learner), limit=limits.LEASES_BYTES)
    if lease.node != node:
        raise Refused("lease.other_node")
    prompt = lease.prompt_ids
    for asked, most, what in (
        (len(prompt), min(card.limits.prompt_tokens, own.prompt_tokens), "prompt tokens"),
        (lease.max_new_tokens, min(card.limits.new_tokens, own.new_tokens), "new tokens"),
        (len(lease.samples), card.limits.samples_per_group, "samples"),
    ):
        if asked > most:
            raise Refused("lease.limits", f"the lease asks for {asked} {what}, where {most} are agreed")
    if lease.duration_s < limits.MIN_LEASE_S:
        raise Refused("lease.limits", f"the lease stands for {lease.duration_s:.3g} s only")
    if lease.swap_mode not in card.swap_modes:
        raise Refused("lease.limits", f"the lease orders weights to be changed by {lease.swap_mode!r} against the card")
    if len({sample.index for sample in lease.samples}) != len(lease.samples):
        raise Refused("request.invalid", "the lease names a sample twice")
    if int(prompt.max()) >= card.vocabulary:
        raise Refused("request.invalid", f"the prompt holds token {int(prompt.max())}, outside the vocabulary")
    return lease


def _demand(asked: int, most: int, what: str, setting: str) -> None:
    if asked > most:
        raise Refused("card.limits", f"the run asks for {asked:,} {what}; this node takes {most:,} ({setting})")


def _demand_gb(asked: int, most: int, what: str, setting: str) -> None:
    if asked > most:
        raise Refused("card.limits", f"the run asks for {_gb(asked)} {what}; this node takes {_gb(most)} ({setting})")


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / limits.GIB:,.2f} GiB"


def _refuse_code(value: object, *, depth: int) -> None:
    """``auto_map`` may stand in a part of the configuration too, such as that of a vision tower."""
    if depth > limits.MAX_NESTING:
        raise Refused("card.model", "the model's configuration is nested too deeply")
    if isinstance(value, dict):
        if found := sorted(CODE_KEYS & value.keys()):
            raise Refused(
                "card.model",
                f"the model asks for code of its own ({found[0]} in its configuration), which is never run",
            )
        for inner in value.values():
            _refuse_code(inner, depth=depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _refuse_code(inner, depth=depth + 1)
