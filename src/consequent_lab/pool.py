"""Runs functions side by side in processes of one thread each, and lets them report progress while they run."""

import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")
Message = TypeVar("Message")

_queue: Any = None  # in a worker process: where its reports go


class Pool(Generic[Message]):
    """Calls functions as `function(report, *arguments)`.

    With one worker everything happens in this process, at once and in order.

    Args:
        workers: how many calls run at a time.
        report: receives, in this process, what the functions report.

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
        self._threads = torch.get_num_threads()
        if self._workers == 1:
            torch.set_num_threads(1)
            return self
        context = get_context("spawn")
        self._messages = context.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._processes = ProcessPoolExecutor(self._workers, context, _start_worker, (self._messages,))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._workers == 1:
            torch.set_num_threads(self._threads)
            return
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
            return self._processes.submit(_call, function, *args, **kwargs)
        future: Future[Value] = Future()
        future.set_result(function(self._report, *args, **kwargs))
        return future

    def _listen(self) -> None:
        while (message := self._messages.get()) is not None:
            self._report(message)


def _start_worker(queue: Any) -> None:
    global _queue
    _queue = queue
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then stops its workers.
    torch.set_num_threads(1)


def _call(
    function: Callable[Concatenate[Callable[[Message], None], Arguments], Value],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Value:
    return function(_queue.put, *args, **kwargs)
