import org.apache.rocketmq.client.apis.ClientConfigurationBuilder;
import org.apache.rocketmq.client.apis.StaticSessionCredentialsProvider;

/** The user of the environment, if it names one. */
final class AccessKey {
    private AccessKey() {
    }

    /** Let a client sign its calls. */
    static ClientConfigurationBuilder addTo(ClientConfigurationBuilder builder) {
        String key = System.getenv("ROCKETMQ_ACCESS_KEY");
        if (key != null) {
            builder.setCredentialProvider(
                    new StaticSessionCredentialsProvider(key, System.getenv("ROCKETMQ_SECRET_KEY")));
        }
        return builder;
    }
}
