"""Work that a GPU does again at every step, launched as one: recorded as CUDA graphs, inside of an eager program.

To launch a dozen kernels from Python takes the host longer than a small network's GPU takes to run them. A recording
launches them at once. It reads from the addresses that it was made with: so it is replayed only where all that goes in
lies where it lay then, which the memory allocator sees to more often than not, and is made again where it does not.
"""

import gc
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from consequent.engines.gpu.streams import switched_to
from consequent.reports.errors import ConsequentWarning

MOST_RECORDINGS = 6  # of one piece of work: memory comes in patterns that alternate
MOST_KEYS = 64  # remembered, of work that was not recorded
FREE_RECORDINGS = 2  # of each piece of work; then one every so often, since to record takes longer than to launch:
RUNS_PER_RECORDING = 25
MOST_ROUNDS_WITHOUT = 100  # until a piece of work that no longer comes is forgotten

Work = Callable[[], tuple[Tensor, ...]]


class Recording(Protocol):
    """Launches that can be repeated."""

    def replay(self) -> None:
        """Launch them again."""


class Recorder(Protocol):
    """Makes recordings."""

    def record(self, work: Callable[[], object]) -> Recording:
        """Records what work launches, which does not happen yet. RuntimeError if it cannot be recorded."""


@dataclass
class _Piece:
    """One piece of work: the same results every time, computed from inputs that may lie anywhere."""

    results: tuple[Tensor, ...] = ()  # where all its recordings put them
    recordings: "OrderedDict[Hashable, Recording]" = field(default_factory=OrderedDict)
    seen: "OrderedDict[Hashable, None]" = field(default_factory=OrderedDict)  # keys that were run as they are
    runs: int = 0
    recorded: int = 0
    last_round: int = 0


class Replays:
    """Pieces of work, each of which is done once a step.

    Args:
        recorder: how to record; one for all, as recordings may share memory. They must run one after the other.
        most_kept: bytes of all their results together, which are kept for as long as they are.
    """

    def __init__(self, recorder: Recorder, most_kept: int) -> None:
        self._recorder = recorder
        self._most_kept = most_kept
        self._pieces: dict[Hashable, _Piece] = {}
        self._works = True
        self._round = 0

    def run(self, piece: Hashable, key: Hashable, work: Work) -> tuple[tuple[Tensor, ...], bool]:
        """Do the work: as it is twice, and by a recording when it comes again. Not in a CUDA graph of the user's.

        Once there is a recording, results lie in the same place every time, whether they are its or not: others may be
        recorded that read them there. They are overwritten by the next run.

        Args:
            piece: whose work this is. Its results have the same shapes every time.
            key: all that the launches depend on, above all the addresses of what goes in.
            work: launches on the current stream alone.

        Returns:
            the results, and whether they lie where those of the next run will.
        """
        if not self._works:
            return work(), False
        known = self._pieces.get(piece)
        if known is None:
            known = self._pieces[piece] = _Piece()
        known.runs += 1
        known.last_round = self._round
        recording = known.recordings.get(key)
        if recording is not None:
            known.recordings.move_to_end(key)
            recording.replay()
            return known.results, True
        results = work()
        if known.results:
            torch._foreach_copy_(known.results, results)
            results = known.results
        if key in known.seen and self._may_record(known, results):
            self._record(known, key, work, results)
        else:
            _remember(known.seen, key, MOST_KEYS)
        return results, bool(known.results)

    def end_round(self) -> None:
        """A step's work is launched: what has not come for long is forgotten, and with it the memory of its results."""
        self._round += 1
        if self._round % MOST_ROUNDS_WITHOUT == 0:
            oldest = self._round - MOST_ROUNDS_WITHOUT
            self._pieces = {name: piece for name, piece in self._pieces.items() if piece.last_round >= oldest}

    def _may_record(self, known: _Piece, results: tuple[Tensor, ...]) -> bool:
        if known.recorded >= FREE_RECORDINGS + known.runs // RUNS_PER_RECORDING:
            return False
        return bool(known.results) or self._kept + _bytes(results) <= self._most_kept

    @property
    def _kept(self) -> int:
        return sum([_bytes(piece.results) for piece in self._pieces.values()])

    def _record(self, known: _Piece, key: Hashable, work: Work, results: tuple[Tensor, ...]) -> None:
        # The results must not lie in memory that recordings share: another one's replay would overwrite them.
        known.results = known.results or results
        try:
            recording = self._recorder.record(lambda: torch._foreach_copy_(known.results, work()))
        except RuntimeError as error:
            warnings.warn(
                f"launches cannot be recorded ({error}); steps go on as before, and take the host longer",
                ConsequentWarning,
                stacklevel=2,
            )
            self._works = False
            self._pieces.clear()
            return
        known.recorded += 1
        known.seen.pop(key)
        known.recordings[key] = recording
        if len(known.recordings) > MOST_RECORDINGS:
            known.recordings.popitem(last=False)


class GraphRecorder:
    """Records CUDA graphs. They share the memory for what is needed only while they run, one after the other.

    Args:
        apart: the stream to record on, where the current one may be that of the legacy API, which cannot be recorded.
    """

    def __init__(self, apart: torch.cuda.Stream | None = None) -> None:
        self._apart = apart
        self._pool: Any = None

    def record(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """A graph of what work launches on the current stream; RuntimeError if something in it cannot be in a graph."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph(), which waits for the device first. What other threads do meanwhile is their affair.
        with _without_garbage_collection(), nullcontext() if self._apart is None else switched_to(self._apart):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # it says once more that the capture failed
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """What is collected may be of CUDA, and must not be destroyed while something is captured."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _bytes(tensors: tuple[Tensor, ...]) -> int:
    return sum([tensor.nbytes for tensor in tensors])


def _remember(keys: "OrderedDict[Hashable, None]", key: Hashable, most: int) -> None:
    keys[key] = None
    keys.move_to_end(key)
    if len(keys) > most:
        keys.popitem(last=False)
