//! What the official Rust client is put through: `scenarios SCENARIO '{"endpoint": ...}'`.
//!
//! Prints facts as JSON lines on standard output and judges nothing. The client has no push consumer,
//! and neither changes invisible durations nor recalls.

mod guide;

use std::env;
use std::sync::mpsc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rocketmq::conf::{ClientOption, LoggingFormat, ProducerOption, SimpleConsumerOption};
use rocketmq::error::ClientError;
use rocketmq::model::common::{FilterExpression, FilterType, SendReceipt};
use rocketmq::model::message::{Message, MessageBuilder, MessageView};
use rocketmq::model::transaction::{Transaction, TransactionResolution};
use rocketmq::{Producer, SimpleConsumer};
use serde_json::{json, Value};

// A poll. The client has it as the deadline of the call too, which must leave the five seconds that a
// poll takes at least.
const AWAIT: Duration = Duration::from_secs(7);
const INVISIBLE: Duration = Duration::from_secs(30); // longer than any scenario
const BRIEF: Duration = Duration::from_secs(1); // for a delivery that is to expire
const WAIT: Duration = Duration::from_secs(40); // for anything, on the slowest machine
const DELAY_S: i64 = 3; // the client says whole seconds
const RECEIVE_MAX: i32 = 32;
const MESSAGE_GROUPS: usize = 3;

struct Client {
    endpoint: String,
    topic: String,
    group: String,
    tags: Option<String>,
    sql: Option<String>,
}

type Outcome = Result<(), ClientError>;

fn tell(fact: &str, mut values: Value) {
    values["fact"] = json!(fact);
    println!("{values}");
}

fn tell_received(message: &MessageView, at_ms: u128) {
    let mut keys = message.keys().to_vec();
    keys.sort();
    tell("received", json!({
        "id": message.message_id(), "topic": message.topic(), "tag": message.tag(), "keys": keys,
        "properties": message.properties(), "group": message.message_group(),
        "due": message.delivery_timestamp(), "attempt": message.delivery_attempt(),
        "size": message.body().len(),
        "body": String::from_utf8_lossy(&message.body()[..message.body().len().min(40)]),
        "atMs": at_ms as u64,
    }));
}

fn now_ms() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_millis()
}

impl Client {
    fn options(&self) -> ClientOption {
        let mut options = ClientOption::default();
        options.set_access_url(&self.endpoint);
        options.set_enable_tls(false);
        options.set_long_polling_timeout(AWAIT);
        if let Ok(key) = env::var("ROCKETMQ_ACCESS_KEY") {
            options.set_access_key(key);
            options.set_secret_key(env::var("ROCKETMQ_SECRET_KEY").expect("the secret of the key"));
        }
        options
    }

    fn producer_options(&self) -> ProducerOption {
        let mut options = ProducerOption::default();
        options.set_logging_format(LoggingFormat::Terminal);
        options.set_topics(vec![&self.topic]);
        options
    }

    fn wanted(&self) -> FilterExpression {
        match (&self.sql, &self.tags) {
            (Some(sql), _) => FilterExpression::new(FilterType::Sql, sql.as_str()),
            (None, Some(tags)) => FilterExpression::new(FilterType::Tag, tags.as_str()),
            (None, None) => FilterExpression::new(FilterType::Tag, "*"),
        }
    }

    async fn producer(&self) -> Result<Producer, ClientError> {
        let mut producer = Producer::new(self.producer_options(), self.options())?;
        producer.start().await?;
        Ok(producer)
    }

    async fn consumer(&self) -> Result<SimpleConsumer, ClientError> {
        let mut options = SimpleConsumerOption::default();
        options.set_logging_format(LoggingFormat::Terminal);
        options.set_consumer_group(&self.group);
        options.set_topics(vec![&self.topic]);
        let mut consumer = SimpleConsumer::new(options, self.options())?;
        consumer.start().await?;
        Ok(consumer)
    }

    async fn receive(
        &self, consumer: &SimpleConsumer, wanted: usize, invisible: Duration,
    ) -> Result<Vec<MessageView>, ClientError> {
        let wanted_messages = self.wanted();
        let deadline = SystemTime::now() + WAIT;
        let mut found = Vec::new();
        while found.len() < wanted && SystemTime::now() < deadline {
            let some = consumer.receive_with(&self.topic, &wanted_messages, RECEIVE_MAX, invisible).await?;
            let at_ms = now_ms();
            for message in &some {
                tell_received(message, at_ms);
            }
            found.extend(some);
        }
        Ok(found)
    }

    async fn send(&self, producer: &Producer, message: impl Message) -> Result<SendReceipt, ClientError> {
        let receipt = producer.send(message).await?;
        tell("sent", json!({"id": receipt.message_id()}));
        Ok(receipt)
    }

    async fn tell_left(&self, consumer: &SimpleConsumer) -> Outcome {
        let left = consumer.receive_with(&self.topic, &self.wanted(), RECEIVE_MAX, INVISIBLE).await?;
        tell("left", json!({"count": left.len()}));
        Ok(())
    }

    /// Send messages of every kind and size, receive and ack them, and find nothing left.
    async fn round_trip(&self) -> Outcome {
        let (producer, consumer) = (self.producer().await?, self.consumer().await?);
        let new = || MessageBuilder::builder().set_topic(&self.topic);
        self.send(&producer, new().set_body(b"x".to_vec()).build()?).await?;
        self.send(&producer, new().set_body(b"tagged".to_vec()).set_tag("tag").build()?).await?;
        let keyed = new().set_body(b"keyed".to_vec()).set_keys(vec!["key-1", "key-2"]);
        self.send(&producer, keyed.build()?).await?;
        let described = new().set_body(b"with properties".to_vec());
        let described = described.set_properties([("name", "wert"), ("grün", "🌊")].into());
        self.send(&producer, described.build()?).await?;
        self.send(&producer, new().set_body(vec![b'7'; 1 << 20]).build()?).await?;
        for message in self.receive(&consumer, 5, INVISIBLE).await? {
            consumer.ack(&message).await?;
        }
        self.tell_left(&consumer).await?;
        producer.shutdown().await?;
        consumer.shutdown().await
    }

    /// Let a delivery expire, and ack the next.
    async fn redelivery(&self) -> Outcome {
        let (producer, consumer) = (self.producer().await?, self.consumer().await?);
        let message = MessageBuilder::builder().set_topic(&self.topic).set_body(b"expires".to_vec());
        self.send(&producer, message.build()?).await?;
        self.receive(&consumer, 1, BRIEF).await?;
        for message in self.receive(&consumer, 1, INVISIBLE).await? {
            consumer.ack(&message).await?;
        }
        Ok(())
    }

    /// Send messages with one dedup key.
    async fn dedup(&self) -> Outcome {
        let producer = self.producer().await?;
        for body in ["first", "first", "another"] {
            let message = MessageBuilder::builder().set_topic(&self.topic).set_body(body.into());
            let message = message.set_properties([("dedup-key", "k")].into());
            self.send(&producer, message.build()?).await?;
        }
        producer.shutdown().await
    }

    /// Receive and ack the two messages that the filter selects, and find nothing left.
    async fn filtered(&self) -> Outcome {
        let consumer = self.consumer().await?;
        for message in self.receive(&consumer, 2, INVISIBLE).await? {
            consumer.ack(&message).await?;
        }
        self.tell_left(&consumer).await
    }

    /// Let both deliveries of a message expire, and receive it from the dead-letter topic.
    async fn dead_letter(&self) -> Outcome {
        let (producer, consumer) = (self.producer().await?, self.consumer().await?);
        let message = MessageBuilder::builder().set_topic(&self.topic).set_body(b"poison".to_vec());
        self.send(&producer, message.build()?).await?;
        self.receive(&consumer, 1, BRIEF).await?;
        self.receive(&consumer, 1, BRIEF).await?;
        self.tell_left(&consumer).await?;
        let dead = Client {
            endpoint: self.endpoint.clone(),
            topic: format!("%DLQ%{}", self.group),
            group: format!("{}-reader", self.group),
            tags: None,
            sql: None,
        };
        let reader = dead.consumer().await?;
        for message in dead.receive(&reader, 1, INVISIBLE).await? {
            reader.ack(&message).await?;
        }
        Ok(())
    }

    /// Commit one message, roll one back, and let the checker decide about two others.
    async fn transaction(&self) -> Outcome {
        let (decided, decisions) = mpsc::sync_channel(100);
        let checker = move |_: String, message: MessageView| {
            let body = String::from_utf8_lossy(message.body()).to_string();
            tell("checked", json!({"body": body, "id": message.message_id()}));
            let _ = decided.try_send(());
            if body == "checked yes" { TransactionResolution::COMMIT } else { TransactionResolution::ROLLBACK }
        };
        let mut producer =
            Producer::new_transaction_producer(self.producer_options(), self.options(), Box::new(checker))?;
        producer.start().await?;
        for body in ["commit", "rollback", "checked yes", "checked no"] {
            let message = MessageBuilder::transaction_message_builder(&self.topic, body.into());
            let started = producer.send_transaction_message(message.build()?).await?;
            tell("sent", json!({"id": started.message_id(), "transaction": started.transaction_id()}));
            match body {
                "commit" => started.commit().await?,
                "rollback" => started.rollback().await?,
                _ => {}
            }
        }
        // The runtime has other threads for the checks.
        let is_done = (0..2).all(|_| decisions.recv_timeout(WAIT).is_ok());
        tell("done", json!({"is_done": is_done}));
        tokio::time::sleep(Duration::from_secs(1)).await; // For the last decision, sent after the check.
        producer.shutdown().await
    }

    async fn delayed(&self) -> Outcome {
        let (producer, consumer) = (self.producer().await?, self.consumer().await?);
        let due_s = (now_ms() / 1000) as i64 + DELAY_S;
        let message = MessageBuilder::delay_message_builder(&self.topic, b"later".to_vec(), due_s);
        self.send(&producer, message.build()?).await?;
        tell("due", json!({"ms": due_s * 1000}));
        for message in self.receive(&consumer, 1, INVISIBLE).await? {
            consumer.ack(&message).await?;
        }
        Ok(())
    }

    /// Send message groups in turn, and ack each message when it is received.
    async fn fifo(&self) -> Outcome {
        let (producer, consumer) = (self.producer().await?, self.consumer().await?);
        const MESSAGES: usize = 12;
        for n in 0..MESSAGES {
            let group = format!("group-{}", n % MESSAGE_GROUPS);
            let body = format!("{group} {n}").into_bytes();
            let message = MessageBuilder::fifo_message_builder(&self.topic, body, group);
            self.send(&producer, message.build()?).await?;
        }
        let mut received = 0;
        while received < MESSAGES {
            let batch = self.receive(&consumer, 1, INVISIBLE).await?;
            received += batch.len();
            for message in batch {
                consumer.ack(&message).await?;
            }
        }
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Outcome {
    let arguments: Vec<String> = std::env::args().collect();
    if arguments[1] == "guide" {
        return guide::run().await;
    }
    let given: Value = serde_json::from_str(&arguments[2]).expect("JSON");
    let text = |name: &str| given[name].as_str().expect(name).to_string();
    let endpoint = given["endpoints"][0].as_str().expect("an endpoint").to_string();
    let optional = |name: &str| given[name].as_str().map(str::to_string);
    let client = Client {
        endpoint,
        topic: text("topic"),
        group: optional("group").unwrap_or_default(),
        tags: optional("tags"),
        sql: optional("sql"),
    };
    match arguments[1].as_str() {
        "roundTrip" => client.round_trip().await,
        "redelivery" => client.redelivery().await,
        "delayed" => client.delayed().await,
        "fifo" => client.fifo().await,
        "filtered" => client.filtered().await,
        "dedup" => client.dedup().await,
        "deadLetter" => client.dead_letter().await,
        "transaction" => client.transaction().await,
        other => panic!("no scenario {other}"),
    }
}
