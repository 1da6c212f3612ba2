// The official Node.js client in every role at once: `loop.mjs '{"endpoint": ..., "name": ...}'`.
//
// Tells the lines that tests/e2e/python/loop.py describes, and is stopped as that is.

import { createInterface } from 'node:readline';
import { performance } from 'node:perf_hooks';
import { setTimeout as pause } from 'node:timers/promises';
import client from 'rocketmq-client-nodejs';

const { ConsumeResult, FilterExpression, Producer, PushConsumer, SimpleConsumer } = client;

const NORMAL = 'normal', DELAYED = 'delayed', ORDERED = 'ordered';
const TRANSACTION = 'transaction', PRIORITY = 'priority', DEDUP = 'dedup', FILTERED = 'filtered';
// Between two sends of a kind, per kind. All languages and kinds together are a light load.
const PAUSE_MS = 50;
const DELAY_MS_MAX = 4000;
const AWAIT_MS = 5000; // what a poll takes at least; the deadline is 3 s behind it
const INVISIBLE_MS = 15_000; // what is not acked comes back while the test waits for it
const RECEIVE_MAX = 16;
const MESSAGE_GROUPS = 2;
const PRIORITIES = 4;
const DEDUP_KEY = 'dedup-key';
const TAGS = [ 'red', 'green', 'blue' ], TAG_FILTER = 'red || green';
const LEVELS = 10, SQL_FILTER = 'level >= 5';
const SQL = 2; // FilterType of the protocol; the client does not export it
const COMMIT = 1, ROLLBACK = 2; // TransactionResolution of the protocol, as well
const RESOLVED_OF = 4; // Of so many transactions, the producer commits the first, rolls back the second.
const RECEIVERS = 2; // one may wait at a topic without messages while another has some
// One of so many is not acked, or fails, when it is first seen here.
const REFUSED_OF = 50, REFUSED_OF_ORDERED = 250;
const MESSAGE_NOT_FOUND = 40401; // how this client says that a receive was empty

const logger = { info() {}, warn() {}, error() {}, debug() {}, close() {} };
const { endpoint, name, topics = [ NORMAL, DELAYED, ORDERED ] } = JSON.parse(process.argv[2]);
const { ROCKETMQ_ACCESS_KEY: accessKey, ROCKETMQ_SECRET_KEY: accessSecret } = process.env;
const sessionCredentials = accessKey ? { accessKey, accessSecret } : undefined;
const options = { endpoints: endpoint, namespace: '', logger, sessionCredentials };
const refused = new Set();
let isStopping = false;

const nowUs = () => Math.floor((performance.timeOrigin + performance.now()) * 1000);

function tell(fact, values) {
  process.stdout.write(JSON.stringify({ fact, ...values }) + '\n');
}

async function errorOf(call) {
  try {
    await call();
    return '';
  } catch (error) {
    return `${error.name} ${error.code ?? ''} ${error.message}`;
  }
}

function numberOf(key) {
  return Number(key.slice(key.lastIndexOf('/') + 1));
}

// Whether a message is to come again: once, for some.
function refuses(role, topic, key) {
  const of = topic === ORDERED ? REFUSED_OF_ORDERED : REFUSED_OF;
  if (numberOf(key) % of !== of - 1 || refused.has(`${role} ${key}`)) return false;
  refused.add(`${role} ${key}`);
  return true;
}

const checker = {
  // Decide by the number of the message.
  async check(message) {
    const key = message.body.toString();
    tell('checked', { key });
    return numberOf(key) % 2 ? ROLLBACK : COMMIT;
  },
};

async function produce(producer, topic) {
  for (let number = 0; ; number++) {
    await pause(PAUSE_MS * topics.length);
    if (isStopping) return;
    await send(producer, topic, number);
    // The application sends a dedup key again after an answer and after an error.
    if (topic === DEDUP) await send(producer, topic, number);
  }
}

async function send(producer, topic, number) {
  const key = `${name}/${topic}/${number}`;
  const message = { topic, body: Buffer.from(key) };
  const group = topic === ORDERED ? `${name}-${number % MESSAGE_GROUPS}` : '';
  const transaction = topic === TRANSACTION ? producer.beginTransaction() : undefined;
  let due = 0;
  if (group) {
    message.messageGroup = group;
  } else if (topic === DELAYED) {
    due = Date.now() + Math.floor(Math.random() * DELAY_MS_MAX) + 100;
    message.deliveryTimestamp = new Date(due);
  } else if (topic === PRIORITY) {
    message.priority = number % PRIORITIES;
  } else if (topic === DEDUP) {
    message.properties = new Map([[ DEDUP_KEY, key ]]);
  } else if (topic === FILTERED) {
    message.tag = TAGS[number % TAGS.length];
    message.properties = new Map([[ 'level', String(number % LEVELS) ]]);
  }
  const begun = nowUs();
  let id = '';
  const error = await errorOf(async () => {
    id = (await producer.send(message, transaction)).messageId;
  });
  tell('send', { key, topic, group, due, begun, ended: nowUs(), error, id });
  if (transaction && !error) await resolve(transaction, number);
}

// Commits a transaction, rolls it back, or leaves it to the checker.
async function resolve(transaction, number) {
  const begun = nowUs();
  let error = '';
  if (number % RESOLVED_OF === 0) error = await errorOf(() => transaction.commit());
  if (number % RESOLVED_OF === 1) error = await errorOf(() => transaction.rollback());
  if (error) tell('failed', { role: '', during: TRANSACTION, begun, ended: nowUs(), error });
}

async function consume(consumer, role) {
  for (;;) {
    const begun = nowUs();
    let found = [];
    const error = await errorOf(async () => {
      try {
        found = await consumer.receive(RECEIVE_MAX, INVISIBLE_MS);
      } catch (failure) {
        if (failure.code !== MESSAGE_NOT_FOUND) throw failure;
      }
    });
    if (error) {
      tell('failed', { role, during: 'receive', begun, ended: nowUs(), error });
      await pause(PAUSE_MS);
    }
    if (found.length) await settle(consumer, role, found);
  }
}

// Ack what was received; behind one that is not acked nothing ordered is.
async function settle(consumer, role, found) {
  const [ { topic } ] = found;
  const keys = found.map(message => message.body.toString());
  const attempts = found.map(message => message.deliveryAttempt);
  tell('received', { role, topic, keys, at: nowUs(), attempts, ids: found.map(message => message.messageId) });
  for (const [ index, message ] of found.entries()) {
    const isAcked = !refuses(role, topic, keys[index]) && await ack(consumer, role, keys[index], message);
    if (!isAcked && topic === ORDERED) return;
  }
}

async function ack(consumer, role, key, message) {
  const begun = nowUs();
  const error = await errorOf(() => consumer.ack(message));
  const { topic, deliveryAttempt: attempt } = message;
  tell('ack', { role, topic, key, attempt, begun, ended: nowUs(), error });
  return !error;
}

// Whether its client could ack what a listener took nobody tells an application.
function listen(role, message) {
  const { topic, deliveryAttempt: attempt } = message;
  const key = message.body.toString();
  tell('received', { role, topic, keys: [ key ], attempts: [ attempt ], ids: [ message.messageId ], at: nowUs() });
  if (refuses(role, topic, key)) return ConsumeResult.FAILURE;
  tell('ack', { role, topic, key, attempt, begun: nowUs(), ended: nowUs(), error: '' });
  return ConsumeResult.SUCCESS;
}

// The filters of each role with topics.
function subscriptions() {
  const plain = topics.filter(topic => topic !== ORDERED && topic !== FILTERED);
  const roles = {
    simple: plain.map(topic => [ topic, '*' ]),
    push: plain.map(topic => [ topic, '*' ]),
    'ordered-simple': [[ ORDERED, '*' ]],
    'ordered-push': [[ ORDERED, '*' ]],
    'tag-simple': [[ FILTERED, TAG_FILTER ]],
    'sql-push': [[ FILTERED, new FilterExpression(SQL_FILTER, SQL) ]],
  };
  return Object.entries(roles).filter(([ , filters ]) => filters.every(([ topic ]) => topics.includes(topic)));
}

const producer = new Producer({ ...options, topics, checker });
await producer.startup();
for (const [ role, filters ] of subscriptions()) {
  const about = { ...options, consumerGroup: role, subscriptions: new Map(filters) };
  if (role.endsWith('push')) {
    await new PushConsumer({ ...about, messageListener: { consume: message => listen(role, message) } }).startup();
    continue;
  }
  const simple = new SimpleConsumer({ ...about, awaitDuration: AWAIT_MS });
  await simple.startup();
  for (let n = 0; n < RECEIVERS; n++) consume(simple, role);
}
const producing = topics.map(topic => produce(producer, topic));
tell('ready', {});

const input = createInterface({ input: process.stdin });
input.once('line', async () => {
  isStopping = true;
  await Promise.all(producing);
  tell('stopped', {});
});
// To shut consumers down would wait for whole long polls.
input.once('close', () => process.exit(0));
