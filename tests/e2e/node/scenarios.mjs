// What the official Node.js client is put through: `scenarios.mjs SCENARIO '{"topic": ...}'`.
//
// Prints facts as JSON lines on standard output and judges nothing.

import { createHash } from 'node:crypto';
import client from 'rocketmq-client-nodejs';

const { ConsumeResult, FilterExpression, Producer, PushConsumer, SimpleConsumer } = client;

const AWAIT_MS = 3000; // a poll's least time, with the request timeout of 3 s on top
const INVISIBLE_MS = 30_000; // longer than any scenario
const LONG_AWAIT_MS = 20_000; // so that what a slow reader has asked for comes before its deadline
const CONSUMED_MS = 120_000; // invisible while a slow reader takes what else it has asked for
const DELAY_MS = 4000; // of a message that is scheduled
const WAIT_MS = 40_000; // for anything, on the slowest machine

const given = JSON.parse(process.argv[3]);
const namespace = given.namespace ?? '';
const sslEnabled = given.tls === true;
const COMMIT = 1; // TransactionResolution of the protocol
const ROLLBACK = 2;
const SQL = 2; // FilterType of the protocol; the client does not export it

const logger = { info() {}, warn() {}, error() {}, debug() {}, close() {} };

function tell(fact, values) {
  process.stdout.write(JSON.stringify({ fact, ...values }) + '\n');
}

function tellReceived(message, values = {}) {
  tell('received', {
    id: message.messageId,
    topic: message.topic,
    tag: message.tag,
    group: message.messageGroup,
    keys: message.keys,
    properties: Object.fromEntries(message.properties),
    size: message.body.length,
    sha: createHash('sha256').update(message.body).digest('hex'),
    body: message.body.subarray(0, 40).toString(),
    attempt: message.deliveryAttempt,
    isCorrupted: message.corrupted === true,
    ...values,
  });
}

const { ROCKETMQ_ACCESS_KEY: accessKey, ROCKETMQ_SECRET_KEY: accessSecret } = process.env;
const sessionCredentials = accessKey ? { accessKey, accessSecret } : undefined;

async function producing(endpoint, topics, use) {
  const producer = new Producer({
    endpoints: endpoint, namespace, topics, logger, sessionCredentials, sslEnabled,
  });
  await producer.startup();
  try {
    return await use(producer);
  } finally {
    await producer.shutdown();
  }
}

async function consuming(endpoint, group, filters, use, awaitDuration = AWAIT_MS) {
  const consumer = new SimpleConsumer({
    endpoints: endpoint, namespace, consumerGroup: group, awaitDuration, logger, sessionCredentials, sslEnabled,
    subscriptions: new Map(Object.entries(filters)),
  });
  await consumer.startup();
  try {
    return await use(consumer);
  } finally {
    await consumer.shutdown();
  }
}

function wanted() {
  return given.sql ? new FilterExpression(given.sql, SQL) : given.tags ?? '*';
}

async function pushing(endpoint, group, topics, consume, use) {
  const consumer = new PushConsumer({
    endpoints: endpoint, namespace, consumerGroup: group, logger, sessionCredentials,
    subscriptions: new Map(topics.map(topic => [ topic, wanted() ])),
    messageListener: { consume },
  });
  await consumer.startup();
  // Its shutdown waits for a whole long poll, so the process ends without it.
  return await use(consumer);
}

async function receive(consumer, wanted, invisibleMs = INVISIBLE_MS) {
  const found = [];
  const deadline = Date.now() + WAIT_MS;
  while (found.length < wanted) {
    if (Date.now() > deadline) throw new Error(`${found.length} of ${wanted} messages came`);
    found.push(...await receiveOnce(consumer, invisibleMs));
  }
  return found;
}

// An empty receive is an error or an empty list, as the version of the client has it.
async function receiveOnce(consumer, invisibleMs = INVISIBLE_MS) {
  try {
    return await consumer.receive(32, invisibleMs);
  } catch (error) {
    if (error.code === 40401) return [];
    throw error;
  }
}

async function tellError(during, call) {
  try {
    await call();
    tell('error', { during, code: null, text: '' });
  } catch (error) {
    tell('error', { during, code: error.code ?? null, text: String(error.message) });
  }
}

// A promise, and what fulfils it.
function signal() {
  let done;
  const promise = new Promise((resolve, reject) => {
    done = resolve;
    setTimeout(() => reject(new Error('the messages did not arrive')), WAIT_MS).unref();
  });
  return { promise, done };
}

const scenarios = {
  async roundTrip({ endpoints: [ endpoint ], topic, group }) {
    const messages = [
      { topic, body: Buffer.from('x') },
      { topic, body: Buffer.from('tagged'), tag: 'tag' },
      { topic, body: Buffer.from('keyed'), keys: [ 'key-1', 'key-2' ] },
      {
        topic, body: Buffer.from('with properties'),
        properties: new Map([[ 'name', 'wert' ], [ 'grün', '🌊' ]]),
      },
      { topic, body: Buffer.alloc(1 << 20, 7) },
    ];
    await producing(endpoint, [ topic ], async producer => {
      for (const message of messages) {
        const { messageId } = await producer.send(message);
        const sha = createHash('sha256').update(message.body).digest('hex');
        tell('sent', { id: messageId, sha });
      }
    });
    await consuming(endpoint, group, { [topic]: '*' }, async consumer => {
      for (const message of await receive(consumer, messages.length)) {
        tellReceived(message);
        await consumer.ack(message);
      }
      tell('left', { count: (await receiveOnce(consumer)).length });
    });
  },

  async redelivery({ endpoints: [ endpoint ], topic, group }) {
    await producing(endpoint, [ topic ], async producer => {
      await producer.send({ topic, body: Buffer.from('expires') });
    });
    await consuming(endpoint, group, { [topic]: '*' }, async consumer => {
      const [ first ] = await receive(consumer, 1, 2000);
      tellReceived(first);
      const [ second ] = await receive(consumer, 1);
      tellReceived(second);
      await tellError('expired', () => consumer.ack(first));
      const old = second.receiptHandle;
      await consumer.changeInvisibleDuration(second, 60_000);
      tell('changed', { isNew: second.receiptHandle !== old });
      await consumer.changeInvisibleDuration(second, 0);
      const [ third ] = await receive(consumer, 1);
      tellReceived(third);
      await consumer.ack(third);
    });
  },

  async twoTopics({ endpoints: [ endpoint ], topics, group }) {
    const began = Date.now();
    await producing(endpoint, topics, async producer => {
      for (const topic of topics) await producer.send({ topic, body: Buffer.from(topic) });
    });
    const filters = Object.fromEntries(topics.map(topic => [ topic, '*' ]));
    await consuming(endpoint, group, filters, async consumer => {
      const left = new Set(topics);
      while (left.size) {
        for (const message of await receiveOnce(consumer)) {
          tellReceived(message);
          left.delete(message.topic);
          await consumer.ack(message);
        }
      }
    });
    tell('took', { ms: Date.now() - began });
  },

  async push({ endpoints: [ endpoint ], topic, group, messages }) {
    const { promise, done } = signal();
    const succeeded = new Set();
    const consume = message => {
      const body = message.body.toString();
      const succeeds = body !== '2' || message.deliveryAttempt > 1;
      tellReceived(message, { succeeds });
      if (!succeeds) return ConsumeResult.FAILURE;
      succeeded.add(body);
      if (succeeded.size === messages) done();
      return ConsumeResult.SUCCESS;
    };
    await pushing(endpoint, group, [ topic ], consume, () =>
      producing(endpoint, [ topic ], async producer => {
        for (let n = 0; n < messages; n++) await producer.send({ topic, body: Buffer.from(`${n}`) });
        await promise;
      }));
    tell('done', {});
  },

  // Every message of `poison` fails, in an ordered group.
  async pushFifo({ endpoints: [ endpoint ], topic, group, messages, poison }) {
    const { promise, done } = signal();
    const seen = new Set();
    const consume = message => {
      const body = message.body.toString();
      const succeeds = body !== poison;
      tellReceived(message, { succeeds });
      seen.add(body);
      if (seen.size === messages) done();
      return succeeds ? ConsumeResult.SUCCESS : ConsumeResult.FAILURE;
    };
    await pushing(endpoint, group, [ topic ], consume, () =>
      producing(endpoint, [ topic ], async producer => {
        for (let n = 0; n < messages; n++) {
          const messageGroup = `group-${n % 3}`;
          await producer.send({ topic, messageGroup, body: Buffer.from(`${messageGroup} ${n}`) });
        }
        await promise;
      }));
    tell('done', {});
    if (poison) await scenarios.read({ endpoints: [ endpoint ], topic: `%DLQ%${group}`, group: `${group}-reader` });
  },

  // Kill processes of the server one after the other, and go on with the same clients.
  async outage({ endpoints: [ endpoint ], topic, group, pids }) {
    const arrivals = new Map();
    const arrival = body => {
      if (!arrivals.has(body)) arrivals.set(body, signal());
      return arrivals.get(body);
    };
    const consume = message => {
      arrival(message.body.toString()).done();
      return ConsumeResult.SUCCESS;
    };
    const send = async (producer, body) => {
      const deadline = Date.now() + WAIT_MS;
      for (;;) {
        try {
          return await producer.send({ topic, body: Buffer.from(body) });
        } catch (error) {
          if (Date.now() > deadline) throw error;
          await new Promise(resolve => setTimeout(resolve, 100));
        }
      }
    };
    await pushing(endpoint, group, [ topic ], consume, () =>
      producing(endpoint, [ topic ], async producer => {
        for (const [ n, pid ] of [ null, ...pids ].entries()) {
          if (pid) process.kill(pid, 'SIGKILL');
          await send(producer, `${n}`);
          await arrival(`${n}`).promise;
          tell('arrived', { body: `${n}` });
        }
      }));
  },

  async read({ endpoints: [ endpoint ], topic, group }) {
    await consuming(endpoint, group, { [topic]: '*' }, async consumer => {
      const [ message ] = await receive(consumer, 1);
      tellReceived(message, { isDead: true });
      await consumer.ack(message);
    });
  },

  async deadLetter({ endpoints: [ endpoint ], topic, group, attempts }) {
    await producing(endpoint, [ topic ], async producer => {
      const { messageId } = await producer.send({ topic, body: Buffer.from('poison'), tag: 'tag' });
      tell('sent', { id: messageId });
    });
    await consuming(endpoint, group, { [topic]: '*' }, async consumer => {
      for (let attempt = 0; attempt < attempts; attempt++) {
        const [ message ] = await receive(consumer, 1);
        tellReceived(message);
        await consumer.changeInvisibleDuration(message, 0);
      }
    });
    await scenarios.read({ endpoints: [ endpoint ], topic: `%DLQ%${group}`, group: `${group}-reader` });
  },

  async delayed({ endpoints: [ endpoint ], topic, group }) {
    await producing(endpoint, [ topic ], async producer => {
      const due = new Date(Date.now() + DELAY_MS);
      const receipts = [];
      for (const body of [ 'delivered', 'recalled' ]) {
        const receipt = await producer.send({
          topic, body: Buffer.from(body), deliveryTimestamp: due,
        });
        receipts.push(receipt);
        tell('sent', { id: receipt.messageId, body, dueMs: due.getTime() });
      }
      for (let n = 0; n < 2; n++) {
        const { messageId } = await producer.recallMessage(topic, receipts[1].recallHandle);
        tell('recalled', { id: messageId });
      }
      await consuming(endpoint, group, { [topic]: '*' }, async consumer => {
        const [ message ] = await receive(consumer, 1);
        const atMs = Date.now();
        tellReceived(message, { atMs, dueMs: message.deliveryTimestamp?.getTime() ?? null });
        await consumer.ack(message);
        await tellError('too late', () => producer.recallMessage(topic, receipts[0].recallHandle));
        tell('left', { count: (await receiveOnce(consumer)).length });
      });
    });
  },

  // Receive and ack all that is there, with several polls at a time, and tell how calls ended.
  async consumeAll({ endpoints: [ endpoint ], topic, group, messages, receivers, wait_s: waitS }) {
    const ids = new Set();
    const ended = {};
    let bytes = 0;
    const count = async (during, call) => {
      let outcome = 'OK';
      try {
        return await call();
      } catch (error) {
        outcome = error.code === 40401 ? 'MESSAGE_NOT_FOUND' : `${error.code ?? ''} ${error.message}`;
        return [];
      } finally {
        const name = `${during}: ${outcome}`;
        ended[name] = (ended[name] ?? 0) + 1;
      }
    };
    const began = Date.now();
    let last = began;
    const deadline = began + waitS * 1000;
    await consuming(endpoint, group, { [topic]: '*' }, async consumer => {
      const receiver = async () => {
        while (ids.size < messages && Date.now() < deadline) {
          const received = await count('receive', () => consumer.receive(32, CONSUMED_MS));
          for (const message of received) {
            ids.add(message.messageId);
            bytes += message.body.length;
            last = Date.now();
            await count('ack', () => consumer.ack(message));
          }
        }
      };
      await Promise.all(Array.from({ length: receivers }, receiver));
      tell('consumed', { messages: ids.size, bytes, ended, tookS: (last - began) / 1000 });
    }, LONG_AWAIT_MS);
  },

  // Consumes until standard input ends; what is poison is never consumed.
  async stay({ endpoints: [ endpoint ], topic, group }) {
    const consume = async message => {
      tellReceived(message);
      return message.body.toString() === 'poison' ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
    };
    await pushing(endpoint, group, [ topic ], consume, async () => {
      tell('ready', {});
      for await (const _ of process.stdin); // Nothing that comes means anything but its end.
    });
  },

  // Commits one message, rolls one back, and lets the checker decide about two others.
  async transaction({ endpoints: [ endpoint ], topic }) {
    const answers = { 'checked yes': COMMIT, 'checked no': ROLLBACK };
    let left = Object.keys(answers).length;
    let end;
    const isDone = new Promise(resolve => {
      end = resolve;
      setTimeout(() => resolve(false), WAIT_MS).unref();
    });
    const checker = {
      async check(view) {
        const body = view.body.toString();
        tell('checked', { body, id: view.messageId });
        if (--left === 0) end(true);
        return answers[body];
      },
    };
    const producer = new Producer({
      endpoints: endpoint, namespace, topics: [ topic ], logger, sessionCredentials, checker,
    });
    await producer.startup();
    for (const body of [ 'commit', 'rollback', ...Object.keys(answers) ]) {
      const started = producer.beginTransaction();
      const sent = await producer.send({ topic, body: Buffer.from(body) }, started);
      tell('sent', { id: sent.messageId, transaction: sent.transactionId });
      if (body === 'commit') await started.commit();
      if (body === 'rollback') await started.rollback();
    }
    tell('done', { is_done: await isDone });
    await new Promise(resolve => setTimeout(resolve, 1000)); // For the last decision, sent after the check.
    await producer.shutdown();
  },

  // Starts a push consumer with a wrong SQL filter, and reports the error of the start or of its log.
  async sqlPush({ endpoints: [ endpoint ], topic, group }) {
    const logged = new Promise((_, reject) => {
      const report = (...parts) => reject(new Error(parts.map(String).join(' ')));
      setTimeout(() => report('no error in time'), WAIT_MS).unref();
      logger.error = report;
    });
    const consumer = new PushConsumer({
      endpoints: endpoint, namespace, consumerGroup: group, logger, sessionCredentials,
      subscriptions: new Map([[ topic, wanted() ]]),
      messageListener: { consume: async () => ConsumeResult.SUCCESS },
    });
    await tellError('start', () => Promise.all([ consumer.startup(), logged ]));
  },

  async priorities({ endpoints: [ endpoint ], topic, group }) {
    await producing(endpoint, [ topic ], async producer => {
      await producer.send({ topic, body: Buffer.from('none') });
      for (const priority of [ 0, 1, 7, 100 ]) {
        await producer.send({ topic, body: Buffer.from(String(priority)), priority });
      }
      await tellError('negative', () => producer.send({ topic, body: Buffer.from('negative'), priority: -1 }));
    });
    await consuming(endpoint, group, { [topic]: '*' }, async consumer => {
      for (const message of await receive(consumer, 5)) {
        tellReceived(message, { priority: message.priority ?? null });
        await consumer.ack(message);
      }
    });
  },

  // Send a message to a lite topic.
  async lite({ endpoints: [ endpoint ], topic }) {
    await producing(endpoint, [ topic ], async producer => {
      await tellError('send', () => producer.send({ topic, body: Buffer.from('x'), liteTopic: 'one' }));
    });
  },

  // Send messages with one dedup key.
  async dedup({ endpoints: [ endpoint ], topic }) {
    await producing(endpoint, [ topic ], async producer => {
      for (const body of [ 'first', 'first', 'another' ]) {
        const properties = new Map([[ 'dedup-key', 'k' ]]);
        const { messageId } = await producer.send({ topic, body: Buffer.from(body), properties });
        tell('sent', { id: messageId });
      }
    });
  },

  async wrongType({ endpoints: [ endpoint ], normal, fifo }) {
    await producing(endpoint, [ normal, fifo ], async producer => {
      await tellError('fifo', () => producer.send({ topic: normal, body: Buffer.from('1'), messageGroup: 'g' }));
      await tellError('normal', () => producer.send({ topic: fifo, body: Buffer.from('1') }));
    });
  },
};

await scenarios[process.argv[2]](given);
process.exit(0);
