"""Coverage-guided fuzzing of what a peer's bytes reach first: the patch decoder and the manifest parser.

    tests/fuzz/run.sh [SECONDS] [patch|manifest]

Whatever the bytes are: a good answer or :class:`Refused`, within a second and within the memory that the layout allows.
Anything else ends the run with the input that did it. The kernels are compiled, so atheris sees their outcomes and not
their branches; the head, the tables and the checks before them are what it explores.
"""

from __future__ import annotations

import contextlib
import sys
import time

import atheris

import rollmesh_protocol.patch.kernels  # noqa: F401 - before the others: numba cannot compile what atheris instrumented

with atheris.instrument_imports(include=["rollmesh_protocol"]):
    from rollmesh_protocol import limits
    from rollmesh_protocol.envelope import Envelope
    from rollmesh_protocol.errors import Refused
    from rollmesh_protocol.manifest import Manifest
    from rollmesh_protocol.patch.codec import apply_patch, encode_patch
    from tests.unit.weights.kit import MIXED, RUN, nudged, patch, random_image

OLD = random_image(MIXED, 5)
NEW = nudged(MIXED, OLD, 6, share=0.05)
EDGE = patch(MIXED, OLD, NEW, version=7)
MOST_S = 1.0


def fuzz_patch(data: bytes) -> None:
    """A payload of any bytes leaves the image as it was, or changes it without touching the padding."""
    image = bytearray(OLD)
    started = time.monotonic()
    try:
        apply_patch(MIXED, image, data)
    except Refused:
        assert image == OLD
    assert time.monotonic() - started < MOST_S
    for tensor, offset in zip(MIXED.tensors, MIXED.offsets, strict=True):
        end = offset + tensor.tensor_bytes
        assert not any(image[end : -(-end // 64) * 64])


def fuzz_manifest(data: bytes) -> None:
    """A body of any bytes is a manifest that encodes to the same bytes, or refused; the envelope around it likewise.

    The learner's signature is checked before a body is read: this is what stands behind it.
    """
    for read in (_read_envelope, _read_manifest):
        try:
            assert read(data) == data
        except Refused:
            continue


def _read_envelope(data: bytes) -> bytes:
    sealed = Envelope.decode(data, limit=limits.MANIFEST_BYTES, code="manifest.invalid")
    return sealed.encode()


def _read_manifest(data: bytes) -> bytes:
    manifest = Manifest.decode(data, limit=limits.MANIFEST_BYTES, code="manifest.invalid")
    with contextlib.suppress(Refused):
        manifest.check(run=RUN, layout=MIXED)
    return manifest.encode()


def main() -> None:
    """Fuzz until libFuzzer's limits are reached; ``corpus/`` folders are given on the command line."""
    target = {"patch": fuzz_patch, "manifest": fuzz_manifest}[sys.argv.pop(1)]
    assert encode_patch(MIXED, old=OLD, new=NEW) == EDGE.payload
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
