"""The program of docs/clients/python.md, whose blocks are the regions of this file."""

# region: connect
import logging
import os
import sys
import time

from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
)

logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
log = logging.getLogger("shop")
credentials = Credentials(os.environ["ACCESS_KEY"], os.environ["ACCESS_SECRET"])
configuration = ClientConfiguration(os.environ["ENDPOINT"], credentials)
producer = Producer(configuration, ("orders", "reminders", "steps"), tls_enable=True)
producer.startup()
# end

# region: send
message = Message()
message.topic = "orders"
message.body = b"one coffee"
message.tag = "drink"
message.keys = "order-17"
message.add_property("customer", "ada")
receipt = producer.send(message)
log.info("sent %s", receipt.message_id)
# end

# region: delay
reminder = Message()
reminder.topic = "reminders"
reminder.body = b"call back"
reminder.delivery_timestamp = int(time.time()) + 3600  # whole seconds
receipt = producer.send(reminder)
producer.recall_message("reminders", receipt.recall_handle)  # It is never delivered.
log.info("recalled %s", receipt.message_id)
# end

# region: fifo
for step in ("first", "second"):
    message = Message()
    message.topic = "steps"
    message.message_group = "order-17"
    message.body = step.encode()
    producer.send(message)
# end

poison = Message()
poison.topic, poison.body = "orders", b"poison"
producer.send(poison)


# region: push
class Worker(MessageListener):
    """Calls the work, in each of its threads."""

    def consume(self, message: Message) -> ConsumeResult:
        """Report the result of the work to the broker."""
        try:
            work(message.body.decode())
        except ValueError as error:
            log.info("attempt %s failed: %s", message.delivery_attempt, error)
            return ConsumeResult.FAILURE  # The message comes again after the back-off.
        return ConsumeResult.SUCCESS


def work(order: str) -> None:
    """Do the work. It may run twice for one message."""
    if order == "poison":
        raise ValueError(order)
    log.info("done %s", order)


worker = PushConsumer(
    configuration,
    "billing",
    Worker(),
    {"orders": FilterExpression("*")},
    consumption_thread_count=4,
    tls_enable=True,
)
worker.startup()
# end


# region: simple
def receive_one(topic: str, group: str) -> Message:
    """Receive and ack one message."""
    consumer = SimpleConsumer(configuration, group, await_duration=10, tls_enable=True)
    consumer.startup()
    consumer.subscribe(topic, FilterExpression("*"))
    messages = []
    while not messages:
        messages = consumer.receive(1, 30)  # one message, invisible for 30 s
    consumer.change_invisible_duration(messages[0], 60)  # The work takes longer.
    consumer.ack(messages[0])
    consumer.shutdown()
    return messages[0]


# end

for _ in range(2):
    log.info("step %s", receive_one("steps", "steps").body.decode())

# region: dead
letter = receive_one("%DLQ%billing", "letters")
log.info("dead letter %s", letter.body.decode())
# end

# region: stop
worker.shutdown()  # It waits for the messages in work.
producer.shutdown()
log.info("stopped")
# end
