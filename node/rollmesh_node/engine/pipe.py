"""What travels between the engine's supervisor and its host, as msgpack bodies. Both sides use this file; no torch.

    load      {config_json: str, layout: bytes (Layout.encode), image: str,
               threads: int?, max_rows: int?, device: 'auto'|'cpu'|'cuda'?, dtype: 'bfloat16'|'float32'?} -> {load_s}
    swap      {image: str} -> {load_s}
    generate  {requests: [{key, prompt: bytes, samples: [{index, seed}], max_new_tokens, stop: [int]}]}
              items {key, index, tokens: bytes, logprobs: bytes, finish: 'stop'|'length', elapsed_s}
    stats     {} -> the fields of :class:`.backend.Stats`
    shutdown  {} -> {} and the process ends

``prompt`` and ``tokens`` are little-endian uint32, ``logprobs`` little-endian float32; ``threads`` 0 or absent means
what :data:`THREADS_ENV` says, else torch's choice; ``max_rows`` 0 or absent the backend's own bound. The four optional
fields count at the first load of a process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rollmesh_node.engine.backend import Finish, GroupRequest, Rollout, SampleRequest
from rollmesh_protocol import limits
from rollmesh_protocol.errors import ChildFailed

THREADS_ENV: Final = "ROLLMESH_THREADS"
"""Environment variable with the number of threads of a child that computes."""

Body = dict[str, object]

_FINISHES: Final[Mapping[str, Finish]] = {"stop": "stop", "length": "length"}


def group_body(request: GroupRequest) -> Body:
    """Return the body of one request."""
    return {
        "key": request.key,
        "prompt": request.prompt.astype("<u4").tobytes(),
        "samples": [{"index": sample.index, "seed": sample.seed} for sample in request.samples],
        "max_new_tokens": request.max_new_tokens,
        "stop": sorted(request.stop),
    }


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
        key=_whole(fields, "key", 1 << 64),
        prompt=prompt.astype(np.uint32),
        samples=tuple(
            SampleRequest(index=_whole(sample, "index", 1 << 32), seed=_whole(sample, "seed", 1 << 64))
            for sample in samples
        ),
        max_new_tokens=max_new_tokens,
        stop=frozenset(_whole({"stop": token}, "stop", 1 << 32) for token in _list(fields, "stop")),
    )


def rollout_body(rollout: Rollout) -> Body:
    """Return the body of one finished rollout."""
    return {
        "key": rollout.key,
        "index": rollout.index,
        "tokens": rollout.tokens.astype("<u4").tobytes(),
        "logprobs": rollout.logprobs.astype("<f4").tobytes(),
        "finish": rollout.finish,
        "elapsed_s": rollout.elapsed_s,
    }


def read_rollout(body: Body) -> Rollout:
    """Return the rollout in a body; ``ChildFailed("child.request")`` when the engine sent something else."""
    tokens, logprobs = _array(body, "tokens", np.dtype("<u4")), _array(body, "logprobs", np.dtype("<f4"))
    finish, elapsed = _FINISHES.get(str(body.get("finish"))), body.get("elapsed_s")
    if finish is None or not isinstance(elapsed, float) or not 0 < tokens.size == logprobs.size:
        raise _wrong("a rollout that is not one")
    return Rollout(
        key=_whole(body, "key", 1 << 64),
        index=_whole(body, "index", 1 << 32),
        tokens=tokens.astype(np.uint32),
        logprobs=logprobs.astype(np.float32),
        finish=finish,
        elapsed_s=elapsed,
    )


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
