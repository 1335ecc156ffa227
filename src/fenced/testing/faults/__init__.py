"""A TCP proxy that breaks connections on purpose: between a client and any server, at a chosen moment.

```python
with Proxy(server.host, server.port) as proxy:
    trigger = proxy.on(b"fenced_acquire", Fault.LOSE_REPLY)
    ...  # a client of proxy.host, proxy.port asks; the server does it; the client never hears of it
    trigger.wait()
```

It sees bytes, not protocols, and cannot look into TLS. One thread carries all connections; calls from other
threads are handed to it and return when they are in effect. It adds about 0.03 ms to a round trip.
"""

from fenced.testing.faults.proxy import Proxy, http2_reply
from fenced.testing.faults.triggers import Fault, Trigger

__all__ = ["Fault", "Proxy", "Trigger", "http2_reply"]
