"""How much a peer may do: a token bucket, and a book of offences. Pure; the time comes as an argument, in seconds."""

from __future__ import annotations

from collections import OrderedDict

from rollmesh_protocol import limits


class TokenBucket:
    """Holds up to ``burst`` tokens and gains ``rate`` a second; whoever finds it empty has to wait."""

    __slots__ = ("_burst", "_rate", "_tokens", "_updated")

    def __init__(self, *, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._updated = now

    def take(self, now: float, *, tokens: float = 1.0) -> bool:
        """Take ``tokens`` if they are there; False, and nothing taken, if not."""
        self._refill(now)
        if self._tokens < tokens:
            return False
        self._tokens -= tokens
        return True

    def give(self, tokens: float) -> None:
        """Put ``tokens`` in, as far as they fit."""
        self._tokens = min(self._burst, self._tokens + tokens)

    def is_full(self, now: float) -> bool:
        """True when nothing was taken for long enough: such a bucket may be forgotten."""
        self._refill(now)
        return self._tokens >= self._burst

    def _refill(self, now: float) -> None:
        if now > self._updated:
            self._tokens = min(self._burst, self._tokens + (now - self._updated) * self._rate)
            self._updated = now


class OffenceBook:
    """Counts malformed input by peer, forgives it with time, and shuts a peer out for a while when it is too much.

    Bounded: at most ``limits.MAX_BANS`` peers are remembered in each of its two tables, the newest ones.
    """

    def __init__(self) -> None:
        self._patience: OrderedDict[str, TokenBucket] = OrderedDict()
        self._banned_until: OrderedDict[str, float] = OrderedDict()

    def record(self, peer: str, *, now: float, weight: float = 1.0) -> bool:
        """Write an offence down. True when it was one too many: the peer is shut out from now on."""
        patience = self._patience.get(peer)
        if patience is None:
            rate = limits.MAX_OFFENCES / limits.OFFENCE_WINDOW_S
            patience = self._patience[peer] = TokenBucket(rate=rate, burst=limits.MAX_OFFENCES, now=now)
            _forget_oldest(self._patience)
        if patience.take(now, tokens=weight):
            return False
        self._patience.pop(peer, None)
        self._banned_until.pop(peer, None)
        self._banned_until[peer] = now + limits.BAN_S
        _forget_oldest(self._banned_until)
        return True

    def is_banned(self, peer: str, *, now: float) -> bool:
        """True while ``peer`` is shut out."""
        until = self._banned_until.get(peer)
        if until is None:
            return False
        if now >= until:
            del self._banned_until[peer]
            return False
        return True


def _forget_oldest(table: OrderedDict[str, TokenBucket] | OrderedDict[str, float]) -> None:
    while len(table) > limits.MAX_BANS:
        table.popitem(last=False)
