"""What travels between the engine's supervisor and its host, as msgpack bodies. Both sides use this file; no torch.

    load      {config_json: str, layout: bytes (Layout.encode), image: str, root: bytes?,
               sums: bytes?, threads: int?, max_rows: int?, device: 'auto'|'cpu'|'cuda'?, dtype: 'bfloat16'|'float32'?,
               gpus: [int]?, compile: bool?, columns: int?, memory_gb: float?, memory_share: float?} -> {load_s}
    swap      {image: str, root: bytes?, sums: bytes?} -> {load_s}
    generate  {requests: [request]?, finish: bool?}; goes on until it is told to end; held samples go on with it
       notes  add    {requests: [request]}    more work
              finish {}                       no more comes: end when everything in flight has ended
              hold   {}                       end now; what is unfinished stays in the host until the next generate
       items  {rollout: {key, index, tokens: bytes, logprobs: bytes, finish: 'stop'|'length', elapsed_s,
                         segments: [[first_token, root], ...]}}
              {refused: {key, code, detail}}  a request of a note that the model cannot do
              {beat: {in_flight, tokens, steps}}  at least every 2 s while the engine steps
    stats     {} -> the fields of :class:`.backend.Stats`
    shutdown  {} -> {} and the process ends

A request is {key, prompt: bytes, samples: [{index, seed}], max_new_tokens, stop: [int]}; its key is of no other one in
the host. ``prompt`` and ``tokens`` are little-endian uint32, ``logprobs`` little-endian float32. A beat's ``tokens``
and ``steps`` are totals: an engine whose beats, rollouts and numbers all stand still hangs. Whoever leaves generate
abandons its work. ``sums`` are the image's (:func:`rollmesh_peer.bit_sums.pack_sums`), known before the engine stops
for it. The optional fields of load but root and sums count at the first load of a process: ``threads`` 0 or absent
means what :data:`THREADS_ENV` says, else torch's choice; ``max_rows`` 0 or absent the backend's own bound; ``columns``
are the tokens of the run's longest rollout; ``memory_gb`` (0: no bound) and ``memory_share`` what may be taken of a
device (:mod:`.measured_plan`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rollmesh_node.engine.backend import Finish, GroupRequest, SampleRequest
from rollmesh_node.engine.segments import Completion, Span
from rollmesh_protocol import limits
from rollmesh_protocol.errors import ChildFailed

THREADS_ENV: Final = "ROLLMESH_THREADS"
"""Environment variable with the number of threads of a child that computes."""
ADD: Final = "add"
FINISH: Final = "finish"
HOLD: Final = "hold"

Body = dict[str, object]

_FINISHES: Final[Mapping[str, Finish]] = {"stop": "stop", "length": "length"}
_U64: Final = 1 << 64
_U32: Final = 1 << 32


@dataclass(frozen=True, kw_only=True)
class Beat:
    """A sign of life: samples in flight now; completion tokens and steps since the process began."""

    in_flight: int
    tokens: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A request that the engine did not take, and why."""

    key: int
    code: str
    detail: str


def group_body(request: GroupRequest) -> Body:
    """Return the body of one request."""
    return {
        "key": request.key,
        "prompt": request.prompt.astype("<u4").tobytes(),
        "samples": [{"index": sample.index, "seed": sample.seed} for sample in request.samples],
        "max_new_tokens": request.max_new_tokens,
        "stop": sorted(request.stop),
    }


def read_groups(body: Mapping[str, object]) -> list[GroupRequest]:
    """Return the requests in the body of a call or a note, none where there is no such field."""
    return [read_group(one) for one in _list({"requests": [], **body}, "requests")]


def read_group(body: object) -> GroupRequest:
    """Return the request in a body; ``ChildFailed("child.request")`` names what is wrong with it."""
    fields = _mapping(body, "a request")
    samples = [_mapping(sample, "a sample") for sample in _list(fields, "samples")]
    prompt = _array(fields, "prompt", np.dtype("<u4"))
    max_new_tokens = _whole(fields, "max_new_tokens", limits.MAX_NEW_TOKENS + 1)
    if not (0 < prompt.size <= limits.MAX_PROMPT_TOKENS and 0 < len(samples) <= limits.MAX_SAMPLES_PER_GROUP):
        raise _wrong(f"{prompt.size} prompt tokens and {len(samples)} samples")
    if not max_new_tokens:
        raise _wrong("max_new_tokens")
    return GroupRequest(
        key=_whole(fields, "key", _U64),
        prompt=prompt.astype(np.uint32),
        samples=tuple(
            SampleRequest(index=_whole(sample, "index", _U32), seed=_whole(sample, "seed", _U64)) for sample in samples
        ),
        max_new_tokens=max_new_tokens,
        stop=frozenset(_whole({"stop": token}, "stop", _U32) for token in _list(fields, "stop")),
    )


def rollout_item(done: Completion) -> Body:
    """Return the item of one finished completion."""
    return {
        "rollout": {
            "key": done.key,
            "index": done.index,
            "tokens": done.tokens.astype("<u4").tobytes(),
            "logprobs": done.logprobs.astype("<f4").tobytes(),
            "finish": done.finish,
            "elapsed_s": done.elapsed_s,
            "segments": [[span.first_token, span.root] for span in done.segments],
        }
    }


def beat_item(beat: Beat) -> Body:
    """Return the item of a sign of life."""
    return {"beat": {"in_flight": beat.in_flight, "tokens": beat.tokens, "steps": beat.steps}}


def refusal_item(refusal: Refusal) -> Body:
    """Return the item of a request that was not taken."""
    return {"refused": {"key": refusal.key, "code": refusal.code, "detail": refusal.detail}}


def read_item(body: Mapping[str, object]) -> Completion | Beat | Refusal:
    """Return what is in an item; ``ChildFailed("child.request")`` when the engine sent something else."""
    if "beat" in body:
        fields = _mapping(body["beat"], "a beat")
        in_flight, tokens, steps = (_whole(fields, name, _U64) for name in ("in_flight", "tokens", "steps"))
        return Beat(in_flight=in_flight, tokens=tokens, steps=steps)
    if "refused" in body:
        fields = _mapping(body["refused"], "a refusal")
        return Refusal(key=_whole(fields, "key", _U64), code=str(fields.get("code")), detail=str(fields.get("detail")))
    return _completion(_mapping(body.get("rollout"), "an item"))


def read_rollout(body: Mapping[str, object]) -> Completion | None:
    """Return the completion in an item, None for a beat: for those who have sent everything with the call."""
    item = read_item(body)
    if isinstance(item, Refusal):
        raise ChildFailed(item.detail, code=item.code)
    return item if isinstance(item, Completion) else None


def read_root(body: Mapping[str, object]) -> bytes:
    """Return the root that a load or swap names; empty where the caller does not care."""
    root = body.get("root", b"")
    if not isinstance(root, bytes):
        raise _wrong("root")
    return root


def _completion(body: Mapping[str, object]) -> Completion:
    tokens, logprobs = _array(body, "tokens", np.dtype("<u4")), _array(body, "logprobs", np.dtype("<f4"))
    finish, elapsed = _FINISHES.get(str(body.get("finish"))), body.get("elapsed_s")
    if finish is None or not isinstance(elapsed, float) or not 0 < tokens.size == logprobs.size:
        raise _wrong("a rollout that is not one")
    return Completion(
        key=_whole(body, "key", _U64),
        index=_whole(body, "index", _U32),
        tokens=tokens.astype(np.uint32),
        logprobs=logprobs.astype(np.float32),
        finish=finish,
        segments=_segments(body, len(tokens)),
        elapsed_s=elapsed,
    )


def _segments(body: Mapping[str, object], num_tokens: int) -> tuple[Span, ...]:
    spans = []
    for pair in _list(body, "segments"):
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[1], bytes):
            raise _wrong("a segment")
        spans.append(Span(first_token=_whole({"first_token": pair[0]}, "first_token", num_tokens), root=pair[1]))
    starts = [span.first_token for span in spans]
    if starts[:1] != [0] or starts != sorted(set(starts)):
        raise _wrong("segments")
    return tuple(spans)


def _array(fields: Mapping[str, object], name: str, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    value = fields.get(name)
    if not isinstance(value, bytes) or len(value) % 4:
        raise _wrong(name)
    return np.frombuffer(value, dtype=dtype)


def _whole(fields: Mapping[str, object], name: str, beyond: int) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < beyond:
        raise _wrong(name)
    return value


def _list(fields: Mapping[str, object], name: str) -> list[object]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise _wrong(name)
    return value


def _mapping(value: object, what: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise _wrong(what)
    return value


def _wrong(what: str) -> ChildFailed:
    return ChildFailed(f"the engine's pipe carried a wrong value: {what}", code="child.request")
