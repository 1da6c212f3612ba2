// The official Node.js client in every role at once: `loop.mjs '{"endpoint": ..., "name": ...}'`.
//
// Tells the lines that tests/e2e/python/loop.py describes, and is stopped as that is.

import { createInterface } from 'node:readline';
import { performance } from 'node:perf_hooks';
import { setTimeout as pause } from 'node:timers/promises';
import client from 'rocketmq-client-nodejs';

const { ConsumeResult, Producer, PushConsumer, SimpleConsumer } = client;

const NORMAL = 'normal', DELAYED = 'delayed', ORDERED = 'ordered';
const PAUSE_MS = 150; // between two sends of a kind
const DELAY_MS_MAX = 4000;
const AWAIT_MS = 5000; // what a poll takes at least; the deadline is 3 s behind it
const INVISIBLE_MS = 15_000; // what is not acked comes back while the test waits for it
const RECEIVE_MAX = 16;
const MESSAGE_GROUPS = 2;
const RECEIVERS = 2; // one may wait at a topic without messages while another has some
// One of so many is not acked, or fails, when it is first seen here.
const REFUSED_OF = 50, REFUSED_OF_ORDERED = 250;
const MESSAGE_NOT_FOUND = 40401; // how this client says that a receive was empty

const logger = { info() {}, warn() {}, error() {}, debug() {}, close() {} };
const { endpoint, name } = JSON.parse(process.argv[2]);
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

// Whether a message is to come again: once, for some.
function refuses(role, topic, key) {
  const of = topic === ORDERED ? REFUSED_OF_ORDERED : REFUSED_OF;
  const number = Number(key.slice(key.lastIndexOf('/') + 1));
  if (number % of !== of - 1 || refused.has(`${role} ${key}`)) return false;
  refused.add(`${role} ${key}`);
  return true;
}

async function produce(producer, topic) {
  for (let number = 0; ; number++) {
    await pause(PAUSE_MS);
    if (isStopping) return;
    const key = `${name}/${topic}/${number}`;
    const message = { topic, body: Buffer.from(key) };
    const group = topic === ORDERED ? `${name}-${number % MESSAGE_GROUPS}` : '';
    if (group) message.messageGroup = group;
    let due = 0;
    if (topic === DELAYED) {
      due = Date.now() + Math.floor(Math.random() * DELAY_MS_MAX) + 100;
      message.deliveryTimestamp = new Date(due);
    }
    const begun = nowUs();
    const error = await errorOf(() => producer.send(message));
    tell('send', { key, topic, group, due, begun, ended: nowUs(), error });
  }
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
  tell('received', { role, topic, keys, at: nowUs(), attempts: found.map(message => message.deliveryAttempt) });
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
  tell('received', { role, topic, keys: [ key ], attempts: [ attempt ], at: nowUs() });
  if (refuses(role, topic, key)) return ConsumeResult.FAILURE;
  tell('ack', { role, topic, key, attempt, begun: nowUs(), ended: nowUs(), error: '' });
  return ConsumeResult.SUCCESS;
}

const producer = new Producer({ ...options, topics: [ NORMAL, DELAYED, ORDERED ] });
await producer.startup();
for (const [ prefix, topics ] of [[ '', [ NORMAL, DELAYED ]], [ 'ordered-', [ ORDERED ]]]) {
  const subscriptions = () => new Map(topics.map(topic => [ topic, '*' ]));
  const simple = new SimpleConsumer({
    ...options, consumerGroup: `${prefix}simple`, awaitDuration: AWAIT_MS, subscriptions: subscriptions(),
  });
  await simple.startup();
  for (let n = 0; n < RECEIVERS; n++) consume(simple, `${prefix}simple`);
  const pushed = new PushConsumer({
    ...options, consumerGroup: `${prefix}push`, subscriptions: subscriptions(),
    messageListener: { consume: message => listen(`${prefix}push`, message) },
  });
  await pushed.startup();
}
const producing = [ NORMAL, DELAYED, ORDERED ].map(topic => produce(producer, topic));
tell('ready', {});

const input = createInterface({ input: process.stdin });
input.once('line', async () => {
  isStopping = true;
  await Promise.all(producing);
  tell('stopped', {});
});
// To shut consumers down would wait for whole long polls.
input.once('close', () => process.exit(0));
