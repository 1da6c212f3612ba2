"""Reminders with FastAPI: each one is a delayed message, moved and cancelled by its key.

    pip install fastapi uvicorn httpx rocketmq-python-client
    tidemill topic create reminders --type DELAY
    uvicorn --app-dir examples/fastapi_reminders app:app --port 8000

The application stores nothing: the broker has the reminders. A worker of this topic, such as
examples/worker.py, delivers them.
"""

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI, HTTPException
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, Field
from rocketmq import ClientConfiguration, Credentials, Message, Producer

TOPIC = "reminders"
ENDPOINT = os.environ.get("ENDPOINT", "127.0.0.1:8081")
ADMIN = os.environ.get("TIDEMILL_ADMIN", "http://127.0.0.1:8080")

producer = Producer(ClientConfiguration(ENDPOINT, Credentials()), (TOPIC,))


class Reminder(BaseModel):
    """A text, and the time until it is due."""

    text: str
    in_seconds: int = Field(ge=1, le=34_560_000)  # 400 days


@asynccontextmanager
async def lifespan(application: FastAPI) -> AsyncIterator[None]:
    """Keep the producer and the client of the REST API for the life of the application."""
    await run_in_threadpool(producer.startup)
    async with httpx.AsyncClient(base_url=f"{ADMIN}/api/v1", timeout=30) as application.state.admin:
        yield
    await run_in_threadpool(producer.shutdown)


app = FastAPI(lifespan=lifespan)


@app.put("/reminders/{key}")
async def put(key: str, reminder: Reminder) -> dict[str, str]:
    """Create a reminder, or move the one that is pending."""
    if timer := await find(key):
        await act(timer, "reschedule", {"delayMs": reminder.in_seconds * 1_000})
        return {"key": key, "state": "moved"}
    message = Message()
    message.topic, message.keys, message.body = TOPIC, key, reminder.text.encode()
    message.delivery_timestamp = int(time.time()) + reminder.in_seconds
    await run_in_threadpool(producer.send, message)
    return {"key": key, "state": "scheduled"}


@app.delete("/reminders/{key}")
async def delete(key: str) -> dict[str, str]:
    """Cancel a reminder: it never arrives after this answer."""
    if not (timer := await find(key)):
        raise HTTPException(404, f"no reminder {key!r} is pending")
    await act(timer, "cancel", None)
    return {"key": key, "state": "cancelled"}


async def find(key: str) -> dict | None:
    """Return the pending timer with a key."""
    found = await app.state.admin.get("/timers", params={"topic": TOPIC, "key": key})
    return next(iter(found.raise_for_status().json()["timers"]), None)


async def act(timer: dict, verb: str, body: dict | None) -> None:
    """Cancel or move a timer."""
    path = f"/timers/{timer['timerId']}:{verb}"
    done = await app.state.admin.post(path, params={"broker": timer["broker"]}, json=body)
    done.raise_for_status()
