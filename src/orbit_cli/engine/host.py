"""The engine's own process: an embedded `sglang.Engine` that answers operations over one channel.

Run as `python -m orbit_cli.engine.host FD` by process.py, in a session of its own. It leaves no way to outlive its
owner: the kernel kills it with the owner's thread, and an empty channel kills the whole session.
Left out: what the operations do (service.py).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
import threading
import traceback

from orbit_cli.engine.channel import Channel
from orbit_cli.errors import EngineError, OrbitError

_PR_SET_PDEATHSIG = 1


def main() -> None:
    descriptor = int(sys.argv[1])
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    channel = Channel(socket.socket(fileno=descriptor))
    inbox: asyncio.Queue = asyncio.Queue()
    number, operation, settings = channel.receive()
    assert operation == "start", operation
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        from orbit_cli.engine.service import Service

        service = Service(settings, loop)
        report = loop.run_until_complete(service.start())
    except BaseException as error:  # noqa: BLE001 - whatever stopped the start is the owner's to know
        traceback.print_exc()
        channel.send((number, False, _sendable(error)))
        _end_session()
    # Not before: the engine may fork while it starts, and a fork wants one thread. Until then the kernel's signal and
    # our owner's kill of this session end us.
    threading.Thread(target=_read, args=(channel, loop, inbox), name="orbit-channel", daemon=True).start()
    channel.send((number, True, report))
    loop.run_until_complete(_serve(channel, inbox, service))


async def _serve(channel: Channel, inbox: asyncio.Queue, service) -> None:
    """Operations run concurrently, each as a task; their order of arrival is the order in which they begin."""
    running: set[asyncio.Task] = set()
    while True:
        number, operation, payload = await inbox.get()
        task = asyncio.create_task(_answer(channel, service, number, operation, payload))
        running.add(task)
        task.add_done_callback(running.discard)


async def _answer(channel: Channel, service, number: int, operation: str, payload: dict) -> None:
    try:
        value = await getattr(service, operation)(**payload)
    except Exception as error:  # one operation's failure is its caller's, not the engine's
        traceback.print_exc()
        channel.send((number, False, _sendable(error)))
    else:
        channel.send((number, True, value))


def _read(channel: Channel, loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue) -> None:
    while True:
        try:
            message = channel.receive()
        except EOFError:
            _end_session()
        loop.call_soon_threadsafe(inbox.put_nowait, message)


def _sendable(error: BaseException) -> OrbitError:
    """An exception that unpickles on the other side."""
    if isinstance(error, OrbitError):
        return error
    return EngineError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def _end_session() -> None:
    """Kill every process of this session, this one included."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
