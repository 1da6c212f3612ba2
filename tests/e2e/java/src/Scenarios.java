import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.annotations.SerializedName;
import java.lang.reflect.Method;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientException;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.FilterExpressionType;
import org.apache.rocketmq.client.apis.consumer.MessageListener;
import org.apache.rocketmq.client.apis.consumer.PushConsumer;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.SendReceipt;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionChecker;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;

/**
 * What the official Java client is put through: {@code Scenarios SCENARIO '{"topic": ...}'}.
 *
 * <p>Prints facts as JSON lines on standard output and judges nothing. The client logs below the
 * home folder of the user, which is the property user.home.
 */
public final class Scenarios {
    // A poll's least time, with the request timeout of 3 s on top.
    private static final Duration AWAIT = Duration.ofSeconds(3);
    private static final Duration INVISIBLE = Duration.ofSeconds(30); // longer than any scenario
    // So that what a slow reader has asked for comes before its deadline.
    private static final Duration LONG_AWAIT = Duration.ofSeconds(20);
    // Invisible while a slow reader takes what else it has asked for.
    private static final Duration CONSUMED = Duration.ofSeconds(120);
    private static final Duration BRIEF = Duration.ofSeconds(1); // for a delivery that is to expire
    private static final Duration DELAY = Duration.ofSeconds(4); // of a message that is scheduled
    private static final Duration WAIT = Duration.ofSeconds(40); // for anything, on the slowest machine
    private static final int RECEIVE_MAX = 32;
    private static final int MESSAGE_GROUPS = 3;
    private static final int SHOWN_BYTES = 40; // of a body

    private static final Gson JSON = new GsonBuilder().serializeNulls().create();
    private static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();

    private final Arguments given;

    private Scenarios(Arguments given) {
        this.given = given;
    }

    record Arguments(
            List<String> endpoints,
            String topic,
            String group,
            int messages,
            int receivers,
            @SerializedName("wait_s") double waitS,
            boolean tls,
            String namespace,
            String tags,
            String sql,
            String poison) {}

    interface Call {
        void run() throws Exception;
    }

    public static void main(String[] args) throws Exception {
        Scenarios scenarios = new Scenarios(JSON.fromJson(args[1], Arguments.class));
        switch (args[0]) {
            case "roundTrip" -> scenarios.roundTrip();
            case "redelivery" -> scenarios.redelivery();
            case "priorities" -> scenarios.priorities();
            case "push" -> scenarios.push();
            case "pushFifo" -> scenarios.pushFifo();
            case "delayed" -> scenarios.delayed();
            case "lite" -> scenarios.lite();
            case "dedup" -> scenarios.dedup();
            case "consumeAll" -> scenarios.consumeAll();
            case "stay" -> scenarios.stay();
            case "repeatedForward" -> scenarios.repeatedForward();
            case "sqlPush" -> scenarios.sqlPush();
            case "transaction" -> scenarios.transaction();
            default -> throw new IllegalArgumentException(args[0]);
        }
        // Threads of the client outlive it for a while.
        System.exit(0);
    }

    private void roundTrip() throws Exception {
        List<Message> messages = messagesOfEveryKind();
        try (Producer producer = producer()) {
            for (Message message : messages) {
                send(producer, message);
            }
        }
        try (SimpleConsumer consumer = consumer()) {
            for (MessageView message : receive(consumer, messages.size(), INVISIBLE)) {
                tellReceived(message, Map.of());
                consumer.ack(message);
            }
            tell("left", Map.of("count", consumer.receive(RECEIVE_MAX, INVISIBLE).size()));
        }
    }

    /** Let a delivery expire, and give the next one back. */
    private void redelivery() throws Exception {
        try (Producer producer = producer()) {
            send(producer, message("expires").build());
        }
        try (SimpleConsumer consumer = consumer()) {
            MessageView first = receive(consumer, 1, BRIEF).get(0);
            tellReceived(first, Map.of());
            MessageView second = receive(consumer, 1, INVISIBLE).get(0);
            tellReceived(second, Map.of());
            tellError("expired", () -> consumer.ack(first));
            consumer.changeInvisibleDuration(second, INVISIBLE.multipliedBy(2));
            consumer.changeInvisibleDuration(second, Duration.ZERO);
            MessageView third = receive(consumer, 1, INVISIBLE).get(0);
            tellReceived(third, Map.of());
            consumer.ack(third);
        }
    }

    /** Send several priorities, the lowest first; receive them. */
    private void priorities() throws Exception {
        try (Producer producer = producer()) {
            send(producer, message("none").build());
            for (int priority : new int[] {0, 1, 7, 100}) {
                send(producer, message(String.valueOf(priority)).setPriority(priority).build());
            }
        }
        try {
            message("negative").setPriority(-1);
            tell("error", Map.of("during", "negative", "text", ""));
        } catch (IllegalArgumentException error) {
            tell("error", Map.of("during", "negative", "text", error.getMessage()));
        }
        try (SimpleConsumer consumer = consumer()) {
            for (MessageView message : receive(consumer, 5, INVISIBLE)) {
                tellReceived(message, Map.of());
                consumer.ack(message);
            }
        }
    }

    /**
     * Let a listener succeed, but for the first time it sees message 2.
     *
     * <p>To close the consumer would wait for whole long polls, so the process ends without it.
     */
    private void push() throws Exception {
        Set<String> succeeded = ConcurrentHashMap.newKeySet();
        CountDownLatch left = new CountDownLatch(given.messages());
        MessageListener listener = message -> {
            String body = StandardCharsets.UTF_8.decode(message.getBody()).toString();
            boolean succeeds = !body.equals("2") || message.getDeliveryAttempt() > 1;
            tellReceived(message, Map.of("succeeds", succeeds));
            if (!succeeds) {
                return ConsumeResult.FAILURE;
            }
            if (succeeded.add(body)) {
                left.countDown();
            }
            return ConsumeResult.SUCCESS;
        };
        startPushConsumer(listener);
        try (Producer producer = producer()) {
            for (int n = 0; n < given.messages(); n++) {
                send(producer, message(String.valueOf(n)).build());
            }
            if (!left.await(WAIT.toMillis(), TimeUnit.MILLISECONDS)) {
                throw new IllegalStateException(left.getCount() + " messages did not succeed");
            }
        }
    }

    /** Send message groups in turn to an ordered group; the message {@code poison} always fails. */
    private void pushFifo() throws Exception {
        Set<String> seen = ConcurrentHashMap.newKeySet();
        CountDownLatch left = new CountDownLatch(given.messages());
        startPushConsumer(message -> {
            String body = StandardCharsets.UTF_8.decode(message.getBody()).toString();
            boolean succeeds = !body.equals(given.poison());
            tellReceived(message, Map.of("succeeds", succeeds));
            if (seen.add(body)) {
                left.countDown();
            }
            return succeeds ? ConsumeResult.SUCCESS : ConsumeResult.FAILURE;
        });
        try (Producer producer = producer()) {
            for (int n = 0; n < given.messages(); n++) {
                String group = "group-" + n % MESSAGE_GROUPS;
                send(producer, message(group + " " + n).setMessageGroup(group).build());
            }
        }
        tell("done", Map.of("is_done", left.await(WAIT.toMillis(), TimeUnit.MILLISECONDS)));
        try (SimpleConsumer consumer = consumer("%DLQ%" + given.group(), given.group() + "-reader", AWAIT)) {
            MessageView dead = receive(consumer, 1, INVISIBLE).get(0);
            tellReceived(dead, Map.of("isDead", true));
            consumer.ack(dead);
        }
    }

    /** Schedule two messages, recall one, receive the other, and try to recall that too late. */
    private void delayed() throws Exception {
        try (Producer producer = producer()) {
            long dueMs = System.currentTimeMillis() + DELAY.toMillis();
            List<String> handles = new ArrayList<>();
            for (String body : List.of("delivered", "recalled")) {
                SendReceipt sent = producer.send(message(body).setDeliveryTimestamp(dueMs).build());
                handles.add(sent.getRecallHandle());
                tell("sent", Map.of("id", sent.getMessageId().toString(), "dueMs", dueMs));
            }
            for (int n = 0; n < 2; n++) {
                String id = producer.recallMessage(given.topic(), handles.get(1)).getMessageId().toString();
                tell("recalled", Map.of("id", id));
            }
            try (SimpleConsumer consumer = consumer()) {
                MessageView received = receive(consumer, 1, INVISIBLE).get(0);
                tellReceived(received, Map.of("atMs", System.currentTimeMillis()));
                consumer.ack(received);
                tellError("too late", () -> producer.recallMessage(given.topic(), handles.get(0)));
                tell("left", Map.of("count", consumer.receive(RECEIVE_MAX, INVISIBLE).size()));
            }
        }
    }

    /** Send a message to a lite topic. */
    private void lite() throws Exception {
        try (Producer producer = producer()) {
            tellError("send", () -> producer.send(message("x").setLiteTopic("one").build()));
        }
    }

    /** Send messages with one dedup key. */
    private void dedup() throws Exception {
        try (Producer producer = producer()) {
            for (String body : List.of("first", "first", "another")) {
                send(producer, message(body).addProperty("dedup-key", "k").build());
            }
        }
    }

    /** Have the client repeat the forward of a message to the dead letters, as after a lost answer. */
    private void repeatedForward() throws Exception {
        CompletableFuture<PushConsumer> started = new CompletableFuture<>();
        // The last message may arrive before the answer to the forward.
        CountDownLatch left = new CountDownLatch(2);
        MessageListener listener = message -> {
            String body = StandardCharsets.UTF_8.decode(message.getBody()).toString();
            tellReceived(message, Map.of());
            if (body.equals("last")) {
                left.countDown();
                return ConsumeResult.SUCCESS;
            }
            tell("forwarded", Map.of("answer", forward(started.join(), message)));
            left.countDown();
            // The client sends the same request after this failure.
            return ConsumeResult.FAILURE;
        };
        started.complete(startPushConsumer(listener));
        try (Producer producer = producer()) {
            send(producer, message("first").setMessageGroup("one").build());
            send(producer, message("last").setMessageGroup("one").build());
        }
        tell("done", Map.of("is_done", left.await(WAIT.toMillis(), TimeUnit.MILLISECONDS)));
    }

    /** Call a method that the client does not export. */
    private static String forward(PushConsumer consumer, MessageView message) {
        try {
            for (Method method : consumer.getClass().getDeclaredMethods()) {
                if (method.getName().equals("forwardMessageToDeadLetterQueue")) {
                    method.setAccessible(true);
                    return String.valueOf(((Future<?>) method.invoke(consumer, message)).get());
                }
            }
        } catch (Exception error) {
            return error.toString();
        }
        return "the client has no such method";
    }

    /** Consume until standard input ends; what is poison is never consumed. */
    private void stay() throws Exception {
        startPushConsumer(message -> {
            String body = StandardCharsets.UTF_8.decode(message.getBody()).toString();
            tellReceived(message, Map.of());
            return body.equals("poison") ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
        });
        tell("ready", Map.of());
        while (System.in.read() >= 0) {
            // Nothing that comes means anything but its end.
        }
    }

    /** Receive and ack all that is there, with several polls at a time, and tell how calls ended. */
    private void consumeAll() throws Exception {
        Set<String> ids = ConcurrentHashMap.newKeySet();
        Map<String, Integer> ended = new ConcurrentHashMap<>();
        AtomicLong bytes = new AtomicLong();
        long began = System.nanoTime();
        AtomicLong last = new AtomicLong(began);
        long deadline = began + (long) (given.waitS() * 1e9);
        try (SimpleConsumer consumer = consumer(LONG_AWAIT)) {
            Runnable receiver = () -> {
                while (ids.size() < given.messages() && System.nanoTime() < deadline) {
                    List<MessageView> received = new ArrayList<>();
                    count(ended, "receive", () -> received.addAll(consumer.receive(RECEIVE_MAX, CONSUMED)));
                    for (MessageView message : received) {
                        ids.add(message.getMessageId().toString());
                        bytes.addAndGet(message.getBody().remaining());
                        last.set(System.nanoTime());
                        count(ended, "ack", () -> consumer.ack(message));
                    }
                }
            };
            List<Thread> receivers = new ArrayList<>();
            for (int n = 0; n < given.receivers(); n++) {
                Thread thread = new Thread(receiver);
                thread.start();
                receivers.add(thread);
            }
            for (Thread thread : receivers) {
                thread.join();
            }
            double tookS = (last.get() - began) / 1e9;
            tell(
                    "consumed",
                    Map.of("messages", ids.size(), "bytes", bytes.get(), "ended", ended, "tookS", tookS));
        }
    }

    private static void count(Map<String, Integer> ended, String during, Call call) {
        String outcome = "OK";
        try {
            call.run();
        } catch (Exception error) {
            outcome = error.getMessage();
        }
        ended.merge(during + ": " + outcome, 1, Integer::sum);
    }

    // ------------------------------------------------------------ the client

    private ClientConfiguration configuration() {
        return AccessKey.addTo(ClientConfiguration.newBuilder())
                .setEndpoints(given.endpoints().get(0))
                .setNamespace(given.namespace() == null ? "" : given.namespace())
                .enableSsl(given.tls())
                .build();
    }

    private Producer producer() throws Exception {
        return PROVIDER.newProducerBuilder()
                .setClientConfiguration(configuration())
                .setTopics(given.topic())
                .build();
    }

    private SimpleConsumer consumer() throws Exception {
        return consumer(AWAIT);
    }

    private SimpleConsumer consumer(Duration await) throws Exception {
        return consumer(given.topic(), given.group(), await);
    }

    private SimpleConsumer consumer(String topic, String group, Duration await) throws Exception {
        return PROVIDER.newSimpleConsumerBuilder()
                .setClientConfiguration(configuration())
                .setConsumerGroup(group)
                .setSubscriptionExpressions(Map.of(topic, FilterExpression.SUB_ALL))
                .setAwaitDuration(await)
                .build();
    }

    /** Starts a push consumer with a wrong SQL filter, and reports the error of the start. */
    private void sqlPush() throws Exception {
        try {
            startPushConsumer(message -> ConsumeResult.SUCCESS);
            tell("error", Map.of("during", "start", "text", ""));
        } catch (Exception error) { // The client wraps it in several of its own.
            tell("error", Map.of("during", "start", "text", error.toString()));
        }
    }

    /** Commits one message, rolls one back, and lets the checker decide about two others. */
    private void transaction() throws Exception {
        Map<String, TransactionResolution> answers =
                Map.of("checked yes", TransactionResolution.COMMIT, "checked no", TransactionResolution.ROLLBACK);
        CountDownLatch decided = new CountDownLatch(answers.size());
        TransactionChecker checker = view -> {
            String body = new String(bytes(view.getBody()), StandardCharsets.UTF_8);
            tell("checked", Map.of("body", body, "id", view.getMessageId().toString()));
            decided.countDown();
            return answers.get(body);
        };
        try (Producer producer = PROVIDER.newProducerBuilder()
                .setClientConfiguration(configuration())
                .setTopics(given.topic())
                .setTransactionChecker(checker)
                .build()) {
            for (String body : List.of("commit", "rollback", "checked yes", "checked no")) {
                Transaction started = producer.beginTransaction();
                SendReceipt sent = producer.send(message(body).build(), started);
                tell("sent", Map.of("id", sent.getMessageId().toString()));
                if (body.equals("commit")) {
                    started.commit();
                } else if (body.equals("rollback")) {
                    started.rollback();
                }
            }
            tell("done", Map.of("is_done", decided.await(WAIT.toSeconds(), TimeUnit.SECONDS)));
            Thread.sleep(1000); // For the last decision, which the client sends after the check.
        }
    }

    private PushConsumer startPushConsumer(MessageListener listener) throws Exception {
        FilterExpression filter = new FilterExpression(given.tags() == null ? "*" : given.tags());
        if (given.sql() != null) {
            filter = new FilterExpression(given.sql(), FilterExpressionType.SQL92);
        }
        return PROVIDER.newPushConsumerBuilder()
                .setClientConfiguration(configuration())
                .setConsumerGroup(given.group())
                .setSubscriptionExpressions(Map.of(given.topic(), filter))
                .setMessageListener(listener)
                .build();
    }

    private static void send(Producer producer, Message message) throws Exception {
        String id = producer.send(message).getMessageId().toString();
        tell("sent", Map.of("id", id, "sha", sha(bytes(message.getBody()))));
    }

    private static List<MessageView> receive(SimpleConsumer consumer, int wanted, Duration invisible)
            throws Exception {
        List<MessageView> found = new ArrayList<>();
        long deadline = System.nanoTime() + WAIT.toNanos();
        while (found.size() < wanted) {
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException(found.size() + " of " + wanted + " messages came");
            }
            found.addAll(consumer.receive(RECEIVE_MAX, invisible));
        }
        return found;
    }

    private MessageBuilder message(String body) {
        return message(body.getBytes(StandardCharsets.UTF_8));
    }

    private MessageBuilder message(byte[] body) {
        return PROVIDER.newMessageBuilder().setTopic(given.topic()).setBody(body);
    }

    private List<Message> messagesOfEveryKind() {
        List<Message> messages = new ArrayList<>();
        messages.add(message("x").build());
        messages.add(message("tagged").setTag("tag").build());
        messages.add(message("keyed").setKeys("key-1", "key-2").build());
        messages.add(message("with properties")
                .addProperty("name", "wert")
                .addProperty("grün", "🌊 \\ \"'")
                .build());
        for (int size : new int[] {100, 1 << 16, 1 << 20}) {
            byte[] body = new byte[size];
            for (int i = 0; i < size; i++) {
                body[i] = (byte) (i * 7 + size);
            }
            messages.add(message(body).build());
        }
        return messages;
    }

    // ------------------------------------------------------------ the facts

    private static synchronized void tell(String fact, Map<String, ?> values) {
        Map<String, Object> line = new HashMap<>(values);
        line.put("fact", fact);
        byte[] json = (JSON.toJson(line) + "\n").getBytes(StandardCharsets.UTF_8);
        System.out.write(json, 0, json.length);
        System.out.flush();
    }

    private static void tellReceived(MessageView message, Map<String, ?> more) {
        byte[] body = bytes(message.getBody());
        int shown = Math.min(body.length, SHOWN_BYTES);
        Map<String, Object> values = new HashMap<>(more);
        values.put("id", message.getMessageId().toString());
        values.put("topic", message.getTopic());
        values.put("tag", message.getTag().orElse(null));
        values.put("keys", message.getKeys());
        values.put("properties", message.getProperties());
        values.put("size", body.length);
        values.put("sha", sha(body));
        values.put("body", new String(body, 0, shown, StandardCharsets.UTF_8));
        values.put("attempt", message.getDeliveryAttempt());
        tell("received", values);
    }

    /** Call, and tell the error, or that there was none; this client puts the code into the text. */
    private static void tellError(String during, Call call) throws Exception {
        String text = "";
        try {
            call.run();
        } catch (ClientException error) {
            text = error.getMessage();
        }
        tell("error", Map.of("during", during, "text", text));
    }

    private static byte[] bytes(ByteBuffer buffer) {
        byte[] bytes = new byte[buffer.remaining()];
        buffer.duplicate().get(bytes);
        return bytes;
    }

    private static String sha(byte[] body) {
        try {
            return HexFormat.of().formatHex(MessageDigest.getInstance("SHA-256").digest(body));
        } catch (NoSuchAlgorithmException impossible) {
            throw new AssertionError(impossible);
        }
    }
}
