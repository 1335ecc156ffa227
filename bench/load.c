/* A load of durable grants and releases, the same for the service and for etcd's lock, so that the client costs the same.

   load KIND HOST PORT CONNECTIONS EACH SECONDS RUN LEASE WARM_UP

   KIND lease:  POST /v1/leases, then POST /v1/leases/release, on each connection.
   KIND batch:  the same by POST /v1/batch, with EACH operations in a request.
   KIND v3lock: etcd's Lock and Unlock over gRPC, EACH at the same time on a connection; client N uses the lease LEASE + N.

   Each client has a name of its own, with RUN in it, and begins its next pair when the last one is answered. One thread.
   Prints pairs a second, the median and the 99th percentile of a pair in microseconds, and how many pairs there were with
   those of the first WARM_UP seconds, which are not counted. At least one pair is counted. */

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define CONNECTIONS_MAX 256
#define EACH_MAX 1000
#define ROOM (1 << 20)
#define SLOWEST 2000000

struct client {
    int number;          /* of its attempts */
    int holds;           /* the next request is a release */
    uint32_t stream;     /* v3lock: where the answer arrives */
    int answered;        /* v3lock: a message has arrived */
    char key[256];       /* v3lock: what Unlock names */
    int key_length;
    double began;
};

struct connection {
    int fd, first;       /* the index of its first client */
    uint32_t next_stream;
    struct client *clients;
    char *in;
    int filled;
};

enum { LEASE, BATCH, V3LOCK };
static int kind, each, in_flight, stopping;
static const char *run;
static char host[64], attempts_of_run[33];
static uint64_t lease;
static double starts, ends;
static long pairs, all_pairs;
static uint32_t *times;

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec / 1e9;
}

static void fail(const char *what) {
    fprintf(stderr, "load: %s\n", what);
    exit(1);
}

static void put(struct connection *c, const char *data, size_t length) {
    while (length) {
        ssize_t sent = send(c->fd, data, length, MSG_NOSIGNAL);
        if (sent < 0 && errno == EAGAIN) continue;
        if (sent <= 0) fail("cannot send");
        data += sent;
        length -= sent;
    }
}

static void pair_done(struct client *who, double at) {
    all_pairs++;
    if (at < starts || (at >= ends && pairs)) return;
    double us = (at - who->began) * 1e6;
    pairs++;
    times[us < SLOWEST ? (int)us : SLOWEST - 1]++;
}

/* HTTP/1.1 with JSON. */

static int attempt(char *to, int client, int number) {
    return sprintf(to, "%.16s%06x%010x", attempts_of_run, client, number);
}

static int ask_text(char *to, int client, struct client *who) {
    char id[40], series[40];
    attempt(id, client, who->number);
    attempt(series, client, 0);
    return sprintf(to,
        "{\"attempt\":\"%s\",\"names\":[\"%s/%d\"],\"ttl\":30,\"holder\":{\"id\":\"%s-%d\",\"label\":\"bench\"},"
        "\"series\":\"%s\",\"number\":%d,\"settled\":%d}",
        id, run, client, run, client, series, who->number, who->number - 1);
}

static int release_text(char *to, int client, struct client *who) {
    char id[40];
    attempt(id, client, who->number);
    return sprintf(to, "{\"attempt\":\"%s\"}", id);
}

static void request(struct connection *c) {
    static char body[ROOM], message[ROOM + 512];
    int length = 0, count = kind == BATCH ? each : 1, holds = c->clients[0].holds;
    if (kind == BATCH) length += sprintf(body, "{\"do\":[");
    for (int i = 0; i < count; i++) {
        struct client *who = &c->clients[i];
        if (!holds) {
            who->number++;
            who->began = now();
        }
        if (kind == BATCH) length += sprintf(body + length, "%s{\"%s\":", i ? "," : "", holds ? "release" : "ask");
        length += (holds ? release_text : ask_text)(body + length, c->first + i, who);
        if (kind == BATCH) body[length++] = '}';
    }
    if (kind == BATCH) length += sprintf(body + length, "]}");
    const char *path = kind == BATCH ? "/v1/batch" : holds ? "/v1/leases/release" : "/v1/leases";
    int head = sprintf(message, "POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n",
                       path, host, length);
    memcpy(message + head, body, length);
    in_flight++;
    put(c, message, head + length);
}

/* Returns how many bytes were used; 0: the answer is not complete. */
static int answer(struct connection *c) {
    c->in[c->filled] = 0;
    char *end = strstr(c->in, "\r\n\r\n"), *field;
    if (!end) return 0;
    field = strcasestr(c->in, "\r\ncontent-length:");
    if (!field || field > end) fail("an answer without a length");
    int length = atoi(field + 17), total = (int)(end + 4 - c->in) + length;
    if (c->filled < total) return 0;
    int count = kind == BATCH ? each : 1, holds = c->clients[0].holds, found = 0;
    char *text = end + 4, last = text[length];
    text[length] = 0;
    const char *word = holds ? "\"answer\":\"released\"" : "\"answer\":\"granted\"";
    for (char *at = text; (at = strstr(at, word)); at++) found++;
    if (found != count) fail(c->in);
    text[length] = last;
    double at = now();
    in_flight--;
    for (int i = 0; i < count; i++) {
        c->clients[i].holds = !holds;
        if (holds) pair_done(&c->clients[i], at);
    }
    if (!holds || !stopping) request(c);
    return total;
}

/* gRPC over HTTP/2. */

static int frame(char *to, int type, int flags, uint32_t stream, const char *data, int length) {
    uint32_t id = htonl(stream);
    to[0] = length >> 16, to[1] = length >> 8, to[2] = length, to[3] = type, to[4] = flags;
    memcpy(to + 5, &id, 4);
    memcpy(to + 9, data, length);
    return 9 + length;
}

static int text_of(char *to, const char *text) {
    int length = strlen(text);
    to[0] = length;
    memcpy(to + 1, text, length);
    return 1 + length;
}

static int varint(char *to, uint64_t value) {
    int at = 0;
    for (; value >= 128; value >>= 7) to[at++] = value | 128;
    to[at++] = value;
    return at;
}

static void call(struct connection *c, int which) {
    struct client *who = &c->clients[which];
    char headers[256], body[512], message[1024];
    int h = 0, b = 5, m = 0;
    headers[h++] = 0x83, headers[h++] = 0x86; /* POST, http */
    headers[h++] = 0x04, h += text_of(headers + h, who->holds ? "/v3lockpb.Lock/Unlock" : "/v3lockpb.Lock/Lock");
    headers[h++] = 0x01, h += text_of(headers + h, host);
    headers[h++] = 0x0f, headers[h++] = 0x10, h += text_of(headers + h, "application/grpc");
    headers[h++] = 0x00, h += text_of(headers + h, "te"), h += text_of(headers + h, "trailers");
    body[b++] = 0x0a;
    if (who->holds) {
        b += varint(body + b, who->key_length);
        memcpy(body + b, who->key, who->key_length);
        b += who->key_length;
    } else {
        b += text_of(body + b, "");
        int length = sprintf(body + b, "%s/%d", run, c->first + which);
        body[b - 1] = length;
        b += length;
        body[b++] = 0x10, b += varint(body + b, lease + c->first + which);
        who->began = now();
    }
    uint32_t length = htonl(b - 5);
    body[0] = 0;
    memcpy(body + 1, &length, 4);
    who->stream = c->next_stream, c->next_stream += 2, who->answered = 0;
    m += frame(message + m, 1, 4, who->stream, headers, h);
    m += frame(message + m, 0, 1, who->stream, body, b);
    in_flight++;
    put(c, message, m);
}

static void greet(struct connection *c) {
    char message[256];
    int m = sprintf(message, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    m += frame(message + m, 4, 0, 0, "", 0);
    m += frame(message + m, 8, 0, 0, "\x7f\xff\x00\x00", 4); /* receive as much as we like */
    put(c, message, m);
}

static void message_of(struct client *who, const unsigned char *data, int length) {
    if (length < 5) fail("a message in pieces");
    who->answered = 1;
    for (int at = 5; !who->holds && at < length;) {
        int field = data[at++];
        uint64_t value = 0;
        for (int shift = 0;; shift += 7) {
            value |= (uint64_t)(data[at] & 127) << shift;
            if (data[at++] < 128) break;
        }
        if ((field & 7) != 2) continue;
        if (field >> 3 == 2) {
            if (value > sizeof who->key) fail("a long key");
            who->key_length = value;
            memcpy(who->key, data + at, value);
        }
        at += value;
    }
}

static void called(struct connection *c, int which) {
    struct client *who = &c->clients[which];
    if (!who->answered || (!who->holds && !who->key_length)) fail("etcd refused a call");
    in_flight--;
    if (who->holds) pair_done(who, now());
    who->holds = !who->holds;
    if (who->holds || !stopping) call(c, which);
}

static int frames(struct connection *c) {
    unsigned char *at = (unsigned char *)c->in;
    if (c->filled < 9) return 0;
    int length = at[0] << 16 | at[1] << 8 | at[2], type = at[3], flags = at[4];
    uint32_t stream = (uint32_t)(at[5] & 127) << 24 | at[6] << 16 | at[7] << 8 | at[8];
    if (c->filled < 9 + length) return 0;
    char reply[64];
    if (type == 7) fail("etcd closed the connection");
    if (type == 4 && !(flags & 1)) put(c, reply, frame(reply, 4, 1, 0, "", 0));
    if (type == 6 && !(flags & 1)) put(c, reply, frame(reply, 6, 1, 0, (char *)at + 9, 8));
    for (int i = 0; (type == 0 || type == 1 || type == 3) && i < each; i++) {
        if (c->clients[i].stream != stream) continue;
        if (type == 3) fail("etcd closed a stream"); /* it may do that after the answer, when the client has another one */
        if (type == 0 && length) message_of(&c->clients[i], at + 9, length);
        if (type == 1 && flags & 1) called(c, i);
        break;
    }
    return 9 + length;
}

static void begin(struct connection *c, struct sockaddr_in *address, int first) {
    int on = 1;
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(c->fd, (struct sockaddr *)address, sizeof *address)) fail("cannot connect");
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    c->first = first, c->next_stream = 1, c->filled = 0;
    c->in = malloc(ROOM + 1);
    c->clients = calloc(each, sizeof *c->clients);
    if (kind == V3LOCK) {
        greet(c);
        for (int i = 0; i < each; i++) call(c, i);
    } else {
        request(c);
    }
}

static void receive(struct connection *c) {
    ssize_t got = recv(c->fd, c->in + c->filled, ROOM - c->filled, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) fail("the connection was closed");
    c->filled += got;
    for (int used; c->filled && (used = kind == V3LOCK ? frames(c) : answer(c));) {
        c->filled -= used;
        memmove(c->in, c->in + used, c->filled);
    }
}

static double percentile(double share) {
    long seen = 0;
    for (int us = 0; us < SLOWEST; us++)
        if ((seen += times[us]) >= pairs * share) return us;
    return SLOWEST;
}

int main(int count, char **arguments) {
    static struct connection connections[CONNECTIONS_MAX];
    if (count != 10) fail("KIND HOST PORT CONNECTIONS EACH SECONDS RUN LEASE WARM_UP");
    kind = !strcmp(arguments[1], "lease") ? LEASE : !strcmp(arguments[1], "batch") ? BATCH : V3LOCK;
    int many = atoi(arguments[4]);
    double seconds = atof(arguments[6]);
    each = atoi(arguments[5]), run = arguments[7], lease = strtoull(arguments[8], 0, 10);
    if (many > CONNECTIONS_MAX || each > EACH_MAX) fail("too many connections or operations");
    if (strlen(run) != 16) fail("RUN has 16 hexadecimal digits");
    strcpy(attempts_of_run, run);
    snprintf(host, sizeof host, "%s:%s", arguments[2], arguments[3]);
    times = calloc(SLOWEST, sizeof *times);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(arguments[3]))};
    inet_pton(AF_INET, arguments[2], &address.sin_addr);
    int poll = epoll_create1(0);
    starts = now() + atof(arguments[9]), ends = starts + seconds;
    for (int i = 0; i < many; i++) {
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &connections[i]};
        begin(&connections[i], &address, i * each);
        epoll_ctl(poll, EPOLL_CTL_ADD, connections[i].fd, &event);
    }
    while (in_flight) {
        struct epoll_event ready[64];
        int found = epoll_wait(poll, ready, 64, 60000);
        if (!found) fail("no answer for a minute");
        for (int i = 0; i < found; i++) receive(ready[i].data.ptr);
        stopping = pairs && now() >= ends;
    }
    printf("{\"pairs\":%.1f,\"p50\":%.0f,\"p99\":%.0f,\"all\":%ld}\n", pairs / seconds, percentile(0.5), percentile(0.99), all_pairs);
    return 0;
}
