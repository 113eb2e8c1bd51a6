"""What one observer knows of all leases: who lives, and who has long been silent.

No wall clock is compared: an observer notes on its own clock when it last saw a learner's newest
beat change.
"""

import math
from collections.abc import Iterable

from gradientmail.exchange import layout
from gradientmail.exchange.layout import beats_among

KEPT_TIMEOUTS = 20
KEPT_SECONDS = 3600.0


def kept_seconds(timeout: float) -> float:
    """How long a lease must have been seen not to change before it may be swept."""
    return max(KEPT_TIMEOUTS * timeout, KEPT_SECONDS)


class LeaseBook:
    """What one observer knows of all leases, on its own clock. Pure bookkeeping.

    Every node of a run keeps one, of all the others, and looks into it at every poll: what that
    costs grows with what has changed, not with how many there are.
    """

    def __init__(self, timeout: float) -> None:
        """``timeout`` seconds without a change make a lease stale."""
        self._timeout = timeout
        self._listed: tuple[str, ...] = ()
        self._keys: frozenset[str] = frozenset()
        """What was listed last time, in order and as a set."""
        self._newest: dict[str, tuple[int, float]] = {}
        """Each one's newest beat, and when that was seen first."""
        self._observed_at = -math.inf
        self._live: frozenset[str] = frozenset()
        """Who was live when this was last looked up, which was right until ``_first_end``."""
        self._first_end = math.inf
        """None of the leases in ``_live`` runs out before this. Renewals only make it later."""
        self._live_when_listed = self._live

    def observe(self, keys: Iterable[str], now: float) -> None:
        """Take in a listing of ``leases/``, made at ``now``."""
        self._forgive_blindness(now)
        listed = tuple(keys)
        if listed != self._listed:  # most listings say what the last one said
            self._take_in(listed, now)
        self._live_when_listed = self.live(now)

    def _take_in(self, listed: tuple[str, ...], now: float) -> None:
        before, keys = self._keys, frozenset(listed)
        self._listed, self._keys = listed, keys
        changed: set[str] = set()
        for learner, number in beats_among(keys - before):
            newest = self._newest.get(learner)
            if newest is None or number > newest[0]:
                self._newest[learner] = (number, now)
                changed.add(learner)
        # Usually an older beat than the newest, which a renewal has deleted.
        fallen = {
            who for who, number in beats_among(before - keys) if self._newest[who][0] == number
        }
        gone = self._fall_back(fallen, now) if fallen else fallen
        came = (changed | fallen) - gone - self._live
        if gone or came:
            self._live = (self._live - gone) | came
            self._first_end = min(self._first_end, now + self._timeout)

    def _fall_back(self, fallen: set[str], now: float) -> set[str]:
        """The newest beat of these was deleted: their newest now, and who of them has none."""
        left: dict[str, int] = {}
        for learner, number in beats_among(self._keys):
            if learner in fallen:
                left[learner] = max(number, left.get(learner, number))
        for learner in fallen - left.keys():
            del self._newest[learner]
        self._newest |= {learner: (number, now) for learner, number in left.items()}
        return fallen - left.keys()

    def live(self, now: float) -> frozenset[str]:
        """The learners whose newest beat was listed last time and changed within the timeout.

        The same object as the last time when nothing has changed in between.
        """
        if self._first_end < now:
            ends = {who: changed + self._timeout for who, (_, changed) in self._newest.items()}
            live = frozenset(who for who, end in ends.items() if now <= end)
            if live != self._live:
                self._live = live
            self._first_end = min((ends[who] for who in live), default=math.inf)
        return self._live

    def has_lost(self, now: float) -> bool:
        """Whether by ``now`` a lease has run out of one who was live at the last listing."""
        return self.live(now) is not self._live_when_listed

    def listed(self) -> frozenset[str]:
        """All learners that have a beat, live or stale."""
        return frozenset(self._newest)

    def silent(self, seconds: float) -> list[str]:
        """The keys of all beats of the learners that were seen not to change for so long.

        Up to the last listing: what came after it is not known, and time without a listing is none
        that anybody was seen in.
        """
        now = self._observed_at
        silent = {who for who, (_, changed) in self._newest.items() if now - changed > seconds}
        beats = sorted(
            beat for beat in beats_among(self._keys if silent else ()) if beat[0] in silent
        )
        return [layout.beat_key(who, number) for who, number in beats]

    def _forgive_blindness(self, now: float) -> None:
        """Time in which nothing could be observed makes nobody stale.

        After an outage of the store, or when this process was stopped, every beat looks old: the
        others could not renew either, or renewed unseen. Only half of the timeout counts.
        """
        blind = now - self._observed_at - self._timeout / 2
        if 0 < blind < math.inf:
            self._newest = {
                learner: (beat, changed + blind)
                for learner, (beat, changed) in self._newest.items()
            }
            self._first_end = -math.inf  # who was called lost meanwhile may not be
        self._observed_at = now
