"""A hub model that a learner names is measured before it is fetched."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rollmesh_peer.models import base
from rollmesh_protocol.errors import Refused


def test_a_hub_model_beyond_the_owners_limit_is_refused_before_the_first_byte(tmp_path, monkeypatch) -> None:
    files = [("model.safetensors", 900), ("config.json", 100), ("pytorch_model.bin", 10**9), ("evil.py", 10**9)]
    siblings = [SimpleNamespace(rfilename=name, size=size) for name, size in files]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda self, *a, **k: SimpleNamespace(siblings=siblings))
    fetched = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: fetched.append(k) or str(tmp_path))
    with pytest.raises(Refused) as caught:
        base.import_base("hub:some/model", cache=tmp_path, max_bytes=999)
    assert caught.value.code == "manifest.limits" and "1,000 bytes" in caught.value.detail
    assert fetched == []
    with pytest.raises(Exception, match="no config.json"):
        base.import_base("hub:some/model", cache=tmp_path, max_bytes=1000)
    assert fetched and "*.bin" not in fetched[0]["allow_patterns"]
