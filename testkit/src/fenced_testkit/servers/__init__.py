"""Real servers for tests: started on loopback and a free port, broken on purpose, and removed afterwards.

`with PostgresqlServer() as server:` starts one in a temporary folder and removes both at the end. A server also ends
when the test is killed. Drivers and programs are needed only when a server is started; `MissingProgram` says how to
install one that is missing.
"""

from fenced_testkit.servers.base import Endpoint, MissingProgram, Server, ServerFailed
from fenced_testkit.servers.dynamodb import DynamoServer
from fenced_testkit.servers.etcd import EtcdCluster, EtcdServer
from fenced_testkit.servers.galera import GaleraCluster
from fenced_testkit.servers.mariadb import MariadbServer
from fenced_testkit.servers.mysql import MysqlServer, mariadb_or_mysql
from fenced_testkit.servers.nats import NatsServer
from fenced_testkit.servers.pgbouncer import Pgbouncer
from fenced_testkit.servers.postgresql import PostgresqlServer
from fenced_testkit.servers.rabbitmq import RabbitmqServer
from fenced_testkit.servers.redis import RedisCluster, RedisGroup, RedisSentinels, RedisServer, ValkeyServer
from fenced_testkit.servers.seaweedfs import SeaweedServer
from fenced_testkit.servers.service import ServiceServer
from fenced_testkit.servers.zookeeper import ZooKeeperEnsemble, ZooKeeperServer

__all__ = [
    "DynamoServer",
    "Endpoint",
    "EtcdCluster",
    "EtcdServer",
    "GaleraCluster",
    "MariadbServer",
    "MissingProgram",
    "MysqlServer",
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
    "mariadb_or_mysql",
]
