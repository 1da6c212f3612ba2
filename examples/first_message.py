"""Send a message to a Tidemill on this machine, receive and ack it, with the official client.

    python examples/first_message.py [HOST:PORT] [--tls]

With --tls the server's certificate must be signed by an authority that gRPC knows, from its own
list or from the file that the variable GRPC_DEFAULT_SSL_ROOTS_FILE_PATH names.
"""

import os
import sys

from rocketmq import ClientConfiguration, Credentials, Message, Producer, SimpleConsumer

ADDRESSES = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
ENDPOINT = ADDRESSES[0] if ADDRESSES else os.environ.get("ENDPOINT", "127.0.0.1:8081")
TLS = "--tls" in sys.argv
TOPIC, GROUP = "orders", "billing"

configuration = ClientConfiguration(ENDPOINT, Credentials())

producer = Producer(configuration, (TOPIC,), tls_enable=TLS)
producer.startup()
message = Message()
message.topic = TOPIC
message.body = b"one coffee, no sugar"
message.tag = "coffee"
print("sent    ", producer.send(message).message_id)
producer.shutdown()

consumer = SimpleConsumer(configuration, GROUP, tls_enable=TLS)
consumer.startup()
consumer.subscribe(TOPIC)
for received in consumer.receive(32, 15):
    print("received", received.message_id, received.body.decode())
    consumer.ack(received)
consumer.shutdown()
