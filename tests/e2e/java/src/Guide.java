import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.StaticSessionCredentialsProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.PushConsumer;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.SendReceipt;

/** The program of docs/clients/java.md, whose blocks are the regions of this file. */
public final class Guide {
    private static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();
    private static ClientConfiguration configuration;

    public static void main(String[] args) throws Exception {
        // region: connect
        configuration = ClientConfiguration.newBuilder()
                .setEndpoints(System.getenv("ENDPOINT"))
                .setCredentialProvider(new StaticSessionCredentialsProvider(
                        System.getenv("ACCESS_KEY"), System.getenv("ACCESS_SECRET")))
                .enableSsl(true) // the default; the client trusts every certificate
                .build();
        Producer producer = PROVIDER.newProducerBuilder()
                .setClientConfiguration(configuration)
                .setTopics("orders", "reminders", "steps")
                .build();
        // end

        // region: send
        Message message = PROVIDER.newMessageBuilder()
                .setTopic("orders")
                .setBody("one coffee".getBytes(StandardCharsets.UTF_8))
                .setTag("drink")
                .setKeys("order-17")
                .addProperty("customer", "ada")
                .build();
        SendReceipt receipt = producer.send(message);
        System.out.println("sent " + receipt.getMessageId());
        // end

        // region: delay
        Message reminder = PROVIDER.newMessageBuilder()
                .setTopic("reminders")
                .setBody("call back".getBytes(StandardCharsets.UTF_8))
                .setDeliveryTimestamp(System.currentTimeMillis() + Duration.ofHours(1).toMillis())
                .build();
        String handle = producer.send(reminder).getRecallHandle();
        producer.recallMessage("reminders", handle); // It is never delivered.
        // end

        // region: fifo
        for (String step : List.of("first", "second")) {
            producer.send(PROVIDER.newMessageBuilder()
                    .setTopic("steps")
                    .setMessageGroup("order-17")
                    .setBody(step.getBytes(StandardCharsets.UTF_8))
                    .build());
        }
        // end

        byte[] poison = "poison".getBytes(StandardCharsets.UTF_8);
        producer.send(PROVIDER.newMessageBuilder().setTopic("orders").setBody(poison).build());

        // region: push
        PushConsumer worker = PROVIDER.newPushConsumerBuilder()
                .setClientConfiguration(configuration)
                .setConsumerGroup("billing")
                .setSubscriptionExpressions(Map.of("orders", FilterExpression.SUB_ALL))
                .setConsumptionThreadCount(4)
                .setMessageListener(view -> {
                    String order = StandardCharsets.UTF_8.decode(view.getBody()).toString();
                    if (order.equals("poison")) {
                        System.out.println("attempt " + view.getDeliveryAttempt() + " failed: " + order);
                        return ConsumeResult.FAILURE; // The message comes again after the back-off.
                    }
                    System.out.println("done " + order);
                    return ConsumeResult.SUCCESS;
                })
                .build();
        // end

        for (int n = 0; n < 2; n++) {
            System.out.println("step " + text(receiveOne("steps", "steps")));
        }

        // region: dead
        MessageView letter = receiveOne("%DLQ%billing", "letters");
        System.out.println("dead letter " + StandardCharsets.UTF_8.decode(letter.getBody()));
        // end

        // region: stop
        worker.close(); // It waits for the messages in work and for a long poll.
        producer.close();
        System.out.println("stopped");
        // end
        System.exit(0);
    }

    // region: simple
    private static MessageView receiveOne(String topic, String group) throws Exception {
        try (SimpleConsumer consumer = PROVIDER.newSimpleConsumerBuilder()
                .setClientConfiguration(configuration)
                .setConsumerGroup(group)
                .setSubscriptionExpressions(Map.of(topic, FilterExpression.SUB_ALL))
                .setAwaitDuration(Duration.ofSeconds(10))
                .build()) {
            List<MessageView> views = List.of();
            while (views.isEmpty()) { // A receive without a message is an empty list.
                views = consumer.receive(1, Duration.ofSeconds(30)); // invisible for 30 s
            }
            consumer.changeInvisibleDuration(views.get(0), Duration.ofMinutes(1)); // The work takes longer.
            consumer.ack(views.get(0));
            return views.get(0);
        }
    }
    // end

    private static String text(MessageView view) {
        return StandardCharsets.UTF_8.decode(view.getBody()).toString();
    }
}
