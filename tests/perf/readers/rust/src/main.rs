//! Receives and acks all that is there, with several polls at a time:
//! `reader ENDPOINT TOPIC GROUP MESSAGES RECEIVERS WAIT_S`.
//!
//! Prints how calls ended as one line of JSON, and judges nothing. All polls share one connection,
//! as those of any client do.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

#[allow(clippy::all)]
mod v2 {
    tonic::include_proto!("apache.rocketmq.v2");
}

use v2::messaging_service_client::MessagingServiceClient;
use v2::receive_message_response::Content;

const AWAIT: Duration = Duration::from_secs(20); // so that what has been asked for comes before it
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3); // on top, as official clients have it
const INVISIBLE_S: i64 = 120; // while a slow reader takes what else it has asked for
const RECEIVE_MAX: i32 = 32;

#[derive(Default)]
struct ReadCounts {
    ids: HashSet<String>,
    bytes: usize,
    last: Option<Instant>,
    ended: BTreeMap<String, u64>,
}

struct Reader {
    client: MessagingServiceClient<Channel>,
    topic: v2::Resource,
    group: v2::Resource,
    told: Arc<Mutex<ReadCounts>>,
}

fn resource(name: &str) -> v2::Resource {
    v2::Resource { name: name.into(), ..Default::default() }
}

fn duration(seconds: i64) -> Option<prost_types::Duration> {
    Some(prost_types::Duration { seconds, nanos: 0 })
}

fn request<T>(message: T, timeout: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("x-mq-client-id", "tonic".parse().expect("ASCII"));
    request.metadata_mut().insert("x-mq-client-version", "5.0.0".parse().expect("ASCII"));
    request.set_timeout(timeout);
    request
}

fn name_of(status: &v2::Status) -> String {
    v2::Code::try_from(status.code)
        .map_or_else(|_| status.code.to_string(), |code| code.as_str_name().to_string())
}

impl Reader {
    fn count(&self, during: &str, outcome: &str) {
        let mut told = self.told.lock().expect("not poisoned");
        *told.ended.entry(format!("{during}: {outcome}")).or_default() += 1;
    }

    async fn read(&mut self, messages: usize, deadline: Instant) {
        while self.told.lock().expect("not poisoned").ids.len() < messages
            && Instant::now() < deadline
        {
            let mut received = Vec::new();
            let outcome = self.receive(&mut received).await.unwrap_or_else(|error| error.to_string());
            self.count("receive", &outcome);
            for message in received {
                let outcome = self.ack(message).await.unwrap_or_else(|error| error.to_string());
                self.count("ack", &outcome);
            }
        }
    }

    /// Receives once; what has come is there even when the call fails.
    async fn receive(&mut self, received: &mut Vec<v2::Message>) -> Result<String, Status> {
        let poll = v2::ReceiveMessageRequest {
            group: Some(self.group.clone()),
            message_queue: Some(v2::MessageQueue {
                topic: Some(self.topic.clone()),
                ..Default::default()
            }),
            batch_size: RECEIVE_MAX,
            invisible_duration: duration(INVISIBLE_S),
            long_polling_timeout: duration(AWAIT.as_secs() as i64),
            ..Default::default()
        };
        let poll = request(poll, AWAIT + REQUEST_TIMEOUT);
        let mut responses = self.client.receive_message(poll).await?.into_inner();
        let mut outcome = "no status".to_string();
        while let Some(response) = responses.message().await? {
            match response.content {
                Some(Content::Status(status)) => outcome = name_of(&status),
                Some(Content::Message(message)) => received.push(message),
                _ => {}
            }
        }
        Ok(outcome)
    }

    async fn ack(&mut self, message: v2::Message) -> Result<String, Status> {
        let properties = message.system_properties.unwrap_or_default();
        {
            let mut told = self.told.lock().expect("not poisoned");
            told.ids.insert(properties.message_id.clone());
            told.bytes += message.body.len();
            told.last = Some(Instant::now());
        }
        let ack = v2::AckMessageRequest {
            group: Some(self.group.clone()),
            topic: Some(self.topic.clone()),
            entries: vec![v2::AckMessageEntry {
                message_id: properties.message_id,
                receipt_handle: properties.receipt_handle.unwrap_or_default(),
                ..Default::default()
            }],
        };
        let response = self.client.ack_message(request(ack, REQUEST_TIMEOUT)).await?.into_inner();
        Ok(response.status.as_ref().map_or_else(|| "no status".into(), name_of))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [endpoint, topic, group, messages, receivers, wait_s] = arguments.as_slice() else {
        return Err("ENDPOINT TOPIC GROUP MESSAGES RECEIVERS WAIT_S".into());
    };
    let channel = Endpoint::from_shared(format!("http://{endpoint}"))?.connect().await?;
    let (messages, receivers): (usize, usize) = (messages.parse()?, receivers.parse()?);
    let began = Instant::now();
    let deadline = began + Duration::from_secs_f64(wait_s.parse()?);
    let told = Arc::new(Mutex::new(ReadCounts::default()));
    let tasks: Vec<_> = (0..receivers)
        .map(|_| {
            let mut reader = Reader {
                client: MessagingServiceClient::new(channel.clone()),
                topic: resource(topic),
                group: resource(group),
                told: told.clone(),
            };
            tokio::spawn(async move { reader.read(messages, deadline).await })
        })
        .collect();
    for task in tasks {
        task.await?;
    }
    let told = told.lock().expect("not poisoned");
    let ended: Vec<String> = told.ended.iter().map(|(name, count)| format!("{name:?}: {count}")).collect();
    println!(
        "{{\"fact\": \"consumed\", \"messages\": {}, \"bytes\": {}, \"ended\": {{{}}}, \"tookS\": {}}}",
        told.ids.len(),
        told.bytes,
        ended.join(", "),
        told.last.map_or(0.0, |last| (last - began).as_secs_f64())
    );
    Ok(())
}
