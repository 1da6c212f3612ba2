import com.google.gson.Gson;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Map;
import org.apache.rocketmq.filter.expression.EvaluationContext;
import org.apache.rocketmq.filter.expression.Expression;
import org.apache.rocketmq.filter.expression.MQFilterException;
import org.apache.rocketmq.filter.parser.SelectorParser;

/**
 * SQL92 filters as RocketMQ evaluates them.
 *
 * <p>Reads lines {@code {"expression": ..., "properties": {...}}} from standard input, and prints a
 * line {@code {"result": ...}} for each: true, false, error (the evaluation raised) or rejected.
 */
public final class SqlFilters {
    private static final Gson JSON = new Gson();

    private SqlFilters() {}

    public static void main(String[] args) throws IOException {
        var input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            System.out.println(JSON.toJson(Map.of("result", result(JSON.fromJson(line, Case.class)))));
        }
    }

    private static String result(Case given) {
        Expression filter;
        try {
            filter = SelectorParser.parse(given.expression);
        } catch (MQFilterException rejection) {
            return "rejected";
        }
        try {
            return Boolean.TRUE.equals(filter.evaluate(given)) ? "true" : "false";
        } catch (Exception error) { // The broker logs it and skips the message.
            return "error";
        }
    }

    /** A line of the input: the properties of a message are the context of an evaluation. */
    private static final class Case implements EvaluationContext {
        private String expression;
        private Map<String, String> properties;

        @Override
        public Object get(String name) {
            return properties.get(name);
        }

        @Override
        public Map<String, Object> keyValues() {
            return new HashMap<>(properties);
        }
    }
}
