"""Calls, streams and notices over one pair of asyncio streams; both ends may call.

In: frames. Out: answers to our calls, calls to our handler.

Headers: call {id, op, args}, notice {op, args}, answer {re, ok}, stream item {re, item}, end {re, end},
error {re, error: {kind, message, hint}}, cancel {cancel}, room for more items {more, bytes}.

**A slow reader of a stream never blocks the connection**: the sender sends the next item only while less than
STREAM_ROOM of that stream is unread, and waits otherwise; calls and other streams continue. The reader gives back what
it has read, whatever else waits, so neither end waits for the other. **No memory without a bound**: an end that sends
more items than that, or has requests of more than REQUEST_ROOM without an answer, loses the connection; the reason is
in the error of everything that was open. Nothing that is received stops the reading of frames, except a notice while
it is handled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from typing import Any, NamedTuple, Union

from remote_agent.wire.frames import (
    CUT,
    LENGTHS_BYTES,
    MAX_BODY,
    Frame,
    Problem,
    ProtocolError,
    WireError,
    decode,
    encode,
    encode_sized,
    sizes,
)

log = logging.getLogger(__name__)

# One stream may have this many unread bytes, in transit or queued. The last item may exceed this.
STREAM_ROOM = 4 * 1024 * 1024
# Requests from the other side may have this many bytes while they are being served.
REQUEST_ROOM = 64 * 1024 * 1024
# A frame counts as at least this many bytes: objects in memory are larger than their JSON.
LEAST_COST = 64 * 1024


class ChannelClosed(WireError):
    """The other side has closed the connection."""


class CallFailed(Problem):
    """The other side answered a call with an error."""


class Answer(NamedTuple):
    """The answer to a call: JSON data and raw bytes."""

    data: Any
    body: bytes = b""


Args = dict[str, Any]
"""The arguments of a request or a notice, which its handler reads."""
Items = AsyncGenerator[Answer, None]
Handler = Callable[[str, Args, bytes], Awaitable[Union[Answer, Items]]]


async def read_frame(reader: asyncio.StreamReader) -> Frame | None:
    """Return the next frame, None if the stream ends between two frames; raises ProtocolError."""
    try:
        lengths = await reader.readexactly(LENGTHS_BYTES)
    except asyncio.IncompleteReadError as short:
        if short.partial:
            raise ProtocolError(CUT) from short
        return None
    size = sizes(lengths)
    try:
        text = await reader.readexactly(size.header)
        body = await reader.readexactly(size.body)
    except asyncio.IncompleteReadError as short:
        raise ProtocolError(CUT) from short
    return decode(size, text, body)


async def refuse(op: str, args: Args, body: bytes) -> Answer | Items:
    """Answer every call with an error: the handler of a side that only calls."""
    raise Problem("unknown_op", f"no such request: {op}")


class _Incoming:
    """A stream that we read."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[tuple[Answer, int] | Problem | WireError | None] = asyncio.Queue()
        """Items with their costs, then the reason of the end, None: it is complete."""
        self.unread = 0

    def add(self, item: Answer, cost: int) -> None:
        """Queue an item; raises ProtocolError where the sender should have waited."""
        if self.unread >= STREAM_ROOM:
            raise ProtocolError("more items of a stream than there is room for")
        self.unread += cost
        self.queue.put_nowait((item, cost))


class _Outgoing:
    """A stream that we serve."""

    def __init__(self) -> None:
        self._unread = 0
        self._room = asyncio.Event()
        self._room.set()

    async def wait(self) -> None:
        """Wait until the other side has room."""
        await self._room.wait()

    def count(self, sent: int) -> None:
        """Note bytes that were sent, or, negative, read."""
        self._unread += sent
        if self._unread < STREAM_ROOM:
            self._room.set()
        else:
            self._room.clear()


class Channel:
    """A connection with calls in both directions. Its owner must await `run` for as long as it is open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler = refuse) -> None:
        self._reader = reader
        self._writer = writer
        self.handler = handler
        self.closed = asyncio.Event()
        self.ended = False
        """Whether the other side has ended it, as the kernel does for a process that dies; a firewall sends resets."""
        self._closing = False
        self._next_id = 0
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._streams: dict[int, _Incoming] = {}
        """Streams whose end has not arrived."""
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._requested = 0
        """The cost of the requests that are being served."""
        self._outgoing: dict[int, _Outgoing] = {}
        self._write_lock = asyncio.Lock()
        self._running: asyncio.Task[Any] | None = None

    async def run(self) -> None:
        """Read and dispatch frames until the other side closes; then fail open calls and end our streams."""
        self._running = asyncio.current_task()
        reason = "the other side closed the connection"
        try:
            while True:
                frame = await read_frame(self._reader)
                if frame is None:
                    self.ended = not self._closing
                    return
                await self._dispatch(frame)
        except (ProtocolError, ConnectionError, OSError) as error:
            log.debug("channel ends: %s", error)
            if isinstance(error, ProtocolError):
                reason = f"the connection was closed, because the other side violates the protocol: {error}"
        finally:
            await self._finish(reason)

    async def call(
        self, op: str, args: Mapping[str, object] | None = None, body: bytes = b"", timeout: float = 30.0
    ) -> Answer:
        """Return the answer to one request; raises CallFailed, ChannelClosed, asyncio.TimeoutError."""
        number = self._number()
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        try:
            return await asyncio.wait_for(self._call(number, op, args, body, future), timeout)
        except (asyncio.TimeoutError, asyncio.CancelledError):
            # Nobody waits for the answer any more: the other side can stop working on it.
            with contextlib.suppress(WireError, asyncio.TimeoutError):
                await asyncio.wait_for(self._send({"cancel": number}), 1.0)
            raise
        finally:
            self._calls.pop(number, None)

    async def _call(
        self, number: int, op: str, args: Mapping[str, object] | None, body: bytes, future: asyncio.Future[Answer]
    ) -> Answer:
        await self._send({"id": number, "op": op, "args": args or {}}, body)
        return await future

    async def stream(self, op: str, args: Mapping[str, object] | None = None) -> Items:
        """Yield the items of one request; closing the generator cancels it there. Raises CallFailed, ChannelClosed."""
        number = self._number()
        incoming = self._streams[number] = _Incoming()
        ended, taken = False, 0
        try:
            await self._send({"id": number, "op": op, "args": args or {}})
            while True:
                item = await incoming.queue.get()
                if isinstance(item, tuple):
                    answer, cost = item
                    yield answer
                    incoming.unread -= cost
                    taken += cost
                    if taken >= STREAM_ROOM // 2:
                        # The connection has ended; items that arrived before are still queued, and so is the reason.
                        with contextlib.suppress(ChannelClosed):
                            await self._send({"more": number, "bytes": taken})
                        taken = 0
                    continue
                ended = True
                if item is None:
                    return
                raise item
        finally:
            self._streams.pop(number, None)
            if not ended and not self.closed.is_set():
                with contextlib.suppress(WireError, asyncio.TimeoutError):
                    await asyncio.wait_for(self._send({"cancel": number}), 1.0)

    async def notify(self, op: str, args: Mapping[str, object] | None = None) -> None:
        """Send a request without an answer; raises ChannelClosed."""
        await self._send({"op": op, "args": args or {}})

    async def send_encoded(self, frame: bytes) -> None:
        """Send a frame that `encode` has made, for several connections; raises ChannelClosed."""
        async with self._write_lock:
            if self._closing or self.closed.is_set():
                # A TLS transport that was closed twice raises AttributeError.
                raise ChannelClosed("the connection is closed")
            try:
                self._writer.write(frame)
                await self._writer.drain()
            except (ConnectionError, OSError, RuntimeError) as error:
                raise ChannelClosed(f"the connection is closed: {error}") from error

    async def close(self) -> None:
        """Close the connection and wait until `run` returns, if it is running."""
        self._closing = True
        self._writer.close()
        with contextlib.suppress(asyncio.TimeoutError, OSError):
            await asyncio.wait_for(self._writer.wait_closed(), 2.0)
        if self._running is not None and self._running is not asyncio.current_task():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.closed.wait(), 2.0)

    def _number(self) -> int:
        if self.closed.is_set():
            raise ChannelClosed("the connection is closed")
        self._next_id += 1
        return self._next_id

    async def _send(self, header: Mapping[str, object], body: bytes = b"") -> int:
        """Send a frame and return its cost at the other side; raises ProtocolError, ChannelClosed."""
        data, size = encode_sized(header, body)
        await self.send_encoded(data)
        return cost_of(size)

    async def _dispatch(self, frame: Frame) -> None:
        header = frame.header
        check_header(header)
        if "re" in header:
            self._receive(header, frame)
        elif "cancel" in header:
            task = self._serving.get(header["cancel"])
            if task is not None:
                task.cancel()
        elif "more" in header:
            outgoing = self._outgoing.get(header["more"])
            if outgoing is not None:
                outgoing.count(-header.get("bytes", 0))
        elif isinstance(header.get("op"), str):
            number = header.get("id")
            args = header.get("args") or {}
            if number is None:
                # Notices are handled in the order of arrival: a state change must not overtake another.
                await self._serve(None, header["op"], args, frame.body)
            else:
                self._begin(number, frame, args)
                # It begins now: a notice must not overtake a state change that a request makes, such as a join.
                await asyncio.sleep(0)
        else:
            raise ProtocolError("a frame without op and without answer")

    def _begin(self, number: int, frame: Frame, args: Args) -> None:
        """Serve a request concurrently with all others."""
        if number in self._serving:
            raise ProtocolError(f"request {number} is still being served")
        if self._requested >= REQUEST_ROOM:
            raise ProtocolError("more requests without an answer than there is room for")
        cost = cost_of(frame.size)
        self._requested += cost
        task = self._serving[number] = asyncio.ensure_future(self._serve(number, frame.header["op"], args, frame.body))

        def served(_task: asyncio.Task[None]) -> None:
            del self._serving[number]
            self._requested -= cost

        task.add_done_callback(served)

    def _receive(self, header: dict[str, Any], frame: Frame) -> None:
        number = header["re"]
        failure: CallFailed | None = None
        if "error" in header:
            error = header["error"]
            failure = CallFailed(str(error.get("kind")), str(error.get("message")), str(error.get("hint") or ""))
        incoming = self._streams.get(number)
        if incoming is not None:
            data = header.get("item", header.get("ok"))
            if failure is None and data is not None:
                incoming.add(Answer(data, frame.body), cost_of(frame.size))
            if failure is not None or "item" not in header:
                incoming.queue.put_nowait(failure)
                del self._streams[number]
            return
        future = self._calls.get(number)
        if future is None or future.done():
            return
        if failure is not None:
            future.set_exception(failure)
        elif "ok" in header:
            future.set_result(Answer(header["ok"], frame.body))
        else:
            future.set_exception(CallFailed("protocol", "a stream where one answer was expected"))

    async def _serve(self, number: int | None, op: str, args: Args, body: bytes) -> None:
        try:
            result = await self.handler(op, args, body)
            if isinstance(result, Answer):
                if number is not None:
                    await self._send({"re": number, "ok": result.data}, result.body)
                return
            try:
                await self._serve_items(number, result)
            finally:
                await result.aclose()
            await self._send({"re": number, "end": True})
        except Problem as problem:
            await self._refuse(number, problem)
        except ProtocolError as error:
            await self._refuse(number, Problem("too_large", f"{op}: {error}"))
        except WireError as error:
            log.debug("request %s: %s", op, error)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("request %s failed", op)
            await self._refuse(number, Problem("internal", f"{op}: {type(error).__name__}: {error}"))

    async def _serve_items(self, number: int | None, items: Items) -> None:
        if number is None:
            raise Problem("bad_request", "no stream expects these items")
        outgoing = self._outgoing[number] = _Outgoing()
        try:
            async for item in items:
                await outgoing.wait()
                outgoing.count(await self._send({"re": number, "item": item.data}, item.body))
        finally:
            del self._outgoing[number]

    async def _refuse(self, number: int | None, problem: Problem) -> None:
        if number is None:
            log.warning("notice refused: %s", problem.message)
            return
        error = {"kind": problem.kind, "message": problem.message, "hint": problem.hint}
        with contextlib.suppress(WireError):
            await self._send({"re": number, "error": error})

    async def _finish(self, reason: str) -> None:
        self.closed.set()
        gone = ChannelClosed(reason)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(gone)
                # A caller that was cancelled in the meantime never retrieves the exception.
                future.exception()
        for incoming in self._streams.values():
            incoming.queue.put_nowait(gone)
        tasks = list(self._serving.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._writer.close()


def cost_of(size: int) -> int:
    """Return what a frame of that size counts as."""
    return max(size, LEAST_COST)


def check_header(header: dict[str, Any]) -> None:
    """Raise ProtocolError for a header with fields of wrong types."""
    if any(not isinstance(header.get(key, 0), int) for key in ("id", "re", "cancel", "more", "bytes")):
        raise ProtocolError("a frame's number is not a number")
    if any(not isinstance(header.get(key, {}), dict) for key in ("args", "ok", "item", "error")):
        raise ProtocolError("a part of a frame's header is not a JSON object")


def bodies(sock: socket.socket, op: str, args: Mapping[str, object]) -> Iterator[memoryview]:
    """Yield the body of each item of a stream, which counts until the next one; raises CallFailed, WireError.

    A thread that may block uses it, because an event loop copies gigabytes several times.
    """
    _send(sock, {"id": 1, "op": op, "args": args})
    space = memoryview(bytearray(MAX_BODY))
    unread = 0
    while True:
        size = sizes(bytes(_receive(sock, space, LENGTHS_BYTES)))
        frame = decode(size, bytes(_receive(sock, space, size.header)), b"")
        body, header = _receive(sock, space, size.body), frame.header
        check_header(header)
        if "error" in header:
            error = header["error"]
            raise CallFailed(str(error.get("kind")), str(error.get("message")), str(error.get("hint")))
        if header.get("end"):
            return
        if "item" not in header:
            raise ProtocolError(f"not an item of a stream: {json.dumps(header)[:80]}")
        yield body
        unread += cost_of(frame.size + size.body)
        if unread >= STREAM_ROOM // 2:
            _send(sock, {"more": 1, "bytes": unread})
            unread = 0


def _send(sock: socket.socket, header: Mapping[str, object]) -> None:
    try:
        sock.sendall(encode(header))
    except OSError as error:
        raise ChannelClosed(f"the connection is closed: {error}") from error


def _receive(sock: socket.socket, space: memoryview, length: int) -> memoryview:
    """Return this many bytes, in `space`; raises ChannelClosed where the other side has closed."""
    count = 0
    while count < length:
        try:
            received = sock.recv_into(space[count:length])
        except OSError as error:
            raise ChannelClosed(f"the connection is closed: {error}") from error
        if not received:
            raise ChannelClosed("the other side closed the connection")
        count += received
    return space[:length]
