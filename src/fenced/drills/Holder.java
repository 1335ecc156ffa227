import java.net.URI;
import java.net.http.*;
import java.nio.charset.StandardCharsets;
import java.sql.*;
import java.util.*;
import java.util.regex.*;

/** A holder in Java that speaks the protocol of worker.py: a lease over HTTP that a thread renews, writes over JDBC or HTTP. */
public class Holder {
    static final HttpClient http = HttpClient.newHttpClient();
    static String service, values, attempt, stamp, name, holder, seen;
    static Connection db;
    static double ttl;
    static boolean guarded;
    static int token, seq, updates;
    static ArrayList<Object[]> live = new ArrayList<>();

    public static void main(String[] none) throws Exception {
        Scanner in = new Scanner(System.in, StandardCharsets.UTF_8);
        String setup = in.nextLine();
        holder = find(setup, "holder"); service = find(setup, "authority"); values = find(setup, "guard"); ttl = Double.parseDouble(find(setup, "ttl"));
        guarded = find(setup, "guarded").equals("true");
        String jdbc = System.getenv("FENCED_DRILL_JDBC_URL");
        if (jdbc != null) {
            db = DriverManager.getConnection(jdbc, System.getenv("FENCED_DRILL_JDBC_USER"), System.getenv("FENCED_DRILL_JDBC_PASSWORD"));
            db.setAutoCommit(false);
        }
        say("ready", "");
        while (in.hasNextLine()) {
            String line = in.nextLine();
            switch (find(line, "do")) {
                case "fill" -> fill(Double.parseDouble(find(line, "seconds")));
                case "acquire" -> acquire(find(line, "name"));
                case "read" -> read();
                case "collect" -> collect();
                case "write" -> write(Integer.parseInt(find(line, "amount")));
                case "release" -> release();
                default -> throw new IllegalArgumentException(line);
            }
        }
        System.exit(0);
    }

    /** Objects are added until one collection stops the process for so long. */
    static void fill(double seconds) {
        double stopped = 0;
        Random random = new Random(1);
        while (stopped < seconds && live.size() < 18) {
            Object[] block = new Object[1_000_000];
            for (int n = 0; n < block.length; n++)
                block[n] = new Object[]{live.isEmpty() ? null : live.get(random.nextInt(live.size()))[random.nextInt(block.length)], new long[1]};
            live.add(block);
            if (live.size() % 3 == 0) stopped = stop();
        }
        say("filled", number("seconds", stopped));
    }

    static double stop() {
        long began = System.nanoTime();
        System.gc();
        return (System.nanoTime() - began) / 1e9;
    }

    static void collect() {
        say("collecting", "");
        say("collected", number("seconds", stop()));
    }

    static void acquire(String wanted) throws Exception {
        name = wanted;
        attempt = UUID.randomUUID().toString().replace("-", "");
        double began = now();
        say("asking", text("name", name));
        String answer = send("POST", service + "/v1/leases", "{\"attempt\":\"" + attempt + "\",\"names\":[\"" + name + "\"],\"ttl\":" + ttl + ",\"holder\":{\"label\":\"drill " + holder + " in Java\"}}", null).body();
        stamp = find(answer, "stamp");
        if (stamp == null) { say("not_granted", text("name", name) + text("why", answer.replace('"', '\''))); return; }
        token = Integer.parseInt(find(answer, "token"));
        Thread renewing = new Thread(Holder::renew);
        renewing.setDaemon(true);
        renewing.start();
        say("granted", text("name", name) + number("token", token) + number("began", began));
    }

    static void renew() {
        try {
            String answer;
            do {
                Thread.sleep((long) (ttl * 333));
                answer = send("POST", service + "/v1/leases/renew", "{\"attempts\":[\"" + attempt + "\"]}", null).body();
            } while (answer.contains("kept"));
        } catch (Exception error) {
            System.err.println("renewal: " + error);
        }
    }

    static void release() throws Exception {
        send("POST", service + "/v1/leases/release", "{\"attempt\":\"" + attempt + "\"}", null);
        say("released", text("name", name) + number("token", token));
    }

    static void read() throws Exception {
        double began = now();
        String carried = stamp(0);
        if (db != null) {
            announce(carried);
            try (PreparedStatement select = db.prepareStatement("SELECT convert_from(value, 'UTF8') FROM fenced_guard.value WHERE name = ?")) {
                select.setString(1, name);
                ResultSet found = select.executeQuery();
                seen = found.next() ? found.getString(1) : "[]";
            }
            db.commit();
        } else {
            HttpResponse<String> reply = send("GET", values + "/v1/values/" + name, null, carried);
            seen = reply.statusCode() == 200 ? reply.body() : "[]";
        }
        if (guarded) operation("announce", carried, "admitted", "", began);
        operation("read", carried, "admitted", number("stock", stock(seen)), began);
    }

    static void write(int amount) throws Exception {
        String update = holder + ++updates, carried = stamp(++seq), order = "[\"" + update + "\", " + amount + "]";
        String value = seen.equals("[]") ? "[" + order + "]" : seen.substring(0, seen.length() - 1) + ", " + order + "]";
        say("writing", text("name", name) + number("token", token) + number("amount", amount) + number("stock", stock(value)));
        double began = now();
        String why = db != null ? overJdbc(carried, value) : overHttp(carried, value);
        operation("write", carried, why == null ? "admitted" : "refused", text("update", update) + (why == null ? "" : text("why", why)), began);
    }

    static String overJdbc(String carried, String value) throws SQLException {
        try {
            announce(carried);
            String upsert = "INSERT INTO fenced_guard.value AS v (name, value, is_bytes, version) VALUES (?, ?, true, 1) ON CONFLICT (name) DO UPDATE SET value = excluded.value, version = v.version + 1";
            try (PreparedStatement write = db.prepareStatement(upsert)) {
                write.setString(1, name);
                write.setBytes(2, value.getBytes(StandardCharsets.UTF_8));
                write.executeUpdate();
            }
            db.commit();
            return null;
        } catch (SQLException error) {
            db.rollback();
            if (!error.getSQLState().startsWith("ZF")) throw error;
            return error.getMessage().contains("stale") ? "stale" : error.getSQLState();
        }
    }

    static void announce(String carried) throws SQLException {
        try (PreparedStatement announce = db.prepareStatement("SELECT fenced_guard.announce(?)")) {
            announce.setString(1, carried);
            announce.execute();
        }
    }

    static String overHttp(String carried, String value) throws Exception {
        HttpResponse<String> reply = send("PUT", values + "/v1/values/" + name, value, carried);
        if (reply.statusCode() == 200) return null;
        if (reply.body().contains("stale")) return "stale";
        throw new IllegalStateException(reply.statusCode() + " " + reply.body());
    }

    static HttpResponse<String> send(String method, String url, String body, String carried) throws Exception {
        HttpRequest.Builder request = HttpRequest.newBuilder(URI.create(url)).header("Content-Type", "application/json")
            .method(method, body == null ? HttpRequest.BodyPublishers.noBody() : HttpRequest.BodyPublishers.ofString(body));
        if (carried != null) request.header("Fenced-Stamp", '"' + carried + '"');
        return http.send(request.build(), HttpResponse.BodyHandlers.ofString());
    }

    /** The stamp of an operation: that of the grant, with the number of the operation. */
    static String stamp(int number) {
        String[] parts = stamp.split(":");
        parts[3] = String.valueOf(number);
        return String.join(":", parts);
    }

    static int stock(String orders) {
        Matcher amounts = Pattern.compile("\\[\"[^\"]*\", ?(\\d+)\\]").matcher(orders);
        int stock = 10;
        while (amounts.find()) stock -= Integer.parseInt(amounts.group(1));
        return stock;
    }

    static void operation(String kind, String carried, String decision, String facts, double began) {
        String mark = guarded && decision.equals("admitted") ? number("mark", token) : ",\"mark\":null";
        String update = facts.contains("\"update\"") ? "" : ",\"update\":null";
        say("operation", text("kind", kind) + text("name", name) + text("stamp", carried) + number("token", token) + text("decision", decision) + mark + update + facts + number("began", began));
    }

    /** A line to the drill, on the clock that all holders share. */
    static void say(String event, String facts) {
        System.out.println("{\"event\":\"" + event + "\"" + facts + number("time", now()) + "}");
        System.out.flush();
    }

    /** Seconds since the machine was started; Java has no clock with that zero. */
    static double now() {
        return System.nanoTime() / 1e9 + OFFSET;
    }

    static final double OFFSET = offset();

    static double offset() {
        try (Scanner uptime = new Scanner(new java.io.File("/proc/uptime"))) {
            return Double.parseDouble(uptime.next()) - System.nanoTime() / 1e9;
        } catch (java.io.IOException error) {
            throw new IllegalStateException(error);
        }
    }

    static String text(String key, String value) { return ",\"" + key + "\":\"" + value + "\""; }
    static String number(String key, Object value) { return ",\"" + key + "\":" + (value instanceof Double seconds ? String.format(Locale.ROOT, "%.6f", seconds) : value); }
    static String find(String text, String key) { Matcher found = Pattern.compile("\"" + key + "\": ?\"?([^\",}]*)").matcher(text); return found.find() ? found.group(1) : null; }
}
