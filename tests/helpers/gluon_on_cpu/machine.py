"""Warps that run one at a time, their waits, and the known order of events.

A clock counts the known events of every agent of a program. Agents are groups of warps, and their asynchronous parts:
their matrix products, their stores by the copy engine, and its loads, one agent per barrier on which they arrive.
Waiting adds the clocks of others. (Vector clocks: Mattern, 1989; for races, Flanagan and Freund, FastTrack, 2009.)
"""

import random
import threading
from collections.abc import Callable

import numpy as np

# of a program: four groups of warps with their products and stores, and its barriers
AGENTS = 96
# turns after which the programs are taken to run for ever
_TURNS = 2 * 10**5
# one of these is drawn for each, so that some get far ahead of others
_SPEEDS = (1, 10, 100)


class Deadlock(AssertionError):
    """No warps can go on."""


class Race(AssertionError):
    """Nothing orders an access after an earlier one."""


class _Ended(BaseException):
    """Another group of warps has failed."""


def _not_yet() -> threading.Lock:
    """A turn to wait for: a lock that is taken, faster than a semaphore of 0."""
    turn = threading.Lock()
    turn.acquire()
    return turn


class Warps:
    """A group of warps that run the same code in step: a warpgroup, or a single warp. All of them know the events of
    each only where they have waited for each other. From then on, a signal of one of them passes on those of all."""

    def __init__(self, program: "Program", name: str, count: int, run: Callable[[], None]) -> None:
        self.program = program
        program.warps.append(self)
        self.name = f"{name} of program {program.number}"
        self.agent, self.products, self.stores = (program.new_agent() for _ in range(3))
        self.clock = np.zeros(AGENTS, np.int64)
        self.clock[self.agent] = 1
        self.together = self.clock.copy()
        self.single = count == 1
        self.fences = [0]
        self.started_products = 0
        self.started_stores = 0
        self.speed = program.machine.random.choice(_SPEEDS)
        self.waits_for: Callable[[], bool] | None = None
        self.reason = ""
        self.ended = False
        self.turn = _not_yet()
        self.thread = threading.Thread(target=self._run, args=(run,), daemon=True)

    def _run(self, run: Callable[[], None]) -> None:
        machine = self.program.machine
        self.turn.acquire()
        try:
            # of each thread: infinities are as good as any number
            with np.errstate(all="ignore"):
                if machine.error is None:
                    run()
                if self.clock[self.stores] < self.started_stores:
                    raise Race(f"{self.name} ends before its stores have been read")
        except _Ended:
            pass
        except BaseException as error:
            machine.error = machine.error or error
        self.ended = True
        machine.warps.remove(self)
        machine.go_on()

    def now(self) -> int:
        return self.clock[self.agent]

    def tick(self) -> None:
        self.clock[self.agent] += 1

    def wait_for_each_other(self) -> None:
        self.together = self.clock.copy()
        self.tick()

    def known(self) -> np.ndarray:
        """Clock that a signal passes on."""
        if self.single:
            self.wait_for_each_other()
        return self.together

    def learn(self, clock: np.ndarray) -> None:
        np.maximum(self.clock, clock, out=self.clock)

    def wait_for_products(self, pending: int) -> None:
        """Products end in their order."""
        done = self.started_products - pending
        self.clock[self.products] = max(self.clock[self.products], done)

    def start_store(self, write: Callable[[], None]) -> None:
        self.started_stores += 1
        self.program.machine.stores.append(Store(self, self.started_stores, write))

    def wait_for_stores(self, pending: int, written: bool = False) -> None:
        """Until all but the last ones have been read, or written, too."""
        last = self.started_stores - pending
        stores = self.program.machine.stores
        self.program.machine.wait(
            lambda: not any(s.warps is self and s.number <= last and (written or not s.read) for s in stores),
            "its stores",
        )
        self.clock[self.stores] = max(self.clock[self.stores], last)

    def fence(self) -> None:
        """From here on the copy engine, and matrix products, see earlier writes."""
        self.fences.append(self.now())
        self.tick()


class Barrier:
    """An mbarrier: a phase ends after `count` arrivals, and when the expected bytes have come."""

    def __init__(self, program: "Program", count: int) -> None:
        self.count = self.missing = count
        self.bytes = 0
        self.phase = 0
        self.agent = program.new_agent()
        self.told = np.zeros(AGENTS, np.int64)
        self.known = self.told

    def arrive(self, count: int, clock: np.ndarray) -> None:
        if self.missing < count:
            raise Race("more arrivals at a barrier than it waits for")
        self.missing -= count
        self._complete(clock)

    def receive(self, size: int, clock: np.ndarray) -> None:
        """Receive a copy's bytes, and the clock of the warps that started it."""
        self.bytes -= size
        self._complete(clock)

    def _complete(self, clock: np.ndarray) -> None:
        self.told = np.maximum(self.told, clock)
        if self.missing == 0 and self.bytes == 0:
            self.phase += 1
            self.missing = self.count
            self.told[self.agent] = self.phase
            self.known = self.told.copy()

    def passed(self, parity: int) -> bool:
        return self.phase & 1 != parity


class Store:
    """Store of a tile by the copy engine, which reads it at some time, and writes it at some time after that."""

    def __init__(self, warps: Warps, number: int, write: Callable[[], None]) -> None:
        self.warps = warps
        self.number = number
        self.write = write
        # the clocks find warps that overwrite the tile before they may know of it
        self.read = False


class Program:
    """One of a launch: its warps, those that have ended, too, and how many agents it has."""

    def __init__(self, machine: "Machine", number: int, programs: int) -> None:
        self.machine = machine
        self.number = number
        self.programs = programs
        self.warps: list[Warps] = []
        self.agents = 0

    def new_agent(self) -> int:
        self.agents += 1
        if self.agents > AGENTS:
            raise AssertionError(f"more than {AGENTS} agents")
        return self.agents - 1


class Machine:
    """Runs the programs of a launch, in an order that follows from the seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.warps: list[Warps] = []
        self.loads: list[Callable[[], None]] = []
        self.stores: list[Store] = []
        self.turns = 0
        self.over = _not_yet()
        self.current: Warps | None = None
        self.error: BaseException | None = None
        self.speed_of_copies = self.random.choice(_SPEEDS)

    def start(self, warps: Warps) -> None:
        self.warps.append(warps)
        warps.thread.start()

    def run(self) -> None:
        """Until all have ended."""
        self.go_on()
        self.over.acquire()
        for warps in list(self.warps):  # after an error
            warps.turn.release()
            self.over.acquire()
        if self.error is not None:
            raise self.error

    def go_on(self) -> None:
        """Let the next warps run; in the thread of those that have run, for a thread is a slow thing to wake up."""
        ran = self.current
        try:
            self.current = self._next()
        except BaseException as error:
            self.current, self.error = None, error
        if ran is not None and self.current is ran:
            return
        (self.over if self.current is None else self.current.turn).release()
        if ran is not None and not ran.ended:
            ran.turn.acquire()

    def _next(self) -> Warps | None:
        """Next warps to run, after the copies before them; None at the end, and after an error."""
        while self.error is None and (self.warps or self.loads or self.stores):
            chosen = [warps for warps in self.warps if warps.waits_for is None or warps.waits_for()]
            speeds = [warps.speed for warps in chosen]
            for copies, turn in ((self.loads, self._end_a_load), (self.stores, self._go_on_with_a_store)):
                if copies:
                    chosen.append(turn)
                    speeds.append(self.speed_of_copies)
            self.turns += 1
            if not chosen or self.turns > _TURNS:
                waiting = "\n".join(f"{warps.name} waits for {warps.reason}" for warps in self.warps)
                raise Deadlock(f"no end after {_TURNS} turns" if chosen else f"no warps can go on:\n{waiting}")
            turn = self.random.choices(chosen, speeds)[0]
            if isinstance(turn, Warps):
                return turn
            turn()
        return None

    def _end_a_load(self) -> None:
        self.loads.pop(self.random.randrange(len(self.loads)))()

    def _go_on_with_a_store(self) -> None:
        store = self.random.choice(self.stores)
        if store.read:
            store.write()
            self.stores.remove(store)
        store.read = True

    # of the current warps

    def wait(self, condition: Callable[[], bool], reason: str) -> None:
        """Let others run, and go on some time after the condition holds."""
        warps = self.current
        warps.waits_for, warps.reason = condition, reason
        self.go_on()
        warps.waits_for = None
        if self.error is not None:
            raise _Ended

    def pause(self) -> None:
        self.wait(lambda: True, "nothing")


# the one that runs
running: Machine | None = None


def warps() -> Warps:
    """Warps that are running."""
    return running.current


def program() -> Program:
    return running.current.program
