import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import org.apache.rocketmq.client.apis.ClientConfigurationBuilder;
import org.apache.rocketmq.client.apis.SessionCredentials;
import org.apache.rocketmq.client.apis.StaticSessionCredentialsProvider;

/** The user of the environment, if it names one. */
final class AccessKey {
    private AccessKey() {
    }

    /** Let a client sign its calls. It also sends a session token, if there is a file with one. */
    static ClientConfigurationBuilder addTo(ClientConfigurationBuilder builder) {
        String key = System.getenv("ROCKETMQ_ACCESS_KEY");
        String secret = System.getenv("ROCKETMQ_SECRET_KEY");
        String file = System.getenv("ROCKETMQ_SESSION_TOKEN_FILE");
        if (file != null) {
            builder.setCredentialProvider(() -> new SessionCredentials(key, secret, content(Path.of(file))));
        } else if (key != null) {
            builder.setCredentialProvider(new StaticSessionCredentialsProvider(key, secret));
        }
        return builder;
    }

    private static String content(Path file) {
        try {
            return Files.readString(file).strip();
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }
}
