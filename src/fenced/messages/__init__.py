"""Messages that carry stamps, consumers that obey them, and an outbox for producers.

    channel.basic_publish("", "orders", body, pika.BasicProperties(headers=messages.headers(lease)))

    def apply(fence, method, properties, body):
        with orders.transaction(db, fence) as tx:  # a fenced.sql.Guard: admitted before the commit, or nothing happens
            tx.execute("UPDATE orders SET qty = ? WHERE id = ?", json.loads(body))

    channel.basic_consume("orders", messages.on_pika(apply))

A message that was overtaken is rejected, one that was applied before is acknowledged, and neither is applied.
"""

from fenced.messages.consumers import on_aio_pika, on_nats, on_pika
from fenced.messages.outbox import AsyncOutbox, Outbox, OutboxMessage
from fenced.messages.outcomes import PROOF, STAMP, Settlement, fence_of, headers, settlement

__all__ = [
    "PROOF",
    "STAMP",
    "AsyncOutbox",
    "Outbox",
    "OutboxMessage",
    "Settlement",
    "fence_of",
    "headers",
    "on_aio_pika",
    "on_nats",
    "on_pika",
    "settlement",
]


def __dir__() -> list[str]:
    return __all__
