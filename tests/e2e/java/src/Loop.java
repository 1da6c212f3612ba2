import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.time.Instant;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ThreadLocalRandom;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.FilterExpressionType;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.SendReceipt;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;

/**
 * The official Java client in every role at once: {@code Loop '{"endpoint": ..., "name": ...}'}.
 *
 * <p>Tells the lines that tests/e2e/python/loop.py describes, and is stopped as that is.
 */
public final class Loop {
    private static final String NORMAL = "normal";
    private static final String DELAYED = "delayed";
    private static final String ORDERED = "ordered";
    private static final String TRANSACTION = "transaction";
    private static final String PRIORITY = "priority";
    private static final String DEDUP = "dedup";
    private static final String FILTERED = "filtered";
    // Between two sends of a kind, per kind. All languages and kinds together are a light load.
    private static final long PAUSE_MS = 50;
    private static final long DELAY_MS_MAX = 4000;
    private static final Duration AWAIT = Duration.ofSeconds(5); // what a poll takes at least
    // What is not acked comes back while the test waits for it.
    private static final Duration INVISIBLE = Duration.ofSeconds(15);
    private static final int RECEIVE_MAX = 16;
    private static final int MESSAGE_GROUPS = 2;
    private static final int PRIORITIES = 4;
    private static final String DEDUP_KEY = "dedup-key";
    private static final List<String> TAGS = List.of("red", "green", "blue");
    private static final FilterExpression TAG_FILTER = new FilterExpression("red || green");
    private static final int LEVELS = 10;
    private static final FilterExpression SQL_FILTER =
            new FilterExpression("level >= 5", FilterExpressionType.SQL92);
    // Of so many transactions, the producer commits the first and rolls back the second.
    private static final int RESOLVED_OF = 4;
    // One may wait at a topic without messages while another has some.
    private static final int RECEIVERS = 2;
    // One of so many is not acked, or fails, when it is first seen here.
    private static final int REFUSED_OF = 50;
    private static final int REFUSED_OF_ORDERED = 250;
    private static final int MICROS = 1_000_000;
    private static final int NANOS_PER_MICRO = 1000;

    private static final Gson JSON = new GsonBuilder().create();
    private static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();

    private final Arguments given;
    private final Set<String> refused = ConcurrentHashMap.newKeySet();
    private volatile boolean isStopping;

    private Loop(Arguments given) {
        this.given = given;
    }

    record Arguments(String endpoint, String name, List<String> topics) {
        Arguments {
            topics = topics == null ? List.of(NORMAL, DELAYED, ORDERED) : topics;
        }
    }

    interface Call {
        void run() throws Exception;
    }

    public static void main(String[] args) throws Exception {
        new Loop(JSON.fromJson(args[0], Arguments.class)).run();
        // To close consumers would wait for whole long polls.
        System.exit(0);
    }

    private void run() throws Exception {
        Producer producer = PROVIDER.newProducerBuilder()
                .setClientConfiguration(configuration())
                .setTopics(given.topics().toArray(String[]::new))
                .setTransactionChecker(Loop::check)
                .build();
        for (Map.Entry<String, Map<String, FilterExpression>> role : subscriptions().entrySet()) {
            startConsumer(role.getKey(), role.getValue());
        }
        List<Thread> producing = new ArrayList<>();
        for (String topic : given.topics()) {
            producing.add(start(() -> produce(producer, topic)));
        }
        tell("ready", Map.of());
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        input.readLine();
        isStopping = true;
        for (Thread thread : producing) {
            thread.join();
        }
        tell("stopped", Map.of());
        input.readLine();
    }

    private ClientConfiguration configuration() {
        return AccessKey.addTo(ClientConfiguration.newBuilder())
                .setEndpoints(given.endpoint())
                .enableSsl(false)
                .build();
    }

    /** The filters of each role with topics. */
    private Map<String, Map<String, FilterExpression>> subscriptions() {
        Map<String, FilterExpression> plain = new HashMap<>();
        Map<String, Map<String, FilterExpression>> roles = new HashMap<>(Map.of("simple", plain, "push", plain));
        for (String topic : given.topics()) {
            switch (topic) {
                case ORDERED -> {
                    roles.put("ordered-simple", Map.of(topic, FilterExpression.SUB_ALL));
                    roles.put("ordered-push", Map.of(topic, FilterExpression.SUB_ALL));
                }
                case FILTERED -> {
                    roles.put("tag-simple", Map.of(topic, TAG_FILTER));
                    roles.put("sql-push", Map.of(topic, SQL_FILTER));
                }
                default -> plain.put(topic, FilterExpression.SUB_ALL);
            }
        }
        return roles;
    }

    private void startConsumer(String role, Map<String, FilterExpression> filters) throws Exception {
        if (role.endsWith("push")) {
            PROVIDER.newPushConsumerBuilder()
                    .setClientConfiguration(configuration())
                    .setConsumerGroup(role)
                    .setSubscriptionExpressions(filters)
                    .setMessageListener(message -> listen(role, message))
                    .build();
            return;
        }
        SimpleConsumer simple = PROVIDER.newSimpleConsumerBuilder()
                .setClientConfiguration(configuration())
                .setConsumerGroup(role)
                .setSubscriptionExpressions(filters)
                .setAwaitDuration(AWAIT)
                .build();
        for (int n = 0; n < RECEIVERS; n++) {
            start(() -> consume(simple, role));
        }
    }

    /** Decides by the number of the message. */
    private static TransactionResolution check(MessageView message) {
        String key = key(message);
        tell("checked", Map.of("key", key));
        return numberOf(key) % 2 == 0 ? TransactionResolution.COMMIT : TransactionResolution.ROLLBACK;
    }

    private void produce(Producer producer, String topic) throws Exception {
        for (int number = 0; ; number++) {
            Thread.sleep(PAUSE_MS * given.topics().size());
            if (isStopping) {
                return;
            }
            send(producer, topic, number);
            if (topic.equals(DEDUP)) {
                // The application sends a dedup key again after an answer and after an error.
                send(producer, topic, number);
            }
        }
    }

    private void send(Producer producer, String topic, int number) {
        String key = given.name() + "/" + topic + "/" + number;
        MessageBuilder builder =
                PROVIDER.newMessageBuilder().setTopic(topic).setBody(key.getBytes(StandardCharsets.UTF_8));
        String group = "";
        long due = 0;
        switch (topic) {
            case ORDERED -> {
                group = given.name() + "-" + number % MESSAGE_GROUPS;
                builder.setMessageGroup(group);
            }
            case DELAYED -> {
                due = System.currentTimeMillis() + 100 + ThreadLocalRandom.current().nextLong(DELAY_MS_MAX);
                builder.setDeliveryTimestamp(due);
            }
            case PRIORITY -> builder.setPriority(number % PRIORITIES);
            case DEDUP -> builder.addProperty(DEDUP_KEY, key);
            case FILTERED -> builder.setTag(TAGS.get(number % TAGS.size()))
                    .addProperty("level", String.valueOf(number % LEVELS));
            default -> { }
        }
        List<SendReceipt> receipts = new ArrayList<>();
        List<Transaction> transactions = new ArrayList<>();
        long begun = nowUs();
        String error = errorOf(() -> {
            if (topic.equals(TRANSACTION)) {
                Transaction transaction = producer.beginTransaction();
                receipts.add(producer.send(builder.build(), transaction));
                transactions.add(transaction);
            } else {
                receipts.add(producer.send(builder.build()));
            }
        });
        String id = error.isEmpty() ? receipts.get(0).getMessageId().toString() : "";
        tell("send", Map.of("key", key, "topic", topic, "group", group, "due", due, "begun", begun,
                "ended", nowUs(), "error", error, "id", id));
        for (Transaction transaction : transactions) {
            resolve(transaction, number);
        }
    }

    /** Commits a transaction, rolls it back, or leaves it to the checker. */
    private static void resolve(Transaction transaction, int number) {
        long begun = nowUs();
        String error = "";
        if (number % RESOLVED_OF == 0) {
            error = errorOf(transaction::commit);
        } else if (number % RESOLVED_OF == 1) {
            error = errorOf(transaction::rollback);
        }
        if (!error.isEmpty()) {
            tell("failed", Map.of("role", "", "during", TRANSACTION, "begun", begun, "ended", nowUs(),
                    "error", error));
        }
    }

    private void consume(SimpleConsumer consumer, String role) throws Exception {
        while (true) {
            long begun = nowUs();
            List<MessageView> found = new ArrayList<>();
            String error = errorOf(() -> found.addAll(consumer.receive(RECEIVE_MAX, INVISIBLE)));
            if (!error.isEmpty()) {
                tell("failed", Map.of("role", role, "during", "receive", "begun", begun, "ended", nowUs(),
                        "error", error));
                Thread.sleep(PAUSE_MS);
            }
            if (!found.isEmpty()) {
                settle(consumer, role, found);
            }
        }
    }

    /** Ack what was received; behind one that is not acked nothing ordered is. */
    private void settle(SimpleConsumer consumer, String role, List<MessageView> found) {
        String topic = found.get(0).getTopic();
        tell("received", Map.of("role", role, "topic", topic, "at", nowUs(),
                "keys", found.stream().map(Loop::key).toList(),
                "attempts", found.stream().map(MessageView::getDeliveryAttempt).toList(),
                "ids", found.stream().map(message -> message.getMessageId().toString()).toList()));
        for (MessageView message : found) {
            boolean isAcked = !refuses(role, topic, key(message)) && ack(consumer, role, message);
            if (!isAcked && topic.equals(ORDERED)) {
                return;
            }
        }
    }

    private static boolean ack(SimpleConsumer consumer, String role, MessageView message) {
        long begun = nowUs();
        String error = errorOf(() -> consumer.ack(message));
        tellAck(role, message, begun, error);
        return error.isEmpty();
    }

    /** Whether its client could ack what a listener took nobody tells an application. */
    private ConsumeResult listen(String role, MessageView message) {
        String topic = message.getTopic();
        tell("received", Map.of("role", role, "topic", topic, "at", nowUs(), "keys", List.of(key(message)),
                "attempts", Collections.singletonList(message.getDeliveryAttempt()),
                "ids", List.of(message.getMessageId().toString())));
        if (refuses(role, topic, key(message))) {
            return ConsumeResult.FAILURE;
        }
        tellAck(role, message, nowUs(), "");
        return ConsumeResult.SUCCESS;
    }

    /** Whether a message is to come again: once, for some. */
    private boolean refuses(String role, String topic, String key) {
        int of = topic.equals(ORDERED) ? REFUSED_OF_ORDERED : REFUSED_OF;
        return numberOf(key) % of == of - 1 && refused.add(role + " " + key);
    }

    private static int numberOf(String key) {
        return Integer.parseInt(key.substring(key.lastIndexOf('/') + 1));
    }

    private static void tellAck(String role, MessageView message, long begun, String error) {
        tell("ack", Map.of("role", role, "topic", message.getTopic(), "key", key(message),
                "attempt", message.getDeliveryAttempt(), "begun", begun, "ended", nowUs(), "error", error));
    }

    private static String key(MessageView message) {
        return StandardCharsets.UTF_8.decode(message.getBody().duplicate()).toString();
    }

    private static String errorOf(Call call) {
        try {
            call.run();
        } catch (Exception error) {
            return error.toString();
        }
        return "";
    }

    private static long nowUs() {
        Instant now = Instant.now();
        return now.getEpochSecond() * MICROS + now.getNano() / NANOS_PER_MICRO;
    }

    private static Thread start(Call call) {
        Thread thread = new Thread(() -> {
            try {
                call.run();
            } catch (Exception error) {
                throw new IllegalStateException(error);
            }
        });
        thread.setDaemon(true);
        thread.start();
        return thread;
    }

    private static synchronized void tell(String fact, Map<String, ?> values) {
        Map<String, Object> line = new HashMap<>(values);
        line.put("fact", fact);
        byte[] json = (JSON.toJson(line) + "\n").getBytes(StandardCharsets.UTF_8);
        System.out.write(json, 0, json.length);
        System.out.flush();
    }
}
