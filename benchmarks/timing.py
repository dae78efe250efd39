"""How a call is measured on a GPU: CUDA-graph replays, wall time, peak memory, and when an autotuner is silent."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import torch

Call = Callable[[], object]
# Several times the L2 of any GPU at hand (60 MB on an H200).
FLUSH_BYTES = 256 * 2**20


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    """One for all captures: libraries keep a workspace for every stream that they have seen."""
    return torch.cuda.Stream()


def capture(call: Call, warmup: int = 2) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one call, forward and backward alike.

    The warm-up runs on the stream of the capture, since a kernel's first launch loads its module, which a capture
    forbids. A backward inside the call runs on the stream of its forward, hence inside the capture. What the call
    returns is dropped: the graph's own memory pool keeps the addresses that its replays write to.
    """
    stream = _capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


def replay_ms(graphs: Mapping[str, torch.cuda.CUDAGraph], replays: int, warmup: int = 5) -> dict[str, float]:
    """Median milliseconds of a replay for each graph; the graphs take turns, so that clocks and heat are shared.

    The L2 is overwritten before every replay, outside the timed events. That write takes longer than the host needs to
    queue a replay, so the GPU never waits for the host.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    for turn in range(warmup + replays):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            start.record()
            graph.replay()
            end.record()
            if turn >= warmup:
                events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(start.elapsed_time(end) for start, end in pairs) for name, pairs in events.items()}


def wall_ms(call: Call, calls: int, warmup: int = 3) -> float:
    """Milliseconds a call when `calls` of them are made one after the other and waited for once."""
    for _ in range(warmup):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls * 1e3


def peak_mb(call: Call) -> float:
    """Most memory (MiB) that one call holds at a time above what was allocated before; the call must be warm."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


class TuningWanted(RuntimeError):
    """A Triton autotuner has no choice for a kernel yet, where none may be measured."""


class TuningWatch:
    """Sees every measurement of Triton's autotuner in this process, and refuses them inside `forbidden()`."""

    def __init__(self) -> None:
        from triton.runtime.autotuner import Autotuner

        self.measurements = 0
        self._refuse = False
        bench = Autotuner._bench

        def watched(tuner: Autotuner, *args: object, **kwargs: object) -> object:
            if self._refuse:
                raise TuningWanted(tuner.base_fn.__name__)
            self.measurements += 1
            return bench(tuner, *args, **kwargs)

        Autotuner._bench = watched

    @contextlib.contextmanager
    def forbidden(self) -> Iterator[None]:
        """For a GPU shared with other work: a choice made now would be noise, and Triton would keep it on disk."""
        self._refuse = True
        try:
            yield
        finally:
            self._refuse = False

    def settle(self, call: Call, limit: int = 10) -> int:
        """Call until a call measures nothing; how many candidates were measured on the way."""
        before = self.measurements
        for _ in range(limit):
            seen = self.measurements
            call()
            torch.cuda.synchronize()
            if self.measurements == seen:
                return self.measurements - before
        raise RuntimeError(f"the autotuner still measures after {limit} calls")
