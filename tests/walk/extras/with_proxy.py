# walk: './fenced[proxy]'
"""A service that knows nothing of fencing, behind `fenced proxy`."""

import re
import subprocess
import sys
import threading
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer

import fenced
from fenced.http import fence_headers


class Service(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


service = HTTPServer(("127.0.0.1", 0), Service)
threading.Thread(target=service.serve_forever, daemon=True).start()
command = ["-m", "fenced", "proxy", "--listen", "127.0.0.1:0", "--store", "sqlite:///marks.db"]
command += [
    "--upstream",
    f"http://127.0.0.1:{service.server_port}",
    "--name",
    "/orders/{id} = orders/{path.id}",
]
proxy = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True)
assert proxy.stderr is not None
said = proxy.stderr.readline()
found = re.search(r"listening on 127.0.0.1:(\d+)", said)
assert found, said + proxy.stderr.read()
port = int(found[1])


def post(stamp: fenced.Stamp) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/orders/42", headers=fence_headers(stamp))
    status = connection.getresponse().status
    connection.close()
    return status


with fenced.Client("sqlite:///leases.db") as leases:
    with leases.hold("orders/42") as lease:
        late = lease.next_stamp()
    with leases.hold("orders/42") as lease:
        assert post(lease.next_stamp()) == 204
    assert post(late) == 412

proxy.terminate()
assert proxy.wait(60) == 0
proxy.stderr.close()
service.shutdown()
service.server_close()
