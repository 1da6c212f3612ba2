// The program of docs/clients/node.md, whose blocks are the regions of this file.

// region: connect
import client from 'rocketmq-client-nodejs';

const { ConsumeResult, Producer, PushConsumer, SimpleConsumer } = client;
const connection = {
  endpoints: process.env.ENDPOINT,
  sslEnabled: true,
  namespace: '',
  sessionCredentials: {
    accessKey: process.env.ACCESS_KEY,
    accessSecret: process.env.ACCESS_SECRET,
  },
};
const producer = new Producer({ ...connection, topics: [ 'orders', 'reminders', 'steps' ] });
await producer.startup();
// end

// region: send
const receipt = await producer.send({
  topic: 'orders',
  body: Buffer.from('one coffee'),
  tag: 'drink',
  keys: [ 'order-17' ],
  properties: new Map([[ 'customer', 'ada' ]]),
});
console.log('sent', receipt.messageId);
// end

// region: delay
const reminder = await producer.send({
  topic: 'reminders',
  body: Buffer.from('call back'),
  deliveryTimestamp: new Date(Date.now() + 3_600_000),
});
await producer.recallMessage('reminders', reminder.recallHandle); // It is never delivered.
// end

// region: fifo
for (const step of [ 'first', 'second' ]) {
  await producer.send({ topic: 'steps', messageGroup: 'order-17', body: Buffer.from(step) });
}
// end

await producer.send({ topic: 'orders', body: Buffer.from('poison') });

// region: push
const worker = new PushConsumer({
  ...connection,
  consumerGroup: 'billing',
  subscriptions: new Map([[ 'orders', '*' ]]),
  messageListener: {
    async consume(message) {
      const order = message.body.toString();
      if (order === 'poison') {
        console.log(`attempt ${message.deliveryAttempt} failed: ${order}`);
        return ConsumeResult.FAILURE; // The message comes again after the back-off.
      }
      console.log('done', order);
      return ConsumeResult.SUCCESS;
    },
  },
});
await worker.startup();
// end

// region: simple
async function receiveOne(topic, consumerGroup) {
  const consumer = new SimpleConsumer({
    ...connection, consumerGroup, awaitDuration: 10_000, subscriptions: new Map([[ topic, '*' ]]),
  });
  await consumer.startup();
  let messages = [];
  while (!messages.length) {
    messages = await consumer.receive(1, 30_000); // one message, invisible for 30 s
  }
  await consumer.changeInvisibleDuration(messages[0], 60_000); // The work takes longer.
  await consumer.ack(messages[0]);
  await consumer.shutdown();
  return messages[0];
}
// end

for (let n = 0; n < 2; n++) console.log('step', (await receiveOne('steps', 'steps')).body.toString());

// region: dead
const letter = await receiveOne('%DLQ%billing', 'letters');
console.log('dead letter', letter.body.toString());
// end

// region: stop
await worker.shutdown(); // It waits for a long poll.
await producer.shutdown();
console.log('stopped');
process.exit(0);
// end
