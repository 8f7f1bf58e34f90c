# A client of RabbitMQ: publishes with confirms, consumes with acknowledgements, and checks each message.
# Usage: rabbitmq.py PORT COUNT; prints messages per second.
import sys
import time

import pika


def body(number):
    return b"%d:" % number + b"x" * (number * 7 % 5000)


port, count = int(sys.argv[1]), int(sys.argv[2])
connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port, heartbeat=0))
channel = connection.channel()
channel.confirm_delivery()
channel.queue_declare("zoo")
begin = time.monotonic()
for number in range(count):
    channel.basic_publish("", "zoo", body(number))
number = 0
for method, _, got in channel.consume("zoo", inactivity_timeout=20):
    assert method is not None, "message %d did not come" % number
    assert got == body(number), "message %d is another" % number
    channel.basic_ack(method.delivery_tag)
    number += 1
    if number == count:
        break
print("%.0f" % (2 * count / (time.monotonic() - begin)))
channel.cancel()
connection.close()
