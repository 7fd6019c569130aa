"""The cache against plain concatenation."""

from __future__ import annotations

import torch

from rollmesh_node.engine.kv_cache import GrowingCache


def test_it_holds_what_concatenation_would():
    generator = torch.Generator().manual_seed(0)
    cache = GrowingCache(layers=2)
    cache.reserve(3)
    plain = [torch.empty(4, 2, 0, 8), torch.empty(4, 2, 0, 8)]

    def append(rows: int, columns: int) -> None:
        for layer in range(2):
            fresh = torch.randn(rows, 2, columns, 8, generator=generator)
            plain[layer] = torch.cat([plain[layer], fresh], dim=2)
            keys, values = cache.update(fresh, -fresh, layer)
            assert torch.equal(keys, plain[layer])
            assert torch.equal(values, -plain[layer])

    append(4, 2)
    append(4, 1)
    append(4, 5)  # beyond what was reserved
    cache.take([0, 0, 3, 2, 1])
    plain = [part[[0, 0, 3, 2, 1]] for part in plain]
    append(5, 1)
    cache.drop([(4, 1)], rows=3)  # rows 0, 4, 2 stay; row 3 and the old row 1 are gone
    plain = [part[[0, 4, 2]] for part in plain]
    append(3, 1)
    append(3, 9)
    cache.drop([], rows=2)
    plain = [part[:2] for part in plain]
    append(2, 1)
    assert cache.get_seq_length() == 20


def test_a_token_is_copied_about_twice_in_its_life():
    cache = GrowingCache(layers=1)
    copies = 0
    for _ in range(2000):
        before = cache.growing[0]._buffers
        cache.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0)
        if before and cache.growing[0]._buffers[0] is not before[0]:
            copies += before[0].shape[2]
    assert copies < 3 * 2000
