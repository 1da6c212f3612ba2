"""Send a message to a Tidemill on this machine, receive and ack it, with the official client."""

import sys

from rocketmq import ClientConfiguration, Credentials, Message, Producer, SimpleConsumer

ENDPOINT = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8081"
TOPIC, GROUP = "orders", "billing"

configuration = ClientConfiguration(ENDPOINT, Credentials())

producer = Producer(configuration, (TOPIC,))
producer.startup()
message = Message()
message.topic = TOPIC
message.body = b"one coffee, no sugar"
message.tag = "coffee"
print("sent    ", producer.send(message).message_id)
producer.shutdown()

consumer = SimpleConsumer(configuration, GROUP)
consumer.startup()
consumer.subscribe(TOPIC)
for received in consumer.receive(32, 15):
    print("received", received.message_id, received.body.decode())
    consumer.ack(received)
consumer.shutdown()
