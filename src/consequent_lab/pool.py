"""Processes of one thread each that call functions side by side and let them report progress while they run."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import forkserver, get_all_start_methods, get_context, parent_process
from types import TracebackType
from typing import Any

Report = Callable[[Any], None]

# A fork of a process with threads can hang, so workers are forked from a server that has none.
_context = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
_FLUSH = "all that came before has been handed on"
_queue: Any = None  # in a worker process: where its reports go,
_stop: Any = None  # and the event that tells it to give up


def start_importing(module: str) -> None:
    """Lets a background process import a module, and all that it imports, for the workers of a later `Pool`.

    Meant to be called before this process imports the same module: the two then take the time of one.
    """
    if _context.get_start_method() == "forkserver":
        _context.set_forkserver_preload([module])
        forkserver.ensure_running()


@contextmanager
def one_thread() -> Iterator[None]:
    """Gives torch one thread in this process, as workers have."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Pool:
    """So many processes; what the functions in them report is handed on in this process."""

    def __init__(self, workers: int, report: Report) -> None:
        self._workers = workers
        self._report = report

    def __enter__(self) -> "Pool":
        self._messages = _context.SimpleQueue()  # whose messages are on their way before a call returns
        self._stop = _context.Event()
        self._flushed = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._processes = ProcessPoolExecutor(self._workers, _context, _start_worker, (self._messages, self._stop))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._stop.set()
        self._processes.shutdown(cancel_futures=True)
        self._messages.put(None)
        self._listener.join()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Starts `function(report, *arguments)`, or queues it until a worker is free; all of it is pickled."""
        return self._processes.submit(function, _report, *arguments)

    def flush(self) -> None:
        """Waits until everything has been handed on that was reported by calls which have returned."""
        self._flushed.clear()
        self._messages.put(_FLUSH)
        self._flushed.wait()

    def _listen(self) -> None:
        while (message := self._messages.get()) is not None:
            if message == _FLUSH:
                self._flushed.set()
            else:
                self._report(message)


def _start_worker(queue: Any, stop: Any) -> None:
    global _queue, _stop
    _queue, _stop = queue, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then stops its workers.
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)


def _leave_with_parent() -> None:
    """Ends this process when its parent has ended without a word, killed: nobody would ever stop it."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _report(message: object) -> None:
    if _stop.is_set():
        raise InterruptedError("stopped by the parent process")
    _queue.put(message)
