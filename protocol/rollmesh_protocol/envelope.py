"""A signed message. The only way to a body is to open its envelope, which verifies it first.

The signature is Ed25519 over ``"rollmesh/1/"``, the run id and the kind, each length-prefixed, and blake3 of the body;
so a body signed for one run or as one kind of thing is worth nothing elsewhere. Nothing inside the body is parsed,
and nothing compressed is unpacked, before the signature has been checked.
"""

from __future__ import annotations

from typing import Final, Literal

from blake3 import blake3
from pydantic import Field

from rollmesh_protocol.errors import Refused
from rollmesh_protocol.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity, is_signed_by, public_key_of
from rollmesh_protocol.record import Record

Kind = Literal["card", "pass", "policy", "notice", "lease", "result", "manifest", "invite"]
"""What a body is signed as."""

RUN_ID_CHARS: Final = 64
_DOMAIN: Final = b"rollmesh/1/"


class Envelope(Record):
    """Bytes, what they are signed as, and by whom. Not to be believed before :meth:`open`."""

    run: str = Field(min_length=1, max_length=RUN_ID_CHARS)
    kind: Kind
    body: bytes
    key: bytes = Field(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)
    sig: bytes = Field(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)

    def open(self, *, run: str, kind: Kind, signer: str) -> bytes:
        """The body, once it is known that ``signer`` (a peer id) signed it as ``kind`` for ``run``.

        Raises:
            Refused: ``envelope.run``, ``envelope.kind``, ``envelope.key`` or ``envelope.signature``.
        """
        if self.run != run:
            raise Refused("envelope.run")
        if self.kind != kind:
            raise Refused("envelope.kind", f"signed as {self.kind!r}, expected {kind!r}")
        if self.key != public_key_of(signer):
            raise Refused("envelope.key")
        if not is_signed_by(self.key, self.sig, _statement(run, kind, self.body)):
            raise Refused("envelope.signature")
        return self.body


def seal(body: bytes, *, run: str, kind: Kind, identity: Identity) -> Envelope:
    """``body``, signed by ``identity`` as a ``kind`` for ``run``."""
    return Envelope(
        run=run, kind=kind, body=body, key=identity.public_key, sig=identity.sign(_statement(run, kind, body))
    )


def _statement(run: str, kind: str, body: bytes) -> bytes:
    parts = [_DOMAIN]
    for text in (run, kind):
        raw = text.encode()
        parts += [len(raw).to_bytes(4, "little"), raw]
    parts.append(blake3(body).digest())
    return b"".join(parts)
