"""A worker in an event loop: the official client blocks, so its calls run in threads.

    python examples/asyncio_worker.py [HOST:PORT]

At most WORK_MAX messages are processed at a time. A message is received only when there is room
for it, so it waits at the broker, where other workers can have it. SIGTERM and Ctrl-C end the
worker after its messages.
"""

import asyncio
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

from rocketmq import ClientConfiguration, Credentials, Message, SimpleConsumer

TOPIC, GROUP = "orders", "billing"
ENDPOINT = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("ENDPOINT", "127.0.0.1:8081")
WORK_MAX = 16
AWAIT_S = 5  # of a poll
INVISIBLE_S = 60  # longer than the work: then the message comes again


async def process(message: Message) -> None:
    """Do the work. It may run twice for one message, so a second run must not harm."""
    await asyncio.sleep(0.01)  # a call of a database or of another service
    print(f"done {message.body.decode()}", flush=True)


async def main() -> None:
    """Receive and process messages until a signal."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    consumer = SimpleConsumer(
        ClientConfiguration(ENDPOINT, Credentials()), GROUP, await_duration=AWAIT_S
    )
    room = asyncio.Semaphore(WORK_MAX)
    with ThreadPoolExecutor(WORK_MAX + 1) as threads:

        async def in_thread(function, *arguments):
            return await loop.run_in_executor(threads, function, *arguments)

        async def work(message: Message) -> None:
            try:
                await process(message)
                await in_thread(consumer.ack, message)  # Without it, the message comes again.
            except Exception as error:  # noqa: BLE001  # The other messages go on.
                print(f"{message.message_id} failed: {error}", file=sys.stderr, flush=True)
            finally:
                room.release()

        await in_thread(consumer.startup)
        await in_thread(consumer.subscribe, TOPIC)
        print("started", flush=True)
        async with asyncio.TaskGroup() as tasks:  # It waits for the work at the end.
            while not stop.is_set():
                await room.acquire()
                messages = await in_thread(consumer.receive, 1, INVISIBLE_S)
                if not messages:
                    room.release()
                for message in messages:
                    tasks.create_task(work(message))
        await in_thread(consumer.shutdown)
    print("stopped", flush=True)


asyncio.run(main())
