"""Runs functions side by side in processes of one thread each, and lets them report progress while they run."""

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import forkserver, get_all_start_methods, get_context, parent_process
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")
Message = TypeVar("Message")

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


class Pool(Generic[Message]):
    """Calls functions as `function(report, *arguments)`.

    So many workers run at a time, and what the functions report is handed on in this process. With one worker
    everything happens in this process, at once and in order.

    >>> def double(report, number):
    ...     report(f"doubling {number}")
    ...     return 2 * number
    >>> with Pool(1, print) as pool:
    ...     pool.submit(double, 21).result()
    doubling 21
    42
    """

    def __init__(self, workers: int, report: Callable[[Message], None]) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self._workers = workers
        self._report = report

    def __enter__(self) -> Self:
        if self._workers == 1:
            import torch

            self._threads = torch.get_num_threads()
            torch.set_num_threads(1)
            return self
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
        if self._workers == 1:
            import torch

            torch.set_num_threads(self._threads)
            return
        if error is not None:
            self._stop.set()
        self._processes.shutdown(cancel_futures=True)
        self._messages.put(None)
        self._listener.join()

    def submit(
        self,
        function: Callable[Concatenate[Callable[[Message], None], Arguments], Value],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Future[Value]:
        """Starts a call, or queues it until a worker is free. The function must be importable by its name."""
        if self._workers > 1:
            call: Callable[..., Value] = _call
            return self._processes.submit(call, function, *args, **kwargs)
        future: Future[Value] = Future()
        future.set_result(function(self._report, *args, **kwargs))
        return future

    def flush(self) -> None:
        """Waits until everything has been handed on that was reported by calls which have returned."""
        if self._workers > 1:
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


def _call(function: Callable[..., Value], *args: Any, **kwargs: Any) -> Value:
    return function(_report, *args, **kwargs)


def _report(message: object) -> None:
    if _stop.is_set():
        raise InterruptedError("stopped by the parent process")
    _queue.put(message)
