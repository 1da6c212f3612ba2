//! The program of docs/clients/rust.md, whose blocks are the regions of this file.

use std::env;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rocketmq::conf::{ClientOption, ProducerOption, SimpleConsumerOption};
use rocketmq::error::ClientError;
use rocketmq::model::common::{FilterExpression, FilterType};
use rocketmq::model::message::{MessageBuilder, MessageView};
use rocketmq::{Producer, SimpleConsumer};

// region: options
fn options() -> ClientOption {
    let mut options = ClientOption::default();
    options.set_access_url(env::var("ENDPOINT").expect("ENDPOINT"));
    options.set_access_key(env::var("ACCESS_KEY").expect("ACCESS_KEY"));
    options.set_secret_key(env::var("ACCESS_SECRET").expect("ACCESS_SECRET"));
    options.set_enable_tls(false); // The TLS of this client does not work.
    options.set_long_polling_timeout(Duration::from_secs(7)); // at least 6 s
    options
}
// end

// region: simple
async fn receive_one(topic: &str, group: &str) -> Result<MessageView, ClientError> {
    let mut option = SimpleConsumerOption::default();
    option.set_consumer_group(group);
    option.set_topics(vec![topic]);
    let mut consumer = SimpleConsumer::new(option, options())?;
    consumer.start().await?;
    let all = FilterExpression::new(FilterType::Tag, "*");
    let message = loop {
        let messages = consumer.receive_with(topic, &all, 1, Duration::from_secs(30)).await?;
        if let Some(message) = messages.into_iter().next() {
            break message;
        }
    };
    consumer.ack(&message).await?;
    consumer.shutdown().await?;
    Ok(message)
}
// end

pub async fn run() -> Result<(), ClientError> {
    // region: connect
    let mut option = ProducerOption::default();
    option.set_topics(vec!["orders", "reminders", "steps"]);
    let mut producer = Producer::new(option, options())?;
    producer.start().await?;
    // end

    // region: send
    let message = MessageBuilder::builder()
        .set_topic("orders")
        .set_body(b"one coffee".to_vec())
        .set_tag("drink")
        .set_keys(vec!["order-17"])
        .set_properties([("customer", "ada")].into())
        .build()?;
    let receipt = producer.send(message).await?; // one attempt: repeat it after an error
    println!("sent {}", receipt.message_id());
    // end

    // region: delay
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs() as i64;
    let reminder = MessageBuilder::delay_message_builder("reminders", b"call back".to_vec(), now + 3600);
    producer.send(reminder.build()?).await?;
    // end

    // region: fifo
    for step in ["first", "second"] {
        let message = MessageBuilder::fifo_message_builder("steps", step.into(), "order-17");
        producer.send(message.build()?).await?;
    }
    // end

    for _ in 0..2 {
        let step = receive_one("steps", "steps").await?;
        println!("step {}", String::from_utf8_lossy(step.body()));
    }
    let order = receive_one("orders", "billing").await?;
    println!("done {}", String::from_utf8_lossy(order.body()));

    // region: stop
    producer.shutdown().await?;
    println!("stopped");
    // end
    Ok(())
}
