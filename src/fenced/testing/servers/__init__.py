"""Real servers for tests: started on loopback and a free port, broken on purpose, and removed afterwards.

`with PostgresqlServer() as server:` starts one in a temporary folder and removes both at the end. A server also ends
when the test is killed. Drivers and programs are needed only when a server is started; `MissingProgram` says how to
install one that is missing.
"""

from fenced.testing.servers.base import Endpoint, MissingProgram, Server, ServerFailed
from fenced.testing.servers.dynamodb import DynamoServer
from fenced.testing.servers.etcd import EtcdCluster, EtcdServer
from fenced.testing.servers.nats import NatsServer
from fenced.testing.servers.pgbouncer import Pgbouncer
from fenced.testing.servers.postgresql import PostgresqlServer
from fenced.testing.servers.rabbitmq import RabbitmqServer
from fenced.testing.servers.redis import RedisCluster, RedisGroup, RedisSentinels, RedisServer, ValkeyServer
from fenced.testing.servers.seaweedfs import SeaweedServer
from fenced.testing.servers.service import ServiceServer
from fenced.testing.servers.zookeeper import ZooKeeperEnsemble, ZooKeeperServer

__all__ = [
    "DynamoServer",
    "Endpoint",
    "EtcdCluster",
    "EtcdServer",
    "MissingProgram",
    "NatsServer",
    "Pgbouncer",
    "PostgresqlServer",
    "RabbitmqServer",
    "RedisCluster",
    "RedisGroup",
    "RedisSentinels",
    "RedisServer",
    "SeaweedServer",
    "Server",
    "ServerFailed",
    "ServiceServer",
    "ValkeyServer",
    "ZooKeeperEnsemble",
    "ZooKeeperServer",
]
