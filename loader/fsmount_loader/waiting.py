"""How long a training loop waits for its data and how long it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fsmount_loader.batch import Batch

Clock = Callable[[], float]  # seconds from any moment on

_WARM_UP = 10  # batches that are not judged: workers are starting
_WINDOW_BATCHES = 32  # that are judged together, at least
_WINDOW_SECONDS = 10.0  # likewise
_TOO_MUCH = 0.1  # of the time


@dataclass(frozen=True, slots=True)
class Waiting:
    """How this rank's training loop spent its time over some batches, in seconds.

    It `waited` for them, and `computed` from each of them until it asked for the next.
    """

    waited: float = 0.0
    computed: float = 0.0
    batches: int = 0

    @property
    def seconds(self) -> float:
        """All of the time."""
        return self.waited + self.computed

    @property
    def fraction(self) -> float:
        """The part of the time that it waited, 0 to 1."""
        return self.waited / self.seconds if self.seconds else 0.0

    def since(self, earlier: Waiting) -> Waiting:
        """What was added to `earlier`."""
        waited, computed = self.waited - earlier.waited, self.computed - earlier.computed
        return Waiting(waited, computed, self.batches - earlier.batches)


class Meter:
    """Counts the batches of one iteration, and the time. Not thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waited = self._computed = 0.0
        self._judged: Waiting | None = None  # up to where
        self.batches = 0

    def now(self) -> Waiting:
        """All of the iteration up to now."""
        return Waiting(self._waited, self._computed, self.batches)

    def timed(
        self, batches: Iterator[Batch], bottleneck: Callable[[Waiting], object]
    ) -> Iterator[Batch]:
        """The same batches. `bottleneck` is called once, with a stretch of batches that were waited
        for more than a tenth of the time.

        A stretch is 32 batches or more and 10 seconds or more; the first ten batches are in none.
        """
        told = False
        asked = self._clock()
        for batch in batches:
            given = self._clock()
            self._waited += given - asked
            self.batches += 1
            yield batch
            asked = self._clock()
            self._computed += asked - given
            if not told and (stretch := self._stretch()) and stretch.fraction > _TOO_MUCH:
                bottleneck(stretch)
                told = True

    def _stretch(self) -> Waiting | None:
        """The batches since the last stretch, if they are enough for one."""
        if self._judged is None:
            self._judged = self.now() if self.batches == _WARM_UP else None
        elif self.batches - self._judged.batches >= _WINDOW_BATCHES:
            stretch = self.now().since(self._judged)
            if stretch.seconds >= _WINDOW_SECONDS:
                self._judged = self.now()
                return stretch
        return None
