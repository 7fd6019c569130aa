"""Everything that can go wrong, as one tree, and the codes that travel.

    RollmeshError                 one sentence for a person, one stable code for a program
    ├── Refused                   a peer said something wrong, or was told no: the code goes over the wire
    ├── LinkLost                  the other side went away or kept silent: try again
    ├── UsageError                a flag, a config file or a join line is wrong: exit status 2
    ├── HostError                 this machine cannot do it (port, disk, key, memory): exit status 1
    └── ChildFailed               an engine, trainer, auditor or scorer process died or refused

Errors are raised where they are found, given a code there, and caught at boundaries only: the stream router, the
child pipe and the command line. A peer's input is never checked with ``assert``.
"""

from __future__ import annotations

from typing import Final


class RollmeshError(Exception):
    """The root of the tree. ``str(error)`` is one sentence fit for a terminal."""

    default_code: str = "internal"

    def __init__(self, detail: str, *, code: str | None = None) -> None:
        super().__init__(detail)
        self.code: str = code or self.default_code
        self.detail: str = detail

    def __str__(self) -> str:
        return self.detail


class Refused(RollmeshError):
    """A refusal with a code of :data:`CODES`; the only error that travels between peers."""

    default_code = "request.invalid"

    def __init__(self, code: str, detail: str = "") -> None:
        if code not in CODES:
            # A newer peer may know codes that we do not; keep its word, show it as it is.
            super().__init__(detail or code, code=code)
        else:
            super().__init__(detail or CODES[code].meaning, code=code)

    @property
    def advice(self) -> str:
        """What the person who reads this can do about it; empty for an unknown code."""
        known = CODES.get(self.code)
        return known.advice if known else ""


class LinkLost(RollmeshError):
    """The connection or stream ended, or a deadline passed, before the answer was complete."""

    default_code = "link.lost"


class UsageError(RollmeshError):
    """The person at the keyboard can mend it: a wrong flag, config key, path or join line."""

    default_code = "usage"


class HostError(RollmeshError):
    """This machine cannot do what is asked: a busy port, a locked key, a full disk, too little memory."""

    default_code = "host"


class ChildFailed(RollmeshError):
    """A child process ended, hung or answered with an error."""

    default_code = "child.failed"


class Code:
    """One refusal code: what it means and what to do about it."""

    __slots__ = ("advice", "meaning")

    def __init__(self, meaning: str, advice: str) -> None:
        self.meaning: Final = meaning
        self.advice: Final = advice


_REPORT: Final = "update rollmesh; if it goes on, report it with the engine that `rollmesh status` shows"
"""For what an honest node never sends."""

CODES: Final[dict[str, Code]] = {
    # requests in general
    "request.invalid": Code("the message does not have the form that this protocol asks for", "update rollmesh"),
    "request.too_large": Code("the message is larger than this protocol allows", "update rollmesh"),
    "request.timeout": Code("the request did not arrive in time", "check the connection; it is tried again"),
    "request.unknown": Code("there is nothing by that name here", "ask for the edges again"),
    "request.busy": Code("too many requests at once from this peer", "wait; it is tried again"),
    "request.internal": Code("the other side failed while it worked on this request", "it is tried again"),
    "version.unsupported": Code("the two sides speak different major versions of the protocol", "update rollmesh"),
    # envelopes
    "envelope.run": Code("the message belongs to another run", "check the join line"),
    "envelope.kind": Code("the message was signed as something else", "update rollmesh"),
    "envelope.key": Code("the message is signed by a key that may not say this", "check the join line"),
    "envelope.signature": Code("the signature does not match the message", "update rollmesh"),
    # admission
    "node.not_admitted": Code("this peer has not been admitted to the run", "say hello to the learner first"),
    "node.allowlist": Code("this run takes listed nodes only", "send the operator your peer id: rollmesh node id"),
    "node.invite": Code(
        "this run takes invited nodes only, and the invitation is missing, used or forged",
        "ask the operator for a new join line",
    ),
    "node.rate": Code("too many messages in a short time", "nothing; the node slows down by itself"),
    "node.quarantined": Code("this node broke a rule of the run and is out of it", "rollmesh status names the rule"),
    "node.too_many": Code("too many nodes from one address block", "ask the operator to raise admission.per_block"),
    "run.full": Code("the run has all the nodes that it takes", "wait; it is tried again"),
    "run.ended": Code("the run has ended", "nothing; thank you for taking part"),
    # leases
    "lease.unknown": Code("no such lease was given to this node", "nothing; the node asks for a new one"),
    "lease.expired": Code(
        "the lease ran out and its samples were given to others", "lower the number of groups at once"
    ),
    "lease.reused": Code("another result for the same lease was sent before", _REPORT),
    "lease.other_node": Code("the lease belongs to another node", "nothing; the node asks for a new one"),
    # results
    "result.schema": Code("the result is not well formed", "update rollmesh"),
    "result.signature": Code("the result is not signed by the node that sent it", "update rollmesh"),
    "result.prompt": Code("the result answers another prompt than the one that was leased", _REPORT),
    "result.samples": Code("the result does not hold exactly the samples that were leased", _REPORT),
    "result.length": Code("a completion is empty or longer than the lease allows", _REPORT),
    "result.finish": Code("the finish reason does not fit the tokens", _REPORT),
    "result.tokens": Code("a token id is outside the vocabulary", _REPORT),
    "result.logprob": Code("a log-probability is not finite or is above zero", _REPORT),
    "result.sampling": Code("the tokens are not the ones that these weights and this seed give", _REPORT),
    "result.drift": Code(
        "over many tokens the sampling is further from these weights than honest engines are", _REPORT
    ),
    "result.root": Code("the result was made with other weights than the lease names", _REPORT),
    "result.stale": Code("the result came too late for its weights", "lower the number of groups at once"),
    # weights
    "manifest.invalid": Code("the manifest is not well formed", "update rollmesh"),
    "manifest.run": Code("the manifest belongs to another run or another model", "check the join line"),
    "manifest.version": Code("the manifest is not newer than the weights held", "nothing; the node asks for the edges"),
    "manifest.parent": Code(
        "the manifest starts from weights that are not held", "nothing; the node asks for the edges"
    ),
    "manifest.limits": Code(
        "the download is larger than this node allows", "raise limits.download_gb if you trust the run"
    ),
    "chunk.served": Code("this peer has sent its share of this file", "nothing; the rest is taken from another peer"),
    "chunk.digest": Code("a chunk does not match its digest", "nothing; the chunk is taken from another peer"),
    "patch.invalid": Code("the patch does not decode", "nothing; the node takes another edge"),
    "patch.root": Code(
        "the patched weights do not have the promised root", "nothing; the node goes back to its snapshot"
    ),
    "patch.dtype": Code(
        "the model has a tensor of a type that patches do not support", "use a bf16, fp16 or fp32 model"
    ),
    # what a node refuses of a learner
    "card.model": Code("the run asks for a model that this node does not load", "update rollmesh, or join another run"),
    "card.limits": Code("the run asks for more than this node allows", "raise the node's limits if you trust the run"),
    "lease.limits": Code(
        "the lease asks for more than this node allows", "raise the node's limits if you trust the run"
    ),
    "node.stopping": Code("the node is shutting down", "nothing; the samples are leased again"),
    "node.paused": Code("the node takes no work at the moment", "nothing; the samples are leased again"),
    "node.engine": Code("the node's engine failed", "see the node's log"),
    "node.weights": Code("the node does not hold these weights any more", "nothing; the samples are leased again"),
}
"""Every code that one peer may send another, with its meaning and the advice shown beside it. Never reuse a name."""
