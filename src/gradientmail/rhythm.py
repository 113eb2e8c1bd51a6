"""When the next commit is to be expected, learned from when those before it came.

Looking costs requests, and looking seldom costs time. Rounds come about evenly, so a node looks
seldom where the next commit cannot be there yet and at every poll from shortly before it is due.
The mean of the time between commits and its mean deviation are kept as TCP keeps those of its
round trips (RFC 6298), and "shortly" is four times the deviation.
"""

GAIN = 0.3
"""The weight of the newest round in the means."""

SOONER_POLLS = 2
"""So many polls before a commit is due it is expected, however even the rounds are."""

LONGEST_PAUSE_SECONDS = 30.0
"""Between two looks, whatever the rounds take: an unusual commit is not overlooked for longer."""

LEAST_PAUSE = 0.01
"""Of a poll: a shorter one is none. What a clock rounds away would be waited for without end."""


class Rhythm:
    """Of one node's commits, on its own clock."""

    def __init__(self, poll_interval: float, now: float) -> None:
        """Nothing is known yet, so the next commit may come at any time."""
        self._poll_interval = poll_interval
        self._began = now
        self._advanced_at: float | None = None
        self.round_seconds: float | None = None
        """Mean time from one commit to the next, None while there were not two."""
        self._deviation = 0.0
        self._margin = float(SOONER_POLLS * poll_interval)
        """So much sooner or later than expected is no surprise."""

    def advance(self, now: float) -> None:
        """A commit was seen; of several seen at one moment nobody knows how long they took."""
        if self._advanced_at is not None and now > self._advanced_at:
            took = now - self._advanced_at
            if self.round_seconds is None:
                self.round_seconds, self._deviation = took, took / 8
            else:
                error = took - self.round_seconds
                self.round_seconds += GAIN * error
                self._deviation += GAIN * (abs(error) - self._deviation)
            self._margin = max(SOONER_POLLS * self._poll_interval, 4 * self._deviation)
        self._advanced_at = now

    def waited(self, now: float) -> float:
        """Seconds since the last commit, or since the beginning."""
        return now - (self._began if self._advanced_at is None else self._advanced_at)

    @property
    def late_at(self) -> float:
        """When the next commit is late: by more than is usual, or by half a round."""
        began = self._began if self._advanced_at is None else self._advanced_at
        if self.round_seconds is None:
            return began + 1.5 * self._poll_interval
        return began + self.round_seconds + min(self._margin, self.round_seconds / 2)

    def due_in(self, now: float) -> float:
        """Seconds until a commit is to be expected; 0 when one may come now."""
        if self.round_seconds is None or self._advanced_at is None:
            return 0.0
        return max(self._advanced_at + self.round_seconds - self._margin - now, 0.0)

    def pause(self, now: float) -> float:
        """How long to wait before looking again: a poll when a commit is due, else longer.

        No longer than until it is due, an eighth of a round, or ``LONGEST_PAUSE_SECONDS``.
        """
        due = self.due_in(now)
        if not due or self.round_seconds is None:
            return self._poll_interval
        longest = min(self.round_seconds / 8, LONGEST_PAUSE_SECONDS)
        return max(min(due, longest), self._poll_interval)


class Turn:
    """A learner's next round, and when others' snapshots of it are worth looking for.

    They could make it due earlier. When it is due within a poll anyhow, which is usual, the
    requests are saved; unless a poll has passed, and the steps take longer than before.
    """

    def __init__(self, poll_interval: float) -> None:
        """No round is next yet."""
        self._poll_interval = poll_interval
        self._number: int | None = None
        self._since = 0.0

    def pause(self, number: int | None, due_seconds: float, now: float) -> float:
        """Seconds until they are to be looked for, 0 for now; long, when no round is next.

        ``number`` is the next round, due in ``due_seconds`` when that was told.
        """
        if self._number != number:
            self._number, self._since = number, now
        if number is None:
            return LONGEST_PAUSE_SECONDS
        left = self._since + self._poll_interval - now
        is_time = due_seconds > self._poll_interval or left <= LEAST_PAUSE * self._poll_interval
        return 0.0 if is_time else left
